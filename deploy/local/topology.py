"""Two replicas, the Redis that they share, and the Prometheus that scrapes them.

client ──▶ replica 1 ─┬─▶ redis        each on a free port of loopback, all files in one folder
client ──▶ replica 2 ─┘
prometheus ──▶ /metrics of both
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from deploy.local.processes import BackgroundProcess, free_port
from prefixcache.local_server import LocalServer

PROMETHEUS_FOLDER = Path(__file__).parents[1] / "prometheus"
SCRAPE_INTERVAL = "2s"  # somebody is waiting to see something
INSTALL = "apt-get install redis-server prometheus"


class Replica:
    """One server that keeps its ports, and what is on its disk, when it is started again.

    Attributes:
        num_starts: How often it was started.
    """

    def __init__(self, name: str, folder: Path, flags: Sequence[str]) -> None:
        self.name = name
        self.num_starts = 0
        self.port, self.metrics_port = free_port(), free_port()
        self._log = folder / f"{name}.log"
        self._flags = ("--port", str(self.port), "--metrics-port", str(self.metrics_port), *flags)
        self._flags += ("--disk", str(folder / name))
        self._server: LocalServer | None = None

    @property
    def address(self) -> str:
        """Where gRPC listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def metrics_url(self) -> str:
        """Where `/metrics` is."""
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._server is not None
        return self._server.process.pid

    def start(self) -> None:
        """Starts the process; `wait_until_ready` says when it answers."""
        with self._log.open("a") as log:
            self._server = LocalServer(*self._flags, log=log)
        self.num_starts += 1

    def wait_until_ready(self) -> None:
        """Raises NotServing if the process ends instead."""
        assert self._server is not None
        self._server.wait_until_ready()

    def stop(self) -> int:
        """Asks it to drain and end, and returns its exit code."""
        return self._server.stop() if self._server is not None else 0


class Topology:
    """All of it, as a context manager: serving on entry, stopped on exit.

    Args:
        folder: For logs and data; it must exist.
        *flags: Passed on to each `prefixcache serve`.
        redis_memory: Bound of Redis, least recently used pages go first.
    """

    def __init__(self, folder: Path, *flags: str, redis_memory: str = "2gb") -> None:
        self._folder = folder
        self.redis = _redis(folder, redis_memory)
        url = f"redis://127.0.0.1:{self.redis.port}"
        self.replicas = [Replica(name, folder, ("--redis", url, *flags)) for name in ("replica-1", "replica-2")]
        self.prometheus = _prometheus(folder)
        self._stack = ExitStack()

    @property
    def prometheus_url(self) -> str:
        """Prometheus' own pages."""
        return f"http://127.0.0.1:{self.prometheus.port}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.redis.stop)
            self.redis.start()
            for replica in self.replicas:  # they load at the same time
                stack.callback(replica.stop)
                replica.start()
            for replica in self.replicas:
                replica.wait_until_ready()
            stack.callback(self.prometheus.stop)
            (self._folder / "prometheus.yml").write_text(json.dumps(self._prometheus_config()))
            self.prometheus.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _prometheus_config(self) -> dict[str, Any]:
        """The configuration that the compose file uses, with the addresses of here. JSON is YAML."""
        config: dict[str, Any] = yaml.safe_load((PROMETHEUS_FOLDER / "prometheus.yml").read_text())
        config["global"]["scrape_interval"] = SCRAPE_INTERVAL
        config["rule_files"] = [str(PROMETHEUS_FOLDER / pattern) for pattern in config.get("rule_files", ())]
        here = {f"{replica.name}:9464": f"127.0.0.1:{replica.metrics_port}" for replica in self.replicas}
        here["localhost:9090"] = f"127.0.0.1:{self.prometheus.port}"
        for job in config["scrape_configs"]:
            for group in job["static_configs"]:
                group["targets"] = [here[target] for target in group["targets"]]
        return config


def _redis(folder: Path, memory: str) -> BackgroundProcess:
    port = free_port()
    place = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder))
    bound = ("--maxmemory", memory, "--maxmemory-policy", "allkeys-lru", "--save", "", "--appendonly", "no")
    return BackgroundProcess(("redis-server", *place, *bound), port, folder / "redis.log", INSTALL)


def _prometheus(folder: Path) -> BackgroundProcess:
    port = free_port()
    files = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'prometheus'}")
    place = f"--web.listen-address=127.0.0.1:{port}"
    return BackgroundProcess(("prometheus", *files, place), port, folder / "prometheus.log", INSTALL)
