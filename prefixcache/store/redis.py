"""RedisStore: pages in Redis or Valkey, shared by all replicas of the service and kept while they restart.

    <prefix>:<key in hex>  ->  value        SET … PX: header, payload and time to live in one command

One key is one page, so that Redis can never drop half of one (field report E1). Reading renews the time to live in the
same command (GETEX); each lifetime is drawn from ±10 %, so that what was written together does not expire together.
Keys are asked for in batches over one connection and never searched for: there is no KEYS, no SCAN and no script.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from redis.exceptions import AskError, MovedError, RedisClusterException, RedisError, ResponseError

from prefixcache.store.base import StoreClosed, Value, ValueTooLarge
from prefixcache.store.redis_connections import Command, Reply, connect_to, exchange
from prefixcache.store.redis_errors import store_error
from prefixcache.store.redis_url import RedisTarget

MIB = 2**20
TTL_JITTER = 0.1
MAX_LOOKUP_KEYS = 1024  # in one round trip: 16,384 tokens
REDIS_ERRORS = (RedisError, RedisClusterException, OSError)  # TimeoutError is an OSError


@dataclass(frozen=True, slots=True)
class RedisLimits:
    """Bounds on what one store asks of the server."""

    max_connections: int = 4  # to each server; a call that finds none free waits
    max_value_bytes: int = 64 * MIB  # Redis itself ends at 512 MiB
    max_batch_bytes: int = 2 * MIB  # commands and replies, two batches at once: larger ones were slower on loopback
    connect_timeout_s: float = 1.0
    batch_timeout_s: float = 5.0  # how long a whole call may take is for the guard to say


class RedisStore:
    """A PageStore over one server, the master of a Sentinel set, or a cluster. Nothing is sent before the first call.

    Needs Redis 6.2 or Valkey, and of an ACL user: +getex +set +exists +unlink on `<prefix>:*`, and for a cluster
    +cluster|slots +command. Values come back as `bytes`: redis-py reads no other way, so one copy for each value.
    """

    def __init__(
        self, target: RedisTarget, ttl_s: float, prefix: str = "prefixcache", limits: RedisLimits | None = None
    ) -> None:
        """Takes the server's place and how long a value is kept after it was last written or read."""
        self._target = target
        self._ttl_ms = ttl_s * 1000
        self._prefix = prefix.encode() + b":"
        self._limits = limits or RedisLimits()
        self._connections = connect_to(target, self._limits.connect_timeout_s, self._limits.max_connections)
        self._places = asyncio.Semaphore(self._limits.max_connections)  # redis-py's own pools raise when they are empty
        self._value_bytes = MIB  # what a value is expected to be: the largest of the last call
        self._is_closed = False

    def __repr__(self) -> str:
        return f"RedisStore({self._target})"

    async def count_leading(self, keys: Sequence[bytes]) -> int:
        for start in range(0, len(keys), MAX_LOOKUP_KEYS):
            names = [self._name(key) for key in keys[start : start + MAX_LOOKUP_KEYS]]
            replies = await self._ask(names, [(b"EXISTS", name) for name in names])
            answers = [self._checked(reply) for reply in replies]  # all of them: a refusal may stand behind a gap
            num_leading = len(list(takewhile(bool, answers)))
            if num_leading < len(answers):
                return start + num_leading
        return len(keys)

    async def read(self, keys: Sequence[bytes]) -> list[Value | None]:
        names = [self._name(key) for key in keys]
        commands = [(b"GETEX", name, b"PX", self._ttl()) for name in names]
        replies = await self._ask(names, commands, reply_bytes=self._value_bytes)
        values: list[Value | None] = [self._value(reply) for reply in replies]
        self._value_bytes = max((len(value) for value in values if value), default=self._value_bytes)
        return values

    async def write(self, entries: Sequence[tuple[bytes, Value]]) -> None:
        largest = max((len(value) for _, value in entries), default=0)
        if largest > self._limits.max_value_bytes:
            raise ValueTooLarge(f"a value of {largest} bytes; {self!r} takes at most {self._limits.max_value_bytes}")
        names = [self._name(key) for key, _ in entries]
        commands = [
            (b"SET", name, memoryview(value), b"PX", self._ttl())
            for name, (_, value) in zip(names, entries, strict=True)
        ]
        for reply in await self._ask(names, commands):
            self._checked(reply)
        self._value_bytes = largest or self._value_bytes

    async def delete(self, keys: Sequence[bytes]) -> None:
        names = [self._name(key) for key in keys]
        for reply in await self._ask(names, [(b"UNLINK", name) for name in names]):
            self._checked(reply)

    async def close(self) -> None:
        self._is_closed = True
        await self._connections.close()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _ttl(self) -> bytes:
        return b"%d" % max(1, round(self._ttl_ms * random.uniform(1 - TTL_JITTER, 1 + TTL_JITTER)))

    def _value(self, reply: Reply) -> bytes | None:
        if isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE"):
            return b""  # a list or hash under our key: no codec takes an empty value, so that it will be deleted
        value = self._checked(reply)
        return value if isinstance(value, bytes) else None

    def _checked(self, reply: Reply) -> bytes | int | None:
        """Returns a reply that is an answer; raises the StoreError for one that refuses."""
        if isinstance(reply, AskError) and not isinstance(reply, MovedError):
            return None  # the key's slot is moving between servers: not there until it has moved
        if isinstance(reply, ResponseError):
            raise store_error(reply, self._target)
        return reply

    async def _ask(self, names: Sequence[bytes], commands: Sequence[Command], reply_bytes: int = 0) -> list[Reply]:
        """Returns a reply for each command, the n-th of which is about the n-th name."""
        if self._is_closed:
            raise StoreClosed(f"{self!r} is closed")
        if not commands:
            return []
        try:
            async with self._places:
                replies = await self._route(names, commands, reply_bytes)
                moved = [index for index, reply in enumerate(replies) if isinstance(reply, MovedError)]
                if moved and await self._connections.refresh():
                    again = await self._route([names[i] for i in moved], [commands[i] for i in moved], reply_bytes)
                    for index, reply in zip(moved, again, strict=True):
                        replies[index] = reply
        except REDIS_ERRORS as error:
            if self._is_closed:
                raise StoreClosed(f"{self!r} was closed meanwhile") from error
            raise store_error(error, self._target) from error
        return replies

    async def _route(self, names: Sequence[bytes], commands: Sequence[Command], reply_bytes: int) -> list[Reply]:
        """Asks each server for what it has, all at once, and returns the replies in the order of the commands."""
        replies: list[Reply] = [None] * len(commands)

        async def ask_one(indexes: list[int]) -> None:
            batches = _in_batches([commands[index] for index in indexes], reply_bytes, self._limits.max_batch_bytes)
            async with self._connections.lend(names[indexes[0]]) as connection:
                answers = await exchange(connection, batches, self._limits.batch_timeout_s)
            for index, answer in zip(indexes, answers, strict=True):
                replies[index] = answer

        groups = await self._connections.group(names)
        if len(groups) == 1:
            await ask_one(groups[0])
        else:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for indexes in groups:
                        tasks.create_task(ask_one(indexes))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None  # one that failed is enough: the others were cancelled
        return replies


def _in_batches(commands: Sequence[Command], reply_bytes: int, max_bytes: int) -> Iterator[Sequence[Command]]:
    """Yields runs of commands that, with the replies expected, stay within `max_bytes`; at least one in each."""
    start = num_bytes = 0
    for index, command in enumerate(commands):
        more_bytes = sum(len(part) for part in command) + reply_bytes
        if index > start and num_bytes + more_bytes > max_bytes:
            yield commands[start:index]
            start, num_bytes = index, 0
        num_bytes += more_bytes
    yield commands[start:]
