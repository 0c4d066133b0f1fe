"""The stores that the contract is checked on: real files and real servers, each alone and behind the guard."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from prefixcache.store.base import PageStore
from prefixcache.store.disk import DiskStore
from prefixcache.store.guard import GuardedStore, GuardLimits
from prefixcache.store.redis import RedisStore
from prefixcache.store.redis_url import parse_redis_url
from tests.support.redis_server import (
    RedisServer,
    ValkeyServer,
    redis_cluster,
    redis_sentinel,
    redis_server,
    tls_redis_server,
)

PASSWORD = "correct horse/battery:staple@1"
PASSWORD_IN_URL = "correct%20horse%2Fbattery%3Astaple%401"
KINDS = ("disk", "valkey", "redis", "redis-unix", "redis-tls", "redis-cluster", "redis-sentinel")
PATIENT = GuardLimits(base_s=10.0)


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    with redis_server(folder, "--unixsocket", str(folder / "socket")) as server:
        yield server


@pytest.fixture(scope="session")
def single_url(single: RedisServer) -> str:
    return single.url


@pytest.fixture(scope="session")
def unix_url(single: RedisServer) -> str:
    return f"unix://{single.folder / 'socket'}?db=1"


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which(ValkeyServer.binary) is None:
        pytest.skip("there is no valkey-server")
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server.url
    server.kill()


@pytest.fixture(scope="session")
def tls_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tls_redis_server(tmp_path_factory.mktemp("tls"), PASSWORD) as (server, certificates):
        yield f"rediss://:{PASSWORD_IN_URL}@127.0.0.1:{server.port}/0?{certificates.query}"


@pytest.fixture(scope="session")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers[:2])


@pytest.fixture(scope="session")
def sentinel_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_sentinel(tmp_path_factory.mktemp("sentinel")) as (_, _, sentinel):
        yield f"redis+sentinel://127.0.0.1:{sentinel.port}/pages/0"


@pytest.fixture(params=[f"{kind}{guard}" for kind in KINDS for guard in ("", "-guarded")])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PageStore]:
    """A store that holds nothing yet."""
    kind = request.param.removesuffix("-guarded")
    made: PageStore
    if kind == "disk":
        made = DiskStore(tmp_path / "disk", 2**30)
    else:
        url: str = request.getfixturevalue(kind.removeprefix("redis-").replace("redis", "single") + "_url")
        made = RedisStore(parse_redis_url(url), ttl_s=60, prefix=f"test-{secrets.token_hex(4)}")
    if kind != request.param:
        made = GuardedStore("tested", made, value_bytes=2**20, limits=PATIENT, observe=lambda _: None)
    try:
        yield made
    finally:
        await made.close()


NewKeys = Callable[[int], list[bytes]]


@pytest.fixture
def new_keys() -> NewKeys:
    """Makes keys as long as a page's."""
    return lambda count: [secrets.token_bytes(16) for _ in range(count)]
