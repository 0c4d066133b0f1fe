"""CircuitBreaker: when to leave a failing store alone, and when to try it again.

            enough failures in a row,              the wait is over:
            or a refusal                           one try
    CLOSED ───────────────────────────▶ OPEN ────────────────────▶ HALF_OPEN ──▶ CLOSED   it worked
                                          ▲                            │
                                          └─ it failed: twice the wait ┘

Pure: the time comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Counts failures in a row for each operation apart, so that lookups that work cannot hide reads that never do."""

    def __init__(
        self,
        failures_to_open: int,
        first_wait_s: float,
        max_wait_s: float,
        on_change: Callable[[BreakerState, BreakerState], None],
    ) -> None:
        """`on_change` is called with the state before and the state after."""
        self._failures_to_open = failures_to_open
        self._first_wait_s = first_wait_s
        self._max_wait_s = max_wait_s
        self._on_change = on_change
        self._failures: dict[str, int] = {}
        self._opened_by = ""
        self._next_wait_s = first_wait_s
        self.state = BreakerState.CLOSED
        self.retry_at = 0.0

    def admits(self, now: float) -> bool:
        """Returns whether the caller may try. If it is not CLOSED, the caller is the one try that may be."""
        if self.state is BreakerState.OPEN and now >= self.retry_at:
            self._become(BreakerState.HALF_OPEN)
            return True
        return self.state is BreakerState.CLOSED

    def failed(self, operation: str, now: float, at_once: bool = False) -> None:
        """Counts a failure, and opens if there are enough, if it is to open `at_once`, or if it was the one try."""
        if self.state is BreakerState.OPEN:
            return  # a call from before it opened
        self._failures[operation] = self._failures.get(operation, 0) + 1
        if self.state is BreakerState.CLOSED:
            if not at_once and self._failures[operation] < self._failures_to_open:
                return
            self._opened_by = operation
        self.retry_at = now + self._next_wait_s
        self._next_wait_s = min(2 * self._next_wait_s, self._max_wait_s)
        self._become(BreakerState.OPEN)

    def succeeded(self, operation: str) -> None:
        """Closes. Waits stay long until the operation that had opened works as well, whatever the one try was."""
        if operation == self._opened_by:
            self._next_wait_s = self._first_wait_s
        self._failures.pop(operation, None)
        if self.state is not BreakerState.CLOSED:
            self._failures.clear()
            self._become(BreakerState.CLOSED)

    def gave_up(self) -> None:
        """The one try ended without an answer, as when it is cancelled; the next may come at once."""
        if self.state is BreakerState.HALF_OPEN:
            self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        before, self.state = self.state, state
        self._on_change(before, state)
