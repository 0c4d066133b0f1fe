"""A Redis that is absent, killed, silent, slow or cut off: through the proxy, behind the guard (E4 to E9, E14, E16)."""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local.processes import free_port
from prefixcache.store.base import StoreCluster, StoreError, StoreFull, StoreTimeout, StoreUnavailable, StoreUnreachable
from prefixcache.store.breaker import BreakerState
from prefixcache.store.guard import CallEnded, Event, GuardedStore, GuardLimits
from prefixcache.store.redis import RedisLimits, RedisStore
from prefixcache.store.redis_url import parse_redis_url
from tests.contract.conftest import NewKeys
from tests.support.proxy import Proxy, proxy
from tests.support.redis_server import RedisServer, redis_server
from tests.support.wire import eventually

CLOSED, OPEN = BreakerState.CLOSED, BreakerState.OPEN
LIMITS = GuardLimits(
    base_s=5.0, min_bytes_per_s=20e6, max_concurrent=4, failures_to_open=3, first_wait_s=0.2, max_wait_s=0.5
)
HASTY = replace(LIMITS, base_s=0.3)  # where nobody answers in time, or nobody is to
VALUE_BYTES = 50_000


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def server(module_server: RedisServer) -> RedisServer:
    module_server.cli("flushall")
    return module_server


@pytest.fixture
async def line(server: RedisServer) -> AsyncIterator[Proxy]:
    async with proxy(server.port) as running:
        yield running


class Guarded:
    """A guarded store and what it told its observer."""

    def __init__(self, port: int, limits: GuardLimits) -> None:
        self.events: list[Event] = []
        self.plain = RedisStore(
            parse_redis_url(f"redis://127.0.0.1:{port}"), 60, limits=RedisLimits(connect_timeout_s=limits.base_s)
        )
        self.store = GuardedStore("remote", self.plain, VALUE_BYTES, limits, self.events.append)

    def outcomes(self, operation: str) -> list[str]:
        return [each.outcome for each in self.events if isinstance(each, CallEnded) and each.operation == operation]

    async def until_used(self) -> None:
        await eventually(lambda: self.store.state is CLOSED)


@asynccontextmanager
async def guarded(port: int, limits: GuardLimits = LIMITS) -> AsyncIterator[Guarded]:
    made = Guarded(port, limits)
    try:
        yield made
    finally:
        await made.store.close()


def value_of(key: bytes) -> bytes:
    return key * (VALUE_BYTES // 16)


async def fill(server: RedisServer, keys: list[bytes]) -> None:
    store = RedisStore(parse_redis_url(server.url), 60)
    await store.write([(key, value_of(key)) for key in keys])
    await store.close()


async def test_absent_at_the_start_and_there_later(tmp_path: Path, new_keys: NewKeys) -> None:  # E5
    (key,) = new_keys(1)
    later = RedisServer(tmp_path, port=free_port())
    async with guarded(later.port) as it:
        for _ in range(3):
            with pytest.raises(StoreUnreachable):
                await it.store.read([key])
        taken = []
        for _ in range(1000):
            started = time.perf_counter()
            with pytest.raises(StoreUnavailable):
                await it.store.read([key])
            taken.append(time.perf_counter() - started)
        assert statistics.median(taken) < 0.0002  # for a request that does without
        try:
            await asyncio.to_thread(later.start)
            await it.until_used()
            await it.store.write([(key, b"x")])
            assert await it.store.read([key]) == [b"x"]
        finally:
            later.kill()


async def test_killed_under_load_and_restarted(
    tmp_path: Path, new_keys: NewKeys, caplog: pytest.LogCaptureFixture
) -> None:
    keys = new_keys(40)  # E4
    caplog.set_level(logging.INFO, "prefixcache.store")
    with redis_server(tmp_path) as server:
        await fill(server, keys)
        async with guarded(server.port) as it:
            slowest = 0.0
            num_right = 0
            running = True

            async def ask() -> None:
                nonlocal slowest, num_right
                while running:
                    started = time.perf_counter()
                    try:
                        values = await it.store.read(keys[:10])
                        assert all(value in (None, value_of(key)) for key, value in zip(keys, values, strict=False))
                        num_right += 1
                    except StoreError:
                        await asyncio.sleep(0.002)
                    slowest = max(slowest, time.perf_counter() - started)

            asking = [asyncio.create_task(ask()) for _ in range(4)]
            await eventually(lambda: num_right > 20)
            await asyncio.to_thread(server.kill)
            await eventually(lambda: it.store.state is not CLOSED)
            before = num_right
            await asyncio.to_thread(server.start)
            await it.until_used()
            await fill(server, keys)
            await eventually(lambda: num_right > before + 20)
            running = False
            await asyncio.gather(*asking)
            assert await it.store.read(keys) == [value_of(key) for key in keys]
            assert slowest < LIMITS.base_s, "a server that is gone says so at once"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_accepting_but_never_answering(server: RedisServer, line: Proxy, new_keys: NewKeys) -> None:  # E6
    keys = new_keys(4)
    await fill(server, keys)
    async with guarded(line.port, HASTY) as it:
        assert await it.plain.count_leading(keys) == 4
        line.is_black_hole = True
        started = time.perf_counter()
        for _ in range(3):
            with pytest.raises(StoreError) as raised:
                await it.store.count_leading(keys)
            assert raised.value.kind == "timeout"
        assert time.perf_counter() - started < RedisLimits().batch_timeout_s, (
            "it has waited for the store, not the guard"
        )
        assert it.store.state is not CLOSED
        with pytest.raises(StoreUnavailable):
            await it.store.read(keys)
        await asyncio.sleep(1.2)
        assert len(it.outcomes("probe")) <= 4  # growing waits, no storm
        await eventually(lambda: "timeout" in it.outcomes("probe"))
        line.is_black_hole = False
        await it.until_used()
        assert await it.plain.read(keys) == [value_of(key) for key in keys]


async def test_the_loop_runs_on_while_nobody_answers(line: Proxy, new_keys: NewKeys) -> None:  # E7
    line.is_black_hole = True
    gaps = []

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - before)

    async with guarded(line.port, HASTY) as it:
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(it.store.read(new_keys(3)) for _ in range(8)), return_exceptions=True)
        watching.cancel()
    assert sorted(gaps)[len(gaps) * 9 // 10] < 0.05


async def test_answering_too_slowly(server: RedisServer, line: Proxy, new_keys: NewKeys) -> None:
    keys = new_keys(20)
    await fill(server, keys)
    line.bytes_per_s = 2e5  # five seconds for what has 1.05 s
    async with guarded(line.port, replace(LIMITS, base_s=1.0)) as it:
        for _ in range(3):
            assert await it.store.count_leading(keys) == 20  # little ones still work, and hide nothing
            with pytest.raises(StoreTimeout):
                await it.store.read(keys)
        assert it.store.state is OPEN
        line.bytes_per_s = None
        await it.until_used()
        assert await it.store.read(keys) == [value_of(key) for key in keys]


@pytest.mark.parametrize("num_bytes", [0, 1, 20, 30_000, 50_011, 50_012, 120_000, 999_000])
async def test_cut_after_so_many_bytes(server: RedisServer, line: Proxy, new_keys: NewKeys, num_bytes: int) -> None:
    keys = new_keys(20)
    await fill(server, keys)
    async with guarded(line.port) as it:
        line.cut_after_bytes = num_bytes
        with pytest.raises(StoreUnreachable):
            await it.store.read(keys)
        line.cut_after_bytes = None
        assert await it.store.read(keys) == [value_of(key) for key in keys]


async def test_connections_that_died_while_idle_cost_nothing(
    server: RedisServer, line: Proxy, new_keys: NewKeys
) -> None:
    keys = new_keys(4)
    await fill(server, keys)
    async with guarded(line.port) as it:
        for _ in range(3):
            assert await it.store.read(keys) == [value_of(key) for key in keys]
            line.cut_all()
            await eventually(lambda: line.num_open == 0)
            await asyncio.sleep(0.02)  # and the client has seen it
        assert set(it.outcomes("read")) == {"ok"}


@pytest.mark.parametrize("delay_s", [0.0, 0.004])
async def test_no_reader_ever_gets_the_answer_to_another(
    server: RedisServer, line: Proxy, new_keys: NewKeys, delay_s: float
) -> None:  # E8
    keys = new_keys(60)
    await fill(server, keys)
    line.delay_s = delay_s
    chance = random.Random(7)
    limits = GuardLimits(base_s=0.02, min_bytes_per_s=1e8, max_concurrent=3, failures_to_open=10**9)
    num_right = num_abandoned = 0

    async def ask(store: RedisStore | GuardedStore) -> None:
        nonlocal num_right, num_abandoned
        wanted = chance.sample(keys, chance.randint(1, 12))
        call: asyncio.Task[object] = asyncio.create_task(
            store.count_leading(wanted) if chance.random() < 0.2 else store.read(wanted)
        )
        if chance.random() < 0.6:
            await asyncio.sleep(chance.expovariate(200))
            call.cancel()
            await asyncio.sleep(0)
            call.cancel()  # twice, while it may be putting its connection back
        try:
            answer = await call
        except (asyncio.CancelledError, StoreError):
            num_abandoned += 1
        else:
            assert answer in (len(wanted), [value_of(key) for key in wanted])
            num_right += 1

    async with guarded(line.port, limits) as it:
        for _ in range(60):
            await asyncio.gather(*(ask(chance.choice((it.store, it.plain))) for _ in range(6)))
        assert num_right > 50
        assert num_abandoned > 50
        line.delay_s = 0.0
        for key in keys:  # every place of the pool is still there
            assert await it.plain.read([key]) == [value_of(key)]
        answers = await asyncio.gather(*(it.plain.read([key]) for key in keys))
        assert answers == [[value_of(key)] for key in keys]
        await eventually(lambda: line.num_open <= RedisLimits().max_connections)


async def test_a_late_answer_reaches_nobody(server: RedisServer, line: Proxy, new_keys: NewKeys) -> None:  # E8
    first, second = new_keys(2)
    await fill(server, [first, second])
    async with guarded(line.port, replace(LIMITS, base_s=1.0)) as it:
        assert await it.store.read([first]) == [value_of(first)]
        line.delay_s = 1.4
        with pytest.raises(StoreTimeout):
            await it.store.read([first])
        line.delay_s = 0.0
        for _ in range(20):
            assert await it.store.read([second]) == [value_of(second)]
            await asyncio.sleep(0.03)


async def test_full_pauses_writes_until_there_is_room(tmp_path: Path, new_keys: NewKeys) -> None:  # E14
    old, new = new_keys(5), new_keys(20)
    with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as server:
        await fill(server, old)
        server.cli("config", "set", "maxmemory", "1000000")
        async with guarded(server.port) as it:
            refused = []
            for key in new:
                with pytest.raises((StoreFull, StoreUnavailable)) as raised:
                    await it.store.write([(key, value_of(key))])
                refused.append(raised.type)
                assert await it.store.read(old) == [value_of(key) for key in old]
            assert refused[0] is StoreFull
            assert StoreUnavailable in refused
            assert it.store.state is CLOSED
            server.cli("config", "set", "maxmemory", "0")
            await asyncio.sleep(LIMITS.max_wait_s + 0.1)
            await it.store.write([(key, value_of(key)) for key in new])
            assert await it.store.count_leading(new) == 20


async def test_a_server_that_always_names_another(new_keys: NewKeys) -> None:  # E16
    num_commands = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_commands
        while data := await reader.read(65536):
            num_commands += data.count(b"GETEX")
            writer.write(b"-MOVED 1234 127.0.0.1:7001\r\n" * data.count(b"GETEX"))
            await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with guarded(listener.sockets[0].getsockname()[1]) as it:
        with pytest.raises(StoreCluster, match=r"redis\+cluster"):
            await it.store.read(new_keys(1))
        assert it.store.state is OPEN
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until:
            with pytest.raises(StoreUnavailable):
                await it.store.read(new_keys(1))
            await asyncio.sleep(0.005)
        assert num_commands <= 4  # 0.2 s, 0.4 s, then every 0.5 s
    listener.close()


async def test_a_wrong_password_makes_no_storm(
    tmp_path: Path, new_keys: NewKeys, caplog: pytest.LogCaptureFixture
) -> None:  # E17
    caplog.set_level(logging.DEBUG)
    with redis_server(tmp_path, "--requirepass", "right") as server:
        async with proxy(server.port) as line:
            plain = RedisStore(parse_redis_url(f"redis://:hunter2@127.0.0.1:{line.port}"), 60)
            events: list[Event] = []
            store = GuardedStore("remote", plain, VALUE_BYTES, LIMITS, events.append)
            started = time.perf_counter()
            for _ in range(100):
                with pytest.raises(StoreError):
                    await store.read(new_keys(1))
                await asyncio.sleep(0.01)
            assert store.state is not CLOSED
            assert line.num_connections <= 3 + (time.perf_counter() - started) / LIMITS.max_wait_s  # first 0.2 s, 0.4 s
            await store.close()
    assert "refuses these credentials" in caplog.text
    assert "hunter2" not in caplog.text


async def test_closing_in_the_middle_of_everything(server: RedisServer, line: Proxy, new_keys: NewKeys) -> None:
    keys = new_keys(20)
    await fill(server, keys)
    line.delay_s = 0.05
    async with guarded(line.port) as it:
        calls = [asyncio.create_task(store.read(keys)) for store in (it.store, it.plain) * 3]
        await asyncio.sleep(0.02)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, StoreError | list) for outcome in outcomes)
