"""Loads that are cancelled, shared or preempted: pages come back, keys are read once, answers stay right."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path

import pytest

from prefixcache import storage
from prefixcache.cache import mover
from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.kv.layout import PAGE_SIZE
from prefixcache.request import Tier
from prefixcache.store.base import StoreClosed
from tests.equivalence.conftest import StoreSettings
from tests.support.checks import assert_exact, oracle
from tests.support.in_process import greedy, submit
from tests.support.prompts import Prompts
from tests.support.proxy_thread import line_to
from tests.support.redis_server import RedisServer
from tests.support.tiers import TieredService, cached_by_tier, disk_settings, whole_pages

FAMILY = "llama-gqa"
LENGTH = 150
RESTORED = {Tier.REMOTE: whole_pages(LENGTH)}


def stored_prompt(server: RedisServer, seed: int, length: int = LENGTH) -> list[int]:
    """A prompt that a server has answered and left in Redis."""
    prompt = Prompts(seed).tokens(length)
    with TieredService(FAMILY, redis=server.url) as service:
        service.run_one(greedy(prompt, 1))
    return prompt


def test_cancelled_while_loading(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At moments all over a load, whose batches trickle in; the pages are used otherwise at once (D2)."""
    monkeypatch.setattr(mover, "BATCH_BYTES", 17_000)
    prompt, prompts = stored_prompt(server, 500), Prompts(501)
    with line_to(server.port) as line, TieredService(FAMILY, num_pages=24, redis=line.url) as service:
        line.set(bytes_per_s=4e6)  # 4 ms a page
        with service.running() as engine:
            for n in range(50):
                cancelled = submit(engine, greedy(prompt, 4))
                time.sleep(n * 0.001)
                engine.abort(cancelled.handle)
                if n % 5 == 0:
                    other = submit(engine, greedy(prompts.tokens(LENGTH), 2)).wait()
                    assert_exact(other, oracle(FAMILY))
            last = submit(engine, greedy(prompt, 6)).wait()
        assert_exact(last, oracle(FAMILY))
        assert service.cache.page_counts().in_use == 0
        service.forget()
        assert service.cache.page_counts().free == service.num_pages
        again = service.run_one(greedy(prompt, 6))
        assert cached_by_tier(again) == RESTORED
        assert_exact(again, oracle(FAMILY))


@pytest.mark.parametrize("tails", [0, 5])
def test_two_that_want_the_same_pages_fetch_them_once(tails: int, server: RedisServer) -> None:
    prompt, prompts = stored_prompt(server, 510, 161), Prompts(511)
    server.cli("config", "resetstat")
    with TieredService(FAMILY, redis=server.url) as service:
        streams = service.run(*(greedy(prompt + prompts.tokens(tails), 6) for _ in range(4)))

    for stream in streams:
        assert_exact(stream, oracle(FAMILY))
        assert stream.cached_tokens >= 160
    calls = re.search(r"cmdstat_getex:calls=(\d+)", server.cli("info", "commandstats"))
    assert calls
    assert int(calls[1]) == 10, "a page was read more often than once"


def test_the_one_that_loads_for_others_is_cancelled(server: RedisServer) -> None:
    prompt = stored_prompt(server, 520)
    with line_to(server.port) as line, TieredService(FAMILY, redis=line.url) as service:
        line.set(delay_s=0.05)
        with service.running() as engine:
            leader = submit(engine, greedy(prompt, 4))
            followers = [submit(engine, greedy([*prompt, n], 4)) for n in range(3, 6)]
            time.sleep(0.08)  # its load is on its way
            engine.abort(leader.handle)
            for stream in followers:
                stream.wait()
        for stream in followers:
            assert_exact(stream, oracle(FAMILY))
            assert stream.cached_tokens >= whole_pages(LENGTH)


def test_preempted_while_others_load(store: StoreSettings) -> None:
    settings, prompts = store[1], Prompts(530)
    asked = [prompts.tokens(40) for _ in range(8)]
    with TieredService(FAMILY, **settings) as service:
        service.run(*(greedy(prompt, 1) for prompt in asked))
    with TieredService(FAMILY, num_pages=14, chunk=32, **settings) as service:
        for stream in service.run(*(greedy(prompt, 60) for prompt in asked)):
            assert stream.error is None
            assert_exact(stream, oracle(FAMILY))
        assert service.num_preemptions > 0


def test_writes_that_take_long_hold_up_nobody(server: RedisServer) -> None:
    """The device is too small for what comes while pages wait to be written; what is read back later is sound (D7)."""
    asked = [Prompts(540 + n).tokens(LENGTH) for n in range(8)]
    with line_to(server.port) as line, TieredService(FAMILY, num_pages=24, redis=line.url) as service:
        line.set(delay_s=2.0)
        with service.running() as engine:
            streams = [submit(engine, greedy(prompt, 8)) for prompt in asked]
            for stream in streams:
                assert_exact(stream.wait(), oracle(FAMILY))
            line.set(delay_s=0.0)
        assert service.not_saved(Tier.REMOTE, "device_full") > 0
    with TieredService(FAMILY, redis=server.url) as service:
        for prompt in asked:
            stream = service.run_one(greedy(prompt, 4))
            assert_exact(stream, oracle(FAMILY))
            assert cached_by_tier(stream) in ({}, RESTORED)


def test_one_page_that_waits_to_be_written_keeps_a_long_path_only_until_the_room_is_needed(server: RedisServer) -> None:
    """Of a chat that goes on only the end is new to the stores, but all of it stays on the device for that."""
    prompts = Prompts(550)
    chat = prompts.tokens(10 * PAGE_SIZE)
    others = [prompts.tokens(20 * PAGE_SIZE) for _ in range(2)]
    with TieredService(FAMILY, num_pages=24, redis=server.url) as service:
        service.run_one(greedy(chat, 1))
        service.settle()
        server.cli("client", "pause", "60000", "write")
        try:
            with service.running() as engine:
                asked = [prompts.tokens(PAGE_SIZE), chat + prompts.tokens(PAGE_SIZE), *others]  # the second write waits
                streams = [submit(engine, greedy(prompt, 1)).wait() for prompt in asked]
        finally:
            server.cli("client", "unpause")
        assert streams[1].cached_tokens == len(chat)
        for stream in streams:
            assert_exact(stream, oracle(FAMILY))
        assert service.not_saved(Tier.REMOTE, "device_full") > 0


def test_pages_that_leave_the_device_while_a_prompt_waits(store: StoreSettings) -> None:
    """The stores were asked only for what the device did not have then: what it has given up since is computed."""
    tier, settings = store
    prompts = Prompts(555)
    prompt, num_known = prompts.tokens(LENGTH), 5 * PAGE_SIZE
    with TieredService(FAMILY, **settings) as service:
        service.run_one(greedy(prompt, 1))
    with TieredService(FAMILY, max_num_seqs=1, **settings) as service:
        service.run_one(greedy(prompt[:num_known], 1))
        with service.running() as engine:
            submit(engine, greedy(prompts.tokens(5), 200, use_cache=False))
            stream = submit(engine, greedy(prompt, 8))  # its search begins, and then it waits
            flushed = engine.call(PrefixCache.flush)
        assert flushed.result().num_device_pages >= num_known // PAGE_SIZE
        again = service.run_one(greedy(prompt, 8))
    assert cached_by_tier(stream) == {tier: whole_pages(LENGTH) - num_known}
    for each in (stream, again):
        assert_exact(each, oracle(FAMILY))


def test_the_engine_ends_while_loading(server: RedisServer) -> None:
    prompt = stored_prompt(server, 560)
    with line_to(server.port) as line, TieredService(FAMILY, redis=line.url) as service:
        line.set(is_black_hole=True)
        engine = service._new_engine()
        engine.start()
        stream = submit(engine, greedy(prompt, 4))
        time.sleep(0.05)
        engine.stop(5)
        stream.wait()
        assert stream.error is not None
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 5, "closing the stores hangs"
    assert not [thread for thread in threading.enumerate() if thread.name == "stores" and thread.is_alive()]


def test_a_store_that_cannot_be_closed_keeps_nothing_else_open(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "STOP_S", 1.0)
    with TieredService(FAMILY, redis=server.url, **disk_settings(tmp_path)) as service:
        service.run_one(greedy(Prompts(565).tokens(LENGTH), 1))
        assert service.mover is not None
        disk, redis = (tier.store for tier in service.mover._tiers)
        monkeypatch.setattr(disk, "close", lambda: asyncio.sleep(60))
    with pytest.raises(StoreClosed):
        asyncio.run(redis.read([bytes(16)]))
    assert not [thread for thread in threading.enumerate() if thread.name == "stores" and thread.is_alive()]


def test_what_computing_costs_is_known_before_the_first_prompt(server: RedisServer) -> None:
    with TieredService(FAMILY, num_pages=4, always_loads=False, redis=server.url) as service:
        assert service.mover is not None
        assert not service.mover.prefill.is_known
        service.warm_up()
        assert service.mover.prefill.seconds(64, 0) > 0
        assert service.num_prefilled_tokens == 0
        service.check()
        assert service.cache.page_counts().free == 4


@pytest.mark.parametrize(
    ("bytes_per_s", "batch_s", "least", "most"), [(None, 20.0, 2, 2), (400_000, mover.BATCH_S, 4, 9)]
)
def test_a_slow_store_is_read_in_small_pieces(
    bytes_per_s: float | None,
    batch_s: float,
    least: int,
    most: int,
    server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first page shows the pace, and of a slow store little is asked at once, so that it can be met at a page."""
    monkeypatch.setattr(mover, "BATCH_S", batch_s)  # next to which a quick store is quick, however busy this machine is
    prompt = stored_prompt(server, 570)
    with line_to(server.port) as line, TieredService(FAMILY, redis=line.url) as service:
        line.set(bytes_per_s=bytes_per_s)  # 43 ms a page
        stream = service.run_one(greedy(prompt, 4))
        assert least <= service.num_calls(Tier.REMOTE, "read") <= most
    assert_exact(stream, oracle(FAMILY))
    assert cached_by_tier(stream) == RESTORED
