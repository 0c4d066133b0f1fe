"""PagePool: a fixed amount of K/V memory on one device, handed out in pages.

    kv[layer, 0 = K | 1 = V, slot, kv_head, head_dim]        slot = page_id * page_size + offset

Slots of neighbouring pages lie next to each other, so a run of consecutive pages is one plain tensor slice that
attention can read in place. The pool therefore hands out consecutive pages wherever it can.
"""

from __future__ import annotations

import torch
from sortedcontainers import SortedDict, SortedList

from prefixcache.kv.layout import KVLayout


class FreeRuns:
    """The free page ids, kept as maximal runs. Pure bookkeeping; every call is O(log runs) a run touched."""

    def __init__(self, num_pages: int) -> None:
        self.num_free = 0
        self._length_at: SortedDict = SortedDict()  # first page of a run -> its length
        self._by_length: SortedList = SortedList()  # (length, first page)
        self._insert(0, num_pages)

    def take(self, num_pages: int, after: int | None = None) -> list[int]:
        """Take `num_pages` pages: those that follow page `after` if free, else the longest runs first."""
        assert num_pages <= self.num_free
        taken: list[int] = []
        if after is not None and after + 1 in self._length_at:
            taken += self._take_from(after + 1, num_pages)
        while len(taken) < num_pages:
            _, first = self._by_length[-1]
            taken += self._take_from(first, num_pages - len(taken))
        return taken

    def give(self, pages: list[int]) -> None:
        """Take pages back; raises if one of them is free already."""
        for first, length in page_runs(sorted(pages)):
            self._insert(first, length)

    def __contains__(self, page: int) -> bool:
        index = self._length_at.bisect_right(page) - 1
        if index < 0:
            return False
        first, length = self._length_at.peekitem(index)
        return bool(page < first + length)

    def _take_from(self, first: int, num_pages: int) -> list[int]:
        length = self._remove(first)
        used = min(length, num_pages)
        if used < length:
            self._add(first + used, length - used)
        return list(range(first, first + used))

    def _insert(self, first: int, length: int) -> None:
        index = self._length_at.bisect_left(first)
        if index < len(self._length_at):
            following, _ = self._length_at.peekitem(index)
            assert following >= first + length, "a page was freed twice"
            if following == first + length:
                length += self._remove(following)
        if index > 0:
            previous, previous_length = self._length_at.peekitem(index - 1)
            assert previous + previous_length <= first, "a page was freed twice"
            if previous + previous_length == first:
                self._remove(previous)
                first, length = previous, previous_length + length
        self._add(first, length)

    def _add(self, first: int, length: int) -> None:
        if length:
            self._length_at[first] = length
            self._by_length.add((length, first))
            self.num_free += length

    def _remove(self, first: int) -> int:
        length: int = self._length_at.pop(first)
        self._by_length.remove((length, first))
        self.num_free -= length
        return length


class PagePool:
    """K and V of `num_pages` pages over all layers, on one device. Engine thread only.

    Attributes:
        kv: The memory, `[num_layers, 2, num_pages * page_size, num_kv_heads, head_dim]`.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device, *, pinned: bool = False) -> None:
        self.num_pages = num_pages
        self.page_size = layout.page_size
        self.page_bytes = layout.bytes_per_page
        # zeros, not empty: whatever a kernel reads past a sequence's end and masks out must not be a NaN
        self.kv = torch.zeros(
            (layout.num_layers, 2, num_pages * layout.page_size, layout.num_kv_heads, layout.head_dim),
            dtype=layout.dtype,
            device=device,
            pin_memory=pinned,
        )
        self._free = FreeRuns(num_pages)

    @property
    def num_free(self) -> int:
        return self._free.num_free

    def try_allocate(self, num_pages: int, after: int | None = None) -> list[int] | None:
        """Take `num_pages` free pages, consecutive and following page `after` where possible; None if too few."""
        if num_pages > self._free.num_free:
            return None
        return self._free.take(num_pages, after)

    def free(self, pages: list[int]) -> None:
        self._free.give(pages)

    def copy_page(self, source: int, destination: int) -> None:
        """Copy one page's K/V over all layers; ordered on the device like every other step."""
        self.copy_page_to(source, self, destination)

    def copy_page_to(self, source: int, other: PagePool, destination: int) -> None:
        """Copy one page into a pool of the same layout, on this device or another one."""
        size = self.page_size
        target = other.kv[:, :, destination * size : (destination + 1) * size]
        target.copy_(self.kv[:, :, source * size : (source + 1) * size], non_blocking=True)


def page_runs(pages: list[int]) -> list[tuple[int, int]]:
    """Join consecutive page ids, in the order given, into (first page, number of pages) runs."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
