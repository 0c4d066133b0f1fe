"""When the circuit breaker opens, tries and closes."""

from __future__ import annotations

import pytest

from prefixcache.store.breaker import BreakerState, CircuitBreaker

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


@pytest.fixture
def changes() -> list[tuple[BreakerState, BreakerState]]:
    return []


@pytest.fixture
def breaker(changes: list[tuple[BreakerState, BreakerState]]) -> CircuitBreaker:
    return CircuitBreaker(3, 1.0, 5.0, lambda before, after: changes.append((before, after)))


def open_it(breaker: CircuitBreaker, now: float) -> None:
    breaker.failed("read", now, at_once=True)


def test_opens_after_failures_in_a_row(breaker: CircuitBreaker) -> None:
    for operation in ("read", "read", "ok", "read", "read"):
        if operation == "ok":
            breaker.succeeded("read")
        else:
            breaker.failed(operation, 0.0)
        assert breaker.state is CLOSED
    breaker.failed("read", 0.0)
    assert breaker.state is OPEN


def test_lookups_that_work_do_not_hide_reads_that_fail(breaker: CircuitBreaker) -> None:
    for _ in range(3):
        breaker.succeeded("count_leading")
        breaker.failed("read", 0.0)
    assert breaker.state is OPEN


def test_one_try_after_each_wait_and_waits_double_up_to_the_cap(breaker: CircuitBreaker) -> None:
    open_it(breaker, 10.0)
    now = 10.0
    for wait_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert not breaker.admits(now + wait_s - 0.01)
        now += wait_s
        assert breaker.admits(now)
        assert breaker.state is HALF_OPEN
        assert not breaker.admits(now)  # the one try is under way
        breaker.failed("probe", now)
        assert breaker.state is OPEN


def test_closes_when_the_try_works(breaker: CircuitBreaker, changes: list[tuple[BreakerState, BreakerState]]) -> None:
    open_it(breaker, 0.0)
    assert breaker.admits(1.0)
    breaker.succeeded("probe")
    assert breaker.state is CLOSED
    assert breaker.admits(1.0)
    assert changes == [(CLOSED, OPEN), (OPEN, HALF_OPEN), (HALF_OPEN, CLOSED)]


def test_waits_start_anew_only_when_what_failed_works_again(breaker: CircuitBreaker) -> None:
    open_it(breaker, 0.0)
    breaker.admits(1.0)
    breaker.succeeded("probe")
    open_it(breaker, 1.0)  # the probe worked and the next read did not
    assert not breaker.admits(2.5)
    assert breaker.admits(3.0)
    breaker.succeeded("probe")
    breaker.succeeded("read")
    open_it(breaker, 3.0)
    assert breaker.admits(4.0)


def test_failures_from_before_do_not_count_once_open(breaker: CircuitBreaker) -> None:
    open_it(breaker, 0.0)
    for _ in range(5):
        breaker.failed("read", 0.5)
    assert breaker.admits(1.0)


def test_a_try_that_was_given_up_may_be_made_again_at_once(breaker: CircuitBreaker) -> None:
    open_it(breaker, 0.0)
    assert breaker.admits(1.0)
    breaker.gave_up()
    assert breaker.state is OPEN
    assert breaker.admits(1.0)
    breaker.succeeded("write")
    breaker.gave_up()
    assert breaker.state is CLOSED
