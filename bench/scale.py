"""How the tree scales: time of match, insert and evict, and bytes per node, from 100 to 1,000,000 nodes.

    documents   many documents of 2,048 tokens, each asked eight questions that branch off somewhere in it
    one prompt  one system prompt of 2,048 tokens, and every conversation right below it: one node as wide as the tree

Prints JSON; with --plot also draws it. Every size runs in a process of its own, so that memory can be told apart.
Takes about three minutes and 4 GB for a million nodes.

    pip install --group bench
    python -m bench.scale --plot docs/images/tree-scale.svg > tree-scale.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.plots import panels, save
from prefixcache.bench.figures import machine
from prefixcache.request import Namespace
from prefixcache.tree.eviction import LeastRecentlyUsed
from prefixcache.tree.node import BYTES_PER_TOKEN
from prefixcache.tree.radix import RadixTree

PAGE_SIZE = 16
PAGE_BYTES = PAGE_SIZE * BYTES_PER_TOKEN
NAMESPACE = Namespace()
SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
DOCUMENT_PAGES = 128
QUESTIONS = 8
MAX_TAIL_PAGES = 8
NUM_TIMED = 2_000

Prompts = Iterator[bytes]


def documents(source: random.Random) -> Prompts:
    """Questions about documents, eight about one before the next one comes."""
    while True:
        document = source.randbytes(DOCUMENT_PAGES * PAGE_BYTES)
        for _ in range(QUESTIONS):
            shared = source.randint(1, DOCUMENT_PAGES)
            yield document[: shared * PAGE_BYTES] + source.randbytes(source.randint(1, MAX_TAIL_PAGES) * PAGE_BYTES)


def one_prompt(source: random.Random) -> Prompts:
    """Conversations that have only their system prompt in common."""
    system = source.randbytes(DOCUMENT_PAGES * PAGE_BYTES)
    while True:
        yield system + source.randbytes(source.randint(1, MAX_TAIL_PAGES) * PAGE_BYTES)


SHAPES: dict[str, Callable[[random.Random], Prompts]] = {"documents": documents, "one prompt": one_prompt}


def insert(tree: RadixTree, key: bytes) -> None:
    """Find what is known of a prompt and publish the rest, as a request does from its admission to its end."""
    match = tree.match(NAMESPACE, key)
    node = match.node or tree.root(NAMESPACE)
    if match.num_node_pages < len(node.pages):
        node = tree.split(node, match.num_node_pages)
    tree.pin(node)
    known = match.num_tokens // PAGE_SIZE
    pages = list(range(tree.num_pages, tree.num_pages + len(key) // PAGE_BYTES - known))
    if pages:
        node, _ = tree.extend(node, key[known * PAGE_BYTES :], pages, [])
    tree.unpin(node)


def measure(shape: str, num_nodes: int) -> dict[str, Any]:
    """Grow a tree and time what is done to it at its full size."""
    source = random.Random(0)
    prompts = SHAPES[shape](source)
    gc.collect()
    gc.freeze()  # as the server does: what was there before the tree is not walked again
    before = psutil.Process().memory_info().rss
    tree = RadixTree(PAGE_SIZE, LeastRecentlyUsed())
    kept: list[bytes] = []  # prompts from all of the tree's life
    while tree.num_nodes < num_nodes:
        key = next(prompts)
        insert(tree, key)
        if source.random() < 1.2 * NUM_TIMED / num_nodes or num_nodes <= NUM_TIMED:
            kept.append(key)
    kept_bytes = sum(map(sys.getsizeof, kept))
    num_bytes = psutil.Process().memory_info().rss - before - kept_bytes
    nodes, pages = tree.num_nodes, tree.num_pages
    known = source.choices(kept, k=NUM_TIMED)
    started = time.perf_counter()
    gc.collect()
    collection_s = time.perf_counter() - started
    matches = [timed_us(partial(tree.match, NAMESPACE, key)) for key in known]
    inserts, evictions = [], []
    for key in itertools.islice(prompts, NUM_TIMED):  # as in a full cache: what comes in makes something else go
        before_pages = tree.num_pages
        inserts.append(timed_us(partial(insert, tree, key)))
        num_pages = tree.num_pages - before_pages
        evictions.append(timed_us(partial(tree.evict, num_pages)))
    return {
        "shape": shape,
        "nodes": nodes,
        "pages": pages,
        # of a small tree it is lost in what else the process takes
        "bytes_per_node": round(num_bytes / nodes) if nodes >= 10_000 else None,
        "match_us": spread(matches),
        "insert_us": spread(inserts),
        "evict_us": spread(evictions),
        "full_collection_s": round(collection_s, 4),
    }


def timed_us(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


def spread(values: list[float]) -> dict[str, float]:
    values.sort()
    return {
        "median": round(statistics.median(values), 2),
        "p99": round(values[int(len(values) * 0.99)], 2),
        "max": round(values[-1], 2),
        "runs": len(values),
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = panels(4)
    for axis, name in zip(axes, ("match", "insert", "evict"), strict=False):
        axis.set(title=f"{name}, µs: median and 99th percentile", xscale="log", xlabel="nodes")
        for shape in SHAPES:
            own = [row for row in rows if row["shape"] == shape]
            nodes = [row["nodes"] for row in own]
            (line,) = axis.plot(nodes, [row[f"{name}_us"]["median"] for row in own], marker="o", label=shape)
            axis.plot(nodes, [row[f"{name}_us"]["p99"] for row in own], linestyle=":", color=line.get_color())
        axis.set_ylim(bottom=0)
    axes[3].set(title="bytes per node", xscale="log", xlabel="nodes")
    for shape in SHAPES:
        own = [row for row in rows if row["shape"] == shape and row["bytes_per_node"]]
        axes[3].plot([row["nodes"] for row in own], [row["bytes_per_node"] for row in own], marker="o", label=shape)
    axes[3].set_ylim(bottom=0)
    axes[0].legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-nodes", type=int, default=SIZES[-1], help="leave out larger trees")
    parser.add_argument("--plot", type=Path, metavar="SVG")
    arguments = parser.parse_args()
    rows = []
    for shape in SHAPES:
        for num_nodes in SIZES:
            if num_nodes <= arguments.max_nodes:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    rows.append(pool.apply(measure, (shape, num_nodes)))
                print(rows[-1], file=sys.stderr)
    json.dump({"machine": machine(), "rows": rows}, sys.stdout, indent=2)
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
