"""Scheduler: which sequence computes how many tokens in the next step. Pure: no torch, no clock, no I/O.

every step:  1  one token for each decoding sequence; the youngest is preempted where pages run out
             2  what is left of the token budget goes to prompts, shortest rest first, in chunks
                - a prompt whose beginning another one is computing right now waits for it
                - what was passed over in `MAX_OVERTAKEN` steps goes first
                - tenants come by turns, each with its first
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefixcache.engine.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from prefixcache.cache.prefix_cache import PrefixCache

MAX_OVERTAKEN = 8
# How many of the oldest waiting sequences a step looks at: bounds the time of a step, not what gets served.
MAX_CONSIDERED = 64
# Room for this much output is taken with the prompt where pages are free, so that they lie next to each other.
MAX_SPARE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Work:
    """`num_tokens` of `sequence` to compute; 0 where the final state is known and only sampling is left."""

    sequence: Sequence
    num_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the tokens are the prompt's, as long as they are not computed yet."""
        return min(self.num_tokens, max(0, self.sequence.num_prompt_tokens - self.sequence.num_computed_tokens))


@dataclass(slots=True)
class StepPlan:
    """What one step does.

    Attributes:
        work: What is computed.
        admitted: Sequences that run for the first time.
        num_preempted: Sequences put back for lack of pages.
        num_loading: Sequences that wait for other tiers, or for another sequence's prefix, rather than compute.
    """

    work: list[Work] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    num_preempted: int = 0
    num_loading: int = 0


class Scheduler:
    """Owns the waiting and the running sequences. Engine thread only.

    Args:
        cache: Where leases come from.
        max_num_seqs: Most sequences that run at once.
        max_num_batched_tokens: Most tokens computed in one step.
    """

    def __init__(self, cache: PrefixCache, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)  # every decode fits
        self._waiting: list[Sequence] = []  # by arrival
        self._running: list[Sequence] = []  # by admission
        self._serving = itertools.count(1)
        self._last_served: dict[str, int] = {}  # tenant to the serial number of its last prefill

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_arrival)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands, and release what it holds; what is computed is published."""
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._release(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED

    def num_known_tokens(self, sequence: Sequence) -> int:
        """Count tokens that need no computing; for a waiting sequence an estimate, good until the cache changes."""
        if sequence.state is SequenceState.RUNNING:
            return sequence.num_computed_tokens
        if not sequence.reuse:
            return 0
        version, known = sequence.known_tokens
        if version != self._cache.version:
            known = self._cache.num_known_tokens(sequence.namespace, sequence.key())
            sequence.known_tokens = (self._cache.version, known)
        return known

    def num_coming_tokens(self, sequence: Sequence) -> int:
        """Count the leading tokens that others compute anyway or have computed, of a sequence not added yet."""
        others = [other for other in self._running if not other.is_decoding] + self._waiting if sequence.reuse else []
        shared = max((sequence.num_key_tokens_shared(other) for other in others), default=0)
        return max(self.num_known_tokens(sequence), min(shared, len(sequence.token_ids) - 1))

    def ahead_of(self, sequence: Sequence) -> list[tuple[Sequence, int, bool]]:
        """List what is computed before a sequence that is not added yet: those still at their prompt, not longer.

        Of waiting ones only its own tenant's are sure to come first.

        Returns:
            Of each the sequence, its known tokens (as last looked up) and whether it waits.
        """
        rest = len(sequence.token_ids) - self.num_known_tokens(sequence)
        unfinished = [(other, other.num_computed_tokens, False) for other in self._running if not other.is_decoding]
        for other in self._waiting:
            if other.tenant == sequence.tenant:
                known = other.known_tokens[1] if other.known_tokens[0] >= 0 else self.num_known_tokens(other)
                unfinished.append((other, known, True))
        return [entry for entry in unfinished if len(entry[0].token_ids) - entry[1] <= rest]

    def schedule(self) -> StepPlan:
        """Decide one step. Leases are taken, extended and released on the way."""
        plan = StepPlan()
        budget = self.max_num_batched_tokens - self._schedule_decodes(plan)
        self._schedule_prefills(plan, budget)
        return plan

    # --- decodes -----------------------------------------------------------------------------------------------

    def _schedule_decodes(self, plan: StepPlan) -> int:
        for sequence in [s for s in self._running if s.is_decoding]:
            if sequence.state is SequenceState.RUNNING and self._make_room(sequence, plan):
                plan.work.append(Work(sequence, 1))
        return len(plan.work)

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Get a page for one more token, from the youngest if need be; False if that is `sequence` itself."""
        assert sequence.lease is not None
        while not self._cache.try_extend(sequence.lease, sequence.num_computed_tokens + 1):
            youngest = self._running[-1]
            self._preempt(youngest)
            plan.num_preempted += 1
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue at its old place; its K/V stays in the tree for as long as nobody needs the room."""
        self._running.remove(sequence)
        self._release(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed_tokens = 0
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self._cache.release(sequence.lease, sequence.key(), sequence.num_computed_tokens)
        sequence.lease = None

    # --- prefills ----------------------------------------------------------------------------------------------

    def _schedule_prefills(self, plan: StepPlan, budget: int) -> None:
        candidates = [s for s in self._running if not s.is_decoding] + self._considered()
        candidates.sort(key=self._precedence)
        candidates = self._by_turns(candidates)
        served_arrivals: list[int] = []
        passed_over: list[Sequence] = []
        admits = True
        for sequence in candidates:
            if budget <= 0:
                passed_over.append(sequence)
                continue
            if sequence.state is SequenceState.WAITING:
                if self._is_searched_for(sequence) or self._has_leader(sequence):
                    plan.num_loading += 1
                    continue
                if not (admits and self._try_admit(sequence, plan)):
                    passed_over.append(sequence)
                    if sequence.overtaken >= MAX_OVERTAKEN:
                        admits = False  # it gets the next pages that come free, before anybody behind it
                    continue
            assert sequence.lease is not None
            sequence.num_computed_tokens, num_tokens = self._cache.next_chunk(
                sequence.lease, sequence.num_computed_tokens, sequence.num_uncomputed_tokens
            )
            if num_tokens == 0 and sequence.num_uncomputed_tokens:
                plan.num_loading += 1
                continue
            num_tokens = min(num_tokens, budget)
            plan.work.append(Work(sequence, num_tokens))
            budget -= num_tokens
            served_arrivals.append(sequence.arrival)
            self._last_served[sequence.tenant] = next(self._serving)
        youngest_served = max(served_arrivals, default=-1)
        for sequence in passed_over:
            sequence.overtaken += sequence.arrival < youngest_served

    def _considered(self) -> list[Sequence]:
        if len(self._running) >= self._max_num_seqs:
            return []
        waiting = self._waiting
        if len({sequence.tenant for sequence in waiting}) > 1:  # or many of one tenant would hide the others
            waiting = self._by_turns(waiting)
        ready = (sequence for sequence in waiting[: 4 * MAX_CONSIDERED] if not self._has_leader(sequence))
        return list(itertools.islice(ready, MAX_CONSIDERED))

    def _by_turns(self, sequences: list[Sequence]) -> list[Sequence]:
        """Put the first of each tenant first, then the second, and so on; the tenant served longest ago leads.

        So a tenant waits for one sequence of each other tenant at most, however many they send.
        """
        ranks = _ranks(sequences)
        return sorted(sequences, key=lambda sequence: (ranks[sequence], self._last_served.get(sequence.tenant, 0)))

    def _precedence(self, sequence: Sequence) -> tuple[bool, int, int]:
        """Sort key: those passed over too often first, oldest first; then by tokens still to compute."""
        if sequence.overtaken >= MAX_OVERTAKEN:
            return (False, 0, sequence.arrival)
        rest = len(sequence.token_ids) - self.num_known_tokens(sequence)
        return (True, rest, sequence.arrival)

    def _is_searched_for(self, sequence: Sequence) -> bool:
        return sequence.search is not None and sequence.search.is_pending

    def _has_leader(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to publish at least a page more of this one's prompt than is known.

        The leader is ahead and in line already; others with a shorter rest may be served before it, as they would be
        before this one, and `MAX_OVERTAKEN` bounds that. If it is cancelled or preempted it is no longer running, and
        the next to be considered takes its place.
        """
        if not sequence.reuse:
            return False
        worthwhile = self.num_known_tokens(sequence) + self._cache.page_size
        for leader in self._running:
            if leader.num_computed_tokens < leader.num_prompt_tokens:
                shared = min(sequence.num_key_tokens_shared(leader), len(sequence.token_ids) - 1)
                if shared >= worthwhile and shared > leader.num_computed_tokens:
                    return True
        return False

    def _try_admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        if len(self._running) >= self._max_num_seqs:
            return False
        lease = self._cache.try_acquire(
            sequence.namespace,
            sequence.key(),
            num_tokens=len(sequence.token_ids),
            num_spare_tokens=min(sequence.max_tokens - sequence.num_output_tokens, MAX_SPARE_TOKENS),
            reuse=sequence.reuse,
            search=sequence.search,
        )
        if lease is None:
            return False
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.state = SequenceState.RUNNING
        sequence.lease = lease
        sequence.num_computed_tokens = lease.num_cached_tokens
        if sequence.cached_tokens is None:  # counted once, however often it is preempted
            sequence.cached_tokens = lease.cached_tokens
            plan.admitted.append(sequence)
        return True


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _ranks(sequences: list[Sequence]) -> dict[Sequence, int]:
    """Number the sequences of each tenant, in the order given."""
    counts: Counter[str] = Counter()
    ranks: dict[Sequence, int] = {}
    for sequence in sequences:
        ranks[sequence] = counts[sequence.tenant]
        counts[sequence.tenant] += 1
    return ranks
