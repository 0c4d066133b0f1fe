"""A real Prometheus for tests, with the rules of deploy/ and addresses of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.processes import free_port

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
INTERVAL = "500ms"
START_LIMIT_S = 30.0


class PrometheusServer:
    """Answers queries about what a running Prometheus has scraped."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._base}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query, with labels and value; fails where it cannot be parsed."""
        return self._get("query", query=expression)["result"]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def has_scraped(self, num_targets: int) -> bool:
        return len(self.query('prefixcache_ready{job="prefixcache"} == 1')) == num_targets

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._base}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]


@contextmanager
def prometheus_server(folder: Path, targets: Sequence[str]) -> Iterator[PrometheusServer]:
    """Runs one on deploy's configuration, but for how often it looks, and at which servers."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    config["rule_files"] = [str(FOLDER / pattern) for pattern in config["rule_files"]]
    config["scrape_configs"] = [{"job_name": "prefixcache", "static_configs": [{"targets": list(targets)}]}]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [require("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server, deadline_s = PrometheusServer(port), time.monotonic() + START_LIMIT_S
        while not server.is_ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"prometheus did not start:\n{(folder / 'log').read_text()}")
            time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()


def require(binary: str) -> str:
    path = shutil.which(binary)
    if path is None:
        pytest.fail(f"these tests need {binary}: apt-get update && apt-get install -y prometheus")
    return path
