"""What deploy/ has for Prometheus and Grafana, against the real Prometheus and real servers."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.client import Client
from prefixcache.local_server import LocalServer
from tests.support.models import VOCAB_SIZE, slow_server_flags
from tests.support.operations_doc import documented_metrics, documented_queries, headings
from tests.support.patience import LIMIT_S, until
from tests.support.prometheus_server import FOLDER, PrometheusServer, prometheus_server, require
from tests.support.redis_server import redis_server

GRAFANA = FOLDER.parent / "grafana"
NUM_TOKENS = 600


def promtool(*arguments: str | Path) -> str:
    command = [require("promtool"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def queries() -> dict[str, str]:
    """Every expression of the dashboard, by panel, with its variables filled in."""
    dashboard = json.loads((GRAFANA / "dashboards" / "prefixcache.json").read_text())
    values = {"$__rate_interval": "1m", "$job": "prefixcache", "$instance": ".*"}
    found = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in values.items():
                expression = expression.replace(name, value)
            assert "$" not in expression
            found[f"{panel['title']} ({target['refId']})"] = expression
    return found


# --- files ---------------------------------------------------------------------------------------------------------


def test_configuration_and_rules_are_sound_and_do_what_their_tests_say():
    promtool("check", "config", FOLDER / "prometheus.yml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", *FOLDER.glob("*.rules.yml"))
    promtool("test", "rules", FOLDER / "rules.test.yml")


def test_every_alert_has_a_runbook_and_a_test_of_its_own():
    rules = yaml.safe_load((FOLDER / "alerts.rules.yml").read_text())["groups"][0]["rules"]
    tested = set(re.findall(r"alertname: (\w+)\n +exp_alerts", (FOLDER / "rules.test.yml").read_text()))
    for rule in rules:
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert file == "docs/operations.md"
        assert anchor == rule["alert"].lower()
        assert anchor in {heading.lower() for heading in headings()}
    assert tested == {rule["alert"] for rule in rules}


def test_grafana_finds_its_data_source_and_its_dashboard():
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/prefixcache.yml").read_text())["providers"]
    dashboard = json.loads((GRAFANA / "dashboards/prefixcache.json").read_text())
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert all(0 <= x < 24 for x, _ in cells)


# --- a running pair ------------------------------------------------------------------------------------------------


class Watched:
    """Two replicas, every tier below them, under the eyes of a Prometheus."""

    def __init__(self, prometheus: PrometheusServer, one: LocalServer, other: LocalServer) -> None:
        self.prometheus = prometheus
        self.replies: list[pb.CompleteResponse] = []
        self._one, self._other = one, other

    def ask(self) -> None:
        """Sends one prompt of every kind of hit, and for each tier."""
        prompt = [(7 * index + len(self.replies)) % VOCAB_SIZE for index in range(NUM_TOKENS)]
        saved = 'sum(prefixcache_tier_saved_bytes_total{tier="remote"})'
        before = self.prometheus.query(saved)[0]["value"][1]
        self._answer(self._one, prompt)
        until(lambda: bool(self.prometheus.query(f"{saved} > {before}")))
        until(lambda: not self.prometheus.query("prefixcache_tier_pages_in_flight > 0"))
        assert self._answer(self._one, prompt).usage.cached_tokens_by_tier.device > 0
        self._answer(self._one, [*prompt[:500], 5, 6, 7])
        assert self._answer(self._other, prompt).usage.cached_tokens_by_tier.remote > 0

    def _answer(self, server: LocalServer, token_ids: list[int]) -> pb.CompleteResponse:
        with Client(server.address) as client:
            reply = client.complete(token_ids=token_ids, max_tokens=8, temperature=0.0, ignore_eos=True)
        self.replies.append(reply)
        return reply


@pytest.fixture(scope="module")
def watched(slow_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("monitoring")
    flags = (*slow_server_flags(slow_model_folder), "--host-memory", "4MiB")
    with redis_server(folder / "redis") as redis:
        starting = [
            LocalServer(*flags, "--redis", redis.url, "--disk", str(folder / name), "--disk-size", "64MiB")
            for name in ("one", "other")
        ]
        with starting[0] as one, starting[1] as other:
            targets = [server.metrics_url.removeprefix("http://").partition("/")[0] for server in (one, other)]
            with prometheus_server(folder / "prometheus", targets) as prometheus:
                until(lambda: prometheus.has_scraped(2))
                running = Watched(prometheus, one, other)
                running.ask()
                yield running


def without_data(watched: Watched, expressions: dict[str, str]) -> list[str]:
    """Those that give no finite number, however long requests go on: a rate needs them before and after a scrape."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        missing = [
            name
            for name, expression in expressions.items()
            if not any(math.isfinite(float(series["value"][1])) for series in watched.prometheus.query(expression))
        ]
        if not missing or time.monotonic() > deadline_s:
            return missing
        time.sleep(1.0)
        watched.ask()


def test_every_documented_metric_is_scraped(watched: Watched):
    suffix = {"histogram": "_count", "counter": "", "gauge": "", "info": ""}
    series = {name: name + suffix[kind] for name, kind in documented_metrics().items()}
    assert without_data(watched, series) == []


def test_every_recording_rule_has_data(watched: Watched):
    rules = yaml.safe_load((FOLDER / "recording.rules.yml").read_text())["groups"][0]["rules"]
    assert without_data(watched, {rule["record"]: rule["record"] for rule in rules}) == []


def test_every_query_of_the_dashboard_has_data(watched: Watched):
    assert without_data(watched, queries()) == []


def test_every_query_of_the_handbook_has_data(watched: Watched):
    assert len(documented_queries()) >= 3
    assert without_data(watched, {query: query for query in documented_queries()}) == []


def test_no_rule_fails_and_no_alert_fires_on_healthy_servers(watched: Watched):
    rules = watched.prometheus.rules()
    assert len(rules) > 20
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


def test_counters_are_the_sums_of_what_replies_said(watched: Watched):
    """Through two servers and a scrape."""
    num_generated = sum(reply.usage.completion_tokens for reply in watched.replies)
    until(lambda: bool(watched.prometheus.query(f"sum(prefixcache_generated_tokens_total) == {num_generated}")))
    (total,) = watched.prometheus.query("sum(prefixcache_prompt_tokens_total)")
    assert float(total["value"][1]) == sum(reply.usage.prompt_tokens for reply in watched.replies)
