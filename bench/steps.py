"""What one step costs, without a server: against the context's length, and against the number of sequences.

    context   one sequence decodes a token, or computes a chunk of 256, behind 128 to 7,900 tokens
    batch     1 to 64 sequences decode a token each: behind 2,048 tokens that they share, and behind 256 of their own

The floor of a decode step is the time to read the weights once, at the bandwidth measured in the same run.
Prints JSON; with --plot also draws it. Takes the settings of `prefixcache serve`, such as --kernels and --dtype.

    pip install --group bench
    python -m bench.steps --plot docs/images/steps.svg > steps.json
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.plots import COLORS, panels, save
from prefixcache import app
from prefixcache.bench.bare import BareLoop, random_tokens
from prefixcache.bench.figures import Figure, machine, timed_ms
from prefixcache.config import add_settings_arguments, load_settings
from prefixcache.model.spec import DecoderSpec

CONTEXTS = (128, 512, 1024, 2048, 4096, 7900)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_UNSHARED = 16
CHUNK_TOKENS = 256
SHARED_TOKENS, OWN_TOKENS = 2048, 256
NUM_STEPS, NUM_CHUNKS = 15, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="where to draw it")
    add_settings_arguments(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    arguments.cache_tokens = 48_000
    settings = load_settings(arguments)
    served = app.load(settings, lambda line: print(line, file=sys.stderr))
    runner, cache = app.build_runner(served)
    loop = BareLoop(runner, cache, settings.batched_tokens(served.device.type))
    bandwidth = memory_bandwidth()
    result = {
        "machine": machine(),
        "model": served.describe(),
        "memory_gb_s": bandwidth,
        "weights_ms": num_weights_read(served.decoder.spec) * served.decoder.dtype.itemsize / bandwidth / 1e6,
        "context": context_rows(loop),
        "batch": batch_rows(loop),
    }
    print(json.dumps(result, indent=1))
    if arguments.plot is not None:
        draw(result, arguments.plot)


def context_rows(loop: BareLoop) -> list[dict[str, Any]]:
    text = random_tokens(max(CONTEXTS))
    rows = []
    for context in CONTEXTS:
        decode = loop.step_ms(text[:context], 1, NUM_STEPS, 1)
        chunk = loop.extension_ms(text[:context], CHUNK_TOKENS, NUM_CHUNKS)
        rows.append({"context": context, "decode": decode.as_json(), "chunk": chunk.as_json()})
        note(f"context {context}: decode {decode.median:.1f} ms, chunk {chunk.median:.0f} ms")
    return rows


def batch_rows(loop: BareLoop) -> list[dict[str, Any]]:
    prefix = random_tokens(SHARED_TOKENS)
    rows = []
    for batch in BATCHES:
        shared = loop.step_ms(prefix, batch, NUM_STEPS, 1)
        row = {"batch": batch, "shared": shared.as_json()}
        if batch <= MAX_UNSHARED:
            own = loop.step_ms([5], batch, NUM_STEPS, OWN_TOKENS)
            row["own"] = own.as_json()
        rows.append(row)
        note(f"batch {batch}: {shared.median:.1f} ms")
    return rows


def num_weights_read(spec: DecoderSpec) -> int:
    """Weights that a decode step multiplies with: all but the embedding, of which it reads one row."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * (attention + mlp) + spec.vocab_size * spec.hidden_size


def memory_bandwidth() -> float:
    """GB/s at which all threads together read memory."""
    data = torch.ones(2**26)
    figure: Figure = timed_ms(data.sum, 9)
    return data.nbytes / min(figure.values) / 1e6


def note(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def draw(result: dict[str, Any], path: Path) -> None:
    figure, (by_context, by_chunk, by_batch) = panels(3)
    contexts = [row["context"] for row in result["context"]]
    by_context.plot(contexts, [row["decode"]["median"] for row in result["context"]], "o-", label="decode step")
    by_context.axhline(result["weights_ms"], color=COLORS[1], linestyle="--", label="reading the weights once")
    by_context.set(title="One sequence", xlabel="tokens of context", ylabel="ms a step", ylim=(0, None))
    by_context.legend()
    rates = [CHUNK_TOKENS / row["chunk"]["median"] * 1e3 for row in result["context"]]
    by_chunk.plot(contexts, rates, "o-")
    by_chunk.set(
        title=f"A chunk of {CHUNK_TOKENS} tokens", xlabel="tokens before it", ylabel="tokens/s", ylim=(0, None)
    )
    for name, label in (("shared", f"{SHARED_TOKENS:,} tokens shared"), ("own", f"{OWN_TOKENS} tokens of their own")):
        rows = [row for row in result["batch"] if name in row]
        by_batch.plot([row["batch"] for row in rows], [row[name]["median"] for row in rows], "o-", label=label)
    by_batch.set(title="Decode step", xlabel="sequences", ylabel="ms a step", ylim=(0, None))
    by_batch.legend()
    save(figure, path)


if __name__ == "__main__":
    main()
