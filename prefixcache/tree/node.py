"""One edge of the radix tree and the point where it ends.

Token runs are kept as bytes, four per token, so that comparing two runs is one `memcmp`:

    root ──[ 0..47 ]──▶ A ──[ 48..63 ]──▶ B          full nodes: whole pages, any number of them
                        └───[ 48..52 ]──▶ c          partial leaf: less than one page, always a leaf

Edges split at page boundaries only, so every page belongs to exactly one node. Siblings may begin with the same
few tokens (less than a page); a match that ends inside a page is served by copying that page.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sortedcontainers import SortedList

from prefixcache.request import Namespace

BYTES_PER_TOKEN = 4

# Up to this many children the nearest one is found by looking at all of them, and no order is kept.
MAX_UNORDERED = 8


class PageDigest(NamedTuple):
    """What names one page: `key` (16 bytes) finds it in a store, `proof` (32 bytes) shows that it is the right one."""

    key: bytes
    proof: bytes


def token_key(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as the byte string that the tree compares. Any thread."""
    return array("I", token_ids).tobytes()


def common_prefix_bytes(edge: bytes, key: bytes, offset: int) -> int:
    """Count the bytes, in whole tokens, that `edge` and `key[offset:]` have in common at their start."""
    if key.startswith(edge, offset):
        return len(edge)
    low, high = 0, min(len(edge), len(key) - offset) + 1  # the answer lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == key[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    return low - low % BYTES_PER_TOKEN


class Children(dict[bytes, "Node"]):
    """First page of a child's key -> child.

    Nearly every node has one to three children, and then this is a plain dictionary of 250 bytes: an order costs
    more than a kilobyte and a dozen objects for the garbage collector to walk, so only wide nodes keep one.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        super().__init__()
        self._order: SortedList | None = None  # all keys

    def add(self, page: bytes, child: Node) -> None:
        """Put `child` in, or in the place of the one that begins with the same page."""
        is_new = page not in self
        self[page] = child
        if self._order is not None and is_new:
            self._order.add(page)
        elif len(self) > MAX_UNORDERED and self._order is None:
            self._order = SortedList(self)

    def remove(self, page: bytes) -> None:
        del self[page]
        if self._order is not None:
            self._order.remove(page)

    def nearest(self, page: bytes) -> tuple[Node | None, int]:
        """Find the child whose first page begins with most of `page`, and count the bytes (whole tokens) that agree.

        The longest common prefix with any key of a sorted set is the one with a neighbour in sorted order, so two
        comparisons are enough however many children there are.
        """
        child = self.get(page)
        if child is not None:
            return child, len(page)
        candidates: Iterable[bytes] = self
        if self._order is not None:
            index = self._order.bisect_left(page)
            candidates = self._order[max(index - 1, 0) : index + 1]
        best, best_common = None, 0
        for candidate in candidates:
            common = common_prefix_bytes(candidate, page, 0)
            if common > best_common:
                best, best_common = candidate, common
        return (None, 0) if best is None else (self[best], best_common)


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens below `parent`, with the device pages that hold its K/V.

    Attributes:
        key: The run's tokens, `BYTES_PER_TOKEN` each.
        pages: One page id for each started page of `key`.
        children: First page of a child's key -> child; None for a leaf.
        pins: How many leases use this node or one below it (I2).
        saves: How many writes to other tiers wait for this node or one below it; they can be given up.
        last_used: Logical time of the last use; never younger than a child's.
        final_states: Where a prompt ends -> the model's final state there. The place is (whole pages into this node,
            tokens behind them, less than a page); whichever child holds K/V for those tokens will do.
        digests: What names each whole page outside the process; empty where no tier lies below the device.
    """

    parent: Node | None
    key: bytes
    pages: list[int]
    children: Children | None = None
    pins: int = 0
    saves: int = 0
    last_used: int = 0
    final_states: dict[tuple[int, bytes], Any] = field(default_factory=dict)
    digests: list[PageDigest] = field(default_factory=list)

    @property
    def is_pinned(self) -> bool:
        return self.pins > 0 or self.saves > 0

    @property
    def is_evictable(self) -> bool:
        """Whether this node may go now: a leaf that nothing pins, and not a root (I6)."""
        return not self.children and not self.is_pinned and self.parent is not None

    def nearest_child(self, key: bytes, offset: int, page_bytes: int) -> tuple[Node | None, int]:
        """Find the child that shares most of `key[offset:]`'s first page.

        Returns:
            The child and the bytes (whole tokens) of its first page that agree; (None, 0) where none shares a token.
        """
        return self.children.nearest(key[offset : offset + page_bytes]) if self.children else (None, 0)

    def add_child(self, child: Node, page_bytes: int) -> None:
        if self.children is None:
            self.children = Children()
        self.children.add(child.key[:page_bytes], child)

    def remove_child(self, child: Node, page_bytes: int) -> None:
        assert self.children is not None
        self.children.remove(child.key[:page_bytes])
        if not self.children:
            self.children = None


class Root(Node):
    """Top of one namespace's tree: no tokens, no pages, never evicted while anything hangs below."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(parent=None, key=b"", pages=[])
        self.namespace = namespace
