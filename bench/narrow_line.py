"""A line of a chosen bandwidth in front of a port of loopback, in a process of its own so that it takes nobody's GIL.

    python bench/narrow_line.py PORT        prints the port that it listens on

Each line on standard input is a new bandwidth for what the server sends, in bytes a second, 0 for unlimited; all
connections share it. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import TracebackType
from typing import Self

CHUNK_BYTES = 64 * 1024
TIMER_S = 0.002


class Line:
    """Forwards connections. Requests pass freely; replies wait until the line has carried what is before them."""

    def __init__(self, server_port: int) -> None:
        self.bytes_per_s = 0.0
        self._server_port = server_port
        self._free_at_s = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port, limit=CHUNK_BYTES)
        ways = [
            asyncio.create_task(self._pass(reader, server_writer, is_shaped=False)),
            asyncio.create_task(self._pass(server_reader, writer, is_shaped=True)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.close()
        server_writer.close()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_shaped: bool) -> None:
        while data := await source.read(CHUNK_BYTES):
            if is_shaped and self.bytes_per_s:
                now_s = asyncio.get_running_loop().time()
                self._free_at_s = max(self._free_at_s, now_s - TIMER_S) + len(data) / self.bytes_per_s
                if self._free_at_s - now_s > TIMER_S:  # what a sleep takes too long is made up for by the next ones
                    await asyncio.sleep(self._free_at_s - now_s)
            target.write(data)
            await target.drain()


async def main(server_port: int) -> None:
    line, loop = Line(server_port), asyncio.get_running_loop()
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0, limit=CHUNK_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    while text := await loop.run_in_executor(None, sys.stdin.readline):
        line.bytes_per_s = float(text)
        print("set", flush=True)


class NarrowLine:
    """The process above as a context manager; `port` is where it listens."""

    def __init__(self, server_port: int) -> None:
        command = [sys.executable, __file__, str(server_port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._answer())

    def set_bandwidth(self, bytes_per_s: float) -> None:
        """Change the bandwidth; 0 is unlimited."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{bytes_per_s}\n")
        self._process.stdin.flush()
        assert self._answer() == "set"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
