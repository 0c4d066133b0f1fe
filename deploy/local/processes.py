"""A program in the background that is killed and started again on the same port."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from prefixcache.errors import NotServing

START_LIMIT_S = 30.0
STOP_LIMIT_S = 30.0

_PORTS = range(12_000, 22_000)
_given: set[int] = set()


class BackgroundProcess:
    """One program that listens on one port of loopback; what it prints goes to a file.

    Args:
        command: The program's name comes first.
        port: Where it will listen.
        log: Appended to.
        install: Says how to get the program, where it is missing.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path, install: str) -> None:
        self.port = port
        self._command = command
        self._log = log
        self._install = install
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts it, and returns once it listens; raises NotServing if it does not."""
        program = shutil.which(self._command[0])
        if program is None:
            raise NotServing(f"{self._command[0]} is not installed: {self._install}")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([program, *self._command[1:]], stdout=log, stderr=log)
        deadline = time.monotonic() + START_LIMIT_S
        while not _listens(self.port):
            if not self.is_running or time.monotonic() > deadline:
                self.kill()
                raise NotServing(f"{self._command[0]} did not start; its log is {self._log}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Asks it to end, and waits; ends it the hard way if that takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    """Returns a port of loopback that nobody listens on now, another one each time.

    It stays free however long a server takes to load, since the system gives outgoing connections ports from 32,768 on.
    A Redis Cluster's bus, 10,000 above its port, is still below those.
    """
    while True:
        port = secrets.choice(_PORTS)
        if port not in _given and not _listens(port):
            _given.add(port)
            return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
