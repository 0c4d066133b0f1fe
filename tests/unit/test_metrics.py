"""Metrics: their names, their closed label sets, and the endpoint."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.metrics import HitKind, Metrics, Outcome, PageState, serve_metrics
from prefixcache.request import Tier


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        return response.read().decode()


def test_names_carry_prefix_and_unit():
    names = {family.name for family in Metrics().registry.collect()}
    own = {name for name in names if not name.startswith(("process_", "python_"))}
    assert all(name.startswith("prefixcache_") for name in own)
    assert own == {
        "prefixcache_requests",
        "prefixcache_ttft_seconds",
        "prefixcache_itl_seconds",
        "prefixcache_prompt_tokens",
        "prefixcache_cached_tokens",
        "prefixcache_generated_tokens",
        "prefixcache_prefilled_tokens",
        "prefixcache_queue_depth",
        "prefixcache_running_sequences",
        "prefixcache_preemptions",
        "prefixcache_pages",
        "prefixcache_evicted_pages",
        "prefixcache_lookup_seconds",
        "prefixcache_step_seconds",
        "prefixcache_build",
        "prefixcache_host_pages",
        "prefixcache_store_call_seconds",
        "prefixcache_store_errors",
        "prefixcache_store_up",
        "prefixcache_tier_load_actual_seconds",
        "prefixcache_tier_load_expected_seconds",
        "prefixcache_tier_loaded_bytes",
        "prefixcache_tier_missed_pages",
        "prefixcache_tier_not_saved_pages",
        "prefixcache_tier_saved_bytes",
    }


def test_every_labelled_series_exists_from_the_start():
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    for outcome in Outcome:
        assert value("prefixcache_requests_total", {"outcome": outcome}) == 0
    for kind in HitKind:
        assert value("prefixcache_ttft_seconds_count", {"hit": kind}) == 0
    for tier in Tier:
        assert value("prefixcache_cached_tokens_total", {"tier": tier}) == 0
    for state in PageState:
        assert value("prefixcache_pages", {"state": state}) == 0


def test_buckets_start_where_a_cache_hit_shows():
    metrics = Metrics()
    metrics.ttft_seconds[HitKind.FULL].observe(0.0009)
    metrics.lookup_seconds.observe(0.0000009)
    value = metrics.registry.get_sample_value
    assert value("prefixcache_ttft_seconds_bucket", {"hit": "full", "le": "0.001"}) == 1
    assert value("prefixcache_lookup_seconds_bucket", {"le": "1e-06"}) == 1


def test_two_servers_in_one_process_do_not_share_counters():
    one, other = Metrics(), Metrics()
    one.prompt_tokens.inc(3)
    assert other.registry.get_sample_value("prefixcache_prompt_tokens_total") == 0


def test_the_endpoint_serves_what_was_counted_and_can_be_stopped():
    metrics = Metrics()
    metrics.set_build_info(version="1.2.3", model="tiny", device="cpu", dtype="float32")
    metrics.requests[Outcome.OK].inc()
    server = serve_metrics(metrics, "127.0.0.1", 0)
    families = {family.name: family for family in text_string_to_metric_families(scrape(server.port))}
    samples = {
        sample.labels["outcome"]: sample.value
        for sample in families["prefixcache_requests"].samples
        if sample.name.endswith("_total")
    }
    assert samples["ok"] == 1
    assert samples["invalid"] == 0
    assert families["prefixcache_build_info"].samples[0].labels["version"] == "1.2.3"

    with pytest.raises(OSError, match="in use"):
        serve_metrics(metrics, "127.0.0.1", server.port)
    server.stop()
    with pytest.raises(OSError, match="refused"):
        scrape(server.port)
