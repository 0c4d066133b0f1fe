"""The guard's decisions, with a clock that the test moves and a store that fails on command."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from prefixcache.store.base import (
    StoreAuth,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    StoreUnreachable,
    Value,
    ValueTooLarge,
)
from prefixcache.store.breaker import BreakerState
from prefixcache.store.guard import CallEnded, Event, GuardedStore, GuardLimits, StateChanged
from tests.support.wire import eventually

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
KEYS = [b"k" * 16]


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self._now = 100.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, sleeper))
        await sleeper

    async def move(self, seconds: float) -> None:
        self._now += seconds
        for wakes_at, sleeper in self._sleepers:
            if wakes_at <= self._now and not sleeper.done():
                sleeper.set_result(None)
        self._sleepers = [each for each in self._sleepers if not each[1].done()]
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class StoreOnCommand:
    """A PageStore that does what `answer` says, and counts how often each operation reached it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.gate: asyncio.Event | None = None
        self.num_inside = 0
        self.max_inside = 0

    async def count_leading(self, keys: Sequence[bytes]) -> int:
        await self._do("count_leading")
        return len(keys)

    async def read(self, keys: Sequence[bytes]) -> list[Value | None]:
        await self._do("read")
        return [b"value" for _ in keys]

    async def write(self, entries: Sequence[tuple[bytes, Value]]) -> None:
        await self._do("write")

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self._do("delete")

    async def close(self) -> None:
        self.calls.append("close")

    async def _do(self, operation: str) -> None:
        self.calls.append(operation)
        self.num_inside += 1
        self.max_inside = max(self.max_inside, self.num_inside)
        try:
            if self.gate:
                await self.gate.wait()
        finally:
            self.num_inside -= 1
        if operation in self.errors:
            raise self.errors[operation]


class Rig:
    def __init__(self, limits: GuardLimits) -> None:
        self.clock = HandClock()
        self.store = StoreOnCommand()
        self.events: list[Event] = []
        self.guarded = GuardedStore("remote", self.store, 1000, limits, self.events.append, self.clock)

    async def fails(self, call: Awaitable[object], kind: type[StoreError]) -> None:
        with pytest.raises(kind) as raised:
            await call
        assert type(raised.value) is kind

    async def fail_reads(self, times: int, error: StoreError) -> None:
        self.store.errors = {"read": error}
        for _ in range(times):
            await self.fails(self.guarded.read(KEYS), type(error))

    @property
    def states(self) -> list[tuple[str, BreakerState]]:
        return [(event.side, event.state) for event in self.events if isinstance(event, StateChanged)]

    def outcomes(self, operation: str) -> list[str]:
        return [each.outcome for each in self.events if isinstance(each, CallEnded) and each.operation == operation]


LIMITS = GuardLimits(
    base_s=30.0, min_bytes_per_s=1e6, max_concurrent=2, failures_to_open=3, first_wait_s=1.0, max_wait_s=4.0
)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig(LIMITS)
    yield made
    await made.guarded.close()


@pytest.fixture
async def hasty() -> AsyncIterator[Rig]:
    """For calls that are to take too long: the limits are in real time."""
    made = Rig(replace(LIMITS, base_s=0.05))
    yield made
    await made.guarded.close()


async def test_calls_pass_through_and_are_observed(rig: Rig) -> None:
    assert await rig.guarded.count_leading(KEYS) == 1
    assert await rig.guarded.read(KEYS * 2) == [b"value", b"value"]
    await rig.guarded.write([(b"k", b"12345"), (b"l", b"678")])
    await rig.guarded.delete(KEYS)
    ended = [event for event in rig.events if isinstance(event, CallEnded)]
    assert [(event.operation, event.num_bytes, event.outcome) for event in ended] == [
        ("count_leading", 0, "ok"),
        ("read", 10, "ok"),
        ("write", 8, "ok"),
        ("delete", 0, "ok"),
    ]


async def test_opens_after_failures_in_a_row_then_costs_no_io(rig: Rig) -> None:
    await rig.fail_reads(3, StoreUnreachable("gone"))
    assert rig.guarded.state is OPEN
    num_calls = len(rig.store.calls)
    calls: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: rig.guarded.read(KEYS),
        lambda: rig.guarded.count_leading(KEYS),
        lambda: rig.guarded.write([(b"k", b"v")]),
        lambda: rig.guarded.delete(KEYS),
    )
    for call in calls:
        await rig.fails(call(), StoreUnavailable)
    assert len(rig.store.calls) == num_calls
    assert rig.outcomes("read") == ["unreachable"] * 3 + ["unavailable"]


async def test_recovers_by_itself_with_one_try_at_a_time_and_growing_waits(rig: Rig) -> None:
    await rig.fail_reads(3, StoreUnreachable("gone"))
    await settle()
    num_calls = len(rig.store.calls)
    for wait_s in (1.0, 2.0, 4.0, 4.0):
        await rig.clock.move(wait_s - 0.1)
        assert len(rig.store.calls) == num_calls
        await rig.clock.move(0.2)
        num_calls += 1
        assert len(rig.store.calls) == num_calls
        assert rig.guarded.state is OPEN
        await rig.clock.move(-0.1)
    rig.store.errors = {}
    await rig.clock.move(4.1)
    assert rig.guarded.state is CLOSED
    assert await rig.guarded.read(KEYS) == [b"value"]
    assert rig.states[-1] == ("store", CLOSED)


async def test_nobody_else_gets_in_while_the_try_is_under_way(rig: Rig) -> None:
    await rig.fail_reads(3, StoreUnreachable("gone"))
    await settle()
    rig.store.errors = {}
    rig.store.gate = asyncio.Event()
    await rig.clock.move(1.0)
    assert rig.guarded.state is HALF_OPEN
    await rig.fails(rig.guarded.read(KEYS), StoreUnavailable)
    rig.store.gate.set()
    await settle()
    assert rig.guarded.state is CLOSED


async def test_a_try_that_is_never_answered_fails_too(hasty: Rig) -> None:
    await hasty.fail_reads(3, StoreUnreachable("gone"))
    await settle()
    hasty.store.gate = asyncio.Event()
    await hasty.clock.move(1.0)
    await eventually(lambda: hasty.guarded.state is OPEN)
    assert hasty.states[-2:] == [("store", HALF_OPEN), ("store", OPEN)]
    assert hasty.outcomes("probe") == ["timeout"]


async def test_a_refusal_opens_at_once(rig: Rig) -> None:
    await rig.fail_reads(1, StoreAuth("wrong password"))
    assert rig.guarded.state is OPEN


async def test_an_error_that_nobody_foresaw_is_a_failure_of_the_store(rig: Rig) -> None:
    rig.store.errors = {"count_leading": ValueError("no such reply"), "read": KeyError("neither")}
    await rig.fails(rig.guarded.count_leading(KEYS), StoreError)
    assert rig.guarded.state is OPEN
    await rig.clock.move(0.5)  # the try fails in such a way, too, and is not the last one
    assert rig.guarded.state is OPEN
    rig.store.errors.clear()
    await rig.clock.move(30.0)
    assert rig.guarded.state is CLOSED


async def test_too_slow_is_a_failure_and_time_grows_with_bytes(hasty: Rig) -> None:
    hasty.store.gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(StoreTimeout, match=r"longer than 0\.05 s"):
        await hasty.guarded.count_leading(KEYS)
    assert loop.time() - started > 0.04
    started = loop.time()
    with pytest.raises(StoreTimeout, match=r"longer than 0\.25 s"):
        await hasty.guarded.read(KEYS * 200)  # 200 kB at 1 MB/s
    assert loop.time() - started > 0.24
    assert hasty.store.num_inside == 0  # cancelled underneath
    await hasty.fails(hasty.guarded.read(KEYS), StoreTimeout)
    await hasty.fails(hasty.guarded.read(KEYS), StoreTimeout)
    assert hasty.guarded.state is OPEN


async def test_a_pause_of_this_process_is_not_the_stores_fault(hasty: Rig) -> None:
    hasty.store.gate = asyncio.Event()
    call = asyncio.create_task(hasty.guarded.count_leading(KEYS))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.02, hasty.store.gate.set)  # the answer; the limit is 0.05 s
    time.sleep(0.2)  # noqa: ASYNC251
    assert await call == 1
    assert hasty.guarded.state is CLOSED


async def test_bounded_concurrency(rig: Rig) -> None:
    rig.store.gate = asyncio.Event()
    calls = [asyncio.create_task(rig.guarded.count_leading(KEYS)) for _ in range(6)]
    await settle()
    assert rig.store.max_inside == 2
    rig.store.gate.set()
    assert await asyncio.gather(*calls) == [1] * 6
    assert rig.store.max_inside == 2


async def test_waiting_for_a_place_is_part_of_the_time(hasty: Rig) -> None:
    hasty.store.gate = asyncio.Event()
    late = await asyncio.gather(*(hasty.guarded.count_leading(KEYS) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in late] == [StoreTimeout] * 3  # the third one never got a place


async def test_those_who_wait_for_a_place_do_no_io_once_it_is_open(rig: Rig) -> None:
    rig.store.gate = asyncio.Event()
    rig.store.errors = {"read": StoreAuth("no")}
    calls = [asyncio.create_task(rig.guarded.read(KEYS)) for _ in range(5)]
    await settle()
    rig.store.gate.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in outcomes] == [StoreAuth] * 2 + [StoreUnavailable] * 3
    assert len(rig.store.calls) == 2


async def test_a_cancelled_call_is_no_failure(rig: Rig) -> None:
    rig.store.gate = asyncio.Event()
    for _ in range(5):
        call = asyncio.create_task(rig.guarded.read(KEYS))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert rig.guarded.state is CLOSED
    assert rig.outcomes("read") == ["cancelled"] * 5


async def test_refused_writes_pause_writes_only(rig: Rig) -> None:
    rig.store.errors = {"write": StoreFull("full")}
    entries = [(b"k", b"v")]
    await rig.fails(rig.guarded.write(entries), StoreFull)
    assert (rig.guarded.state, rig.guarded.write_state) == (CLOSED, OPEN)
    await rig.fails(rig.guarded.write(entries), StoreUnavailable)
    assert await rig.guarded.read(KEYS) == [b"value"]
    await rig.guarded.delete(KEYS)  # what may make room is still sent
    await rig.clock.move(1.0)
    await rig.fails(rig.guarded.write(entries), StoreFull)
    await rig.clock.move(1.9)
    await rig.fails(rig.guarded.write(entries), StoreUnavailable)
    await rig.clock.move(0.1)
    rig.store.errors = {}
    await rig.guarded.write(entries)
    assert rig.guarded.write_state is CLOSED
    assert rig.store.calls.count("write") == 3


async def test_a_cancelled_write_can_be_tried_again(rig: Rig) -> None:
    rig.store.errors = {"write": StoreFull("full")}
    await rig.fails(rig.guarded.write([(b"k", b"v")]), StoreFull)
    await rig.clock.move(1.0)
    rig.store.errors = {}
    rig.store.gate = asyncio.Event()
    call = asyncio.create_task(rig.guarded.write([(b"k", b"v")]))
    await settle()
    assert rig.guarded.write_state is HALF_OPEN
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    rig.store.gate = None
    await rig.guarded.write([(b"k", b"v")])
    assert rig.guarded.write_state is CLOSED


async def test_what_says_nothing_about_the_store_does_not_count(rig: Rig) -> None:
    rig.store.errors = {"write": ValueTooLarge("64 MiB"), "delete": StoreAuth("may not delete")}
    for _ in range(5):
        await rig.fails(rig.guarded.write([(b"k", b"v")]), ValueTooLarge)
        await rig.fails(rig.guarded.delete(KEYS), StoreAuth)
    assert (rig.guarded.state, rig.guarded.write_state) == (CLOSED, CLOSED)


async def test_one_line_for_each_change_of_use(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefixcache.store")
    await rig.fail_reads(3, StoreUnreachable("connection refused"))
    await settle()
    for _ in range(50):
        await rig.fails(rig.guarded.read(KEYS), StoreUnavailable)
    await rig.clock.move(1.0)  # a try that fails
    rig.store.errors = {}
    await rig.clock.move(2.0)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "remote store is suspended: connection refused"),
        ("INFO", "remote store is resumed"),
    ]
    assert rig.states == [
        ("store", OPEN),
        ("store", HALF_OPEN),
        ("store", OPEN),
        ("store", HALF_OPEN),
        ("store", CLOSED),
    ]
