"""Load or recompute? Online estimates of both, and the page at which the two should meet.

    pages     known │ computed from the front ──▶      ◀── loaded from the back │ new
              0    start                      meet                              end

Computing from the front while the tail loads from the back is the idea of Cake (arXiv 2410.03065): whichever is
quicker does more of the work, and a load that falls behind simply meets the computation later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

# Steps remembered of each order of magnitude of their tokens: few enough to follow a change.
NUM_STEPS = 8
# Where steps contradict each other the later one counts: a step's weight in the fit falls with each that follows it,
# down to what is still enough to speak of lengths that no later step had.
FADING, LEAST_WEIGHT = 0.97, 0.1
# Seconds that are nothing: a cost of 0 may come out as a little less.
ROUNDING = 1e-12
# A step is believed to say something about longer ones, too, from this many tokens on; and how many such it takes.
TELLING_TOKENS, MIN_TELLING = 256, 3
# What is left of an older estimate after a transfer of so many bytes, or after a measured latency.
FADING_TRANSFERS, FADING_BYTES = 0.7, 8 * 2**20
# A load whose time is up by this factor is no longer believed: what is left is taken to need as long again.
PATIENCE = 1.25
# How much of a load has to have arrived for its own pace to count as much as what was expected.
TRUST = 0.1
# Loading and computing at once must promise to take at most this part of the quicker of the two alone: they get in each
# other's way, on a CPU above all, and a step of computation cannot be called back when the load is quicker.
WORTHWHILE = 0.8


class _Step(NamedTuple):
    num_tokens: int
    pairs: float
    seconds: float
    serial: int


class PrefillEstimate:
    """Seconds that a step takes: a fixed part, a part a token, and a part a (query, key) pair for attention.

    Fitted by least squares to the last steps that were really run, short and long ones remembered apart: a long answer
    is hundreds of steps of one token, which say little about a prompt and must not take the place of what does.
    Engine thread only.
    """

    def __init__(self) -> None:
        self._steps: defaultdict[int, deque[_Step]] = defaultdict(lambda: deque(maxlen=NUM_STEPS))
        self._num_observed = 0
        self._weights: tuple[float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether any step has been seen."""
        return bool(self._steps)

    def observe(self, num_tokens: int, pairs: float, seconds: float) -> None:
        """Note one step: its new tokens, the (query, key) pairs they attended to, and how long it took."""
        self._num_observed += 1
        self._steps[num_tokens.bit_length()].append(_Step(num_tokens, pairs, seconds, self._num_observed))
        self._weights = None

    def is_sure_of(self, num_tokens: int) -> bool:
        """Whether enough steps have been seen that were not much shorter, to refuse something because of it."""
        enough = min(num_tokens, TELLING_TOKENS) / 2
        return sum(step.num_tokens >= enough for step in chain.from_iterable(self._steps.values())) >= MIN_TELLING

    def seconds(self, num_tokens: int, context_len: int) -> float:
        """Estimate a prefill of `num_tokens` behind `context_len` tokens; 0 while nothing has been measured."""
        if num_tokens <= 0 or not self.is_known:
            return 0.0
        if self._weights is None:
            self._weights = self._fit()
        fixed, per_token, per_pair = self._weights
        return fixed + per_token * num_tokens + per_pair * attention_pairs(num_tokens, context_len)

    def _fit(self) -> tuple[float, float, float]:
        steps = np.array(list(chain.from_iterable(self._steps.values())))
        seconds = steps[:, 2]
        features = np.column_stack((np.ones(len(steps)), steps[:, 0], steps[:, 1]))
        weights = np.maximum(LEAST_WEIGHT, FADING ** (self._num_observed - steps[:, 3]))
        # every row divided by its own time: relative errors count, so short steps are not drowned by long ones
        solution, *_ = np.linalg.lstsq(features * (weights / seconds)[:, None], weights)
        solution[np.abs(solution) < ROUNDING] = 0.0
        if len(steps) < 3 or (solution < 0).any():  # too little variety to tell the parts apart: all of it a token
            return 0.0, float(weights @ seconds / (weights @ steps[:, 0])), 0.0
        fixed, per_token, per_pair = solution.tolist()
        return fixed, per_token, per_pair


def attention_pairs(num_tokens: int, context_len: int) -> float:
    """Count the (query, key) pairs of `num_tokens` new tokens behind `context_len` others."""
    return num_tokens * (context_len + (num_tokens + 1) / 2)


@dataclass(slots=True)
class TransferEstimate:
    """Seconds that a tier takes to bring bytes to the device: a latency, and a part a byte.

    The starting values are modest guesses; the first transfers replace them.
    """

    latency_s: float
    seconds_per_byte: float
    num_bytes_observed: int = 0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Note one finished transfer, or part of one: the more bytes the more it counts."""
        rate = max(seconds - self.latency_s, 0.1 * seconds) / num_bytes
        self.num_bytes_observed += num_bytes
        weight = max(1 - FADING_TRANSFERS ** (num_bytes / FADING_BYTES), num_bytes / self.num_bytes_observed)
        self.seconds_per_byte += weight * (rate - self.seconds_per_byte)

    def observe_latency(self, seconds: float) -> None:
        """Note one round trip that carried next to nothing."""
        self.latency_s += (1 - FADING_TRANSFERS) * (seconds - self.latency_s)

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + self.seconds_per_byte * num_bytes if num_bytes > 0 else 0.0


def remaining_seconds(estimate: TransferEstimate, total_bytes: int, loaded_bytes: int, elapsed_s: float) -> float:
    """Estimate what is left of a running load, from its estimate while it keeps to it and from its own pace after.

    A load that has shown nothing by the time it should be done is taken to need as long again, and so on: the longer
    it is silent, the less is expected of it.
    """
    if loaded_bytes >= total_bytes:
        return 0.0
    expected_s = estimate.seconds(total_bytes)
    left_s = estimate.seconds_per_byte * (total_bytes - loaded_bytes)
    if loaded_bytes:
        if elapsed_s <= expected_s * loaded_bytes / total_bytes:
            return left_s
        own_pace = (elapsed_s + TRUST * expected_s) / (loaded_bytes + TRUST * total_bytes)
        return max(left_s, own_pace * (total_bytes - loaded_bytes))
    if elapsed_s <= PATIENCE * expected_s:
        return max(expected_s - elapsed_s, left_s * 0.1)
    return elapsed_s


def meeting_page(
    prefill: PrefillEstimate, start_page: int, end_page: int, page_size: int, seconds_per_page: float, latency_s: float
) -> int:
    """Choose how far to compute from the front, so that load and computation end together.

    Returns:
        A page in [start_page, end_page]: pages before it are computed, those from it on are loaded. `end_page` means
        that loading does not pay at all, `start_page` that everything is best loaded; so it is, too, while nothing is
        known of the computation, since right after a restart loading nearly always wins.
    """
    if not prefill.is_known:
        return start_page
    context_len = start_page * page_size

    def compute_s(page: int) -> float:
        return prefill.seconds((page - start_page) * page_size, context_len)

    def load_s(page: int) -> float:
        return latency_s + (end_page - page) * seconds_per_page if page < end_page else 0.0

    low, high = start_page, end_page  # the first page at which computing up to it takes longer than loading the rest
    while low < high:
        middle = (low + high) // 2
        if compute_s(middle) >= load_s(middle):
            high = middle
        else:
            low = middle + 1
    best = min((low, max(low - 1, start_page), end_page), key=lambda page: max(compute_s(page), load_s(page)))
    load_all_s, compute_all_s = load_s(start_page), compute_s(end_page)
    if max(compute_s(best), load_s(best)) <= WORTHWHILE * min(load_all_s, compute_all_s):
        return best
    return start_page if load_all_s <= compute_all_s else end_page
