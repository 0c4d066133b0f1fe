"""How a gateway chooses a replica: in turn, by a hash of the prompt's beginning, or by what each one has cached.

All of them leave out replicas with a long queue while others have a short one, as `smg` does.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections.abc import Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest

from bench.replica_model import BLOCK_BYTES, Replica, Request

# What `smg` has: a queue as long as this takes a worker out of routing; the spread of open requests beyond which load
# alone decides; the share of a prompt that must be cached for the cache to decide.
LONG_QUEUE = 8
MAX_SPREAD = 32
MIN_MATCH = 0.5


class Route(Protocol):
    """Chooses the replica for one request."""

    def __call__(self, request: Request, replicas: Sequence[Replica]) -> Replica: ...


def eligible(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Those whose queue is not long, or all if every queue is."""
    return [replica for replica in replicas if replica.num_waiting < LONG_QUEUE] or replicas


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def __call__(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        candidates = eligible(replicas)
        return candidates[next(self._turn) % len(candidates)]


class PrefixHash:
    """A ring of hashes over the prompt's first blocks; a replica with more than its share of the load is passed over.

    Args:
        num_blocks: Leading blocks that are hashed. One is too few for this trace: all prompts begin with the same.
        load_factor: How far a replica's open requests may lie above the mean.
        points: Places of each replica on the ring.
    """

    def __init__(self, num_blocks: int = 2, load_factor: float = 1.25, points: int = 100) -> None:
        self._num_blocks = num_blocks
        self._load_factor = load_factor
        self._points = points
        self._ring: list[tuple[int, int]] = []

    def __call__(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        if not self._ring:
            places = itertools.product(range(len(replicas)), range(self._points))
            self._ring = sorted((xxh3_64_intdigest(b"%d %d" % (index, point)), index) for index, point in places)
        candidates = set(map(id, eligible(replicas)))
        mean = (sum(replica.num_open for replica in replicas) + 1) / len(replicas)
        limit = math.ceil(self._load_factor * mean)
        start = bisect(self._ring, (xxh3_64_intdigest(request.blocks[: self._num_blocks * BLOCK_BYTES]), 0))
        for step in range(len(self._ring)):
            replica = replicas[self._ring[(start + step) % len(self._ring)][1]]
            if id(replica) in candidates and replica.num_open < limit:
                return replica
        return least_loaded(replicas)


class ByEvents:
    """The replica whose cache has most of the prompt, as its events tell; the least loaded where none has enough."""

    def __call__(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        candidates = eligible(replicas)
        loads = [replica.num_open for replica in candidates]
        if max(loads) - min(loads) > MAX_SPREAD:
            return least_loaded(candidates)
        matches = [replica.cache.num_known_blocks(request.blocks) for replica in candidates]
        best = max(matches)
        if best < MIN_MATCH * request.num_blocks:
            return least_loaded(candidates)
        return least_loaded([replica for replica, match in zip(candidates, matches, strict=True) if match == best])


def least_loaded(replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=lambda replica: replica.num_open)
