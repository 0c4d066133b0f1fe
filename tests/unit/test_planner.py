"""Estimates of computing and loading, and where the two meet."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.cache.planner import (
    PATIENCE,
    WORTHWHILE,
    PrefillEstimate,
    TransferEstimate,
    attention_pairs,
    meeting_page,
    remaining_seconds,
)

PAGE = 16
SECONDS = st.floats(1e-6, 1e3)


def measured(
    fixed: float, per_token: float, per_pair: float, noise: float = 0.0, num_steps: int = 40
) -> PrefillEstimate:
    """An estimate that has seen steps of a machine with these costs."""
    estimate, chance = PrefillEstimate(), random.Random(1)
    for _ in range(num_steps):
        num_tokens, context_len = chance.choice((1, 4, 60, 500, 1000)), chance.randrange(2000)
        pairs = attention_pairs(num_tokens, context_len)
        seconds = fixed + per_token * num_tokens + per_pair * pairs
        estimate.observe(num_tokens, pairs, seconds * chance.uniform(1 - noise, 1 + noise))
    return estimate


# --- computing -----------------------------------------------------------------------------------------------------


def test_nothing_is_known_at_first() -> None:
    estimate = PrefillEstimate()
    assert not estimate.is_known
    assert estimate.seconds(100, 0) == 0.0


@pytest.mark.parametrize("costs", [(0.004, 1e-4, 2e-8), (0.0, 1e-4, 0.0), (0.01, 1e-3, 1e-6)])
def test_costs_are_learned(costs: tuple[float, float, float]) -> None:
    fixed, per_token, per_pair = costs
    for noise, tolerance in ((0.0, 0.02), (0.1, 0.2)):
        estimate = measured(*costs, noise=noise)
        for num_tokens, context_len in ((1, 0), (100, 0), (500, 1500), (2000, 0)):
            exact = fixed + per_token * num_tokens + per_pair * attention_pairs(num_tokens, context_len)
            assert estimate.seconds(num_tokens, context_len) == pytest.approx(exact, rel=tolerance)


def test_a_long_run_of_decode_steps_does_not_push_out_what_prompts_took() -> None:
    estimate = measured(0.02, 0.002, 0.0)
    for _ in range(1000):
        estimate.observe(1, 500, 0.022)
    assert estimate.seconds(1000, 0) == pytest.approx(2.02, rel=0.05)


def test_it_is_sure_of_lengths_that_it_has_seen() -> None:
    estimate = PrefillEstimate()
    for _ in range(100):
        estimate.observe(1, 500, 0.022)
    assert estimate.is_sure_of(1)
    assert not estimate.is_sure_of(16)
    for _ in range(3):
        estimate.observe(300, 500, 0.5)
    assert estimate.is_sure_of(16)
    assert estimate.is_sure_of(8000)


def test_the_pairs_of_a_prompt_are_those_of_its_chunks() -> None:
    assert attention_pairs(100, 0) == 100 * 101 / 2
    assert attention_pairs(60, 0) + attention_pairs(40, 60) == attention_pairs(100, 0)
    assert attention_pairs(0, 50) == 0


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 4000), SECONDS), min_size=1, max_size=80))
def test_whatever_was_measured_more_tokens_never_take_less(steps: list[tuple[int, int, float]]) -> None:
    estimate = PrefillEstimate()
    for num_tokens, context_len, seconds in steps:
        estimate.observe(num_tokens, attention_pairs(num_tokens, context_len), seconds)
    times = [estimate.seconds(num_tokens, 100) for num_tokens in (0, 1, 2, 50, 1000, 10_000)]
    assert times[0] == 0
    assert times == sorted(times)
    assert all(math.isfinite(seconds) for seconds in times)
    assert estimate.seconds(50, 0) <= estimate.seconds(50, 2000)


def test_a_change_of_pace_is_followed() -> None:
    estimate = measured(0.0, 1e-4, 0.0)
    for num_tokens in (1, 50, 700, 900) * 16:
        estimate.observe(num_tokens, attention_pairs(num_tokens, 0), 1e-3 * num_tokens)
    assert estimate.seconds(100, 0) == pytest.approx(0.1, rel=0.1)  # lengths that no longer come still count a little


def test_a_long_answer_does_not_wash_out_what_prompts_cost() -> None:
    estimate = measured(0.08, 3e-3, 1e-7)
    for n in range(1000):
        estimate.observe(1, attention_pairs(1, 2000 + n), 0.083 + 1e-7 * (2000 + n))
    assert estimate.seconds(2000, 0) == pytest.approx(0.08 + 6 + 0.2, rel=0.05)


# --- loading -------------------------------------------------------------------------------------------------------


def test_the_first_transfer_replaces_the_guess_and_later_ones_move_it() -> None:
    estimate = TransferEstimate(0.001, 1 / 500e6)
    estimate.observe(10_000_000, 0.101)
    assert estimate.seconds(10_000_000) == pytest.approx(0.101)
    for _ in range(20):
        estimate.observe(10_000_000, 1.001)
    assert estimate.seconds(10_000_000) == pytest.approx(1.001, rel=0.01)
    for _ in range(20):
        estimate.observe_latency(0.4)
    assert estimate.latency_s == pytest.approx(0.4, rel=0.01)
    assert estimate.seconds(0) == 0


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 100)), max_size=30), st.lists(st.floats(0, 10), max_size=30)
)
def test_whatever_was_measured_more_bytes_never_take_less(
    transfers: list[tuple[int, float]], latencies: list[float]
) -> None:
    estimate = TransferEstimate(0.001, 1 / 500e6)
    for seconds in latencies:
        estimate.observe_latency(seconds)
    for num_bytes, seconds in transfers:
        estimate.observe(num_bytes, seconds)
    times = [estimate.seconds(num_bytes) for num_bytes in (0, 1, 1000, 10**6, 10**9)]
    assert times == sorted(times)
    assert times[0] == 0
    assert all(math.isfinite(seconds) for seconds in times)


def test_what_is_left_of_a_load_that_keeps_to_its_estimate() -> None:
    estimate = TransferEstimate(0.1, 1e-6)
    assert remaining_seconds(estimate, 1_000_000, 0, 0.0) == pytest.approx(1.1)
    assert remaining_seconds(estimate, 1_000_000, 0, 0.6) == pytest.approx(0.5)
    assert remaining_seconds(estimate, 1_000_000, 750_000, 0.8) == pytest.approx(0.25)
    assert remaining_seconds(estimate, 1_000_000, 1_000_000, 5.0) == 0


def test_a_load_that_falls_behind_is_believed_less_and_less() -> None:
    estimate = TransferEstimate(0.1, 1e-6)
    late = [remaining_seconds(estimate, 1_000_000, 0, PATIENCE * 1.1 + after) for after in (0.01, 1, 5, 50)]
    assert late == sorted(late)
    assert late[-1] > 50
    # its own pace so far, 2 s for a tenth, and as much again of what was expected
    assert remaining_seconds(estimate, 1_000_000, 100_000, 2.0) == pytest.approx((2 + 0.11) / 0.2 * 0.9)


@given(SECONDS, st.integers(1, 10**9), st.floats(0, 1), st.floats(0, 1e3))
def test_what_is_left_is_never_negative(latency_s: float, total: int, share: float, elapsed_s: float) -> None:
    left_s = remaining_seconds(TransferEstimate(latency_s, 1e-8), total, int(share * total), elapsed_s)
    assert left_s >= 0
    assert math.isfinite(left_s)


# --- where they meet -----------------------------------------------------------------------------------------------


@given(
    st.integers(0, 200),
    st.integers(0, 200),
    st.floats(0, 1),
    st.floats(0, 1),
    st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-6)),
)
def test_no_other_page_would_be_better(
    start: int, num_pages: int, seconds_per_page: float, latency_s: float, costs: tuple[float, float, float]
) -> None:
    prefill, end = measured(*costs, num_steps=8), start + num_pages

    def total_s(page: int) -> float:
        compute_s = prefill.seconds((page - start) * PAGE, start * PAGE)
        return max(compute_s, latency_s + (end - page) * seconds_per_page if page < end else 0.0)

    meet = meeting_page(prefill, start, end, PAGE, seconds_per_page, latency_s)

    assert start <= meet <= end
    alone = min(total_s(start), total_s(end))
    best = min(map(total_s, range(start, end + 1)))
    assert total_s(meet) <= (best if best <= WORTHWHILE * alone else alone) * (1 + 1e-9)
    assert meet in (start, end) or total_s(meet) <= WORTHWHILE * alone * (1 + 1e-9)


def test_a_slower_store_is_left_more_to_computing() -> None:
    prefill = measured(0.001, 1e-4, 1e-8)
    meets = [meeting_page(prefill, 0, 100, PAGE, pace_s, 0.001) for pace_s in (0, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 1)]
    assert meets == sorted(meets)
    assert (meets[0], meets[-1]) == (0, 100)
    assert 0 < meets[3] < 100


def test_edges() -> None:
    prefill = measured(0.001, 1e-4, 1e-8)
    assert meeting_page(prefill, 7, 7, PAGE, 1e-3, 0.001) == 7
    assert meeting_page(PrefillEstimate(), 3, 50, PAGE, 1e9, 1e9) == 3, "an unknown computation is not a free one"
    assert meeting_page(prefill, 3, 4, PAGE, 1e9, 0.0) == 4
    assert meeting_page(prefill, 3, 4, PAGE, 1e-9, 0.0) == 3
