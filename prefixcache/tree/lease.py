"""The right to use K/V until it is given back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prefixcache.request import Namespace
from prefixcache.tree.node import Node


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence's hold on a root-to-node path and on its private pages. Engine thread only.

        page_table: [ shared, shared, shared │ private, private ]
                      ▲ path root..node        ▲ written by this sequence alone (I5)

    Made by `PrefixCache.try_acquire`, ended by `PrefixCache.release`; it has exactly one owner.

    Attributes:
        namespace: Where the path lies; None for a sequence that neither reads nor writes the cache.
        node: Deepest pinned node; the path down to it holds exactly the shared pages.
        page_table: Page ids in token order.
        num_shared_pages: How many of them, from the front, belong to the tree.
        num_cached_tokens: Tokens whose K/V was there when the lease was taken.
        final_state: The model's final state at the end of the prompt, if an equal prompt left one.
        version: Changes whenever `page_table` changes in another way than by growing.
    """

    namespace: Namespace | None
    node: Node | None
    page_table: list[int] = field(default_factory=list)
    num_shared_pages: int = 0
    num_cached_tokens: int = 0
    final_state: Any = None
    version: int = 0
    is_released: bool = False
