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
PROMPT = [(7 * index + 3) % VOCAB_SIZE for index in range(600)]


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


@pytest.fixture(scope="module")
def scraped(slow_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """A Prometheus that has watched two replicas, every tier below them, serve every kind of hit."""
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
                answer(one, PROMPT)
                saved = 'min(prefixcache_tier_saved_bytes_total{tier="remote"} > 0)'
                until(lambda: bool(prometheus.query(saved)))
                until(lambda: not prometheus.query("prefixcache_tier_pages_in_flight > 0"))
                replies = [answer(one, PROMPT), answer(one, [*PROMPT[:500], 5, 6, 7]), answer(other, PROMPT)]
                assert replies[0].usage.cached_tokens_by_tier.device > 0
                assert replies[2].usage.cached_tokens_by_tier.remote > 0
                yield prometheus


def answer(server: LocalServer, token_ids: list[int]) -> pb.CompleteResponse:
    with Client(server.address) as client:
        return client.complete(token_ids=token_ids, max_tokens=8, temperature=0.0, ignore_eos=True)


def without_data(prometheus: PrometheusServer, expressions: dict[str, str]) -> list[str]:
    """Those that give no finite number, once they have had time to."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        missing = [
            name
            for name, expression in expressions.items()
            if not any(math.isfinite(float(series["value"][1])) for series in prometheus.query(expression))
        ]
        if not missing or time.monotonic() > deadline_s:
            return missing
        time.sleep(0.5)


def test_every_documented_metric_is_scraped(scraped: PrometheusServer):
    suffix = {"histogram": "_count", "counter": "", "gauge": "", "info": ""}
    series = {name: name + suffix[kind] for name, kind in documented_metrics().items()}
    assert without_data(scraped, series) == []


def test_every_recording_rule_has_data(scraped: PrometheusServer):
    rules = yaml.safe_load((FOLDER / "recording.rules.yml").read_text())["groups"][0]["rules"]
    assert without_data(scraped, {rule["record"]: rule["record"] for rule in rules}) == []


def test_every_query_of_the_dashboard_has_data(scraped: PrometheusServer):
    assert without_data(scraped, queries()) == []


def test_every_query_of_the_handbook_has_data(scraped: PrometheusServer):
    assert len(documented_queries()) >= 3
    assert without_data(scraped, {query: query for query in documented_queries()}) == []


def test_no_rule_fails_and_no_alert_fires_on_healthy_servers(scraped: PrometheusServer):
    rules = scraped.rules()
    assert len(rules) > 20
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


def test_counters_are_the_sums_of_what_replies_said(scraped: PrometheusServer):
    """Four requests of known lengths, through two servers and a scrape."""
    until(lambda: bool(scraped.query("sum(prefixcache_generated_tokens_total) == 32")))
    (total,) = scraped.query("sum(prefixcache_prompt_tokens_total)")
    assert float(total["value"][1]) == 3 * len(PROMPT) + 503
