"""The proxy for tests that are no coroutines: it runs on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.proxy import Proxy, proxy


class Line:
    """A proxy on a thread of its own, whose faults are set from this one."""

    def __init__(self, running: Proxy, loop: asyncio.AbstractEventLoop) -> None:
        self._running = running
        self._loop = loop
        self.url = f"redis://127.0.0.1:{running.port}"

    def set(self, **faults: float | bool | None) -> None:
        """Changes attributes of the proxy."""

        def change() -> None:
            for name, value in faults.items():
                setattr(self._running, name, value)

        self._call(change)

    def cut_all(self) -> None:
        self._call(self._running.cut_all)

    def _call(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)


@contextmanager
def line_to(port: int) -> Iterator[Line]:
    """Runs a proxy in front of a port for as long as the block lasts."""
    ready: list[Line] = []
    is_ready = threading.Event()
    ends: list[Callable[[], object]] = []

    async def run() -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        ends.append(lambda: loop.call_soon_threadsafe(end.set))
        async with proxy(port) as running:
            ready.append(Line(running, loop))
            is_ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert is_ready.wait(10)
    try:
        yield ready[0]
    finally:
        ends[0]()
        thread.join(10)
