"""Measure the service through gRPC, each figure against references from the same run.

Starts a server of its own with the given settings, and loads the same model beside it for the references.
Prints JSON on standard output and a table on standard error. Takes a few minutes; the machine should be quiet.

Examples:
  prefixcache bench
  prefixcache bench --quick
  prefixcache bench --dtype bfloat16 > result.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from transformers import AutoModelForCausalLM

from prefixcache import app
from prefixcache.bench.bare import BareLoop, Transformers, random_tokens
from prefixcache.bench.figures import Figure, machine
from prefixcache.bench.lookup import build_tree, lookup_us
from prefixcache.bench.over_grpc import ServiceBench
from prefixcache.bench.report import Row, table
from prefixcache.client import AsyncClient
from prefixcache.config import Settings, add_settings_arguments, load_settings
from prefixcache.local_server import LocalServer
from prefixcache.model.loader import locate

PREFIX_TOKENS = 2048
NEW_TOKENS = 64
SUFFIX_TOKENS = 32
ANSWER_TOKENS = 32
CLIENTS = (1, 4, 16)
# Room for what one bench computes: enough that nothing it measures is evicted.
CACHE_TOKENS = 65_536


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, and no transformers reference")
    add_settings_arguments(parser)


def run(args: argparse.Namespace) -> int:
    settings = load_settings(args)
    console = Console(stderr=True)
    given = {name: value for name, value in vars(args).items() if name in Settings.model_fields}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ({"cache_tokens": CACHE_TOKENS} | given).items()]
    result: dict[str, Any] = {"machine": machine()}
    with open(os.devnull, "w", encoding="utf-8") as nowhere, LocalServer(*flags, log=nowhere) as server:
        console.print(f"measuring {server.description}")
        result["server"] = server.description
        bench = Bench(settings, server.address, 3 if args.quick else 5, console.print)
        result["rows"] = [row.as_json() for row in asyncio.run(bench.rows(with_transformers=not args.quick))]
    console.print(table(result["rows"]))
    json.dump(result, sys.stdout, indent=2)
    print()
    return 0


class Bench:
    """All measurements of one run, in order.

    Args:
        settings: Those of the server; the references use the same model, dtype and threads.
        address: Where the server listens.
        repeat: How often each thing is measured.
        say: Hears what is being measured.
    """

    def __init__(self, settings: Settings, address: str, repeat: int, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._address = address
        self._repeat = repeat
        self._say = say
        served = app.load(settings.model_copy(update={"cache_tokens": CACHE_TOKENS}), say)
        runner, cache = app.build_runner(served)
        self._bare = BareLoop(runner, cache, settings.batched_tokens(served.device.type))
        self._served = served

    async def rows(self, *, with_transformers: bool) -> list[Row]:
        plain = self._load_transformers() if with_transformers else None
        async with AsyncClient(self._address) as client:
            service = ServiceBench(client)
            await service.warm_up()
            prefix = random_tokens(PREFIX_TOKENS)
            self._say("time to first token")
            rows = [await self._cold(service, n, plain) for n in (512, PREFIX_TOKENS)]
            self._say("decode steps")
            step = self._bare.step_ms(prefix, 1, 32, suffix_tokens=1)
            rows += [await self._repeated(service, prefix, step), await self._extended(service, prefix)]
            rows.append(await self._itl(service, prefix, step, plain))
            for num_clients in CLIENTS:
                self._say(f"{num_clients} clients")
                rows.append(await self._shared(service, prefix, num_clients))
            self._say("unique prompts, cache on and off in turns")
            rows.append(await self._unique(service))
        self._say("look-up")
        return [*rows, self._lookup()]

    async def _cold(self, service: ServiceBench, num_tokens: int, plain: Transformers | None) -> Row:
        repeat = max(3, self._repeat // 2)
        ours = await service.cold_ttft(num_tokens, repeat)
        row = Row(f"TTFT, cold, {num_tokens} tokens", ours)
        row.references["bare loop"] = self._bare.prefill_ms([random_tokens(num_tokens) for _ in range(repeat)])
        if plain is not None:
            row.references["transformers"] = plain.prefill_ms([random_tokens(num_tokens) for _ in range(repeat)])
        return row

    async def _repeated(self, service: ServiceBench, prefix: list[int], step: Figure) -> Row:
        ours = await service.repeated_ttft(prefix, 3 * self._repeat)
        limit = 0.25 * step.median + 3
        aim = f"at most 0.25 x bare decode step + 3 ms = {limit:.1f} ms", ours.median <= limit
        return Row(f"TTFT, the same {PREFIX_TOKENS} tokens again", ours, {"bare decode step": step}, aim)

    async def _extended(self, service: ServiceBench, prefix: list[int]) -> Row:
        ours = await service.extended_ttft(prefix, NEW_TOKENS, 2 * self._repeat)
        bare = self._bare.extension_ms(prefix, NEW_TOKENS, 2 * self._repeat)
        row = Row(f"TTFT, {PREFIX_TOKENS} known tokens + {NEW_TOKENS} new", ours, {"bare forward pass": bare})
        row.aim = "at most 1.15 x the bare forward pass", row.ratio("bare forward pass") <= 1.15
        return row

    async def _itl(self, service: ServiceBench, prefix: list[int], step: Figure, plain: Transformers | None) -> Row:
        row = Row(f"ITL, one client, {PREFIX_TOKENS} tokens", await service.itl(prefix, 32), {"bare decode step": step})
        if plain is not None:
            row.references["transformers"] = plain.step_ms(prefix, 32)
        return row

    async def _shared(self, service: ServiceBench, prefix: list[int], num_clients: int) -> Row:
        ours = await service.shared_throughput(
            prefix, num_clients, SUFFIX_TOKENS, ANSWER_TOKENS, max(2, self._repeat // 2)
        )
        step = self._bare.step_ms(prefix, num_clients, ANSWER_TOKENS // 2, SUFFIX_TOKENS)
        bare = Figure([num_clients * 1e3 / value for value in step.values], "tokens/s")
        name = f"throughput, {num_clients} clients sharing {PREFIX_TOKENS} tokens"
        return Row(name, ours, {"bare decode steps alone": bare})

    async def _unique(self, service: ServiceBench) -> Row:
        cached, uncached = await service.unique_throughput(128, 4, 16, self._repeat)
        row = Row("throughput, unique prompts, cache on", cached, {"cache off": uncached})
        row.aim = "at least 0.99 x cache off", row.ratio("cache off") >= 0.99
        return row

    def _lookup(self) -> Row:
        tree, prompt = build_tree(10_000, num_documents=40, document_tokens=7_680)
        figure = lookup_us(tree, prompt, 1_000)
        aim = "at most 100 us", figure.median <= 100
        return Row(f"look-up, {len(prompt)} tokens, {tree.num_nodes} nodes", figure, aim=aim)

    def _load_transformers(self) -> Transformers:
        _, source = locate(self._settings.model, self._settings.cache_dir, self._say)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=self._served.plan.layout.dtype, device_map={"": self._served.device}
        )
        model.train(False)
        return Transformers(model)
