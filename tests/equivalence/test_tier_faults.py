"""A Redis that is away, slow, broken or full, and values that are not what they should be: every answer stays right."""

from __future__ import annotations

import random
import resource
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from deploy.local.processes import free_port
from prefixcache.cache import mover
from prefixcache.kv.codec import FORMAT_VERSION
from prefixcache.request import Namespace, Tier
from prefixcache.tree.node import token_key
from tests.equivalence.conftest import set_guard
from tests.support.checks import assert_exact, oracle
from tests.support.in_process import Stream, greedy, submit
from tests.support.prompts import Prompts
from tests.support.proxy_thread import Line, line_to
from tests.support.redis_server import RedisServer, redis_server
from tests.support.tiers import TieredService, cached_by_tier, disk_settings, whole_pages

FAMILY = "llama-gqa"
LENGTH = 100
NUM_PAGES = LENGTH // 16
RESTORED = {Tier.REMOTE: whole_pages(LENGTH)}
STALL_S = 3.0  # a request that meets a store's faults for the first time may wait for its time limits, not longer


@pytest.fixture(params=[1, 3])
def batch_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many of the tiny pages are read or written in one call."""
    monkeypatch.setattr(mover, "BATCH_BYTES", request.param * 17_000)


@pytest.fixture
def line(server: RedisServer) -> Iterator[Line]:
    with line_to(server.port) as running:
        yield running


def store_prompts(server: RedisServer, count: int, seed: int) -> list[list[int]]:
    """Prompts that a server has answered and left in Redis."""
    prompts = [Prompts(seed + n).tokens(LENGTH) for n in range(count)]
    with TieredService(FAMILY, redis=server.url) as service:
        service.run(*(greedy(prompt, 1) for prompt in prompts))
    return prompts


def ask(service: TieredService, prompt: list[int], limit_s: float = STALL_S) -> Stream:
    """One request's right answer, within a time limit; what it leaves to be written is written by then."""
    with service.running() as engine:
        started_s = time.monotonic()
        stream = submit(engine, greedy(prompt, 4)).wait()
        taken_s = time.monotonic() - started_s
    assert stream.error is None
    assert taken_s < limit_s, f"it took {taken_s:.1f} s"
    assert_exact(stream, oracle(FAMILY))
    return stream


# --- the connection ------------------------------------------------------------------------------------------------


def test_absent_at_the_start_and_there_later(tmp_path: Path) -> None:
    later = RedisServer(tmp_path, port=free_port())
    prompts = [Prompts(100 + n).tokens(LENGTH) for n in range(6)]
    try:
        with TieredService(FAMILY, redis=later.url) as service:
            for prompt in prompts:
                assert cached_by_tier(ask(service, prompt)) == {}
            assert service.not_saved(Tier.REMOTE, "unreachable") > 0
            later.start()
            deadline_s = time.monotonic() + 60
            while not int(later.cli("dbsize")):
                assert time.monotonic() < deadline_s, "it is not used again"
                ask(service, Prompts(random.randrange(10**6)).tokens(LENGTH))
                time.sleep(0.1)
            ask(service, prompts[0])
            last = Prompts(110).tokens(LENGTH)
            ask(service, last)
        with TieredService(FAMILY, redis=later.url) as service:
            assert cached_by_tier(ask(service, last)) == RESTORED
    finally:
        later.kill()


def test_killed_and_restarted_under_load(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        prompts = store_prompts(server, 12, 120)
        with TieredService(FAMILY, num_pages=60, redis=server.url) as service:

            def disturb() -> None:
                for _ in range(2):
                    time.sleep(0.15)
                    server.kill()
                    time.sleep(0.3)
                    server.start()

            disturbing = threading.Thread(target=disturb)
            disturbing.start()
            streams = []
            with service.running() as engine:
                for round_ in range(6):
                    streams += [submit(engine, greedy(prompt, 4)) for prompt in prompts[round_ * 2 :] + prompts[:2]]
                    time.sleep(0.2)
                for stream in streams:
                    stream.wait()
            disturbing.join()
            for stream in streams:
                assert stream.error is None
                assert_exact(stream, oracle(FAMILY))


def test_black_hole(server: RedisServer, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = store_prompts(server, 6, 140)
    set_guard(monkeypatch, 1.0)
    with TieredService(FAMILY, redis=line.url) as service:
        assert cached_by_tier(ask(service, prompts[0])) == RESTORED
        line.set(is_black_hole=True)
        for prompt in prompts[1:]:
            assert cached_by_tier(ask(service, prompt)) == {}
        num_late, num_refused = (service.missed(Tier.REMOTE, reason) for reason in ("timeout", "unavailable"))
        assert num_late > 0
        assert ask(service, Prompts(149).tokens(LENGTH)).cached_tokens == 0
        assert service.missed(Tier.REMOTE, "timeout") == num_late, "it was waited for, but known to be bad by now"
        assert service.missed(Tier.REMOTE, "unavailable") > num_refused


def test_requests_that_need_nothing_from_a_silent_store_do_not_wait(
    server: RedisServer, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stored,) = store_prompts(server, 1, 160)
    known = Prompts(161).tokens(LENGTH)
    set_guard(monkeypatch, 2.0)
    with TieredService(FAMILY, redis=line.url) as service:
        ask(service, known)
        line.set(is_black_hole=True)
        with service.running() as engine:
            waiting = submit(engine, greedy(stored, 4))
            quick = submit(engine, greedy(known, 4)).wait()
            assert not waiting.has_ended
            waiting.wait()
        for stream in (quick, waiting):
            assert_exact(stream, oracle(FAMILY))
        assert cached_by_tier(quick) == {Tier.DEVICE: LENGTH - 1}


def test_slow_and_not_worth_it(server: RedisServer, line: Line) -> None:
    """After a few samples a store that takes longer than computing is left alone (G4)."""
    prompts = store_prompts(server, 6, 170)
    with TieredService(FAMILY, redis=line.url, always_loads=False) as service:
        ask(service, Prompts(169).tokens(LENGTH))
        line.set(delay_s=1.0)
        for prompt in prompts[:3]:
            ask(service, prompt, limit_s=10.0)
        num_lookups = service.num_calls(Tier.REMOTE, "count_leading")
        for prompt in prompts[3:]:
            ask(service, prompt)
        assert service.num_calls(Tier.REMOTE, "count_leading") == num_lookups
        assert service.missed(Tier.REMOTE, "slower") > 0


@pytest.mark.usefixtures("batch_pages")
@pytest.mark.parametrize("num_bytes", [0, 3000, 40_000])
def test_cut_in_the_middle(num_bytes: int, server: RedisServer, line: Line) -> None:
    prompts = store_prompts(server, 5, 190)
    with TieredService(FAMILY, redis=line.url) as service:
        line.set(cut_after_bytes=num_bytes)
        for prompt in prompts[:4]:
            assert ask(service, prompt).cached_tokens in range(0, LENGTH, 16)
        line.set(cut_after_bytes=None)
        line.cut_all()
        ask(service, prompts[4])


@pytest.mark.parametrize("reply", [b"-MOVED\r\n", b":x\r\n"])
def test_replies_that_no_redis_gives(reply: bytes) -> None:
    class Peer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(2**16):
                self.request.sendall(reply)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Peer) as peer:
        threading.Thread(target=peer.serve_forever).start()
        with TieredService(FAMILY, redis=f"redis://127.0.0.1:{peer.server_address[1]}") as service:
            for n in range(3):
                assert cached_by_tier(ask(service, Prompts(170 + n).tokens(LENGTH))) == {}
            assert service.missed(Tier.REMOTE, "error") > 0
        peer.shutdown()


# --- room ----------------------------------------------------------------------------------------------------------


def test_a_full_disk(tmp_path: Path) -> None:
    prompts = [Prompts(400 + n).tokens(LENGTH) for n in range(12)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TieredService(FAMILY, **disk_settings(tmp_path)) as service:
        ask(service, prompts[0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limits[1]))  # no file may grow beyond this
        try:
            for prompt in prompts[1:]:
                ask(service, prompt)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert service.not_saved(Tier.DISK, "full") > 0
    with TieredService(FAMILY, **disk_settings(tmp_path)) as service:
        assert cached_by_tier(ask(service, prompts[0])) == {Tier.DISK: whole_pages(LENGTH)}
        for prompt in prompts[1:]:
            ask(service, prompt)


def test_full_and_refusing_writes(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as server:
        prompts = store_prompts(server, 3, 200)
        server.cli("config", "set", "maxmemory", "1mb")
        with TieredService(FAMILY, redis=server.url) as service:
            for n in range(8):
                assert cached_by_tier(ask(service, Prompts(210 + n).tokens(LENGTH))) == {}
            for prompt in prompts:
                assert cached_by_tier(ask(service, prompt)) == RESTORED
            assert service.not_saved(Tier.REMOTE, "full") > 0
            server.cli("config", "set", "maxmemory", "0")
            size, deadline_s = server.cli("dbsize"), time.monotonic() + 60
            while server.cli("dbsize") == size:
                assert time.monotonic() < deadline_s, "writes do not come back"
                ask(service, Prompts(random.randrange(10**6)).tokens(LENGTH))
                time.sleep(0.1)


@pytest.mark.usefixtures("batch_pages")
def test_keys_that_vanish_at_random(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-random") as server:
        prompts = [Prompts(230 + n).tokens(LENGTH) for n in range(30)]
        for _ in range(2):
            with TieredService(FAMILY, num_pages=40, redis=server.url) as service:
                streams = service.run(*(greedy(prompt, 2) for prompt in prompts))
                for stream in streams:
                    assert stream.error is None
                    assert_exact(stream, oracle(FAMILY))


# --- the values ----------------------------------------------------------------------------------------------------


def flipped(values: list[bytes], chooser: random.Random) -> list[bytes]:
    def flip(value: bytes) -> bytes:
        at = chooser.randrange(len(value))
        return value[:at] + bytes([value[at] ^ (1 << chooser.randrange(8))]) + value[at + 1 :]

    return [flip(value) for value in values]


def truncated(values: list[bytes], chooser: random.Random) -> list[bytes]:
    return [value[: chooser.randrange(len(value))] for value in values]


def swapped(values: list[bytes], chooser: random.Random) -> list[bytes]:
    return values[1:] + values[:1]


def lengthened(values: list[bytes], chooser: random.Random) -> list[bytes]:
    return [value + b"x" for value in values]


def replaced(values: list[bytes], chooser: random.Random) -> list[bytes]:
    return [b"cos\nsystem\n(S'touch /nowhere'\ntR." for _ in values]


DAMAGES = (flipped, truncated, swapped, lengthened, replaced)
CORRUPT = {
    flipped: ("checksum", "magic", "short", "length"),
    truncated: ("short",),
    swapped: ("key",),
    lengthened: ("length",),
    replaced: ("magic",),
}


@pytest.mark.usefixtures("batch_pages")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_values_are_never_served_and_are_deleted(
    damage: Callable[[list[bytes], random.Random], list[bytes]], server: RedisServer
) -> None:
    prompts = store_prompts(server, 3, 260)
    client = Redis(port=server.port)
    keys = sorted(client.keys())
    values = [client.get(key) for key in keys]
    for key, value in zip(keys, damage(values, random.Random(1)), strict=True):
        client.set(key, value)
    damaged = {key: client.get(key) for key in keys}

    with TieredService(FAMILY, redis=server.url) as service:
        for prompt in prompts:
            assert cached_by_tier(ask(service, prompt)) == {}
        # the last page of each prompt was read first, found wrong, and taken out or written anew
        counted = sum(service.missed(Tier.REMOTE, reason) for reason in CORRUPT[damage])
        assert counted >= len(prompts)
        assert all(client.get(key) != damaged[key] for key in _last_keys_of(server, prompts))
    with TieredService(FAMILY, redis=server.url) as service:
        for prompt in prompts:
            assert cached_by_tier(ask(service, prompt)) == RESTORED
    client.close()


def test_values_of_other_types(server: RedisServer) -> None:
    prompts = store_prompts(server, 3, 270)
    client = Redis(port=server.port)
    for key, make in zip(_last_keys_of(server, prompts), ("lpush", "sadd", "zset"), strict=True):
        client.delete(key)
        if make == "zset":
            client.zadd(key, {"a": 1})
        else:
            getattr(client, make)(key, "a")
    with TieredService(FAMILY, redis=server.url) as service:
        for prompt in prompts:
            assert cached_by_tier(ask(service, prompt)) == {}
        for prompt in prompts:
            ask(service, [*prompt, 5])
    with TieredService(FAMILY, redis=server.url) as service:
        for prompt in prompts:
            assert cached_by_tier(ask(service, prompt)) == RESTORED
    client.close()


@pytest.mark.usefixtures("batch_pages")
def test_a_value_of_another_version_is_left_alone(server: RedisServer) -> None:
    (prompt,) = store_prompts(server, 1, 280)
    client = Redis(port=server.port)
    (key,) = _last_keys_of(server, [prompt])
    value = client.get(key)
    foreign = value[:8] + (FORMAT_VERSION + 1).to_bytes(2, "little") + value[10:]
    client.set(key, foreign)
    with TieredService(FAMILY, redis=server.url) as service:
        ask(service, prompt)
        assert service.missed(Tier.REMOTE, "version") == 1
    assert client.get(key) == foreign, "this version's page took the place of a newer one's"
    client.close()


def test_what_was_restored_is_not_written_back_to_where_it_came_from(server: RedisServer, tmp_path: Path) -> None:
    prompts = store_prompts(server, 3, 300)
    server.cli("config", "resetstat")
    with TieredService(FAMILY, redis=server.url, **disk_settings(tmp_path)) as service:
        for prompt in prompts:
            assert cached_by_tier(ask(service, prompt)) == RESTORED
    assert "cmdstat_set:" not in server.cli("info", "commandstats")
    with TieredService(FAMILY, **disk_settings(tmp_path)) as service:  # but it was to where it was missing
        for prompt in prompts:
            assert cached_by_tier(ask(service, prompt)) == {Tier.DISK: whole_pages(LENGTH)}


@pytest.mark.usefixtures("batch_pages")
@pytest.mark.parametrize("page", [0, 2, 5])
def test_a_hole_ends_the_run(page: int, server: RedisServer) -> None:
    (prompt,) = store_prompts(server, 1, 290)
    client = Redis(port=server.port)
    client.delete(_keys_of(server, prompt)[page])
    with TieredService(FAMILY, redis=server.url) as service:
        assert cached_by_tier(ask(service, prompt)) == ({Tier.REMOTE: 16 * page} if page else {})
    with TieredService(FAMILY, redis=server.url) as service:
        assert cached_by_tier(ask(service, prompt)) == RESTORED
    client.close()


def _keys_of(server: RedisServer, prompt: list[int]) -> list[bytes]:
    """The names of a prompt's whole pages in Redis, in order."""
    with TieredService(FAMILY, redis=server.url) as service:
        assert service.mover is not None
        chain = service.mover.chain(Namespace())
    chain.extend(token_key(prompt[: NUM_PAGES * 16]))
    return [b"prefixcache:" + digest.key.hex().encode() for digest in chain.digests]


def _last_keys_of(server: RedisServer, prompts: list[list[int]]) -> list[bytes]:
    return [_keys_of(server, prompt)[-1] for prompt in prompts]
