"""A server of one's own in a subprocess on free loopback ports: for the demo, benchmarks and tests."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import IO, Self

from prefixcache.errors import NotServing

_READY = re.compile(r"is ready on (?P<address>\S+): (?P<what>.*), metrics on (?P<metrics>\S+)")
STOP_S = 60.0


class LocalServer:
    """`prefixcache serve` as a context manager: ready on entry, stopped (and waited for) on exit.

    Args:
        *flags: Passed on to `prefixcache serve`.
        log: Where the server's log goes; None for this process's standard error.
        on_line: Told each line that the server prints before it is ready.

    Attributes:
        address: Where gRPC listens, `host:port`.
        metrics_url: Where `/metrics` is.
        description: Model, device and cache size, in words.
    """

    def __init__(self, *flags: str, log: IO[str] | None = None, on_line: Callable[[str], None] | None = None) -> None:
        self.address = self.metrics_url = self.description = ""
        self._on_line = on_line
        command = [sys.executable, "-m", "prefixcache", "serve", "--port", "0", "--metrics-port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def wait_until_ready(self) -> None:
        """Read what the server prints until it says that it is ready; raises NotServing if it ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := _READY.search(line):
                self.address, self.metrics_url = match["address"], match["metrics"]
                self.description = match["what"]
                # whatever it prints later must not fill the pipe and block it
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return
            if self._on_line is not None:
                self._on_line(line.rstrip())
        raise NotServing(f"the server ended with exit code {self.process.wait()} before it was ready")

    def stop(self) -> int:
        """Ask it to drain and end; return its exit code. Ends it the hard way if that takes too long."""
        self.process.terminate()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> Self:
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
