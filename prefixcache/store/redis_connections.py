"""Connections to one deployment of Redis, whatever its topology, and the exchange of commands for replies on one.

redis-py opens, authenticates and follows: TCP, TLS, Sentinel, the slots of a cluster. The exchange is ours, since a
reply must never outlive its command: a connection goes back to its pool only after the last reply was read, and is
closed on any other way out, a cancellation among them (field report E8). Nothing is retried here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError, SlotNotCoveredError

from prefixcache.store.redis_url import RedisTarget, Tls, Topology
from prefixcache.store.time_limit import time_limit

Command = Sequence[bytes | memoryview]
Reply = bytes | int | None | ResponseError

READ_SIZE_BYTES = (
    64 * 1024
)  # twice redis-py's own: large values arrive with half the work, beyond that nothing is gained


class RedisConnections(Protocol):
    """The part that differs between one server, Sentinel and a cluster. Event loop only."""

    async def group(self, keys: Sequence[bytes]) -> list[list[int]]:
        """Returns indexes of `keys`, one list for each server that has to be asked."""

    def lend(self, key: bytes) -> AbstractAsyncContextManager[AbstractConnection]:
        """Lends a connected, idle connection to the server that has `key`."""

    async def refresh(self) -> bool:
        """Asks anew where the keys are. Returns False where there is nothing to ask."""

    async def close(self) -> None:
        """Closes all connections, those in use as well."""


def connect_to(target: RedisTarget, connect_timeout_s: float, max_connections: int) -> RedisConnections:
    """Returns what will connect when it is first used; nothing is sent yet."""
    limits: dict[str, Any] = {
        "socket_connect_timeout": connect_timeout_s,
        "socket_timeout": None,  # `exchange` has its own limit; redis-py's costs a timer and a task for every reply
        "socket_read_size": READ_SIZE_BYTES,
        "protocol": 2,  # no pushed messages between replies, and no HELLO that old servers and proxies lack
        "retry": Retry(NoBackoff(), 0),
        "driver_info": None,  # no CLIENT SETINFO, which Redis before 7.2 refuses
    }
    login = {"username": target.credentials.username, "password": target.credentials.password}
    if target.topology is Topology.CLUSTER:
        return _ClusterConnections(
            connect_timeout_s,
            startup_nodes=[ClusterNode(host, port) for host, port in target.hosts],
            require_full_coverage=False,
            max_connections=max_connections,
            **limits,
            **login,
            **(_tls_arguments(target.tls) | {"ssl": True} if target.tls else {}),
        )
    pool: dict[str, Any] = limits | login | {"max_connections": max_connections, "db": target.db}
    if target.tls:
        pool |= _tls_arguments(target.tls)
    if target.topology is Topology.SENTINEL:
        encryption = _tls_arguments(target.tls) | {"ssl": True} if target.tls else {}
        to_sentinels = limits | encryption | {"socket_timeout": connect_timeout_s}
        sentinel_login = target.sentinel_credentials
        sentinel = Sentinel(  # type: ignore[no-untyped-call]
            target.hosts,
            sentinel_kwargs=to_sentinels | {"username": sentinel_login.username, "password": sentinel_login.password},
        )
        pooled = SentinelConnectionPool(target.service, sentinel, ssl=bool(target.tls), **pool)  # type: ignore[no-untyped-call]
        return _PooledConnections(pooled, connect_timeout_s, sentinel)
    if target.path:
        return _PooledConnections(
            ConnectionPool(UnixDomainSocketConnection, path=target.path, **pool), connect_timeout_s
        )
    ((host, port),) = target.hosts
    kind = SSLConnection if target.tls else Connection
    return _PooledConnections(ConnectionPool(kind, host=host, port=port, **pool), connect_timeout_s)


def _tls_arguments(tls: Tls) -> dict[str, Any]:
    return {
        "ssl_ca_certs": tls.ca_file,
        "ssl_certfile": tls.cert_file,
        "ssl_keyfile": tls.key_file,
        "ssl_check_hostname": tls.check_hostname and tls.check_certificate,
        "ssl_cert_reqs": "required" if tls.check_certificate else "none",
    }


async def exchange(
    connection: AbstractConnection, batches: Iterable[Sequence[Command]], batch_timeout_s: float
) -> list[Reply]:
    """Sends the commands and returns a reply for each; what the server refused is among them as a ResponseError.

    The next batch is sent before the replies to the one before it are read, so that the server never waits for us and
    never has more than two batches to answer.

    Raises:
        TimeoutError: Sending a batch and reading the replies to the one before took longer than `batch_timeout_s`.
        RedisError: The connection broke, or what came is no reply.
    """
    replies: list[Reply] = []
    num_due = 0
    is_done = False
    try:
        async with time_limit(batch_timeout_s) as limit:
            for batch in batches:
                await connection.send_packed_command(connection.pack_commands(batch), check_health=False)
                await _read(connection, num_due, replies)
                num_due = len(batch)
                limit.restart(batch_timeout_s)
            await _read(connection, num_due, replies)
        is_done = True
    finally:
        if not is_done:
            await connection.disconnect(nowait=True)
    return replies


async def _read(connection: AbstractConnection, num_replies: int, replies: list[Reply]) -> None:
    for _ in range(num_replies):
        try:
            replies.append(await connection.read_response(disable_decoding=True))
        except ResponseError as refusal:
            replies.append(refusal)


class _PooledConnections:
    """One server, or the master that Sentinel names."""

    def __init__(self, pool: ConnectionPool, connect_timeout_s: float, sentinel: Sentinel | None = None) -> None:
        self._pool = pool
        self._connect_timeout_s = connect_timeout_s
        self._sentinel = sentinel

    async def group(self, keys: Sequence[bytes]) -> list[list[int]]:
        return [list(range(len(keys)))]

    @asynccontextmanager
    async def lend(self, key: bytes) -> AsyncIterator[AbstractConnection]:
        async with time_limit(self._connect_timeout_s):
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            yield connection
        finally:
            await asyncio.shield(self._pool.release(connection))  # a second cancellation must not cost us the place

    async def refresh(self) -> bool:
        return False

    async def close(self) -> None:
        await self._pool.aclose()
        if self._sentinel:
            await self._sentinel.aclose()


class _ClusterConnections:
    """The masters of a cluster. Replicas are not asked: GETEX renews, so that it is a write."""

    def __init__(self, connect_timeout_s: float, **arguments: Any) -> None:
        self._cluster = RedisCluster(**arguments)
        self._connect_timeout_s = connect_timeout_s
        self._is_stale = False

    async def group(self, keys: Sequence[bytes]) -> list[list[int]]:
        async with time_limit(self._connect_timeout_s):
            await self._cluster.initialize()
        if self._is_stale:
            await self.refresh()
        groups: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            groups.setdefault(self._node(key).name, []).append(index)
        return list(groups.values())

    @asynccontextmanager
    async def lend(self, key: bytes) -> AsyncIterator[AbstractConnection]:
        node = self._node(key)
        connection = node.acquire_connection()
        is_done = False
        try:
            async with time_limit(self._connect_timeout_s):
                await node.disconnect_if_needed(connection)
                if connection.is_connected and await connection.can_read():  # closed by the server, or out of step
                    await connection.disconnect(nowait=True)
                await connection.connect()  # type: ignore[no-untyped-call]
            yield connection
            is_done = True
        finally:
            self._is_stale |= not is_done  # this server may have been replaced
            node.release(connection)

    async def refresh(self) -> bool:
        async with time_limit(self._connect_timeout_s):
            await self._cluster.nodes_manager.initialize()
        self._is_stale = False
        return True

    async def close(self) -> None:
        await self._cluster.aclose()

    def _node(self, key: bytes) -> ClusterNode:
        try:
            node = self._cluster.get_node_from_key(key)  # type: ignore[arg-type]
        except SlotNotCoveredError:
            self._is_stale = True
            raise
        assert node  # None is for replicas only
        return node
