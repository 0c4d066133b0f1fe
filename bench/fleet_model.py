"""A trace of requests, and a fleet of modelled replicas that it is replayed over.

trace ──▶ route ──▶ replica, replica, … ──▶ (one store behind all of them)
"""

from __future__ import annotations

import json
import random
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.replica_model import Clock, Job, Replica, Request, ServiceTimes
from bench.routing_model import Route
from bench.store_model import StoreModel

# Requests that decode together in the estimate of how busy a trace keeps a replica.
TYPICAL_BATCH = 8


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is modelled.

    Attributes:
        device_tokens: What each replica's device holds.
        store_tokens: What the store holds; 0 for no store.
        store_bytes_per_s: Most that one master of the store gives and takes.
        num_shards: Masters that share the store's keys and add up their bandwidth.
    """

    num_replicas: int
    device_tokens: int
    store_tokens: int
    block_tokens: int
    store_bytes_per_s: float
    num_shards: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay came to.

    Attributes:
        device_hit_rate: Prompt tokens found on the replica's own device, of all.
        store_hit_rate: Those that came from the store.
        ttft_s: Of each request, in the order of their ends.
        store_read_bytes_per_s: Over the whole replay.
        unwritten_share: Prompts that were not stored since the last write was still under way, of all.
    """

    num_requests: int
    device_hit_rate: float
    store_hit_rate: float
    ttft_s: list[float]
    duration_s: float
    store_read_bytes_per_s: float
    store_write_bytes_per_s: float
    unwritten_share: float

    def ttft_percentile_s(self, percent: int) -> float:
        return statistics.quantiles(self.ttft_s, n=100, method="inclusive")[percent - 1]


def read_trace(path: Path, max_prompt_tokens: int | None = None) -> list[Request]:
    """Read a trace of the Mooncake format, without the prompts that are too long.

    Arrivals were noted in steps of three seconds; here they are spread over them.
    """
    chance = random.Random(0)
    requests = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            if max_prompt_tokens is not None and entry["input_length"] > max_prompt_tokens:
                continue
            requests.append(
                Request(
                    arrival_s=entry["timestamp"] / 1e3 + chance.uniform(0, 3),
                    num_tokens=entry["input_length"],
                    num_output_tokens=max(entry["output_length"], 1),
                    blocks=array("I", entry["hash_ids"]).tobytes(),
                )
            )
    return sorted(requests, key=lambda request: request.arrival_s)


def work_s(requests: Sequence[Request], times: ServiceTimes) -> float:
    """Estimate the seconds that one replica without any cache works for these requests."""
    total_s = 0.0
    for request in requests:
        step_s = times.step_s(TYPICAL_BATCH, TYPICAL_BATCH * request.num_tokens)
        total_s += times.prefill_s(request.num_tokens, 0) + request.num_output_tokens * step_s / TYPICAL_BATCH
    return total_s


def at_load(requests: Sequence[Request], times: ServiceTimes, num_replicas: int, load: float) -> list[Request]:
    """Stretch or squeeze the trace in time, so that replicas without a cache would be busy `load` of the time."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    factor = work_s(requests, times) / (load * num_replicas * span_s)
    return [
        Request(request.arrival_s * factor, request.num_tokens, request.num_output_tokens, request.blocks)
        for request in requests
    ]


def replay(requests: Sequence[Request], times: ServiceTimes, fleet: Fleet, route: Route) -> Outcome:
    """Let all requests run through the fleet."""
    clock = Clock()
    ended: list[Job] = []
    store = None
    if fleet.store_tokens:
        store = StoreModel(
            clock,
            fleet.store_tokens // fleet.block_tokens,
            times.restore_latency_s,
            times.restore_bytes_per_s,
            fleet.store_bytes_per_s * fleet.num_shards,
        )
    cache_blocks = fleet.device_tokens // fleet.block_tokens
    replicas = [
        Replica(clock, times, cache_blocks, fleet.block_tokens, store, ended.append) for _ in range(fleet.num_replicas)
    ]

    def arrive(request: Request) -> None:
        route(request, replicas).submit(request)

    for request in requests:
        clock.at(request.arrival_s, partial(arrive, request))
    clock.run()
    duration_s = clock.now_s - requests[0].arrival_s
    num_tokens = sum(request.num_tokens for request in requests)
    from_device = sum(min(job.num_device_blocks * fleet.block_tokens, job.request.num_tokens - 1) for job in ended)
    cached = sum(job.num_cached_tokens for job in ended)
    return Outcome(
        num_requests=len(ended),
        device_hit_rate=from_device / num_tokens,
        store_hit_rate=(cached - from_device) / num_tokens,
        ttft_s=[job.ttft_s for job in ended],
        duration_s=duration_s,
        store_read_bytes_per_s=store.read_bytes / duration_s if store else 0.0,
        store_write_bytes_per_s=store.written_bytes / duration_s if store else 0.0,
        unwritten_share=sum(replica.num_unwritten for replica in replicas) / len(requests),
    )
