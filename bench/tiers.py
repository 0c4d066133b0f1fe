"""Measure the tiers below the device: the engine in this process, no gRPC, references measured in the same run.

  shaped    TTFT of a known prefix that is in Redis, behind a line of so many MB/s, against computing all of it and
            against loading all of it: never slower than the quicker of the two
  speed     the same from loopback, against redis-py reading the same bytes alone, and from disk against reading a file
  misses    what a prompt pays that no tier has, tiers on and off in turns
  digests   what the names of a page outside the process cost

Prints JSON on standard output and a table on standard error. The machine should be quiet. Needs redis-server.

Examples:
  python -m bench.tiers
  python -m bench.tiers --only speed digests
  python -m bench.tiers --only shaped --megabytes-per-s 10 20 0 --repeat 1
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from redis import Redis
from rich.console import Console

from bench.in_process import LoadsEverything, Service, redis_server, redis_url
from bench.narrow_line import NarrowLine
from prefixcache import app
from prefixcache.bench.bare import random_tokens
from prefixcache.bench.figures import Figure, machine, timed_ms
from prefixcache.bench.report import Row, table
from prefixcache.cache.planner import PrefillEstimate
from prefixcache.config import Settings, add_settings_arguments, load_settings
from prefixcache.kv.layout import MemoryPlan
from prefixcache.request import Namespace, Tier
from prefixcache.tree.hashing import DigestChain
from prefixcache.tree.node import token_key

PREFIX_TOKENS = 2048
# One prompt and the copy of its last page: the next prompt's pages are those of this one, but for a page or two.
POOL_TOKENS = PREFIX_TOKENS + 32
MISS_TOKENS = 256
MISS_POOL_TOKENS = 8192
IN_A_ROW = 5
MEGABYTES_PER_S = (10.0, 15.0, 20.0, 40.0, 100.0, 0.0)
QUICK_MEGABYTES_PER_S = 100.0  # what takes a second or less is measured more often
FILE_SIZE = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to measure")
    parser.add_argument("--repeat", type=int, default=3, help="how often (default: 3; misses and speed more often)")
    parser.add_argument(
        "--megabytes-per-s",
        nargs="+",
        type=float,
        default=MEGABYTES_PER_S,
        help="bandwidths for `shaped`, 0 for unlimited (default: %(default)s)",
    )
    add_settings_arguments(parser)
    args = parser.parse_args()
    console = Console(stderr=True)
    bench = Bench(load_settings(args), args.repeat, args.megabytes_per_s, console.print)
    rows = [row.as_json() for name in args.only for row in SECTIONS[name](bench)]
    console.print(table(rows))
    json.dump({"machine": machine(), "model": bench.served.describe(), "rows": rows}, sys.stdout, indent=2)
    print()
    return 0


class Bench:
    """One loaded model, served again and again with other tiers.

    Args:
        settings: Of the server; those of the tiers are overridden.
        repeat: How often a thing is measured.
        megabytes_per_s: For `shaped`.
        say: Hears what is being measured.
    """

    def __init__(
        self, settings: Settings, repeat: int, megabytes_per_s: list[float], say: Callable[[str], None]
    ) -> None:
        nowhere = redis_url(1)  # never connected to: the model's fingerprint is made only where there are tiers
        self._settings = settings.model_copy(update={"redis": nowhere, "cache_tokens": POOL_TOKENS})
        self._repeat = repeat
        self._megabytes_per_s = megabytes_per_s
        self._say = say
        self.served = app.load(self._settings, say)

    # --- shaped ------------------------------------------------------------------------------------------------

    def shaped(self) -> list[Row]:
        """Two known prompts in turns, in a pool that holds one of them, so that the next one is always in Redis alone.

        Also the first prompt of a new server, which knows nothing of the line yet, at the first and the last bandwidth.
        """
        prompts = [random_tokens(PREFIX_TOKENS + 1) for _ in range(2)]
        rows: list[Row] = []
        after_start: list[Row] = []
        with redis_server() as port, NarrowLine(port) as line:
            with self._service(redis=redis_url(port)) as service:
                _store(service, prompts)
            with self._service(redis=redis_url(line.port)) as service:
                for rate in self._megabytes_per_s:
                    self._say(f"shaped: {rate:g} MB/s")
                    line.set_bandwidth(rate * 1e6)
                    rows.append(self._shaped(service, prompts, rate))
            for index in (0, -1):
                rate, like = self._megabytes_per_s[index], rows[index]
                self._say(f"shaped: a new server at {rate:g} MB/s")
                line.set_bandwidth(rate * 1e6)
                after_start.append(self._after_start(line.port, prompts, rate, like))
        return rows + after_start

    def _shaped(self, service: Service, prompts: list[list[int]], rate: float) -> Row:
        planned: list[float] = []
        restored: list[float] = []
        computed: list[float] = []
        turns = self._repeat if 0 < rate < QUICK_MEGABYTES_PER_S else 3 * self._repeat
        for turn in range(turns):
            if turn < self._repeat:
                computed.append(service.ask(prompts[0], use_cache=False).ttft_ms)
            restored.append(_restore_ms(service, prompts[0]))
            answer = service.ask(prompts[1])
            planned.append(answer.ttft_ms)
            self._say(f"  {answer.ttft_ms:,.0f} ms with {answer.cached(Tier.REMOTE)} tokens from Redis")
        row = Row(f"{_at(rate)}: TTFT, {PREFIX_TOKENS} known tokens", Figure(planned, "ms"))
        row.references = {"compute all": Figure(computed, "ms"), "load all": Figure(restored, "ms")}
        return _with_aim(row)

    def _after_start(self, port: int, prompts: list[list[int]], rate: float, like: Row) -> Row:
        values = []
        for turn in range(self._repeat):
            with self._service(redis=redis_url(port)) as service:
                answer = service.ask(prompts[turn % 2])
                values.append(answer.ttft_ms)
                self._say(f"  {answer.ttft_ms:,.0f} ms with {answer.cached(Tier.REMOTE)} tokens from Redis")
        row = Row(f"{_at(rate)}: the same, first prompt of a new server", Figure(values, "ms"), dict(like.references))
        return _with_aim(row)

    # --- speed -------------------------------------------------------------------------------------------------

    def speed(self) -> list[Row]:
        prompts = [random_tokens(PREFIX_TOKENS + 1) for _ in range(2)]
        with redis_server() as port, tempfile.TemporaryDirectory() as folder:
            disk: dict[str, Any] = {"disk": f"{folder}/kv", "disk_size": FILE_SIZE}
            with self._service(redis=redis_url(port), **disk) as service:
                _store(service, prompts)
            self._say("speed: Redis")
            rows = []
            with self._service(redis=redis_url(port)) as service:
                rows += self._restores(service, prompts, Tier.REMOTE, "redis-py alone", _redis_read_ms(port), 1.5)
            self._say("speed: disk")
            file = Path(folder) / "plain"
            file.write_bytes(bytes(self._prefix_bytes()))
            with self._service(redis=None, **disk) as service:
                rows += self._restores(service, prompts, Tier.DISK, "reading a file", lambda: _file_read_ms(file), 2.0)
        return rows

    def _restores(
        self,
        service: Service,
        prompts: list[list[int]],
        tier: Tier,
        reference: str,
        reference_ms: Callable[[], float],
        aim: float,
    ) -> list[Row]:
        loads: list[float] = []
        ttfts: list[float] = []
        plain: list[float] = []
        for turn in range(3 * self._repeat + 1):
            before_s = service.total("tier_load_actual_seconds", tier)
            ttft_ms = _restore_ms(service, prompts[turn % 2], tier)
            plain_ms = reference_ms()
            if turn:  # the first one finds nothing set up
                loads.append((service.total("tier_load_actual_seconds", tier) - before_s) * 1e3)
                ttfts.append(ttft_ms)
                plain.append(plain_ms)
        computed = [service.ask(prompt, use_cache=False).ttft_ms for prompt in prompts]
        size = f"{PREFIX_TOKENS} tokens ({self._prefix_bytes() / 1e6:.0f} MB)"
        row = Row(f"{tier.value}: load of {size}", Figure(loads, "ms"), {reference: Figure(plain, "ms")})
        row.aim = f"at most {aim:g} x {reference}", row.ratio(reference) <= aim
        ttft = Row(f"{tier.value}: TTFT of the same", Figure(ttfts, "ms"), {"compute all": Figure(computed, "ms")})
        ttft.aim = "at most 1/8 of computing it", ttft.ratio("compute all") <= 1 / 8
        return [row, ttft]

    def _prefix_bytes(self) -> int:
        return self.served.plan.layout.bytes_per_page * (PREFIX_TOKENS // self.served.plan.layout.page_size)

    # --- misses ------------------------------------------------------------------------------------------------

    def misses(self) -> list[Row]:
        """Alone, so that what it adds to the prompt is seen; and in a row, where one is written while the next runs."""
        self._say("misses: tiers on and off in turns")
        on: list[float] = []
        off: list[float] = []
        row_on: list[float] = []
        row_off: list[float] = []
        plan = self.served.plan
        roomy = replace(self.served, plan=MemoryPlan.from_tokens(plan.layout, MISS_POOL_TOKENS, plan.max_model_len))
        with redis_server() as port, tempfile.TemporaryDirectory() as folder:
            tiers: dict[str, Any] = {"redis": redis_url(port), "disk": f"{folder}/kv", "disk_size": FILE_SIZE}
            with Service(roomy, self._settings, **tiers) as tiered, Service(roomy, self._settings, redis=None) as bare:
                for turn in range(8 * self._repeat + 1):
                    for service, times in ((tiered, on), (bare, off))[:: 1 if turn % 2 else -1]:
                        times.append(service.ask(random_tokens(MISS_TOKENS)).ttft_ms)
                        service.settle()
                for turn in range(self._repeat):
                    for service, times in ((tiered, row_on), (bare, row_off))[:: 1 if turn % 2 else -1]:
                        times += [service.ask(random_tokens(MISS_TOKENS)).ttft_ms for _ in range(IN_A_ROW)]
                        service.settle()
        alone = Row(f"TTFT, {MISS_TOKENS} tokens that no tier has, tiers on", Figure(on[1:], "ms"))
        alone.references = {"tiers off": Figure(off[1:], "ms")}
        alone.aim = "at most 1.01 x tiers off", alone.ratio("tiers off") <= 1.01
        in_a_row = Row(f"the same, {IN_A_ROW} in a row, each written during the next", Figure(row_on, "ms"))
        in_a_row.references = {"tiers off": Figure(row_off, "ms")}
        return [alone, in_a_row]

    # --- digests -----------------------------------------------------------------------------------------------

    def digests(self) -> list[Row]:
        self._say("digests")
        key, num_pages = token_key(random_tokens(PREFIX_TOKENS)), PREFIX_TOKENS // 16
        chain_ms = timed_ms(lambda: DigestChain(b"f" * 32, Namespace(), 16).extend(key), 2000 * self._repeat)
        row = Row("keys and proofs, a page", Figure([value * 1e3 / num_pages for value in chain_ms.values], "us"))
        row.aim = "at most 1.5 us", row.ours.median <= 1.5
        return [row]

    def _service(self, **tiers: Any) -> Service:
        return Service(self.served, self._settings, **tiers)


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "shaped": Bench.shaped,
    "speed": Bench.speed,
    "misses": Bench.misses,
    "digests": Bench.digests,
}


def _at(rate: float) -> str:
    return f"{rate:g} MB/s" if rate else "unshaped"


def _with_aim(row: Row) -> Row:
    quicker = min(row.references.values(), key=lambda figure: figure.median).median
    limit = 1.15 * quicker
    row.aim = f"at most 1.15 x the quicker = {limit:,.0f} ms", row.ours.median <= limit
    return row


def _restore_ms(service: Service, prompt: list[int], tier: Tier = Tier.REMOTE) -> float:
    """TTFT of a prompt that is loaded as a whole, whatever the planner thinks."""
    assert service.mover is not None
    estimate: PrefillEstimate = service.mover.prefill
    service.mover.prefill = LoadsEverything()
    try:
        answer = service.ask(prompt)
    finally:
        service.mover.prefill = estimate
    assert answer.cached(tier) >= PREFIX_TOKENS - 2 * 16, "the device had too much of it"
    return answer.ttft_ms


def _store(service: Service, prompts: list[list[int]]) -> None:
    """Have prompts computed and written, one after the other: in a pool this small what runs comes before writes."""
    for prompt in prompts:
        service.ask(prompt)
        service.settle()


def _redis_read_ms(port: int) -> Callable[[], float]:
    """How long redis-py takes for the values of one prompt, in one pipeline."""
    client = Redis(port=port)
    keys = sorted(client.keys())[: PREFIX_TOKENS // 16]

    def read() -> float:
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        started_s = time.perf_counter()
        values = pipeline.execute()
        taken_s = time.perf_counter() - started_s
        assert all(values)
        return taken_s * 1e3

    return read


def _file_read_ms(file: Path) -> float:
    started_s = time.perf_counter()
    file.read_bytes()
    return (time.perf_counter() - started_s) * 1e3


if __name__ == "__main__":
    sys.exit(main())
