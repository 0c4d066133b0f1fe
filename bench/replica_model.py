"""One replica as a discrete-event model: requests take the time that was measured, and no model runs.

    submit ──▶ waiting ──▶ [loading from the store] ──▶ prefilling, one at a time ──▶ decoding, all at once ──▶ done

As in the engine, a step holds one token of every decoding request and one chunk of one prompt, the prompt with the
shortest rest goes first, and one that was passed over for `MAX_OVERTAKEN` chunks goes before all others. Between two
events nothing changes its rate, so the model jumps from event to event instead of counting steps.

What is cached is held by the project's own tree, with a block of the trace in the place of a page.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixcache.cache.planner import attention_pairs
from prefixcache.engine.scheduler import MAX_OVERTAKEN
from prefixcache.request import Namespace
from prefixcache.tree.eviction import LeastRecentlyUsed
from prefixcache.tree.node import BYTES_PER_TOKEN, Node
from prefixcache.tree.radix import Match, RadixTree

if TYPE_CHECKING:
    from bench.store_model import StoreModel

NAMESPACE = Namespace()
BLOCK_BYTES = BYTES_PER_TOKEN  # a block's id stands where the tree expects a token's
INSTANT_S = 1e-6  # what would end within this time ends now: far above what rounding does to long simulated times


class Clock:
    """Simulated time and what is to happen in it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._serial), action))

    def run(self) -> None:
        """Let everything happen, in order of time; among equals in the order in which it was asked for."""
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """What one replica's work takes, as measured by `bench.service_times`.

    Attributes:
        prefill_token_s: A prompt's token, without attention.
        prefill_pair_s: One (query, key) pair of a prompt's attention.
        decode_step_s: A step of one token for each decoding request: the part that every step has.
        decode_request_s: The same, for each request in it.
        decode_context_s: The same, for each token of those requests' contexts.
        restore_latency_s: From asking the store to the first byte.
        restore_bytes_per_s: One replica alone with the store.
        kv_bytes_per_token: What is stored of one token.
        chunk_tokens: Most prompt tokens in one step.
    """

    prefill_token_s: float
    prefill_pair_s: float
    decode_step_s: float
    decode_request_s: float
    decode_context_s: float
    restore_latency_s: float
    restore_bytes_per_s: float
    kv_bytes_per_token: int
    chunk_tokens: int

    def prefill_s(self, num_tokens: int, context_len: int) -> float:
        """Seconds that the prompt's own work takes, however it is cut into chunks."""
        return self.prefill_token_s * num_tokens + self.prefill_pair_s * attention_pairs(num_tokens, context_len)

    def step_s(self, num_requests: int, num_context_tokens: int) -> float:
        """Seconds that one token for each of some requests takes; nothing where there are none."""
        if num_requests == 0:
            return 0.0
        return self.decode_step_s + self.decode_request_s * num_requests + self.decode_context_s * num_context_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the trace.

    Attributes:
        blocks: The ids of its blocks, as the tree takes them; each stands for all tokens up to the block's end.
    """

    arrival_s: float
    num_tokens: int
    num_output_tokens: int
    blocks: bytes

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) // BLOCK_BYTES


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through a replica.

    Attributes:
        num_cached_tokens: Prompt tokens that need no computing; an estimate until the job is admitted.
        node: The pinned end of what the device has of its prompt; None until then.
        num_device_blocks: How many blocks that was.
        num_store_blocks: How many the store added.
        work_s: Seconds of prefill.
        num_chunks: Steps that they are spread over.
        rest: Share of the prefill that is left.
        overtaken_from: The replica's count of chunks when the job came, moved on while it is served itself.
        end_clock: The replica's token clock when its last token will have come.
        ttft_s: When its first token came, from its arrival.
        total_s: When its last one came.
    """

    request: Request
    num_cached_tokens: int
    overtaken_from: float
    node: Node | None = None
    num_device_blocks: int = 0
    num_store_blocks: int = 0
    work_s: float = 0.0
    num_chunks: int = 0
    rest: float = 1.0
    end_clock: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0


class BlockCache:
    """The device's cache: the project's tree and a number of blocks that it may hold."""

    def __init__(self, num_blocks: int) -> None:
        self._tree = RadixTree(1, LeastRecentlyUsed())
        self._num_blocks = num_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self._tree.num_pages

    def num_known_blocks(self, blocks: bytes) -> int:
        return self._tree.match(NAMESPACE, blocks).num_tokens

    def acquire(self, blocks: bytes) -> tuple[Node, int]:
        """Pin what is known of `blocks`, and tell how much that is."""
        match = self._tree.match(NAMESPACE, blocks)
        return self._pin(match), match.num_tokens

    def publish(self, node: Node, blocks: bytes) -> Node:
        """Add the rest of `blocks` below the pinned `node`, as far as memory allows; return what is pinned now."""
        match = self._tree.match(NAMESPACE, blocks)  # others may have published the same meanwhile
        grown = self._pin(match)
        self._tree.unpin(node)
        fresh = blocks[match.num_tokens * BLOCK_BYTES :]
        num_fresh = len(fresh) // BLOCK_BYTES
        missing = num_fresh - (self._num_blocks - self._tree.num_pages)
        if num_fresh == 0 or missing > self._tree.num_pages - self._tree.num_pinned_pages:
            return grown
        if missing > 0:
            self._tree.evict(missing)
        return self._tree.extend(grown, fresh, [0] * num_fresh, [])[0]

    def release(self, node: Node) -> None:
        self._tree.unpin(node)

    def _pin(self, match: Match) -> Node:
        node = match.node or self._tree.root(NAMESPACE)
        if match.num_node_pages < len(node.pages):
            node = self._tree.split(node, match.num_node_pages)
        self._tree.pin(node)
        return node


class Replica:
    """One server.

    Args:
        clock: Time; shared by all.
        times: What its work takes.
        cache_blocks: Blocks that its device holds.
        block_tokens: Tokens in one.
        store: What lies behind it; None for nothing.
        finished: Told each request that has got its last token.
    """

    def __init__(
        self,
        clock: Clock,
        times: ServiceTimes,
        cache_blocks: int,
        block_tokens: int,
        store: StoreModel | None,
        finished: Callable[[Job], None],
    ) -> None:
        self._clock = clock
        self._times = times
        self._block_tokens = block_tokens
        self._store = store
        self._finished = finished
        self.cache = BlockCache(cache_blocks)
        self._waiting: list[Job] = []  # in order of arrival; the one being prefilled is among them
        self._current: Job | None = None
        self._num_loading = 0
        self._decoding: list[tuple[float, int, Job]] = []
        self._context_tokens = 0
        self._token_clock = 0.0  # tokens that a request would have got that had decoded all the time
        self._chunks_done = 0.0
        self._is_writing = False
        self.num_unwritten = 0  # prompts that the store was too slow for
        self._last_s = 0.0
        self._version = 0
        self._serial = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Requests without a first token."""
        return len(self._waiting) + self._num_loading

    @property
    def num_open(self) -> int:
        return self.num_waiting + len(self._decoding)

    def submit(self, request: Request) -> None:
        self._advance()
        known = self.cache.num_known_blocks(request.blocks) * self._block_tokens
        self._waiting.append(Job(request, min(known, request.num_tokens - 1), self._chunks_done))
        self._go_on()

    # --- from event to event -------------------------------------------------------------------------------------

    def _rates(self) -> tuple[float, float, float]:
        """Per second: the current prompt's share, its chunks, and tokens of each decoding request."""
        step_s = self._times.step_s(len(self._decoding), self._context_tokens)
        job = self._current
        if job is None:
            return 0.0, 0.0, 1 / step_s if step_s else 0.0
        steps_per_s = 1 / (job.work_s / job.num_chunks + step_s)
        return steps_per_s / job.num_chunks, steps_per_s, steps_per_s

    def _advance(self) -> None:
        """Bring everything to the present."""
        elapsed_s = self._clock.now_s - self._last_s
        self._last_s = self._clock.now_s
        share, chunks, tokens = self._rates()
        self._token_clock += tokens * elapsed_s
        if self._current is not None:
            self._current.rest -= share * elapsed_s
            self._chunks_done += chunks * elapsed_s
            self._current.overtaken_from += chunks * elapsed_s

    def _go_on(self) -> None:
        """Choose what is prefilled from now on, and be woken when the next thing ends."""
        self._choose()
        self._version += 1
        share, _, tokens = self._rates()
        ends_s = []
        if self._current is not None:
            ends_s.append(self._current.rest / share)
        if self._decoding:
            ends_s.append((self._decoding[0][0] - self._token_clock) / tokens)
        if ends_s:
            version = self._version
            self._clock.at(self._clock.now_s + max(min(ends_s), 0.0), lambda: self._wake(version))

    def _wake(self, version: int) -> None:
        if version != self._version:
            return  # something came in between, and the end was computed anew
        self._advance()
        job = self._current
        share, _, tokens = self._rates()
        if job is not None and job.rest <= share * INSTANT_S:
            self._current = None
            self._waiting.remove(job)
            self._end_prefill(job)
        while self._decoding and self._decoding[0][0] <= self._token_clock + tokens * INSTANT_S:
            job = heapq.heappop(self._decoding)[2]
            self._context_tokens -= job.request.num_tokens
            self._end(job)
        self._go_on()

    def _choose(self) -> None:
        """Take the prompt with the shortest rest, or the oldest one that has been overtaken too often."""
        while self._waiting:
            job = next(
                (job for job in self._waiting if self._chunks_done - job.overtaken_from >= MAX_OVERTAKEN), None
            ) or min(self._waiting, key=self._rest_tokens)
            if job.node is not None or self._admit(job):
                self._current = job
                return
        self._current = None

    def _rest_tokens(self, job: Job) -> float:
        return job.rest * (job.request.num_tokens - job.num_cached_tokens)

    # --- a job's life --------------------------------------------------------------------------------------------

    def _admit(self, job: Job) -> bool:
        """Pin what the device has; False where the job goes away for now, to load what the store has."""
        request, block_tokens, store = job.request, self._block_tokens, self._store
        job.node, job.num_device_blocks = self.cache.acquire(request.blocks)
        known = job.num_device_blocks
        stored = store.num_known_blocks(request.blocks, known) if store is not None else 0
        self._plan(job, known)
        if store is None or stored == 0:
            return True
        num_bytes = stored * block_tokens * self._times.kv_bytes_per_token
        compute_s = self._times.prefill_s(stored * block_tokens, known * block_tokens)
        if store.expected_s(num_bytes) >= compute_s:
            return True
        self._waiting.remove(job)
        self._num_loading += 1
        store.read(num_bytes, lambda: self._end_load(job, stored))
        return False

    def _plan(self, job: Job, num_known_blocks: int) -> None:
        request = job.request
        job.num_cached_tokens = min(num_known_blocks * self._block_tokens, request.num_tokens - 1)
        num_tokens = request.num_tokens - job.num_cached_tokens
        job.work_s = self._times.prefill_s(num_tokens, job.num_cached_tokens)
        job.num_chunks = -(-num_tokens // self._times.chunk_tokens)

    def _end_load(self, job: Job, num_blocks: int) -> None:
        self._advance()
        job.num_store_blocks = num_blocks
        self._plan(job, job.num_device_blocks + num_blocks)
        self._num_loading -= 1
        self._waiting.append(job)
        self._go_on()

    def _end_prefill(self, job: Job) -> None:
        """The first token is there: publish the prompt, have it stored, and go on to decode."""
        request = job.request
        job.ttft_s = self._clock.now_s - request.arrival_s
        assert job.node is not None
        job.node = self.cache.publish(job.node, request.blocks)
        self._offer(request.blocks)
        if request.num_output_tokens <= 1:
            self._end(job)
            return
        job.end_clock = self._token_clock + request.num_output_tokens - 1
        heapq.heappush(self._decoding, (job.end_clock, next(self._serial), job))
        self._context_tokens += request.num_tokens

    def _offer(self, blocks: bytes) -> None:
        """Write what the store lacks, unless the last write is still under way: the queue is bounded."""
        if self._store is None:
            return
        if self._is_writing:
            self.num_unwritten += 1
            return

        def written() -> None:
            self._is_writing = False

        self._is_writing = self._store.write(blocks, self._block_tokens * self._times.kv_bytes_per_token, written)

    def _end(self, job: Job) -> None:
        assert job.node is not None
        self.cache.release(job.node)
        job.total_s = self._clock.now_s - job.request.arrival_s
        self._finished(job)
