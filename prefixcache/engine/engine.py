"""Engine: the one thread that owns tree, pool and model, and the loop that it runs.

event loop ── submit, abort ──▶ inbox ──▶ take messages ─▶ schedule ─▶ run ─▶ publish ──▶ event loop
                                               ▲                                │
                                               └────────────────────────────────┘
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.engine import sampler
from prefixcache.engine.admission import Ahead, Pace, Places, check_deadline
from prefixcache.engine.detokenizer import Detokenizer
from prefixcache.engine.open_request import DeltaSink, OpenRequest, Sample, ending_ids
from prefixcache.engine.runner import Runner
from prefixcache.engine.scheduler import Scheduler, StepPlan, Work
from prefixcache.engine.sequence import Sequence
from prefixcache.engine.warm_up import warm_up
from prefixcache.errors import DeadlinePassed, EngineFailed, InvalidRequest, NotServing, PrefixCacheError
from prefixcache.metrics import HitKind, Metrics, PageState
from prefixcache.model.tokenizer import Tokenizer
from prefixcache.request import Delta, GenerateRequest, Namespace, Tier, TokenLogprobs
from prefixcache.tree.node import BYTES_PER_TOKEN

log = logging.getLogger(__name__)

News = tuple[DeltaSink, Delta | PrefixCacheError]
Publish = Callable[[list[News]], None]
Inbox = SimpleQueue["OpenRequest | Callable[[], None]"]
_T = TypeVar("_T")

# How often an idle engine comes round, so that its heartbeat stays fresh.
IDLE_S = 0.25
# How long a step's worth of waiting lasts when all that is left to do is to wait for pages of lower tiers.
LOADING_S = 0.005
# When to come back to a full queue. A queue drains by whole requests; sooner would mostly meet it full again.
RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request is checked against."""

    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    max_queue: int
    max_tenant_queue: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is at one moment, and what it has done since its start.

    Attributes:
        num_running_requests: Requests of which something is being computed.
        num_waiting_requests: Requests that have not begun.
        num_waiting_tokens: Prompt tokens of those, known ones included.
        usage: Share of the pages that can't be given up now. Cached pages that nobody uses don't count.
        num_generated_tokens: Tokens sampled.
        num_prompt_tokens: Prompt tokens of requests that have got as far as their first token.
        num_cached_tokens: How many of those needed no computing.
    """

    num_running_requests: int
    num_waiting_requests: int
    num_waiting_tokens: int
    usage: float
    num_generated_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int


class Engine:
    """Runs requests. `submit` and `abort` leave messages; all else happens on the engine's own thread.

    Args:
        runner: The model on its device.
        cache: K/V pages and the tree over them.
        scheduler: Decides each step.
        tokenizer: For output text and stop strings.
        limits: Checked at `submit`.
        metrics: Told of every step.
        publish: Called once a step, on the engine thread, with everything that the step has to say.
        inbox: Where messages for the engine thread are put: by `submit` and `abort`, and by the cache's mover.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        metrics: Metrics,
        publish: Publish,
        inbox: Inbox,
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._cache = cache
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._publish = publish
        self._inbox = inbox
        self._open: dict[OpenRequest, None] = {}  # accepted and not yet ended
        self._samples: dict[Sequence, tuple[OpenRequest, Sample]] = {}
        self._serials = itertools.count(1)
        self._arrivals = itertools.count()
        self._places = Places("requests", limits.max_queue, limits.max_tenant_queue, RETRY_AFTER_MS)
        self._pace = Pace()
        self._heartbeat_s = time.monotonic()
        self._is_loading = False  # the last step found nothing to compute but pages to wait for
        self._is_draining = False
        self._is_stopping = False
        self._has_ended = False  # nothing in the inbox will be looked at any more
        self._failure: EngineFailed | None = None
        self._num_evicted_pages = 0
        self._num_evicted_host_pages = 0
        self._calls: dict[Future[Any], None] = {}  # put into the inbox and not answered yet
        self._num_generated_tokens = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- any thread --------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Learn what computing costs before anybody waits for it; takes as long as a prompt. Before `start`."""
        warm_up(self._runner, self._cache, self._scheduler.max_num_batched_tokens)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: GenerateRequest, sink: DeltaSink) -> OpenRequest:
        """Accept a request; its deltas, or one error, will reach `sink` (I8). Event loop only.

        Raises:
            NotServing: Draining or stopped.
            EngineFailed: The engine is dead.
            Overloaded: The queue is full, or this tenant's share of it.
            DeadlinePassed: It is too late.
            InvalidRequest: It needs more pages than there are, so that it could never run.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_draining:
            raise NotServing("the server is shutting down")
        self._check_fits(request)
        now_s = time.monotonic()
        if request.deadline_s is not None and now_s >= request.deadline_s:
            raise DeadlinePassed("the deadline has passed")
        self._places.take(request.namespace.tenant)
        handle = OpenRequest(next(self._serials), request, sink, arrived_s=now_s)
        self._open[handle] = None
        self._inbox.put(handle)
        if self._has_ended and self._open.pop(handle, False) is None:  # too late for the engine to have seen it
            raise self._failure or NotServing("the server is shutting down")
        return handle

    def abort(self, handle: OpenRequest) -> None:
        """Stop working on a request, at the latest after the step that runs now. Any thread; harmless after its end."""
        if handle in self._open:
            self._inbox.put(lambda: self._abort(handle))

    def call(self, work: Callable[[PrefixCache], _T]) -> Future[_T]:
        """Run `work` on the engine thread, between two steps. Any thread.

        The future ends with NotServing or EngineFailed where the engine ends first.
        """
        answer: Future[_T] = Future()

        def run() -> None:
            if self._calls.pop(answer, True) is None and answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work(self._cache))
                except BaseException as error:
                    answer.set_exception(error)
                    raise

        self._calls[answer] = None
        self._inbox.put(run)
        if self._has_ended:
            self._end_calls(self._failure or NotServing("the server is shutting down"))
        return answer

    def load(self) -> EngineLoad:
        """Tell how busy it is. Any thread; the numbers may be a step apart from each other."""
        handles = list(self._open)
        waiting = [handle for handle in handles if handle.admitted_s is None]
        return EngineLoad(
            num_running_requests=len(handles) - len(waiting),
            num_waiting_requests=len(waiting),
            num_waiting_tokens=sum(len(handle.request.prompt_token_ids) for handle in waiting),
            usage=self._cache.num_bound_pages / self.limits.num_pages,
            num_generated_tokens=self._num_generated_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )

    def drain(self) -> None:
        """Refuse new requests from now on. Any thread."""
        self._is_draining = True

    def stop(self, timeout_s: float) -> None:
        """End the thread after its current step; what is still open ends with NotServing. Any thread but its own."""
        self._is_draining = self._is_stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout_s)

    def fail_open_requests(self, error: PrefixCacheError) -> None:
        """End every open request with `error`, also where the engine thread does not come round. Any thread."""
        handles = [handle for handle in list(self._open) if not handle.is_failed]
        self._publish([(handle.sink, error) for handle in handles])
        for handle in handles:
            handle.is_failed = True  # a stuck engine leaves it open; it must not be told, nor aborted, again and again
            self.abort(handle)

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._open)

    @property
    def failure(self) -> EngineFailed | None:
        return self._failure

    def heartbeat_age_s(self) -> float:
        """Seconds since the loop last came round."""
        return time.monotonic() - self._heartbeat_s

    def _check_fits(self, request: GenerateRequest) -> None:
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        if self._cache.pages_for(num_tokens) > self.limits.num_pages:
            raise InvalidRequest(
                "max_tokens",
                f"the prompt's {len(request.prompt_token_ids)} tokens and {request.sampling.max_tokens} more need "
                f"{num_tokens} tokens of K/V, but the cache holds {self.limits.num_pages * self.limits.page_size}",
            )

    # --- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._heartbeat_s = time.monotonic()
                self._take_messages()
                if self._scheduler.has_work:
                    self._step()
                self._cache.publish_events()
                self._note_state()
            self._end_all(NotServing("the server is shutting down"))
        except Exception as error:  # the edge: whatever it is, no stream may be left hanging
            log.exception("the engine failed")
            self._failure = EngineFailed(f"the engine failed: {type(error).__name__}")
            self._end_all(self._failure)

    def _take_messages(self) -> None:
        """Handle what has arrived; with nothing to do, wait a little for it."""
        try:
            is_idle = not self._scheduler.has_work
            message = self._inbox.get(block=is_idle or self._is_loading, timeout=IDLE_S if is_idle else LOADING_S)
            while True:
                if isinstance(message, OpenRequest):
                    self._open_request(message)
                else:
                    message()
                message = self._inbox.get_nowait()
        except Empty:
            pass

    def _step(self) -> None:
        started_s = time.monotonic()
        plan = self._scheduler.schedule()
        self._is_loading = not plan.work
        if self._is_loading and not plan.num_loading:
            raise RuntimeError("sequences wait, none runs, and none could be admitted")
        self._note_admissions(plan, started_s)
        ready = [work for work in plan.work if work.num_tokens == 0]
        if ready:  # nothing to compute but the LM head: these need not wait for the others' forward pass
            self._publish_tokens(ready, torch.stack([_lease_state(work.sequence) for work in ready]))
        to_run = [work for work in plan.work if work.num_tokens]
        if to_run:
            num_prompt_tokens = sum(work.num_prompt_tokens for work in to_run)
            self._run_work(to_run)
            duration_s = time.monotonic() - started_s
            self._cache.note_step([(w.num_tokens, w.sequence.num_computed_tokens) for w in to_run], duration_s)
            self._note_batch(to_run, num_prompt_tokens, duration_s)
        self._note_step(plan, time.monotonic() - started_s)

    def _run_work(self, work: list[Work]) -> None:
        """One forward pass; publish its K/V to the tree and its tokens to the clients."""
        num_outputs = [self._num_outputs(item) for item in work]
        hidden = self._runner.forward(work, num_outputs)
        prompt_logprobs: dict[Sequence, list[TokenLogprobs | None]] = {}
        last_rows: list[int] = []
        finished: list[Work] = []
        row = 0
        for item, num_rows in zip(work, num_outputs, strict=True):
            sequence = item.sequence
            if sequence.num_computed_tokens < sequence.num_prompt_tokens:
                self._metrics.prefilled_tokens.inc(item.num_prompt_tokens)
            if self._reports_prompt(sequence):
                pieces = self._prompt_logprobs(item, hidden[row : row + num_rows])
                if pieces:
                    prompt_logprobs[sequence] = pieces
            row += num_rows
            sequence.num_computed_tokens += item.num_tokens
            if sequence.num_uncomputed_tokens == 0:
                last_rows.append(row - 1)
                finished.append(item)
            elif sequence.lease is not None:  # a chunk of a prompt: those who wait for it may have it now
                self._cache.commit(sequence.lease, sequence.key(), sequence.num_computed_tokens)
        if finished:
            states = self._runner.final_states(hidden, last_rows)
            for item, state in zip(finished, states, strict=True):
                sequence = item.sequence
                if sequence.num_output_tokens == 0 and sequence.lease is not None:
                    self._cache.commit_prompt(sequence.lease, sequence.prompt_key, state.clone())
            self._publish_tokens(finished, states, prompt_logprobs)
        news: list[News] = []
        for sequence, pieces in prompt_logprobs.items():  # of prompts that are not at their end yet
            handle, sample = self._samples[sequence]
            news.append((handle.sink, Delta(sample.index, prompt_logprobs=tuple(pieces))))
        if news:
            self._publish(news)

    def _publish_tokens(
        self,
        work: list[Work],
        final_states: torch.Tensor,
        prompt_logprobs: dict[Sequence, list[TokenLogprobs | None]] | None = None,
    ) -> None:
        """Choose the next token of each sequence from its final state, and tell the clients.

        Entries of `prompt_logprobs` that are sent along are taken out of it.
        """
        logits = self._runner.logits(final_states)
        entries = [self._samples[item.sequence] for item in work]
        states = [sample.sampler for _, sample in entries]
        token_ids = sampler.sample(logits, states, [item.sequence for item in work])
        logprobs = self._logprobs(logits, token_ids, entries)
        now_s = time.monotonic()
        items: list[News] = []
        for row, (handle, sample) in enumerate(entries):
            pieces = (prompt_logprobs or {}).pop(sample.sequence, [])
            delta = self._accept(handle, sample, token_ids[row], now_s)
            items.append((handle.sink, replace(delta, logprobs=logprobs[row], prompt_logprobs=tuple(pieces))))
        self._metrics.generated_tokens.inc(len(items))
        self._num_generated_tokens += len(items)
        self._publish(items)

    def _accept(self, handle: OpenRequest, sample: Sample, token_id: int, now_s: float) -> Delta:
        """Add one token to a sample and end it, and with its last sample the request, where that is due."""
        self._note_token(handle, sample, now_s)
        text, finish = sample.accept(token_id, handle.request, self._tokenizer.eos_token_ids)
        delta = Delta(sample.index, (token_id,), text, finish=finish)
        if finish is None:
            return delta
        self._drop_sample(sample)
        handle.num_unfinished -= 1
        if handle.num_unfinished:
            return delta
        self._close(handle)
        return replace(delta, usage=handle.usage(), timings=handle.timings(now_s))

    # --- log-probabilities -------------------------------------------------------------------------------------

    def _logprobs(
        self, logits: torch.Tensor, token_ids: list[int], entries: list[tuple[OpenRequest, Sample]]
    ) -> list[tuple[TokenLogprobs, ...]]:
        asked = [row for row, (handle, _) in enumerate(entries) if handle.request.sampling.logprobs is not None]
        result: list[tuple[TokenLogprobs, ...]] = [()] * len(entries)
        if asked:
            num_top = [entries[row][0].request.sampling.logprobs or 0 for row in asked]
            reports = sampler.token_logprobs(logits[asked], [token_ids[row] for row in asked], num_top)
            for row, report in zip(asked, reports, strict=True):
                result[row] = (report,)
        return result

    def _num_outputs(self, work: Work) -> int:
        """Of how many of its tokens, the last ones, more is wanted than their K/V."""
        if self._reports_prompt(work.sequence):
            return work.num_tokens
        return int(work.num_tokens == work.sequence.num_uncomputed_tokens)

    def _reports_prompt(self, sequence: Sequence) -> bool:
        handle, sample = self._samples[sequence]
        is_asked = handle.request.sampling.prompt_logprobs is not None and sample.index == 0
        return is_asked and sequence.num_computed_tokens < sequence.num_prompt_tokens

    def _prompt_logprobs(self, work: Work, hidden: torch.Tensor) -> list[TokenLogprobs | None]:
        """Report the prompt tokens that these rows predict; a row after a preemption is not reported again."""
        sequence = work.sequence
        handle, _ = self._samples[sequence]
        num_top = handle.request.sampling.prompt_logprobs
        assert num_top is not None
        start = max(sequence.num_computed_tokens, handle.num_prompt_logprobs - 1)
        end = min(sequence.num_computed_tokens + work.num_tokens, sequence.num_prompt_tokens - 1)
        reports: list[TokenLogprobs | None] = []
        if handle.num_prompt_logprobs == 0:
            reports.append(None)  # nothing precedes the first token
        if start < end:
            rows = hidden[start - sequence.num_computed_tokens : end - sequence.num_computed_tokens]
            position = start + 1
            for logits in self._runner.logits_in_blocks(rows):
                targets = sequence.token_ids[position : position + logits.shape[0]]
                reports += sampler.token_logprobs(logits, targets, [num_top] * len(targets))
                position += len(targets)
        handle.num_prompt_logprobs += len(reports)
        return reports

    # --- opening and closing -----------------------------------------------------------------------------------

    def _open_request(self, handle: OpenRequest) -> None:
        request, params = handle.request, handle.request.sampling
        namespace = self._namespace(handle)
        sequences = [
            Sequence(
                next(self._arrivals),
                namespace,
                list(request.prompt_token_ids),
                params.max_tokens,
                request.namespace.tenant,
                # a cached position has no hidden state, hence no logprob: sample 0 computes them all
                reuse=params.prompt_logprobs is None or index > 0,
            )
            for index in range(request.num_samples)
        ]
        if request.deadline_s is not None:
            try:
                self._check_deadline(sequences[0], request.deadline_s)
            except PrefixCacheError as error:
                self._close(handle)
                self._publish([(handle.sink, error)])
                return
        for index, sequence in enumerate(sequences):
            seed = None if params.seed is None else f"{params.seed}/{index}"
            state = sampler.SamplerState(
                params, ending_ids(request, self._tokenizer.eos_token_ids), random.Random(seed)
            )
            detokenizer = Detokenizer(self._tokenizer, params.skip_special_tokens, params.stop)
            sample = Sample(index, sequence, state, detokenizer)
            if index == 0 and sequence.reuse:
                sequence.search = self._cache.search(namespace, sequence.prompt_key)
            elif index:  # they wait for the same answer, or one of them would run before the first and be its hit
                sequence.search = handle.samples[0].sequence.search
            handle.samples.append(sample)
            self._samples[sequence] = handle, sample
            self._scheduler.add(sequence)
        handle.num_unfinished = request.num_samples

    def _check_deadline(self, sequence: Sequence, deadline_s: float) -> None:
        """Refuse what cannot be in time; raises DeadlinePassed or Overloaded."""
        now_s = time.monotonic()
        num_known = self._scheduler.num_coming_tokens(sequence)
        own_s = self._cache.seconds_to_have(len(sequence.token_ids) - num_known, num_known)
        page_bytes = self._cache.page_size * BYTES_PER_TOKEN
        ahead = [
            Ahead(
                other.prompt_key[:page_bytes], self._cache.seconds_to_have(len(other.token_ids) - known, known), waits
            )
            for other, known, waits in self._scheduler.ahead_of(sequence)
        ]
        check_deadline(deadline_s - now_s, own_s, ahead, self._pace, now_s)

    def _namespace(self, handle: OpenRequest) -> Namespace | None:
        """Without the cache, several samples still share their own prompt, in a namespace that nobody else sees."""
        request = handle.request
        if request.use_cache:
            return request.namespace
        return request.namespace._replace(private_id=handle.serial) if request.num_samples > 1 else None

    def _abort(self, handle: OpenRequest) -> None:
        if handle in self._open:
            for sample in handle.samples:
                if sample.sequence in self._samples:
                    self._drop_sample(sample)
            self._close(handle)

    def _drop_sample(self, sample: Sample) -> None:
        self._scheduler.finish(sample.sequence)
        del self._samples[sample.sequence]

    def _close(self, handle: OpenRequest) -> None:
        del self._open[handle]
        if handle.admitted_s is None:
            self._places.give_back(handle.request.namespace.tenant)
        namespace = self._namespace(handle)
        if namespace is not None and namespace.private_id:
            self._cache.drop(namespace)

    def _end_all(self, error: PrefixCacheError) -> None:
        """End every open request with `error`, those still in the inbox too; the engine's last act."""
        self._is_draining = self._has_ended = True
        handles = list(self._open)
        for handle in handles:
            self._open.pop(handle, None)
        self._publish([(handle.sink, error) for handle in handles])
        self._end_calls(error)

    def _end_calls(self, error: PrefixCacheError) -> None:
        while self._calls:
            answer, _ = self._calls.popitem()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)

    # --- bookkeeping -------------------------------------------------------------------------------------------

    def _note_admissions(self, plan: StepPlan, now_s: float) -> None:
        for sequence in plan.admitted:
            handle, _ = self._samples[sequence]
            if handle.admitted_s is None:
                handle.admitted_s = now_s
                self._places.give_back(handle.request.namespace.tenant)
                self._metrics.queue_seconds.observe(now_s - handle.arrived_s)
        self._pace.observe(len(plan.admitted), self._scheduler.num_waiting, now_s)

    def _note_token(self, handle: OpenRequest, sample: Sample, now_s: float) -> None:
        if handle.first_token_s is None:
            handle.first_token_s = now_s
            self._metrics.ttft_seconds[_hit_kind(handle)].observe(now_s - handle.arrived_s)
            usage = handle.usage()
            self._metrics.prompt_tokens.inc(usage.prompt_tokens)
            self._num_prompt_tokens += usage.prompt_tokens
            self._num_cached_tokens += usage.cached_tokens
            for tier, num_tokens in usage.cached_tokens_by_tier.items():
                self._metrics.cached_tokens[tier].inc(num_tokens)
        if sample.sequence.num_output_tokens:
            self._metrics.itl_seconds.observe(now_s - sample.last_token_s)
        sample.last_token_s = now_s

    def _note_batch(self, work: list[Work], num_prompt_tokens: int, duration_s: float) -> None:
        num_tokens = sum(item.num_tokens for item in work)
        self._metrics.batch_tokens.observe(num_tokens)
        self._metrics.batch_sequences.observe(len(work))
        self._metrics.prefill_seconds.inc(duration_s * num_prompt_tokens / num_tokens)

    def _note_step(self, plan: StepPlan, duration_s: float) -> None:
        self._metrics.step_seconds.observe(duration_s)
        self._metrics.preemptions.inc(plan.num_preempted)
        self._metrics.evicted_pages[Tier.DEVICE].inc(self._cache.num_evicted_pages - self._num_evicted_pages)
        self._num_evicted_pages = self._cache.num_evicted_pages

    def _note_state(self) -> None:
        metrics = self._metrics
        metrics.queue_depth.set(self._scheduler.num_waiting)
        metrics.running_sequences.set(self._scheduler.num_running)
        counts = self._cache.page_counts()
        metrics.pages[PageState.FREE].set(counts.free)
        metrics.pages[PageState.CACHED].set(counts.cached)
        metrics.pages[PageState.IN_USE].set(counts.in_use)
        if (host := self._cache.host) is not None:
            metrics.host_pages[PageState.CACHED].set(host.num_pages)
            metrics.host_pages[PageState.FREE].set(host.capacity_pages - host.num_pages)
            metrics.evicted_pages[Tier.HOST].inc(host.num_evicted_pages - self._num_evicted_host_pages)
            self._num_evicted_host_pages = host.num_evicted_pages
        if not self._scheduler.has_work and not self._cache.is_balanced():
            log.error("pages do not add up: %s of %s", counts, self.limits.num_pages)


def _lease_state(sequence: Sequence) -> torch.Tensor:
    assert sequence.lease is not None
    state: torch.Tensor = sequence.lease.final_state
    return state


def _hit_kind(handle: OpenRequest) -> HitKind:
    sequence = handle.samples[0].sequence
    if not sequence.num_cached_tokens:
        return HitKind.COLD
    is_full = sequence.lease is not None and sequence.lease.final_state is not None
    return HitKind.FULL if is_full else HitKind.PARTIAL
