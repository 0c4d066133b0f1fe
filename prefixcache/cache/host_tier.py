"""HostTier: pages that the device had to give up, kept in main memory by their proof."""

from __future__ import annotations

from collections import OrderedDict

from prefixcache.kv.page_pool import PagePool
from prefixcache.metrics import TierMetrics
from prefixcache.request import Tier
from prefixcache.tree.node import PageDigest


class HostTier:
    """A second pool in main memory, least recently used pages dropped first. Engine thread only.

    Copies are ordered on the device's stream like every other step: a page is read after the kernels that wrote it
    and before those that write it next, and a restored page is there before the kernels that read it.

    Args:
        pool: The host memory, pinned where the device is a GPU.
        device_pool: The pool that pages come from and go back to; same layout.
        metrics: Told what moves.

    Attributes:
        num_evicted_pages: Pages given up so far to make room for others.
    """

    def __init__(self, pool: PagePool, device_pool: PagePool, metrics: TierMetrics) -> None:
        self.num_evicted_pages = 0
        self._pool = pool
        self._device_pool = device_pool
        self._metrics = metrics
        metrics.saved(Tier.HOST, 0)  # so that the series exist from the start
        metrics.loaded(Tier.HOST, 0)
        self._page_at: OrderedDict[bytes, int] = OrderedDict()  # proof -> page, least recently used first

    @property
    def capacity_pages(self) -> int:
        """Pages that can be held."""
        return self._pool.num_pages

    @property
    def num_pages(self) -> int:
        """Pages held now."""
        return len(self._page_at)

    def put(self, pages: list[int], digests: list[PageDigest]) -> None:
        """Keep copies of device pages, given in token order; the first is used again soonest, so it goes in last."""
        for page, digest in zip(reversed(pages), reversed(digests), strict=True):
            held = self._page_at.get(digest.proof)
            if held is None:
                held = self._allocate()
                self._device_pool.copy_page_to(page, self._pool, held)
                self._page_at[digest.proof] = held
                self._metrics.saved(Tier.HOST, self._pool.page_bytes)
            self._page_at.move_to_end(digest.proof)

    def restore(self, digests: list[PageDigest], pages: list[int]) -> int:
        """Copy the leading pages that are held back to the device; return how many those are."""
        found = 0
        for digest, page in zip(digests, pages, strict=True):
            held = self._page_at.get(digest.proof)
            if held is None:
                break
            self._pool.copy_page_to(held, self._device_pool, page)
            found += 1
        for digest in reversed(digests[:found]):
            self._page_at.move_to_end(digest.proof)
        self._metrics.loaded(Tier.HOST, found * self._pool.page_bytes)
        return found

    def clear(self) -> int:
        """Drop all that is held; return how many pages that was."""
        pages = list(self._page_at.values())
        self._page_at.clear()
        self._pool.free(pages)
        return len(pages)

    def _allocate(self) -> int:
        pages = self._pool.try_allocate(1)
        if pages is None:
            self.num_evicted_pages += 1
            return self._page_at.popitem(last=False)[1]
        return pages[0]
