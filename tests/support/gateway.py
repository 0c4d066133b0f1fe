"""A real smg gateway in front of real servers, and what tests ask them."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.local.processes import free_port

SMG = Path(__file__).parents[2] / ".venv-smg" / "bin" / "smg"
START_LIMIT_S = 30.0
# Everything that the gateway does by the clock, quicker than by default, so that tests need not wait for it.
FAST = (
    *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "1"),
    *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--load-monitor-interval", "1", "--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"),
)


class Gateway:
    """A running gateway on free ports of loopback.

    Attributes:
        url: Where its HTTP API is.
    """

    def __init__(self, folder: Path, workers: Sequence[str]) -> None:
        port, self._metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"smg-{port}.log"
        command = [
            *(str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(self._metrics_port)),
            *("--worker-urls", *(f"grpc://{worker}" for worker in workers)),
            *FAST,
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)

    def get(self, path: str) -> Any:
        """The JSON that it answers, whatever the status."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def post(self, path: str) -> tuple[int, str]:
        """The status and the body that it answers to an empty request."""
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, method="POST"), timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def value(self, name: str, **labels: str) -> float:
        """The sum of one metric over all series with these labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=5) as response:
            text = response.read().decode()
        total = 0.0
        for line in re.findall(rf"^{name}\{{.*$", text, re.MULTILINE):
            if all(f'{key}="{label}"' in line for key, label in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def num_indexed(self, worker: str) -> float:
        """How many pages of a worker it knows of."""
        return self.value("smg_kv_index_blocks", worker=f"grpc://{worker}")

    def wait_for_workers(self, count: int) -> None:
        """Returns once it routes to so many workers, whose events it follows."""
        until(lambda: self._num_ready() == count, f"{count} workers at the gateway", log=self.log)

    def _num_ready(self) -> int:
        try:
            workers = self.get("/workers")["workers"]
        except (OSError, ValueError, KeyError):
            return -1
        return sum(worker.get("status") == "ready" and not worker.get("stalled") for worker in workers)

    def log(self) -> str:
        return self._log.read_text()[-8000:]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def gateway(folder: Path, workers: Sequence[str]) -> Iterator[Gateway]:
    """Runs a gateway and waits until it serves all workers."""
    if not SMG.exists():
        pytest.skip("needs the gateway smg in .venv-smg; `make test` installs it where it may")
    running = Gateway(folder, workers)
    try:
        running.wait_for_workers(len(workers))
        yield running
    finally:
        running.stop()


def until(
    condition: Callable[[], bool], what: str, timeout_s: float = START_LIMIT_S, log: Callable[[], str] = str
) -> float:
    """Waits until something is so and returns how long that took; fails if it takes too long."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            pytest.fail(f"{what}: not within {timeout_s:g} s\n{log()}")
        time.sleep(0.02)
    return time.monotonic() - started_s
