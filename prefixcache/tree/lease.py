"""The right to use K/V until it is given back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prefixcache.request import Namespace, Tier
from prefixcache.tree.hashing import DigestChain
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
        cached_tokens: Prompt tokens that needed no computing, by the tier that had them; grows as loads arrive.
        num_cached_tokens: Tokens whose K/V was there when the lease was taken.
        final_state: The model's final state at the end of the prompt, if an equal prompt left one.
        num_offered_pages: Leading pages that the stores have been offered, or had before.
        chain: Names of its whole pages outside the process; None where no tier lies below, or none may be used.
        load: Pages on their way from a lower tier.
    """

    namespace: Namespace | None
    node: Node | None
    page_table: list[int] = field(default_factory=list)
    num_shared_pages: int = 0
    num_cached_tokens: int = 0
    cached_tokens: dict[Tier, int] = field(default_factory=dict)
    final_state: Any = None
    num_offered_pages: int = 0
    chain: DigestChain | None = None
    load: Any = None
    is_released: bool = False
