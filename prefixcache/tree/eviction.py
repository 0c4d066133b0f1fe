"""Which leaf goes first when memory is short."""

from __future__ import annotations

import heapq
from typing import Protocol

from prefixcache.tree.node import Node


class EvictionPolicy(Protocol):
    """Orders the evictable nodes. The tree tells it what becomes evictable and what no longer is."""

    def add(self, node: Node) -> None:
        """Take `node` in, or note that it was used again."""

    def discard(self, node: Node) -> None:
        """Forget `node`; does nothing for one that is not held."""

    def victim(self) -> Node | None:
        """Name the node to evict next, without forgetting it."""


class LeastRecentlyUsed:
    """Evicts the leaf whose last use is longest ago; among equals, the one that became evictable first.

    A heap with lazy deletion: an entry counts only while it is the node's newest, so every call is O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._current: dict[Node, int] = {}  # node -> serial of its valid heap entry
        self._serial = 0

    def __len__(self) -> int:
        return len(self._current)

    def add(self, node: Node) -> None:
        self._serial += 1
        self._current[node] = self._serial
        heapq.heappush(self._heap, (node.last_used, self._serial, node))
        if len(self._heap) > 64 + 2 * len(self._current):
            self._drop_stale_entries()

    def discard(self, node: Node) -> None:
        self._current.pop(node, None)

    def victim(self) -> Node | None:
        while self._heap:
            _, serial, node = self._heap[0]
            if self._current.get(node) == serial:
                return node
            heapq.heappop(self._heap)
        return None

    def _drop_stale_entries(self) -> None:
        self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)
