"""What the Redis store promises beyond the contract, on real servers (field reports E1, E9 to E18)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from prefixcache.errors import ConfigError
from prefixcache.store.base import (
    StoreAuth,
    StoreCluster,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTimeout,
    StoreUnreachable,
    StoreUnsupported,
    ValueTooLarge,
)
from prefixcache.store.redis import RedisLimits, RedisStore
from prefixcache.store.redis_url import parse_redis_url
from tests.contract.conftest import NewKeys
from tests.support.patience import until
from tests.support.proxy import proxy
from tests.support.redis_server import RedisServer, redis_cluster, redis_sentinel, redis_server, tls_redis_server

MIB = 2**20


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def server(module_server: RedisServer) -> RedisServer:
    """A server that holds nothing and has counted nothing."""
    module_server.cli("flushall")
    module_server.cli("config", "resetstat")
    return module_server


@asynccontextmanager
async def opened(url: str, ttl_s: float = 60, limits: RedisLimits | None = None) -> AsyncIterator[RedisStore]:
    store = RedisStore(parse_redis_url(url), ttl_s, limits=limits)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def direct(server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis(port=server.port)
    try:
        yield client
    finally:
        await client.aclose()


def num_calls(server: RedisServer, command: str) -> int:
    """Returns how often the server has run a command."""
    lines = server.cli("info", "commandstats").splitlines()
    found = [line for line in lines if line.startswith(f"cmdstat_{command}:")]
    return int(found[0].partition("calls=")[2].partition(",")[0]) if found else 0


async def test_one_page_is_one_key_with_its_time_to_live(server: RedisServer, new_keys: NewKeys) -> None:  # E1, E15
    keys = new_keys(50)
    async with opened(server.url, ttl_s=1000) as store, direct(server) as client:
        await store.write([(key, b"header" + key) for key in keys])
        names = await client.keys("*")
        assert sorted(names) == sorted(b"prefixcache:" + key.hex().encode() for key in keys)
        lifetimes = [await client.pttl(name) for name in names]
        assert all(899_000 < lifetime <= 1_100_000 for lifetime in lifetimes)
        assert max(lifetimes) - min(lifetimes) > 50_000  # jittered
        assert num_calls(server, "expire") == num_calls(server, "pexpire") == 0
        assert num_calls(server, "set") == 50


async def test_losing_any_key_loses_that_page_only(server: RedisServer, new_keys: NewKeys) -> None:  # E1
    keys = new_keys(50)
    async with opened(server.url) as store, direct(server) as client:
        await store.write([(key, key * 100) for key in keys])
        for index in range(0, 50, 7):
            await client.delete(b"prefixcache:" + keys[index].hex().encode())
            expected = [None if i <= index and i % 7 == 0 else key * 100 for i, key in enumerate(keys)]
            assert await store.read(keys) == expected


async def test_reading_renews_and_counting_does_not(server: RedisServer, new_keys: NewKeys) -> None:  # E15
    keys = new_keys(2)
    names = [name_of(key) for key in keys]
    async with opened(server.url, ttl_s=1000) as store, direct(server) as client:
        await store.write([(key, b"x") for key in keys])
        for name in names:
            await client.pexpire(name, 60_000)
        assert await store.read(keys[:1]) == [b"x"]
        assert await store.count_leading(keys[1:]) == 1
        lifetimes = [await client.pttl(name) for name in names]
        assert lifetimes[0] > 800_000
        assert lifetimes[1] <= 60_000
        for name in names:
            await client.pexpire(name, 1)
        await asyncio.sleep(0.1)
        assert await store.read(keys) == [None, None]


async def test_commands_are_few_and_never_search(server: RedisServer, new_keys: NewKeys) -> None:  # E11
    keys = new_keys(100)
    async with opened(server.url) as store:
        await store.write([(key, bytes(50_000)) for key in keys])
        await store.count_leading(keys)
        await store.read(keys)
        await store.delete(keys)
    assert [num_calls(server, name) for name in ("set", "exists", "getex", "unlink")] == [100] * 4
    names = ("keys", "scan", "eval", "evalsha", "multi", "client|setinfo", "client|setname", "hello", "client|no-evict")
    assert [num_calls(server, name) for name in names] == [0] * len(names)


async def test_a_lookup_is_one_round_trip_and_moves_no_value(server: RedisServer, new_keys: NewKeys) -> None:  # E11
    keys = new_keys(1000)
    async with proxy(server.port) as slow, opened(f"redis://127.0.0.1:{slow.port}") as store:
        await store.write([(key, bytes(10_000)) for key in keys])
        slow.delay_s, before = 1.5, slow.reply_bytes
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert await store.count_leading(keys) == 1000
        assert loop.time() - started < 2.9  # two would take 3.0
        assert slow.reply_bytes - before == 1000 * len(":1\r\n")


async def test_reads_are_batched_by_bytes_not_by_round_trips(server: RedisServer, new_keys: NewKeys) -> None:  # E11
    keys = new_keys(64)
    async with direct(server) as client, opened(server.url, limits=RedisLimits(max_batch_bytes=2 * MIB)) as store:
        await store.write([(key, bytes(MIB // 2)) for key in keys])
        worst = 0

        async def watch() -> None:
            nonlocal worst
            while True:
                worst = max(worst, *(int(each["omem"]) for each in await client.client_list()))

        watching = asyncio.create_task(watch())
        for _ in range(5):
            await store.read(keys)
        watching.cancel()
        assert worst < 6 * MIB  # of replies that wait at the server; without batches all 32 MiB do


async def test_a_pool_that_is_used_up_makes_wait(server: RedisServer, new_keys: NewKeys) -> None:  # E9
    keys = new_keys(64)
    async with (
        proxy(server.port) as counted,
        opened(f"redis://127.0.0.1:{counted.port}", limits=RedisLimits(max_connections=2)) as store,
    ):
        await store.write([(key, key) for key in keys])
        counted.delay_s = 0.002
        assert await asyncio.gather(*(store.read([key]) for key in keys)) == [[key] for key in keys]
        assert counted.num_connections <= 2


async def test_an_impossible_write_is_refused_before_it_is_sent(server: RedisServer, new_keys: NewKeys) -> None:  # E10
    keys = new_keys(2)
    async with opened(server.url, limits=RedisLimits(max_value_bytes=MIB)) as store:
        with pytest.raises(ValueTooLarge):
            await store.write([(keys[0], b"small"), (keys[1], bytes(MIB + 1))])
        assert num_calls(server, "set") == 0
        await store.write([(keys[1], bytes(MIB))])


def test_text_decoding_is_refused_at_the_start() -> None:  # E12
    with pytest.raises(ConfigError, match="would turn stored bytes into text"):
        parse_redis_url("redis://localhost?decode_responses=True")


async def test_full_and_refusing_writes(tmp_path: Path, new_keys: NewKeys) -> None:  # E14
    old, new = new_keys(5), new_keys(20)
    with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as server:
        async with opened(server.url) as store:
            await store.write([(key, bytes(100_000)) for key in old])
            server.cli("config", "set", "maxmemory", "1000000")
            with pytest.raises(StoreFull):
                await store.write([(key, bytes(100_000)) for key in new])
            assert await store.read(old) == [bytes(100_000)] * 5
            server.cli("config", "set", "maxmemory", "0")
            await store.write([(key, bytes(100_000)) for key in new])
            assert await store.count_leading(new) == 20


async def test_evicting_at_random(tmp_path: Path, new_keys: NewKeys) -> None:
    keys = new_keys(100)
    with redis_server(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "allkeys-random") as server:
        async with opened(server.url) as store:
            for key in keys:
                await store.write([(key, key * 6250)])
            values = await store.read(keys)
            assert 0 < sum(value is None for value in values) < 100
            assert all(value in (None, key * 6250) for key, value in zip(keys, values, strict=True))


async def test_values_of_other_types_are_handed_out_as_empty(server: RedisServer, new_keys: NewKeys) -> None:
    keys = new_keys(3)
    async with opened(server.url) as store, direct(server) as client:
        await store.write([(key, b"x") for key in keys])
        name = b"prefixcache:" + keys[1].hex().encode()
        await client.delete(name)
        await client.rpush(name, "a", "list")
        assert await store.read(keys) == [b"x", b"", b"x"]
        await store.write([(keys[1], b"a value again")])
        assert await store.read(keys) == [b"x", b"a value again", b"x"]
        await client.delete(name)
        await client.hset(name, "a", "hash")
        await store.delete([keys[1]])
        assert await store.read(keys) == [b"x", None, b"x"]


async def test_what_others_wrote_is_left_as_it_is(server: RedisServer, new_keys: NewKeys) -> None:  # E18
    (key,) = new_keys(1)
    async with opened(server.url) as store, direct(server) as client:
        await client.set(b"prefixcache:" + key.hex().encode(), b"of a later version")
        assert await store.read([key]) == [b"of a later version"]
        assert await store.read([key]) == [b"of a later version"]


async def test_a_cluster_is_recognised_where_one_server_was_expected(tmp_path: Path, new_keys: NewKeys) -> None:  # E16
    keys = new_keys(20)
    with redis_cluster(tmp_path) as servers:
        async with opened(servers[0].url) as store:
            for call in (store.read(keys), store.count_leading(keys), store.write([(key, b"x") for key in keys])):
                with pytest.raises(StoreCluster, match=r"write redis\+cluster://"):
                    await call


async def test_one_server_is_recognised_where_a_cluster_was_expected(server: RedisServer, new_keys: NewKeys) -> None:
    async with opened(f"redis+cluster://127.0.0.1:{server.port}") as store:
        with pytest.raises(StoreCluster):
            await store.read(new_keys(1))


async def test_passwords(tmp_path: Path, new_keys: NewKeys) -> None:  # E17
    keys = new_keys(1)
    with redis_server(tmp_path, "--requirepass", "s3cret-right") as server:
        for user_info in ("", ":s3cret-wrong@", "nobody:s3cret-wrong@"):
            async with opened(f"redis://{user_info}127.0.0.1:{server.port}") as store:
                for _ in range(2):
                    with pytest.raises(StoreAuth) as refused:
                        await store.read(keys)
                    assert "s3cret" not in str(refused.value) + repr(refused.value) + repr(store)
        async with opened(f"redis://:s3cret-right@127.0.0.1:{server.port}") as store:
            await store.write([(keys[0], b"x")])
            assert await store.read(keys) == [b"x"]
            assert repr(store) == f"RedisStore(redis://***@127.0.0.1:{server.port})"


async def test_users_with_few_rights(tmp_path: Path, new_keys: NewKeys) -> None:  # E17
    keys = new_keys(1)
    enough = ("on", ">pw", "~prefixcache:*", "+getex", "+set", "+exists", "+unlink")
    with redis_server(tmp_path) as server:
        server.cli("acl", "setuser", "enough", *enough)
        server.cli("acl", "setuser", "reader", "on", ">pw", "~prefixcache:*", "+getex", "+exists")
        server.cli("acl", "setuser", "elsewhere", "on", ">pw", "~other:*", "+@all")
        async with opened(f"redis://enough:pw@127.0.0.1:{server.port}") as store:
            await store.write([(keys[0], b"x")])
            assert await store.count_leading(keys) == 1
        async with opened(f"redis://reader:pw@127.0.0.1:{server.port}") as store:
            assert await store.read(keys) == [b"x"]
            with pytest.raises(StoreAuth):
                await store.write([(keys[0], b"y")])
            assert await store.read(keys) == [b"x"]
        async with opened(f"redis://elsewhere:pw@127.0.0.1:{server.port}") as store:
            with pytest.raises(StoreAuth):
                await store.read(keys)


async def test_tls_is_checked(tmp_path: Path, new_keys: NewKeys) -> None:  # E17
    keys = new_keys(1)
    with tls_redis_server(tmp_path, "pw") as (server, certificates):
        place = f"rediss://:pw@127.0.0.1:{server.port}"
        client = f"ssl_certfile={certificates.client_cert}&ssl_keyfile={certificates.client_key}"
        async with opened(f"{place}?{certificates.query}") as store:
            await store.write([(keys[0], b"x")])
            assert await store.read(keys) == [b"x"]
        for url in (
            f"{place}?{client}",  # an authority that nobody here knows
            f"{place}?ssl_ca_certs={certificates.ca}",  # no certificate of our own
            f"redis://:pw@127.0.0.1:{server.port}",  # no TLS
        ):
            async with opened(url) as store:
                with pytest.raises(StoreError) as refused:
                    await store.read(keys)
                assert refused.value.kind in ("unreachable", "error")
        async with opened(f"{place}?{client}&ssl_cert_reqs=none") as store:
            assert await store.read(keys) == [b"x"]


async def test_a_replica_takes_no_changes(tmp_path: Path, server: RedisServer, new_keys: NewKeys) -> None:
    server.cli("config", "set", "repl-diskless-sync-delay", "0")
    with redis_server(tmp_path, "--replicaof", "127.0.0.1", str(server.port)) as replica:
        for _ in range(600):
            if "master_link_status:up" in replica.cli("info", "replication"):
                break
            await asyncio.sleep(0.05)
        async with opened(replica.url) as store:
            with pytest.raises(StoreReadOnly):
                await store.write([(new_keys(1)[0], b"x")])


async def test_a_server_that_cannot_save_takes_no_changes(server: RedisServer, new_keys: NewKeys) -> None:
    server.cli("config", "set", "min-replicas-to-write", "1")
    try:
        async with opened(server.url) as store:
            with pytest.raises(StoreReadOnly, match="NOREPLICAS"):
                await store.write([(new_keys(1)[0], b"x")])
    finally:
        server.cli("config", "set", "min-replicas-to-write", "0")


async def test_a_server_without_getex(tmp_path: Path, new_keys: NewKeys) -> None:
    with redis_server(tmp_path, "--rename-command", "GETEX", "") as server:
        async with opened(server.url) as store:
            with pytest.raises(StoreUnsupported, match=r"Redis 6.2 or newer"):
                await store.read(new_keys(1))


async def test_something_that_is_no_redis(new_keys: NewKeys) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with opened(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}") as store:
        with pytest.raises(StoreError, match="does not speak the protocol"):
            await store.read(new_keys(1))
    listener.close()


async def test_absent(new_keys: NewKeys) -> None:  # E5
    async with opened("redis://127.0.0.1:1") as store:
        with pytest.raises(StoreUnreachable):
            await store.read(new_keys(1))
    async with opened("unix:///nowhere/socket") as store:
        with pytest.raises(StoreUnreachable):
            await store.count_leading(new_keys(1))
    async with opened("redis+cluster://127.0.0.1:1,127.0.0.1:2") as store:
        with pytest.raises(StoreUnreachable):
            await store.read(new_keys(1))
    async with opened("redis+sentinel://127.0.0.1:1/pages") as store:
        with pytest.raises(StoreUnreachable):
            await store.read(new_keys(1))


async def test_a_cluster_that_loses_a_server(tmp_path: Path, new_keys: NewKeys) -> None:
    keys = new_keys(60)
    with redis_cluster(tmp_path) as servers:
        for server in servers:
            server.cli("config", "set", "cluster-require-full-coverage", "no")
        async with opened(f"redis+cluster://127.0.0.1:{servers[0].port}") as store:
            await store.write([(key, key) for key in keys])
            servers[2].kill()
            with pytest.raises((StoreUnreachable, StoreCluster, StoreTimeout)):
                await store.read(keys)
            assert await reads_again(store, keys, servers[2].start) == sum(await counts(servers))


async def counts(servers: list[RedisServer]) -> list[int]:
    return [int(await asyncio.to_thread(server.cli, "dbsize")) for server in servers]


async def reads_again(store: RedisStore, keys: list[bytes], start: Callable[[], None]) -> int:
    """Starts a server and returns how many values are there once the store works again."""
    start()
    for _ in range(600):
        try:
            return sum(value is not None for value in await store.read(keys))
        except StoreError:
            await asyncio.sleep(0.05)
    pytest.fail("the store never came back")


async def test_slots_that_move(tmp_path: Path, new_keys: NewKeys) -> None:
    keys = new_keys(40)
    with redis_cluster(tmp_path) as servers:
        async with opened(f"redis+cluster://127.0.0.1:{servers[1].port}") as store:
            await store.write([(key, key * 100) for key in keys])
            moving = [key for key in keys if slot_of(servers[0], key) <= 5460][:3]
            ids = [server.cli("cluster", "myid") for server in servers]
            for key in moving:
                slot = str(slot_of(servers[0], key))
                servers[2].cli("cluster", "setslot", slot, "importing", ids[0])
                servers[0].cli("cluster", "setslot", slot, "migrating", ids[2])
                servers[0].cli("migrate", "127.0.0.1", str(servers[2].port), name_of(key), "0", "5000")
            expected = [None if key in moving else key * 100 for key in keys]  # ASK: on the move, so not there
            assert await store.read(keys) == expected
            for key in moving:
                for server in (servers[2], servers[0], servers[1]):  # who gets it is told first
                    server.cli("cluster", "setslot", str(slot_of(servers[0], key)), "node", ids[2])
            assert await store.read(keys) == [key * 100 for key in keys]  # MOVED: followed


def name_of(key: bytes) -> str:
    return f"prefixcache:{key.hex()}"


def slot_of(server: RedisServer, key: bytes) -> int:
    return int(server.cli("cluster", "keyslot", name_of(key)))


async def test_sentinel_names_a_new_master(tmp_path: Path, new_keys: NewKeys) -> None:
    keys = new_keys(10)
    with redis_sentinel(tmp_path, down_after_ms=500) as (master, replica, sentinel):
        async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/pages") as store:
            await store.write([(key, key) for key in keys])
            await asyncio.to_thread(until, lambda: int(replica.cli("dbsize")) == 10)
            master.kill()
            with pytest.raises(StoreError):
                await store.read(keys)
            assert await reads_again(store, keys, lambda: None) == 10
            await store.write([(keys[0], b"on the new master")])
            assert replica.cli("get", name_of(keys[0])) == "on the new master"


async def test_large_values_through_tls_and_cluster_stay_whole(tmp_path: Path, new_keys: NewKeys) -> None:
    keys = new_keys(12)
    values = [os.urandom(700_000) for _ in keys]
    with redis_cluster(tmp_path) as servers:
        async with opened(f"redis+cluster://127.0.0.1:{servers[0].port}") as store:
            await store.write(list(zip(keys, values, strict=True)))
            assert await store.read(keys) == values
            assert await store.count_leading(keys) == 12
