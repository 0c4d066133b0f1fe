"""A TCP proxy between a client and a real server that can be slow, silent, broken or narrow, and counts what passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHUNK_BYTES = 16 * 1024
TIMER_S = 0.002
MAX_HELD_CHUNKS = 4096


class Proxy:
    """Forwards to one port of loopback. The faults may be changed at any time, for connections that are open too.

    Attributes:
        port: Where it listens.
        delay_s: How much later every piece of a reply arrives, as over a long line.
        bytes_per_s: What replies of all connections together get; None is all there is.
        is_black_hole: It accepts, reads and never answers.
        cut_after_bytes: A connection breaks once it has carried so many bytes of replies; None is never.
        num_connections: How many were ever opened.
        reply_bytes: What replies have carried.
    """

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.cut_after_bytes: int | None = None
        self.num_connections = 0
        self.reply_bytes = 0
        self._server_port = server_port
        self._answers = asyncio.Event()
        self._answers.set()
        self._free_at = 0.0  # when the narrow line has carried what it was given
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None] | None] = set()

    @property
    def is_black_hole(self) -> bool:
        return not self._answers.is_set()

    @is_black_hole.setter
    def is_black_hole(self, value: bool) -> None:
        if value:
            self._answers.clear()
        else:
            self._answers.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def cut_all(self) -> None:
        """Breaks every open connection now."""
        for writer in self._open:
            writer.transport.abort()

    async def close(self) -> None:
        """Breaks every connection and waits until nothing of them is left."""
        self.cut_all()
        await asyncio.gather(*(task for task in self._serving if task))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        self.num_connections += 1
        self._open.add(writer)
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            server_writer = writer
        else:
            held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_HELD_CHUNKS)
            directions = [
                asyncio.create_task(self._forward_requests(reader, server_writer)),
                asyncio.create_task(self._hold_replies(server_reader, held)),
                asyncio.create_task(self._forward_replies(held, writer)),
            ]
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for task in directions:
                task.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
        for end in (server_writer, writer):
            end.transport.abort()
        self._open.discard(writer)
        self._serving.discard(asyncio.current_task())

    async def _forward_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if not self.is_black_hole:
                writer.write(data)
                await writer.drain()

    async def _hold_replies(self, reader: asyncio.StreamReader, held: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(CHUNK_BYTES):
            await held.put((loop.time() + self.delay_s, data))
        await held.put((loop.time() + self.delay_s, b""))
        await held.join()

    async def _forward_replies(self, held: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        carried = 0
        while True:
            arrives_at, data = await held.get()
            held_s = arrives_at - asyncio.get_running_loop().time()
            if held_s > 0:
                await asyncio.sleep(held_s)
            await self._wait_for_the_line(len(data))
            await self._answers.wait()
            if self.cut_after_bytes is not None and carried + len(data) > self.cut_after_bytes:
                writer.write(data[: self.cut_after_bytes - carried])
                await writer.drain()
                writer.close()  # what was written still arrives
                return
            carried += len(data)
            self.reply_bytes += len(data)
            writer.write(data)
            await writer.drain()
            held.task_done()

    async def _wait_for_the_line(self, num_bytes: int) -> None:
        if self.bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - TIMER_S) + num_bytes / self.bytes_per_s
        if self._free_at - now > TIMER_S:  # sleeping costs as much, and what it costs more is made up for next time
            await asyncio.sleep(self._free_at - now)


@asynccontextmanager
async def proxy(server_port: int) -> AsyncIterator[Proxy]:
    """Runs a proxy on this event loop for as long as the block lasts."""
    running = Proxy(server_port)
    server = await asyncio.start_server(running._serve, "127.0.0.1", 0)
    running.port = server.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        server.close()
        await running.close()
