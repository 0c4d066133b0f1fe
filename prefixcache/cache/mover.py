"""TierMover: everything that is on its way between the device and the tiers below it.

    engine thread                                   store thread
    search ────────── keys ──────────────────────▶  count_leading, tier by tier
           ◀───────── runs ───────────────────────
    start_load ────── pages, from the back ──────▶  read ▶ verify (I7) ▶ into the lease's private pages
           ◀───────── low water mark ─────────────
    save ──────────── pinned pages ──────────────▶  copy ▶ seal ▶ write to each store
           ◀───────── unpin ──────────────────────

The store thread touches page memory only: pages that a lease owns alone, or published ones that a pin keeps as they
are (I5). Tree, leases and pools are changed on the engine thread, by the messages that come back through `post`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from prefixcache.cache.planner import PrefillEstimate, TransferEstimate, meeting_page, remaining_seconds
from prefixcache.cache.tiers import Load, Search, TierRun
from prefixcache.kv.codec import Mismatch, PageCodec, PageIdentity
from prefixcache.kv.transfer import PageBuffer, PageTransfer
from prefixcache.metrics import Direction, TierMetrics
from prefixcache.request import Namespace, Tier
from prefixcache.store.base import ERROR_KINDS, PageStore, StoreError, Value
from prefixcache.store.worker import StoreWorker
from prefixcache.tree.hashing import DigestChain, little_endian
from prefixcache.tree.lease import Lease
from prefixcache.tree.node import BYTES_PER_TOKEN

log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]

# Values read or written in one call: large enough for a store's full speed.
BATCH_BYTES = 8 * 2**20
# Of a slow store, less is read at once: what has not arrived whole is of no use to the computation that meets it.
BATCH_S = 0.1
# Pages that may wait to be written; more are not saved, and counted.
MAX_PENDING_PAGES = 4096
# Keys remembered as stored in a tier, so that they are not written again: 100,000 pages are 1.6 million tokens.
MAX_REMEMBERED_KEYS = 100_000
# What a skipped look-up takes off a tier's latency estimate, so that a tier that recovers is tried again.
FORGETTING = 0.97
# Why pages that were asked of a tier are not used, and why pages are not written: closed sets, for metrics.
MISS_REASONS = ("absent", "slower", "abandoned", *Mismatch, *ERROR_KINDS)
NOT_SAVED_REASONS = ("queue_full", "device_full", *ERROR_KINDS)


@dataclass(slots=True)
class StoreTier:
    """One store below the device, what it is known to hold, and what has been learned about its speed.

    `known` is the engine thread's: keys that need no writing, since the store has them or is about to.
    """

    tier: Tier
    store: PageStore
    estimate: TransferEstimate
    known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def remember(self, keys: Iterable[bytes]) -> None:
        """Note keys that the store has, or is about to have. Engine thread only."""
        for key in keys:
            self.known[key] = None
        while len(self.known) > MAX_REMEMBERED_KEYS:
            self.known.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note keys that the store has not, after all. Engine thread only."""
        for key in keys:
            self.known.pop(key, None)


class PageToSave(NamedTuple):
    """A published page, and the tiers that are not known to have it."""

    identity: PageIdentity
    page: int
    tiers: Sequence[StoreTier]


@dataclass(slots=True, eq=False)
class Save:
    """Published pages on their way to the stores, pinned until they are copied or given up.

    The store thread copies, and the engine thread ends the pin, only with `lock` held.
    """

    pages: list[PageToSave]
    unpin: Callable[[], None]
    is_pinned: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


class TierMover:
    """Searches, loads and saves pages. Engine thread only, but for what says "Store thread".

    Args:
        tiers: Stores below the device, quickest first.
        worker: The thread that they live on.
        transfer: Copies between the pool and bytes.
        codec: Seals and verifies stored values.
        fingerprint: Names the model and the layout of its K/V; part of every page's digest.
        page_size: Tokens in a page.
        post: Runs a callable on the engine thread, soon.
        metrics: Told what happens.
    """

    def __init__(
        self,
        tiers: list[StoreTier],
        worker: StoreWorker,
        transfer: PageTransfer,
        codec: PageCodec,
        fingerprint: bytes,
        page_size: int,
        post: Post,
        metrics: TierMetrics,
    ) -> None:
        self.prefill = PrefillEstimate()
        self._tiers = tiers
        self._by_tier = {tier.tier: tier for tier in tiers}
        self._worker = worker
        self._transfer = transfer
        self._codec = codec
        self._fingerprint = fingerprint
        self._page_size = page_size
        self._post = post
        self._metrics = metrics
        self._page_bytes = codec.header_bytes + codec.payload_bytes
        self._max_batch_pages = max(1, BATCH_BYTES // self._page_bytes)
        self._pinned_saves: dict[Save, None] = {}  # oldest first
        self.num_pinned_pages = 0
        self._saves: set[Future[None]] = set()
        self._save_buffer: PageBuffer | None = None
        self._save_turn = asyncio.Lock()

    # --- names -------------------------------------------------------------------------------------------------

    def chain(self, namespace: Namespace) -> DigestChain:
        """Start the digests of a sequence."""
        return DigestChain(self._fingerprint, namespace, self._page_size)

    def _identities(self, chain: DigestChain, key: bytes, start: int, end: int) -> list[PageIdentity]:
        size = self._page_size * BYTES_PER_TOKEN
        tokens = little_endian(key[start * size : end * size])
        return [
            PageIdentity(chain.namespace_digest, digest.key, digest.proof, tokens[at : at + size])
            for digest, at in zip(chain.digests[start:end], range(0, len(tokens), size), strict=True)
        ]

    def load_seconds(self, num_tokens: int) -> float:
        """Estimate how long the quickest tier would take to bring so many tokens, if it had them."""
        num_bytes = num_tokens // self._page_size * self._page_bytes
        return min(tier.estimate.seconds(num_bytes) for tier in self._tiers)

    # --- search ------------------------------------------------------------------------------------------------

    def search(self, namespace: Namespace, key: bytes, num_known_tokens: int) -> Search | None:
        """Ask the tiers for the pages of `key` behind the known ones; None where asking cannot pay.

        The last token is never asked for: it must be run to have something to sample from.
        """
        num_tokens = len(key) // BYTES_PER_TOKEN
        start, end = num_known_tokens // self._page_size, (num_tokens - 1) // self._page_size
        if start >= end:
            return None
        compute_s = self.prefill.seconds(num_tokens - num_known_tokens, num_known_tokens)
        asked = [tier for tier in self._tiers if not compute_s or tier.estimate.latency_s < compute_s]
        for tier in self._tiers:
            if tier not in asked:
                tier.estimate.latency_s *= FORGETTING
                self._metrics.missed(tier.tier, "slower", end - start)
        if not asked:
            return None
        chain = self.chain(namespace)
        chain.extend(key[: end * self._page_size * BYTES_PER_TOKEN])
        search = Search(chain)
        self._start(self._find(search, asked, [digest.key for digest in chain.digests[start:]], start))
        return search

    async def _find(self, search: Search, tiers: list[StoreTier], keys: list[bytes], start: int) -> None:
        """Ask each tier how far it goes on from where the one before it ends. Store thread."""
        runs: list[TierRun] = []
        num_found = 0
        for tier in tiers:
            asked = keys[num_found:]
            started_s = time.monotonic()
            try:
                count = await tier.store.count_leading(asked) if asked else 0
            except StoreError as error:
                self._metrics.missed(tier.tier, error.kind, len(asked))
                count = 0
            self._post(partial(self._note_search, tier, asked, count, time.monotonic() - started_s))
            if count:
                runs.append(TierRun(tier.tier, start + num_found, start + num_found + count))
                num_found += count
        if num_found < len(keys):
            self._metrics.missed(tiers[-1].tier, "absent", len(keys) - num_found)

        def answer() -> None:
            search.runs = runs

        self._post(answer)

    def _note_search(self, tier: StoreTier, asked: list[bytes], num_found: int, seconds: float) -> None:
        tier.estimate.observe_latency(seconds)
        tier.remember(asked[:num_found])
        tier.forget(asked[num_found:])  # whatever was written is gone: worth writing again

    # --- load --------------------------------------------------------------------------------------------------

    def start_load(self, search: Search, lease: Lease, key: bytes, num_known_tokens: int) -> Load | None:
        """Start to load what the tiers have beyond the known tokens; None where computing it is quicker.

        Loads at most what the planner expects to be left when the computation, starting now at the known tokens,
        would meet it.
        """
        start = num_known_tokens // self._page_size
        runs = [TierRun(run.tier, max(run.start, start), run.end) for run in search.runs or [] if run.end > start]
        if not runs:
            return None
        # what the device had at the search it may have given up since: that is computed, while the rest is loaded
        start, end = runs[0].start, runs[-1].end
        num_bytes = {run.tier: (run.end - run.start) * self._page_bytes for run in runs}
        expected_s = sum(self._by_tier[tier].estimate.seconds(count) for tier, count in num_bytes.items())
        latency_s = max(self._by_tier[run.tier].estimate.latency_s for run in runs)
        meet = meeting_page(self.prefill, start, end, self._page_size, expected_s / (end - start), latency_s)
        if meet >= end:
            for run in runs:
                self._metrics.missed(run.tier, "slower", run.end - run.start)
            return None
        first_batch = {run.tier: self._first_batch(self._by_tier[run.tier].estimate) for run in runs}
        load = Load(runs, time.monotonic(), expected_s, first_batch, low=end, floor=start)
        self._note_moving(load, 1)
        identities = self._identities(search.chain, key, start, end)
        self._start(self._load(load, identities, lease.page_table[start:end], self._transfer.fence()))
        return load

    def computable_tokens(self, load: Load, num_computed_tokens: int) -> int | None:
        """Tell how many tokens are worth computing from the front now; None for no limit.

        0 means that the load will be there sooner than anything that could be computed meanwhile.
        """
        if load.is_done:
            return None
        low = load.low  # looked at once: the store thread may lower it meanwhile
        start = max(num_computed_tokens // self._page_size, load.start)
        if num_computed_tokens // self._page_size >= low:
            return None
        total = (load.end - load.start) * self._page_bytes
        loaded = (load.end - low) * self._page_bytes
        slowest = max((self._by_tier[run.tier].estimate for run in load.runs), key=lambda e: e.seconds_per_byte)
        left_s = remaining_seconds(slowest, total, loaded, time.monotonic() - load.started_s)
        seconds_per_page = left_s / (low - load.start) if low > load.start else 0.0
        meet = meeting_page(self.prefill, start, low, self._page_size, seconds_per_page, 0.0)
        return max(0, meet * self._page_size - num_computed_tokens)

    def _first_batch(self, estimate: TransferEstimate) -> int:
        """Start with one page where nothing was measured yet: it soon shows what to ask for next."""
        return self._batch_pages(estimate.seconds_per_byte * self._page_bytes) if estimate.num_bytes_observed else 1

    async def _load(
        self, load: Load, identities: list[PageIdentity], pages: list[int], fence: torch.cuda.Event | None
    ) -> None:
        """Load from the back, a batch ahead of what is being verified. Store thread."""
        try:
            for run in reversed(load.runs):
                if not await self._load_run(load, run, identities, pages, fence):
                    break
        finally:
            self._post(lambda: self._finish_load(load))

    async def _load_run(
        self,
        load: Load,
        run: TierRun,
        identities: list[PageIdentity],
        pages: list[int],
        fence: torch.cuda.Event | None,
    ) -> bool:
        """Load one tier's pages; False where something was missing, wrong, or no longer wanted. Store thread."""
        tier, first = self._by_tier[run.tier], load.start
        high = run.end
        low = max(run.start, high - load.first_batch[run.tier])
        started_s = time.monotonic()
        reading = self._read(tier.store, identities[low - first : high - first])
        try:
            while True:
                try:
                    values = await reading
                except StoreError as error:
                    self._metrics.missed(run.tier, error.kind, high - run.start)
                    return False
                read_s = time.monotonic() - started_s
                next_low = max(run.start, low - self._batch_pages(read_s / (high - low)))
                if low > max(run.start, load.floor):
                    reading = self._read(tier.store, identities[next_low - first : low - first])
                payloads, wrong = await self._verified(tier, values, identities[low - first : high - first])
                num_placed = self._place(load, high, payloads, pages[: high - first], fence)
                now_s = time.monotonic()
                self._report(run.tier, num_placed, now_s - started_s)
                started_s = now_s
                # where one is wrong more may be: what is computed instead is written anew; foreign ones stay
                if wrong and wrong != Mismatch.VERSION:
                    self._post(partial(tier.forget, [each.key for each in identities[: high - len(payloads) - first]]))
                if num_placed < high - low:
                    return False
                if low == run.start:
                    return True
                if low <= load.floor:
                    self._metrics.missed(run.tier, "abandoned", low - run.start)
                    return False
                low, high = next_low, low
        finally:
            reading.cancel()  # what is still under way when something before it was wrong; its answer reaches nobody

    def _batch_pages(self, seconds_per_page: float) -> int:
        """Choose how many pages to read at once from a store of this speed. Any thread."""
        return max(1, min(self._max_batch_pages, int(BATCH_S / max(seconds_per_page, 1e-9))))

    def _read(self, store: PageStore, identities: list[PageIdentity]) -> asyncio.Task[list[Value | None]]:
        return asyncio.ensure_future(store.read([identity.key for identity in identities]))

    async def _verified(
        self, tier: StoreTier, values: list[Value | None], identities: list[PageIdentity]
    ) -> tuple[list[memoryview], str | None]:
        """Return the sound payloads at the end of a batch, in page order, and what ends them (I7). Store thread."""
        payloads: list[memoryview] = []
        for value, identity in zip(reversed(values), reversed(identities), strict=True):
            payload = None if value is None else self._codec.verify(value, identity)
            if isinstance(payload, memoryview):
                payloads.append(payload)
                continue
            wrong = "absent" if payload is None else payload.value
            self._metrics.missed(tier.tier, wrong, 1)
            if isinstance(payload, Mismatch) and payload.is_corrupt:
                await self._delete(tier.store, identity.key)
            return payloads[::-1], wrong
        return payloads[::-1], None

    def _place(
        self, load: Load, high: int, payloads: list[memoryview], pages: list[int], fence: torch.cuda.Event | None
    ) -> int:
        """Copy payloads into the last of `pages`, which end before page `high` of the prompt. Store thread.

        Returns:
            How many were placed; the computation may have claimed the pages of the others meanwhile.
        """
        with load.lock:
            wanted = payloads[max(0, load.floor - (high - len(payloads))) :] if load.floor < high else []
            if wanted:
                self._transfer.payloads_to_pages(wanted, pages[len(pages) - len(wanted) :], fence)
                load.low = high - len(wanted)
        return len(wanted)

    async def _delete(self, store: PageStore, key: bytes) -> None:
        try:
            await store.delete([key])
        except StoreError as error:
            log.debug("a corrupt value could not be deleted: %s", error.kind)

    def _report(self, tier: Tier, num_pages: int, seconds: float) -> None:
        """Let the engine thread learn from a batch. Store thread."""
        if num_pages:
            num_bytes = num_pages * self._page_bytes
            self._metrics.loaded(tier, num_bytes)
            self._post(lambda: self._by_tier[tier].estimate.observe(num_bytes, seconds))

    def _finish_load(self, load: Load) -> None:
        load.is_done = True
        self._note_moving(load, -1)
        if load.low == load.start:
            self._metrics.load_finished(load.runs[-1].tier, load.expected_s, time.monotonic() - load.started_s)
            log.debug("loaded %d pages, expected %.3f s", load.end - load.start, load.expected_s)

    def _note_moving(self, load: Load, sign: int) -> None:
        for run in load.runs:
            self._metrics.moving(run.tier, Direction.LOAD, sign * (run.end - run.start))

    # --- save --------------------------------------------------------------------------------------------------

    def save(self, chain: DigestChain, key: bytes, start: int, pages: list[int], unpin: Callable[[], None]) -> None:
        """Write published pages to every store, in the background; `unpin` is called when they have been copied.

        Pages that were saved before, or that find the queue full, are left out.
        """
        job: list[PageToSave] = []
        for identity, page in zip(self._identities(chain, key, start, start + len(pages)), pages, strict=True):
            tiers = [tier for tier in self._tiers if identity.key not in tier.known]
            if tiers:
                job.append(PageToSave(identity, page, tiers))
        if job and self.num_pinned_pages + len(job) > MAX_PENDING_PAGES:
            for tier in self._tiers:
                self._metrics.not_saved(tier.tier, "queue_full", sum(tier in item.tiers for item in job))
            job = []
        if not job:
            unpin()
            return
        save = Save(job, unpin)
        self._pinned_saves[save] = None
        self.num_pinned_pages += len(job)
        for tier in self._tiers:
            tier.remember(item.identity.key for item in job if tier in item.tiers)
        self._note_waiting(save, 1)
        saving = self._start(self._save(save, self._transfer.fence()))
        self._saves.add(saving)
        saving.add_done_callback(lambda _: self._note_waiting(save, -1))
        saving.add_done_callback(self._saves.discard)

    def _note_waiting(self, save: Save, sign: int) -> None:
        for tier in self._tiers:
            self._metrics.moving(tier.tier, Direction.SAVE, sign * sum(tier in item.tiers for item in save.pages))

    def give_up_save(self) -> bool:
        """Unpin the pages of the latest save that was not copied yet; False where there is none."""
        if not self._pinned_saves:
            return False
        save = next(reversed(self._pinned_saves))
        self._unpin(save)
        for tier in self._tiers:
            keys = [item.identity.key for item in save.pages if tier in item.tiers]
            tier.forget(keys)
            self._metrics.not_saved(tier.tier, "device_full", len(keys))
        return True

    def _unpin(self, save: Save) -> None:
        with save.lock:
            was_pinned, save.is_pinned = save.is_pinned, False
        if was_pinned:
            del self._pinned_saves[save]
            self.num_pinned_pages -= len(save.pages)
            save.unpin()

    async def _save(self, save: Save, fence: torch.cuda.Event | None) -> None:
        """Copy, seal and write, a buffer at a time; one save after another. Store thread."""
        try:
            async with self._save_turn:
                if self._save_buffer is None:
                    self._save_buffer = self._transfer.new_buffer(self._max_batch_pages, self._codec.header_bytes)
                for start in range(0, len(save.pages), self._max_batch_pages):
                    batch = save.pages[start : start + self._max_batch_pages]
                    with save.lock:
                        if not save.is_pinned:
                            return
                        self._transfer.pages_to_buffer([item.page for item in batch], self._save_buffer, fence)
                    if start + len(batch) == len(save.pages):
                        self._post(partial(self._unpin, save))
                    await self._write(batch, self._save_buffer)
        finally:
            self._post(partial(self._unpin, save))

    async def _write(self, batch: list[PageToSave], buffer: PageBuffer) -> None:
        for index, item in enumerate(batch):
            self._codec.seal(buffer.value(index), item.identity)
        for tier in self._tiers:
            entries: list[tuple[bytes, Value]] = [
                (item.identity.key, buffer.value(index)) for index, item in enumerate(batch) if tier in item.tiers
            ]
            if not entries:
                continue
            try:
                await tier.store.write(entries)
            except StoreError as error:
                self._metrics.not_saved(tier.tier, error.kind, len(entries))
                self._post(partial(tier.forget, [key for key, _ in entries]))
            else:
                self._metrics.saved(tier.tier, len(entries) * self._page_bytes)

    # --- running -----------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        future = self._worker.run(work)
        future.add_done_callback(_log_failure)
        return future

    def flush(self, timeout_s: float) -> bool:
        """Wait until what is queued for writing is written; False where that took too long. The engine has ended."""
        return not wait(self._saves, timeout_s).not_done


def _log_failure(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("the store thread met an unexpected error", exc_info=error)
