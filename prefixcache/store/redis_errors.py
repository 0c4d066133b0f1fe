"""What redis-py raises, put into the closed list of `base.py`. No message repeats a key, a value or a secret."""

from __future__ import annotations

from redis import exceptions as redis

from prefixcache.store.base import (
    StoreAuth,
    StoreCluster,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTimeout,
    StoreUnreachable,
    StoreUnsupported,
)
from prefixcache.store.redis_url import MASK, RedisTarget, Topology

AUTH_ERRORS = (
    redis.AuthenticationError,
    redis.AuthenticationWrongNumberOfArgsError,
    redis.AuthorizationError,
    redis.NoPermissionError,
)
CLUSTER_ERRORS = (
    redis.AskError,  # MOVED as well
    redis.ClusterCrossSlotError,
    redis.ClusterDownError,
    redis.RedisClusterException,
    redis.TryAgainError,
)
REFUSES_CHANGES = ("MISCONF", "NOREPLICAS")  # cannot save to disk; too few replicas are there


def store_error(error: Exception, target: RedisTarget) -> StoreError:
    """Returns the StoreError for what redis-py, asyncio or the system raised, or for a reply that refuses."""
    if isinstance(error, redis.RedisClusterException) and isinstance(error.__cause__, redis.RedisError | OSError):
        return store_error(error.__cause__, target)  # no node could be asked: what counts is why
    if isinstance(error, AUTH_ERRORS):  # before ConnectionError, which some of them are
        return StoreAuth(f"{target} refuses these credentials or lacks rights for them: {_masked(error, target)}")
    if isinstance(error, CLUSTER_ERRORS):
        if target.topology is Topology.CLUSTER:
            return StoreCluster(f"{target} does not serve these keys as a cluster: {_code(error)}")
        return StoreCluster(f"{target} is part of a cluster ({_code(error)}): write redis+cluster:// in its URL")
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return StoreTimeout(f"{target} did not answer in time")
    if isinstance(error, redis.ConnectionError | OSError):
        return StoreUnreachable(f"{target} cannot be reached: {_masked(error, target)}")
    if isinstance(error, redis.OutOfMemoryError):
        return StoreFull(f"{target} has no memory left")
    if isinstance(error, redis.ReadOnlyError) or _code(error) in REFUSES_CHANGES:
        return StoreReadOnly(f"{target} takes no changes: {_code(error)}")
    if isinstance(error, redis.InvalidResponse):
        return StoreError(f"{target} does not speak the protocol of Redis")
    if "unknown command" in str(error).lower():
        return StoreUnsupported(f"{target} lacks a command: Redis 6.2 or newer is needed, or Valkey")
    return StoreError(f"{target} refuses: {_code(error)}")


def _code(error: Exception) -> str:
    """Returns the word in capitals that a refusing reply starts with; the rest of it may repeat keys."""
    return getattr(error, "status_code", None) or str(error).partition(" ")[0]


def _masked(error: Exception, target: RedisTarget) -> str:
    text = str(error)
    for secret in target.secrets:
        text = text.replace(secret, MASK)
    return text
