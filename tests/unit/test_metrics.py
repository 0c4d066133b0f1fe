"""Metrics: their names, and label sets that are closed and complete from the start."""

from __future__ import annotations

from prometheus_client import generate_latest

from prefixcache.metrics import Direction, HitKind, Metrics, Outcome, PageState
from prefixcache.request import Tier


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
        "prefixcache_batch_tokens",
        "prefixcache_batch_sequences",
        "prefixcache_queue_seconds",
        "prefixcache_prefill_seconds",
        "prefixcache_page_bytes",
        "prefixcache_ready",
        "prefixcache_tier_pages_in_flight",
        "prefixcache_build",
        "prefixcache_disk_pages",
        "prefixcache_disk_bytes",
        "prefixcache_disk_size_bytes",
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
        assert value("prefixcache_pages", {"tier": "device", "state": state}) == 0
    for tier in (Tier.DEVICE, Tier.HOST):
        assert value("prefixcache_evicted_pages_total", {"tier": tier}) == 0


def test_a_stores_series_exist_once_it_is_open_and_no_others():
    metrics = Metrics()
    metrics.tiers.open_store(
        Tier.DISK, operations=("read",), errors=("full",), miss_reasons=("absent",), not_saved_reasons=("full",)
    )
    value = metrics.registry.get_sample_value
    assert value("prefixcache_tier_missed_pages_total", {"tier": "disk", "reason": "absent"}) == 0
    assert value("prefixcache_tier_not_saved_pages_total", {"tier": "disk", "reason": "full"}) == 0
    assert value("prefixcache_store_errors_total", {"tier": "disk", "kind": "full"}) == 0
    assert value("prefixcache_store_call_seconds_count", {"tier": "disk", "operation": "read"}) == 0
    assert value("prefixcache_store_up", {"tier": "disk", "side": "writes"}) == 1
    for direction in Direction:
        assert value("prefixcache_tier_pages_in_flight", {"tier": "disk", "direction": direction}) == 0
    assert value("prefixcache_store_up", {"tier": "remote", "side": "store"}) is None


def test_there_is_no_series_for_the_time_at_which_a_series_began():
    assert b"_created" not in generate_latest(Metrics().registry)


def test_whether_it_is_ready_is_asked_at_each_scrape():
    metrics, answers = Metrics(), [False, True]
    metrics.watch_ready(lambda: answers.pop(0))
    assert [metrics.registry.get_sample_value("prefixcache_ready") for _ in range(2)] == [0, 1]


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
