"""The soak: mixed traffic over two replicas while what they stand on goes down and comes back. `make soak`.

    0.20  Redis is killed, and started again 10 s later      (times as parts of the whole)
    0.45  replica 2 is asked to end with requests open, and started again
    0.70  Redis is killed, and started again 10 s later

Clients hold chats and ask about documents, half of them as streams. They try again on the other replica when they are
refused with UNAVAILABLE or RESOURCE_EXHAUSTED; any other end of a call is a failure. Some threads are private (a salt
of their own), which keeps new pages coming. Every answer is compared with a stored one. Exit code 0 if all checks hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from bench.soak_questions import MAX_TOKENS, Question, Thread, stored_threads
from deploy.local.topology import Replica, Topology
from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.bench.figures import machine
from prefixcache.client import AsyncClient, RequestFailed

RESULTS = Path(__file__).with_name("results")
REFUSED_BY_DESIGN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
RETRY_LIMIT_S = 120.0
REQUEST_TIMEOUT_S = 120.0
SAMPLE_INTERVAL_S = 2.0
SCRAPE_TIMEOUT_S, IDLE_LIMIT_S = 15.0, 60.0
PRIVATE_SHARE = 0.25
ELSEWHERE_SHARE = 0.25
THINK_S = 1.0
# Memory counts from when pools and kernel caches have filled; then it may move by this.
WARM_UP_SHARE, GROWTH_LIMIT_BYTES = 0.4, 64 * 2**20
TIERS = ("device", "host", "disk", "remote")

Samples = dict[str, float]
Life = tuple[str, int]
"""A replica's name, and how many times it had been started."""


@dataclass
class Totals:
    """What clients were told, for one life of one replica."""

    replies: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: Counter[str] = field(default_factory=Counter)

    def add(self, usage: pb.Usage) -> None:
        """Count one reply."""
        self.replies += 1
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        for tier in TIERS:
            self.cached[tier] += getattr(usage.cached_tokens_by_tier, tier)

    def as_samples(self) -> Samples:
        """The same, under the names of the server's counters."""
        counts = {
            'prefixcache_requests_total{outcome="ok"}': self.replies,
            "prefixcache_prompt_tokens_total": self.prompt_tokens,
            "prefixcache_generated_tokens_total": self.completion_tokens,
        }
        counts |= {f'prefixcache_cached_tokens_total{{tier="{tier}"}}': self.cached[tier] for tier in TIERS}
        return {name: float(count) for name, count in counts.items()}


class Soak:
    """One run: clients, disturbances, and what was seen. Event loop only."""

    def __init__(self, topology: Topology, threads: Sequence[Thread], duration_s: float, seed: int) -> None:
        self._topology = topology
        self._threads = threads
        self._duration_s = duration_s
        self._seed = seed
        self._started = time.monotonic()
        self.totals: dict[Life, Totals] = {}
        self.final: dict[Life, Samples] = {}
        self.told_before: dict[Life, Samples] = {}  # what clients had been told when `final` of an ended life was read
        self.memory: dict[Life, list[tuple[float, int]]] = {}
        self.refused: Counter[str] = Counter()
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self.events: list[tuple[float, str]] = []
        self.ttft_ms: list[float] = []
        self.kinds: Counter[str] = Counter()
        self.num_compared_tokens = 0
        self.exit_codes: list[int] = []

    @property
    def elapsed_s(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._started

    async def run(self, num_clients: int) -> None:
        """Returns when the time is over, every call has ended and the last counters have been read."""
        sampling = asyncio.create_task(self._sample_memory())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._disturb())
            for index in range(num_clients):
                group.create_task(self._client(index))
        sampling.cancel()
        for replica in self._topology.replicas:
            self.final[_life(replica)] = await _until_idle(replica)

    async def _client(self, index: int) -> None:
        chance = random.Random(self._seed * 1000 + index)
        kind = ("chat", "document")[index % 2]
        own = [thread for thread in self._threads if thread.kind == kind]
        clients = [AsyncClient(replica.address) for replica in self._topology.replicas]
        try:
            while self.elapsed_s < self._duration_s:
                thread = chance.choice(own)
                salt = f"{index}-{chance.random()}" if chance.random() < PRIVATE_SHARE else ""
                home = index // 2 % 2
                for question in thread.questions:
                    target = 1 - home if chance.random() < ELSEWHERE_SHARE else home
                    await self._ask(clients, target, question, kind, salt)
                    await asyncio.sleep(chance.uniform(0, THINK_S))
                    if self.elapsed_s > self._duration_s:
                        break
        finally:
            for client in clients:
                await client.close()

    async def _ask(self, clients: Sequence[AsyncClient], target: int, question: Question, kind: str, salt: str) -> None:
        """One request, tried again where it is refused."""
        give_up_s = self.elapsed_s + RETRY_LIMIT_S
        self.kinds[kind] += 1
        while True:
            try:
                answer, usage = await self._call(clients[target], question, kind, salt)
                break
            except RequestFailed as error:
                if error.code not in REFUSED_BY_DESIGN or self.elapsed_s > give_up_s:
                    self.failed.append(f"{self.elapsed_s:.1f} s: {error}")
                    return
                self.refused[error.code.name] += 1
                await asyncio.sleep((error.retry_after_ms or 100) / 1e3)
                target = 1 - target
        life = _life(self._topology.replicas[target])
        self.totals.setdefault(life, Totals()).add(usage)
        self.num_compared_tokens += len(question.answer)
        if problem := _problem(question, answer, usage):
            self.wrong.append(f"{self.elapsed_s:.1f} s, {life[0]}, {kind}: {problem}")

    async def _call(self, client: AsyncClient, question: Question, kind: str, salt: str) -> tuple[list[int], pb.Usage]:
        options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "cache_salt": salt}
        options |= {"token_ids": question.prompt, "timeout_s": REQUEST_TIMEOUT_S}
        if kind == "chat":
            reply = await client.complete(**options)
            return list(reply.samples[0].token_ids), reply.usage
        answer: list[int] = []
        usage = pb.Usage()
        sent = time.perf_counter()
        async for delta in client.generate(**options):
            if not answer and delta.token_ids:
                self.ttft_ms.append((time.perf_counter() - sent) * 1e3)
            answer += delta.token_ids
            usage = delta.usage
        return answer, usage

    # --- what goes wrong on purpose --------------------------------------------------------------------------------

    async def _disturb(self) -> None:
        outage_s = min(10.0, self._duration_s / 10)
        await self._at(0.20)
        await self._lose_redis(outage_s)
        await self._at(0.45)
        await self._restart(self._topology.replicas[1])
        await self._at(0.70)
        await self._lose_redis(outage_s)

    async def _at(self, part: float) -> None:
        await asyncio.sleep(max(0.0, part * self._duration_s - self.elapsed_s))

    async def _lose_redis(self, outage_s: float) -> None:
        self._note("Redis killed")
        await asyncio.to_thread(self._topology.redis.kill)
        await asyncio.sleep(outage_s)
        await asyncio.to_thread(self._topology.redis.start)
        self._note("Redis back, empty")

    async def _restart(self, replica: Replica) -> None:
        await self._read_counters(replica)
        self._note(f"{replica.name} gets SIGTERM")
        stopping = asyncio.create_task(asyncio.to_thread(replica.stop))
        while not stopping.done():  # as it drains they change for the last time
            await self._read_counters(replica)
            await asyncio.sleep(0.02)
        self.exit_codes.append(stopping.result())
        self._note(f"{replica.name} ended with exit code {stopping.result()}")
        replica.start()
        await asyncio.to_thread(replica.wait_until_ready)
        self._note(f"{replica.name} serves again")

    async def _read_counters(self, replica: Replica) -> None:
        life = _life(replica)
        told = self.totals[life].as_samples() if life in self.totals else {}
        if samples := await asyncio.to_thread(_scrape, replica):
            self.final[life], self.told_before[life] = samples, told

    def _note(self, event: str) -> None:
        self.events.append((round(self.elapsed_s, 1), event))
        print(f"{self.elapsed_s:6.1f} s  {event}", file=sys.stderr, flush=True)

    async def _sample_memory(self) -> None:
        while True:
            for replica in self._topology.replicas:
                try:
                    num_bytes = psutil.Process(replica.pid).memory_full_info().uss  # without pages of mapped files
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
                self.memory.setdefault(_life(replica), []).append((self.elapsed_s, num_bytes))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    # --- what is concluded -------------------------------------------------------------------------------------------

    def checks(self) -> list[tuple[str, bool, str]]:
        """Each promise, whether it held, and the figures behind it."""
        differences = [
            f"{life[0]}: {name} {value:g} told, {self.final.get(life, {}).get(name, 0):g} counted"
            for life, totals in self.totals.items()
            for name, value in totals.as_samples().items()
            # nobody can read the counters of a process that has ended: its last answers may be told and not read
            if not self.told_before.get(life, {}).get(name, value) <= self.final.get(life, {}).get(name, 0) <= value
        ]
        left = [line for life in map(_life, self._topology.replicas) for line in _left_over(life, self.final[life])]
        growth = growth_of([size for _, size in self.memory["replica-1", 1]])  # the replica that ran through
        num_replies = sum(totals.replies for totals in self.totals.values())
        return [
            (
                "wrong answers",
                not self.wrong,
                f"{len(self.wrong)} of {num_replies:,}, {self.num_compared_tokens:,} tokens",
            ),
            ("failed requests", not self.failed, f"{len(self.failed)}"),
            ("replica 2 drained", self.exit_codes == [0], f"exit code {self.exit_codes}"),
            ("usage = counters", not differences, "; ".join(differences) or f"{len(self.totals)} lives, to the token"),
            ("idle at the end", not left, "; ".join(left) or "no page in use, nobody waits or runs"),
            (
                "memory flat",
                growth <= GROWTH_LIMIT_BYTES,
                f"{growth / 2**20:+.1f} MiB from {WARM_UP_SHARE:.0%} of the run to its end, replica 1, private pages",
            ),
        ]

    def cached_tokens(self) -> Counter[str]:
        """Cached prompt tokens by tier, as clients were told."""
        return sum((totals.cached for totals in self.totals.values()), Counter())


def growth_of(sizes: Sequence[int]) -> float:
    """How much memory grew after the warm-up: the median of the last tenth of the samples less that of an earlier one.

    Tenths by count, not by time: on a busy machine samples come at uneven times.
    """
    tenth = max(1, len(sizes) // 10)
    warmed_up = int(WARM_UP_SHARE * len(sizes))
    return statistics.median(sizes[-tenth:]) - statistics.median(sizes[warmed_up : warmed_up + tenth])


def _life(replica: Replica) -> Life:
    return replica.name, replica.num_starts


def _problem(question: Question, answer: Sequence[int], usage: pb.Usage) -> str | None:
    expected = question.answer
    if list(answer[: len(expected)]) != expected or (question.is_whole and len(answer) != len(expected)):
        return f"{list(answer)} instead of {expected}{'' if question.is_whole else ' …'}"
    if usage.prompt_tokens != len(question.prompt) or usage.completion_tokens != len(answer):
        return f"usage says {usage.prompt_tokens} + {usage.completion_tokens} tokens"
    if usage.cached_tokens != sum(getattr(usage.cached_tokens_by_tier, tier) for tier in TIERS):
        return "cached_tokens is not the sum of its parts"
    return None


def _left_over(life: Life, samples: Samples) -> Iterable[str]:
    in_use = 'prefixcache_pages{state="in_use",tier="device"}'
    if not samples:
        return [f"{life[0]} does not answer"]
    names = (in_use, "prefixcache_queue_depth", "prefixcache_running_sequences")
    return [f"{life[0]}: {name} is {samples[name]:g}" for name in names if samples[name]]


async def _until_idle(replica: Replica) -> Samples:
    """Reads the counters once nothing runs, waiting for that within bounds; empty if the replica never answers."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    latest: Samples = {}
    while time.monotonic() < deadline:
        scraped = await asyncio.to_thread(_scrape, replica)
        latest = scraped or latest
        if latest and not _left_over(_life(replica), latest):
            break
        await asyncio.sleep(0.2)
    return latest


def _scrape(replica: Replica) -> Samples | None:
    """All samples by name and labels; None if nobody answers."""
    try:
        with urllib.request.urlopen(replica.metrics_url, timeout=SCRAPE_TIMEOUT_S) as response:
            text = response.read().decode()
    except (urllib.error.URLError, OSError):
        return None
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def as_json(soak: Soak, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was seen."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "duration_s": arguments.duration,
        "clients": arguments.clients,
        "requests": dict(soak.kinds),
        "replies": {f"{name} #{start}": totals.as_samples() for (name, start), totals in soak.totals.items()},
        "cached_tokens": dict(soak.cached_tokens()),
        "refused_and_tried_again": dict(soak.refused),
        "failed": soak.failed,
        "wrong": soak.wrong,
        "events": soak.events,
        "ttft_ms": {f"p{part}": round(value) for part, value in zip((50, 95), _percentiles(soak.ttft_ms), strict=True)},
        "memory_mib": {
            f"{name} #{start}": [(round(at, 1), round(size / 2**20, 1)) for at, size in series]
            for (name, start), series in soak.memory.items()
        },
        "checks": [{"what": what, "holds": holds, "figures": figures} for what, holds, figures in soak.checks()],
    }


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values, n=20)
    return statistics.median(values), cuts[-1]


def table(soak: Soak) -> Table:
    """The checks, and what happened."""
    result = Table(title="Soak", show_header=False)
    for at, event in soak.events:
        result.add_row(f"{at:,.0f} s", event, "")
    result.add_section()
    totals = list(soak.totals.values())
    prompt_tokens = sum(total.prompt_tokens for total in totals)
    cached = soak.cached_tokens()
    result.add_row("requests", ", ".join(f"{count:,} {kind}" for kind, count in soak.kinds.items()), "")
    result.add_row("tried again", ", ".join(f"{n:,} {code}" for code, n in soak.refused.items()) or "none", "")
    result.add_row("prompt tokens", f"{prompt_tokens:,}, cached {cached.total() / max(1, prompt_tokens):.0%}", "")
    result.add_row("cached on", ", ".join(f"{tier} {cached[tier]:,}" for tier in TIERS if cached[tier]), "")
    p50, p95 = _percentiles(soak.ttft_ms)
    result.add_row("TTFT, documents", f"median {p50:,.0f} ms, 95 % below {p95:,.0f} ms", "")
    result.add_section()
    for what, holds, figures in soak.checks():
        result.add_row(what, figures, "ok" if holds else "[red]FAILED[/red]")
    return result


def main() -> int:
    """Run it, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=600.0, help="seconds of traffic")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", help="default: the server's default model")
    parser.add_argument("--document-tokens", type=int, default=700)
    parser.add_argument("--cache-tokens", type=int, default=8192, help="of each replica: small, so that tiers are used")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    threads = stored_threads(arguments.model, arguments.document_tokens, arguments.results, console.print)
    flags = ["--dtype", "float32", "--threads", "1", "--cache-tokens", str(arguments.cache_tokens)]
    flags += ["--max-num-seqs", "8", "--max-queue", "6", "--disk-size", "256MiB", "--log-format", "json"]
    flags += ["--model", arguments.model] if arguments.model else []
    with tempfile.TemporaryDirectory(prefix="prefixcache-soak-") as folder:
        console.print(f"Starting two replicas, Redis and Prometheus, for {arguments.duration:g} s of traffic")
        with Topology(Path(folder), *flags, redis_memory="256mb") as topology:
            soak = Soak(topology, threads, arguments.duration, arguments.seed)
            try:
                asyncio.run(soak.run(arguments.clients))
            finally:
                for log in Path(folder).glob("*.log"):
                    shutil.copy(log, arguments.results / f"soak-{log.name}")
            result = as_json(soak, arguments)
    path = arguments.results / f"soak-{result['date'].replace(':', '')}.json"
    path.write_text(json.dumps(result, indent=1))
    Console().print(table(soak))
    for line in [*soak.wrong[:5], *soak.failed[:5]]:
        console.print(line, markup=False, highlight=False)
    console.print(f"Written to {path}")
    return 0 if all(check["holds"] for check in result["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
