"""The HTTP port: metrics in every format, probes before, while and after it is ready."""

from __future__ import annotations

import gzip
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.metrics import Metrics, Outcome
from prefixcache.request import Tier
from prefixcache.server.health import Readiness
from prefixcache.server.http_endpoint import HttpEndpoint, serve_http


class Rig:
    def __init__(self, host: str = "127.0.0.1") -> None:
        self.metrics, self.readiness = Metrics(), Readiness()
        self.endpoint: HttpEndpoint = serve_http(self.metrics, self.readiness, host, 0)
        self.base = f"http://{f'[{host}]' if ':' in host else host}:{self.endpoint.port}"

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(self.base + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    with rig.endpoint:
        yield rig


def test_metrics_in_the_text_format(rig: Rig):
    rig.metrics.set_build_info(version="1.2.3", model="tiny", device="cpu", dtype="float32")
    rig.metrics.requests[Outcome.OK].inc()
    status, body = rig.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    counts = {sample.labels["outcome"]: sample.value for sample in families["prefixcache_requests"].samples}
    assert status == 200
    assert (counts["ok"], counts["invalid"]) == (1, 0)
    assert families["prefixcache_build_info"].samples[0].labels["version"] == "1.2.3"


def test_metrics_as_openmetrics_and_compressed(rig: Rig):
    accept = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}
    status, body = rig.get("/metrics", **accept)
    names = {family.name for family in parse_openmetrics(gzip.decompress(body).decode())}
    assert status == 200
    assert {"prefixcache_requests", "prefixcache_ttft_seconds"} <= names


def test_alive_from_the_start_and_ready_only_while_it_is_confirmed(rig: Rig):
    assert rig.get("/healthz") == (200, b"alive\n")
    assert rig.get("/readyz") == (503, b"not ready: the model is being loaded\n")
    rig.readiness.confirm(60)
    assert rig.get("/readyz") == (200, b"ready\n")
    rig.readiness.confirm(0)  # and then nothing more is heard
    assert rig.get("/readyz") == (503, b"not ready: the event loop is stuck\n")
    rig.readiness.deny("the server is shutting down")
    assert rig.get("/readyz") == (503, b"not ready: the server is shutting down\n")
    assert rig.get("/healthz") == (200, b"alive\n")


def test_a_suspended_store_is_told_and_does_not_matter(rig: Rig):
    rig.readiness.confirm(60)
    rig.metrics.tiers.store_state(Tier.REMOTE, "store", is_up=False)
    rig.metrics.tiers.store_state(Tier.DISK, "writes", is_up=False)
    assert rig.get("/readyz") == (
        200,
        b"ready\nwriting to the disk store is suspended\nthe remote store is suspended\n",
    )
    rig.metrics.tiers.store_state(Tier.REMOTE, "store", is_up=True)
    rig.metrics.tiers.store_state(Tier.DISK, "writes", is_up=True)
    assert rig.get("/readyz") == (200, b"ready\n")


def test_nothing_else_is_there(rig: Rig):
    for path in ("/", "/metrics/", "/debug", "/healthz/x"):
        assert rig.get(path)[0] == 404


def test_a_silent_client_keeps_nobody_waiting(rig: Rig):
    with socket.create_connection(("127.0.0.1", rig.endpoint.port)):
        assert rig.get("/healthz")[0] == 200


def test_ipv6():
    try:
        rig = Rig("::1")
    except OSError:
        pytest.skip("there is no IPv6 here")
    assert rig.get("/healthz")[0] == 200
    rig.endpoint.stop()


def test_a_taken_port_is_an_error_and_a_stopped_endpoint_is_gone(rig: Rig):
    with pytest.raises(OSError, match="in use"):
        serve_http(rig.metrics, rig.readiness, "127.0.0.1", rig.endpoint.port)
    other = Rig()
    other.endpoint.stop()
    with pytest.raises(OSError, match="refused"):
        other.get("/healthz")
