"""Measure what one replica's work takes, for `bench.replicas`: prefill, decode, and loading from a shared Redis.

Starts two servers of its own with the default model, one after the other, on a Redis that is yours:

    redis-server --port 6399 --save '' --maxmemory 4gb --maxmemory-policy allkeys-lru &
    python -m bench.service_times --redis redis://127.0.0.1:6399 > service-times.json

Takes about three minutes on two cores; the machine should be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from bench.replica_model import ServiceTimes
from prefixcache.bench.bare import random_tokens
from prefixcache.bench.figures import machine
from prefixcache.bench.over_grpc import ServiceBench
from prefixcache.cache.planner import attention_pairs
from prefixcache.client import AsyncClient
from prefixcache.local_server import LocalServer

CHUNK_TOKENS = 512
PREFILLS = ((512, 0), (512, 0), (2048, 0), (2048, 0), (512, 4096), (512, 4096), (2048, 4096))  # new tokens, context
DECODES = ((1, 512), (1, 4096), (4, 512), (8, 512), (4, 1024))  # requests, context of each
STEPS = 32
RESTORED_TOKENS = (1024, 1024, 2048, 4096)  # the first is not measured: a server that has never loaded is careful
FLAGS = ("--cache-tokens", "65536", "--max-num-batched-tokens", str(CHUNK_TOKENS))


async def prefill_times(service: ServiceBench) -> list[tuple[int, int, float]]:
    """Time prompts of new tokens behind known ones."""
    known = random_tokens(max(context for _, context in PREFILLS))
    await service.ask(known, 1)
    rows = []
    for num_tokens, context in PREFILLS:
        answer = await service.ask(known[:context] + random_tokens(num_tokens), 1)
        rows.append((num_tokens, context, answer.ttft_ms / 1e3))
    return rows


async def decode_times(service: ServiceBench) -> list[tuple[int, int, float]]:
    """Time steps of requests that share nothing."""
    rows = []
    for num_requests, context in DECODES:
        prompts = [random_tokens(context) for _ in range(num_requests)]
        for prompt in prompts:
            await service.ask(prompt, 1)
        answers = await asyncio.gather(*(service.ask(prompt, STEPS) for prompt in prompts))
        gaps_ms = [gap for answer in answers for gap in answer.itl_ms[4:-4]]
        rows.append((num_requests, num_requests * context, statistics.median(gaps_ms) / 1e3))
    return rows


async def restore_times(service: ServiceBench, prompts: list[list[int]]) -> list[tuple[int, int, float]]:
    """Time all but the first of prompts that only Redis knows: tokens from there, tokens computed, seconds."""
    rows = []
    await service.ask(prompts[0], 1)
    for prompt in prompts[1:]:
        answer = await service.ask(prompt, 1)
        assert answer.cached_tokens > 0.9 * len(prompt), "it was not in Redis"
        rows.append((answer.cached_tokens, len(prompt) - answer.cached_tokens, answer.ttft_ms / 1e3))
    return rows


def fitted(features: list[list[float]], seconds: list[float]) -> list[float]:
    """Fit weights to measured times; relative errors count, and no weight is below zero."""
    rows = np.array(features) / np.array(seconds)[:, None]
    weights, *_ = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)
    return [max(float(weight), 0.0) for weight in weights]


async def measured(redis: str) -> dict[str, Any]:
    prompts = [random_tokens(length) for length in RESTORED_TOKENS]
    with LocalServer(*FLAGS, "--redis", redis) as server:
        async with AsyncClient(server.address) as client:
            service = ServiceBench(client)
            await service.warm_up()
            info = await client.model_info()
            prefills = await prefill_times(service)
            decodes = await decode_times(service)
            for prompt in prompts:
                await service.ask(prompt, 1)
            time.sleep(3)  # noqa: ASYNC251  # until the last pages are written
    with LocalServer(*FLAGS, "--redis", redis) as server:
        async with AsyncClient(server.address) as client:
            restores = await restore_times(ServiceBench(client), prompts)
    per_token, per_pair = fitted([[n, attention_pairs(n, c)] for n, c, _ in prefills], [s for _, _, s in prefills])

    def prefill_s(num_tokens: int, context: int) -> float:
        return per_token * num_tokens + per_pair * attention_pairs(num_tokens, context)

    step, per_request, per_context = fitted([[1, n, c] for n, c, _ in decodes], [s for _, _, s in decodes])
    loads_s = [max(s - prefill_s(new, cached), 1e-3) for cached, new, s in restores]
    loads_bytes = [cached * info.kv_bytes_per_token for cached, _, _ in restores]
    latency, per_byte = fitted([[1, num_bytes] for num_bytes in loads_bytes], loads_s)
    if per_byte == 0:  # too much noise to tell the parts apart: all of it a byte
        latency, per_byte = 0.0, sum(loads_s) / sum(loads_bytes)
    times = ServiceTimes(
        prefill_token_s=per_token,
        prefill_pair_s=per_pair,
        decode_step_s=step,
        decode_request_s=per_request,
        decode_context_s=per_context,
        restore_latency_s=latency,
        restore_bytes_per_s=1 / per_byte,
        kv_bytes_per_token=info.kv_bytes_per_token,
        chunk_tokens=CHUNK_TOKENS,
    )
    raw = {"prefill": prefills, "decode": decodes, "restore": restores}
    return {"machine": machine(), "server": server.description, "times": asdict(times), "measured": raw}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", required=True, metavar="URL")
    json.dump(asyncio.run(measured(parser.parse_args().redis)), sys.stdout, indent=2)


if __name__ == "__main__":
    main()
