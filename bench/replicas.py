"""How a fleet of replicas does, by routing and with or without a shared store: a trace replayed over 1 to 64 of them.

    pip install --group bench
    python -m bench.service_times --redis redis://127.0.0.1:6399 > service-times.json
    python -m bench.replicas conversation_trace.jsonl --times service-times.json \\
        --plot docs/images/replicas.svg > replicas.json

The trace is one of those published with Mooncake (FAST '25), `conversation_trace.jsonl` in the repository
kvcache-ai/Mooncake: 12,031 requests of a chat service within an hour, as blocks of 512 tokens. It is stretched or
squeezed in time so that every replica has the same work, however many there are. Prints JSON; a table goes to
standard error. Takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bench.fleet_model import Fleet, Outcome, at_load, read_trace, replay, work_s
from bench.plots import COLORS, panels, save
from bench.replica_model import Request, ServiceTimes
from bench.routing_model import ByEvents, PrefixHash, RoundRobin, Route

ROUTES: dict[str, Callable[[], Route]] = {"events": ByEvents, "prefix hash": PrefixHash, "round robin": RoundRobin}
SIZES = (1, 2, 4, 8, 16, 32, 64)
BLOCK_TOKENS = 512


class Study:
    """Replays one trace over fleets of all sizes.

    Args:
        requests: The trace.
        times: One replica's, as measured.
        load: How busy a replica without a cache would be.
        device_tokens: What each replica's device holds.
        store_tokens: What the store holds.
        store_bytes_per_s: Most that one master of it gives and takes.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        times: ServiceTimes,
        load: float,
        device_tokens: int,
        store_tokens: int,
        store_bytes_per_s: float,
    ) -> None:
        self._requests = requests
        self._times = times
        self._load = load
        self._device_tokens = device_tokens
        self._store_tokens = store_tokens
        self._store_bytes_per_s = store_bytes_per_s

    def rows(self, route: str, *, with_store: bool, speedup: float = 1.0, num_shards: int = 1) -> list[dict[str, Any]]:
        """Replay with one kind of routing; `speedup` divides the time of all computing, but not that of the store."""
        times = faster(self._times, speedup)
        rows = []
        for num_replicas in SIZES:
            fleet = Fleet(
                num_replicas,
                device_tokens=self._device_tokens,
                store_tokens=self._store_tokens * with_store,
                block_tokens=BLOCK_TOKENS,
                store_bytes_per_s=self._store_bytes_per_s,
                num_shards=num_shards,
            )
            requests = at_load(self._requests, times, num_replicas, self._load)
            outcome = replay(requests, times, fleet, ROUTES[route]())
            given = {"route": route, "store": with_store, "speedup": speedup, "shards": num_shards}
            rows.append({**given, "replicas": num_replicas, **figures(outcome)})
            print(rows[-1], file=sys.stderr)
        return rows


def faster(times: ServiceTimes, speedup: float) -> ServiceTimes:
    computing = ("prefill_token_s", "prefill_pair_s", "decode_step_s", "decode_request_s", "decode_context_s")
    return replace(times, **{name: getattr(times, name) / speedup for name in computing})


def figures(outcome: Outcome) -> dict[str, float]:
    return {
        "device_hit_rate": round(outcome.device_hit_rate, 4),
        "store_hit_rate": round(outcome.store_hit_rate, 4),
        "ttft_p50_s": round(outcome.ttft_percentile_s(50), 3),
        "ttft_p90_s": round(outcome.ttft_percentile_s(90), 3),
        "ttft_p99_s": round(outcome.ttft_percentile_s(99), 3),
        "store_read_mb_per_s": round(outcome.store_read_bytes_per_s / 1e6, 2),
        "store_write_mb_per_s": round(outcome.store_write_bytes_per_s / 1e6, 2),
        "unwritten_share": round(outcome.unwritten_share, 4),
    }


def plot(rows: list[dict[str, Any]], fast_rows: list[dict[str, Any]], store_mb_per_s: float, path: Path) -> None:
    figure, axes = panels(2, 2)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES, [str(size) for size in SIZES])
        axis.set_xlabel("replicas")
    _lines(axes[0], rows, "hit rate, of all prompt tokens", lambda row: row["device_hit_rate"] + row["store_hit_rate"])
    axes[0].set_ylim(bottom=0)
    for axis, percent in ((axes[1], 50), (axes[2], 90)):
        title = f"TTFT, {'median' if percent == 50 else '90th percentile'}, s"
        _lines(axis, rows, title, itemgetter(f"ttft_p{percent}_s"))
        axis.set_ylim(bottom=0)
    axes[1].legend(title="solid: with Redis, dotted: without")
    axis = axes[3]
    axis.set_title("Redis, read + written, MB/s")
    speedup = fast_rows[0]["speedup"]
    stored = [row for row in rows if row["store"] and row["route"] == "events"]
    one, four = ([row for row in fast_rows if row["shards"] == shards] for shards in (1, 4))
    labels = ("as measured", f"{speedup:g} times as fast", f"{speedup:g} times as fast, 4 shards")
    for own, label in zip((stored, one, four), labels, strict=True):
        mb_per_s = [row["store_read_mb_per_s"] + row["store_write_mb_per_s"] for row in own]
        axis.plot([row["replicas"] for row in own], mb_per_s, marker="o", label=label)
    axis.axhline(store_mb_per_s, color="black", linestyle="--", label="most that one Redis gives")
    axis.set_yscale("log")
    axis.set_ylim(bottom=0.03)  # room for the legend
    axis.legend(loc="lower right")
    save(figure, path)


def _lines(axis: Axes, rows: list[dict[str, Any]], title: str, value: Callable[[dict[str, Any]], float]) -> None:
    axis.set_title(title)
    for index, route in enumerate(ROUTES):
        for with_store in (True, False):
            own = [row for row in rows if row["route"] == route and row["store"] == with_store]
            axis.plot(
                [row["replicas"] for row in own],
                [value(row) for row in own],
                marker="o",
                color=COLORS[index],
                linestyle="-" if with_store else ":",
                label=route if with_store else None,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--times", type=Path, required=True, help="what bench.service_times printed")
    parser.add_argument("--load", type=float, default=0.5, help="how busy a replica without a cache would be")
    parser.add_argument("--device-tokens", type=int, default=2**18, help="what each replica's device holds")
    parser.add_argument("--store-tokens", type=int, default=2**22, help="what Redis holds")
    parser.add_argument("--store-mb-per-s", type=float, default=1250.0, help="of one Redis; 1250 is a 10 Gbit/s link")
    parser.add_argument("--speedup", type=float, default=20.0, help="of the faster replica in the last panel")
    parser.add_argument("--max-prompt-tokens", type=int, default=2**15, help="longer prompts are left out")
    parser.add_argument("--plot", type=Path, metavar="SVG")
    arguments = parser.parse_args()
    times = ServiceTimes(**json.loads(arguments.times.read_text(encoding="utf-8"))["times"])
    requests = read_trace(arguments.trace, arguments.max_prompt_tokens)
    study = Study(
        requests,
        times,
        arguments.load,
        arguments.device_tokens,
        arguments.store_tokens,
        arguments.store_mb_per_s * 1e6,
    )
    rows = [row for route in ROUTES for with_store in (False, True) for row in study.rows(route, with_store=with_store)]
    fast_rows = [
        row
        for num_shards in (1, 4)
        for row in study.rows("events", with_store=True, speedup=arguments.speedup, num_shards=num_shards)
    ]
    result = {
        "times": asdict(times),
        "load": arguments.load,
        "device_tokens": arguments.device_tokens,
        "store_tokens": arguments.store_tokens,
        "store_mb_per_s": arguments.store_mb_per_s,
        "requests": len(requests),
        "mean_prompt_tokens": round(sum(request.num_tokens for request in requests) / len(requests)),
        "mean_work_s": round(work_s(requests, times) / len(requests), 2),
        "rows": rows + fast_rows,
    }
    json.dump(result, sys.stdout, indent=2)
    if arguments.plot:
        plot(rows, fast_rows, arguments.store_mb_per_s, arguments.plot)


if __name__ == "__main__":
    main()
