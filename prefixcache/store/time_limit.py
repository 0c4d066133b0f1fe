"""How long others are waited for, by a clock that stands still while this process does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LATE_S = 0.01  # a timer this late was held up together with all else on the loop


class TimeLimit:
    """Ends what `time_limit` surrounds. Event loop only."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._grace_s = 0.0  # a loop that is late every time is busy: that puts the limit off by its own length at most

    def restart(self, seconds: float) -> None:
        """Allow this long from now on."""
        self._grace_s = seconds
        self._allow(seconds)

    def stop(self) -> None:
        """Allow any time."""
        if self._timer is not None:
            self._timer.cancel()

    def _allow(self, seconds: float) -> None:
        self.stop()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        assert self._timer is not None
        now = self._loop.time()
        late_s = now - self._timer.when()
        if late_s > LATE_S and self._grace_s > 0:
            more_s = min(late_s, self._grace_s)
            self._grace_s -= more_s
            self._allow(more_s)
        else:
            self._timeout.reschedule(now)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[TimeLimit]:
    """Like `asyncio.timeout`, but time in which the event loop could not run does not count.

    A process can be held up, by a long garbage collection or by the machine. The answer has come in meanwhile, but the
    timer is due before anybody has read it; with `asyncio.timeout` it would be thrown away, and a good store be blamed.

    Raises:
        TimeoutError: It took longer.
    """
    async with asyncio.timeout(None) as timeout:
        limit = TimeLimit(timeout)
        limit.restart(seconds)
        try:
            yield limit
        finally:
            limit.stop()
