"""GuardedStore: no request waits long for a store, and none waits at all for one that is known to be bad.

Every call has a time limit that grows with its bytes; waiting for a free place is part of it. Enough failures in a row
open the breaker: from then on calls fail at once and without I/O, while tries in the background, at growing intervals,
find out when the store is back. A store that is there but refuses writes, such as a full one, is spared writes only,
and reads go on (field report E14).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from prefixcache.store.base import (
    PageStore,
    StoreClosed,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    Value,
    ValueTooLarge,
)
from prefixcache.store.breaker import BreakerState, CircuitBreaker
from prefixcache.store.time_limit import time_limit

T = TypeVar("T")
Operation = Literal["count_leading", "read", "write", "delete", "probe"]
Side = Literal["store", "writes"]

PROBE_KEY = bytes(16)  # no page's, so that a probe does what a read does and moves nothing
SAYS_NOTHING = (StoreUnavailable, StoreClosed, ValueTooLarge)  # about the state of the store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """How long, and how often, a store is waited for."""

    base_s: float = 0.5  # for any call
    min_bytes_per_s: float = 8e6  # a call gets a second more for each so many bytes that it moves
    max_concurrent: int = 4
    failures_to_open: int = 3
    first_wait_s: float = 0.5
    max_wait_s: float = 30.0


@dataclass(frozen=True, slots=True)
class CallEnded:
    """One call, for metrics. `outcome` is `ok`, `cancelled` or the kind of a StoreError."""

    operation: Operation
    seconds: float
    num_bytes: int  # of the values that were moved
    outcome: str


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The store, or its writes alone, came into use or went out of it."""

    side: Side
    state: BreakerState


Event = CallEnded | StateChanged


class Clock(Protocol):
    def now(self) -> float:
        """Returns seconds that only ever grow."""

    async def sleep(self, seconds: float) -> None:
        """Waits for this long."""


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class GuardedStore:
    """A PageStore in front of another. Event loop only.

    Besides what the store raises, calls raise StoreUnavailable, without I/O, while it is out of use, and StoreTimeout
    when they take too long. What then goes on underneath is cancelled, so that its answer reaches nobody.
    """

    def __init__(
        self,
        name: str,
        store: PageStore,
        value_bytes: int,
        limits: GuardLimits,
        observe: Callable[[Event], None],
        clock: Clock | None = None,
    ) -> None:
        """Takes a name for the log, the store, and the size of one value, for the time limit of reads.

        `observe` is called on the event loop at the end of each call and at each change of state.
        """
        self._name = name
        self._store = store
        self._value_bytes = value_bytes
        self._limits = limits
        self._observe = observe
        self._clock = clock or SystemClock()
        self._places = asyncio.Semaphore(limits.max_concurrent)
        waits = (limits.first_wait_s, limits.max_wait_s)
        self._breaker = CircuitBreaker(limits.failures_to_open, *waits, self._store_changed)
        self._write_breaker = CircuitBreaker(1, *waits, self._writes_changed)
        self._last_error: StoreError | None = None
        self._recovery: asyncio.Task[None] | None = None

    @property
    def state(self) -> BreakerState:
        """Whether the store is in use."""
        return self._breaker.state

    @property
    def write_state(self) -> BreakerState:
        """Whether a store that is in use is used for writes."""
        return self._write_breaker.state

    async def count_leading(self, keys: Sequence[bytes]) -> int:
        return await self._call("count_leading", lambda: self._store.count_leading(keys), 0)

    async def read(self, keys: Sequence[bytes]) -> list[Value | None]:
        return await self._call("read", lambda: self._store.read(keys), len(keys) * self._value_bytes, _sum_bytes)

    async def write(self, entries: Sequence[tuple[bytes, Value]]) -> None:
        if not self._write_breaker.admits(self._clock.now()):
            raise self._refusal("write")
        num_bytes = sum(len(value) for _, value in entries)
        try:
            await self._call("write", lambda: self._store.write(entries), num_bytes, lambda _: num_bytes)
            self._write_breaker.succeeded("write")
        finally:
            self._write_breaker.gave_up()

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self._call("delete", lambda: self._store.delete(keys), 0)

    async def close(self) -> None:
        if self._recovery:
            self._recovery.cancel()
        await self._store.close()

    async def _call(
        self,
        operation: Operation,
        call: Callable[[], Awaitable[T]],
        expected_bytes: int,
        moved_bytes: Callable[[T], int] = lambda _: 0,
    ) -> T:
        if self._breaker.state is not BreakerState.CLOSED:
            raise self._refusal(operation)
        started = self._clock.now()
        limit_s = self._limits.base_s + expected_bytes / self._limits.min_bytes_per_s
        try:
            async with time_limit(limit_s), self._places:
                if self._breaker.state is not BreakerState.CLOSED:  # it opened while this call waited for a place
                    raise StoreUnavailable(f"{self._name} store is out of use")
                result = await call()
        except StoreError as error:
            self._ended(operation, started, error.kind)
            self._judge(operation, error)
            raise
        except TimeoutError as error:
            late = StoreTimeout(f"{self._name} store took longer than {limit_s:.2f} s to {operation}")
            self._ended(operation, started, late.kind)
            self._judge(operation, late)
            raise late from error
        except asyncio.CancelledError:
            self._ended(operation, started, "cancelled")
            raise
        except Exception as error:  # nobody foresaw it, but whoever waits for the store must hear of it as of any other
            logger.exception("unforeseen error of the %s store", self._name)
            unforeseen = StoreError(f"{self._name} store failed to {operation}: {type(error).__name__}")
            self._ended(operation, started, unforeseen.kind)
            self._judge(operation, unforeseen)
            raise unforeseen from error
        self._breaker.succeeded(operation)
        self._ended(operation, started, "ok", moved_bytes(result))
        return result

    def _judge(self, operation: Operation, error: StoreError) -> None:
        """Lets a failure count: a refused write against writes, all else against the store; deletes may be refused."""
        if isinstance(error, SAYS_NOTHING):
            return
        self._last_error = error
        now = self._clock.now()
        if not error.is_answer:
            self._breaker.failed(operation, now)
        elif operation == "write":
            self._write_breaker.failed(operation, now)
        elif operation != "delete":
            self._breaker.failed(operation, now, at_once=True)  # who says no to a read says no to the next one too

    async def _recover(self) -> None:
        """Tries the store until it works again, so that no request has to."""
        while self._breaker.state is not BreakerState.CLOSED:
            await self._clock.sleep(max(0.0, self._breaker.retry_at - self._clock.now()))
            if not self._breaker.admits(self._clock.now()):
                continue
            started = self._clock.now()
            try:
                async with time_limit(self._limits.base_s):
                    await self._store.read((PROBE_KEY,))
            except Exception as error:  # whatever it is, the store must be tried again
                known = StoreTimeout if isinstance(error, TimeoutError) else error
                self._ended("probe", started, getattr(known, "kind", StoreError.kind))
                self._breaker.failed("probe", self._clock.now())
            else:
                self._ended("probe", started, "ok")
                self._breaker.succeeded("probe")

    def _store_changed(self, before: BreakerState, state: BreakerState) -> None:
        self._changed("store", before, state)
        if before is BreakerState.CLOSED and (self._recovery is None or self._recovery.done()):
            self._recovery = asyncio.get_running_loop().create_task(self._recover())

    def _writes_changed(self, before: BreakerState, state: BreakerState) -> None:
        self._changed("writes", before, state)

    def _changed(self, side: Side, before: BreakerState, state: BreakerState) -> None:
        what = f"{self._name} store" if side == "store" else f"writing to the {self._name} store"
        if before is BreakerState.CLOSED:
            logger.warning("%s is suspended: %s", what, self._last_error)
        elif state is BreakerState.CLOSED:
            logger.info("%s is resumed", what)
        self._observe(StateChanged(side, state))

    def _ended(self, operation: Operation, started: float, outcome: str, num_bytes: int = 0) -> None:
        self._observe(CallEnded(operation, self._clock.now() - started, num_bytes, outcome))

    def _refusal(self, operation: Operation) -> StoreUnavailable:
        self._observe(CallEnded(operation, 0.0, 0, StoreUnavailable.kind))
        return StoreUnavailable(f"{self._name} store is out of use")


def _sum_bytes(values: Sequence[Value | None]) -> int:
    return sum(len(value) for value in values if value is not None)
