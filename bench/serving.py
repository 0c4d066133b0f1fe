"""Three things that only a running server shows.

    chat         TTFT of 7,500 known tokens sent as messages, against the same prompt sent as token ids
    tenants      TTFT of prompts warmed under another salt, against prompts that nobody has sent
    contention   ITL of one client while another process keeps one core busy, against ITL without it

Prints JSON and a table. Takes the settings of `prefixcache serve`.

    python -m bench.serving > serving.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from bench.workload import corpus
from prefixcache.bench.bare import random_tokens
from prefixcache.bench.figures import Figure, machine
from prefixcache.bench.over_grpc import ServiceBench
from prefixcache.bench.report import Row, table
from prefixcache.client import AsyncClient
from prefixcache.local_server import LocalServer

CHAT_TOKENS = 7_500
CHAT_TURNS = 12
CONTEXT_TOKENS = 2_048
NUM_TOKENS = 40
REPEAT = 15
CHAT_AIM_MS = 1.5
CONTENTION_AIM = 2.5
TENANT_PROMPTS, TENANT_PROMPT_TOKENS, TENANT_AIM = 30, 200, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, flags = parser.parse_known_args()
    with LocalServer(*flags) as server:
        rows = asyncio.run(measure(server.address))
    found = [row.as_json() for row in rows]
    print(json.dumps({"machine": machine(), "rows": found}, indent=1))
    Console(stderr=True, width=140).print(table(found))


async def measure(address: str) -> list[Row]:
    async with AsyncClient(address) as client:
        bench = ServiceBench(client)
        await bench.warm_up()
        return [await chat(client), await tenants(client), await contention(bench)]


async def chat(client: AsyncClient) -> Row:
    messages = await long_chat(client)
    ids = await client.tokenize(messages=messages)
    prompts: dict[str, dict[str, Any]] = {"messages": {"messages": messages}, "token ids": {"token_ids": ids}}
    times: dict[str, list[float]] = {name: [] for name in prompts}
    await ttft_ms(client, prompts["token ids"])
    for _ in range(REPEAT):
        for name, prompt in prompts.items():
            times[name].append(await ttft_ms(client, prompt))
    figures = {name: Figure(values, "ms") for name, values in times.items()}
    row = Row(f"TTFT, {len(ids)} known tokens as messages", figures["messages"], {"token ids": figures["token ids"]})
    extra = figures["messages"].median - figures["token ids"].median
    row.aim = f"at most token ids + {CHAT_AIM_MS} ms; it is {extra:.2f} ms", extra <= CHAT_AIM_MS
    return row


async def long_chat(client: AsyncClient) -> list[dict[str, str]]:
    """A conversation of about CHAT_TOKENS tokens of English that was never sent before."""
    text = corpus()
    start = random.randrange(len(text) // 2)
    num_chars = CHAT_TOKENS * 4
    while True:
        piece = num_chars // CHAT_TURNS
        turns = [text[start + turn * piece : start + (turn + 1) * piece] for turn in range(CHAT_TURNS)]
        messages = [
            {"role": "user" if turn % 2 == 0 else "assistant", "content": content} for turn, content in enumerate(turns)
        ]
        num_tokens = len(await client.tokenize(messages=messages))
        if num_tokens <= CHAT_TOKENS:
            return messages
        num_chars = int(num_chars * CHAT_TOKENS / num_tokens * 0.99)


async def ttft_ms(client: AsyncClient, prompt: dict[str, Any]) -> float:
    started = time.perf_counter()
    async for _ in client.generate(max_tokens=1, temperature=0.0, **prompt):
        return (time.perf_counter() - started) * 1e3
    raise AssertionError("no answer")


async def tenants(client: AsyncClient) -> Row:
    prompts = {
        name: [random_tokens(TENANT_PROMPT_TOKENS) for _ in range(TENANT_PROMPTS)] for name in ("warmed", "never sent")
    }
    for prompt in prompts["warmed"]:
        await ttft_ms(client, {"token_ids": prompt, "cache_salt": "a"})
    times: dict[str, list[float]] = {name: [] for name in prompts}
    questions = [(name, prompt) for name, some in prompts.items() for prompt in some]
    random.shuffle(questions)
    for name, prompt in questions:
        times[name].append(await ttft_ms(client, {"token_ids": prompt, "cache_salt": "b"}))
    own = [await ttft_ms(client, {"token_ids": prompt, "cache_salt": "a"}) for prompt in prompts["warmed"]]
    row = Row(
        f"TTFT, {TENANT_PROMPT_TOKENS} tokens warmed under another salt",
        Figure(times["warmed"], "ms"),
        {"never sent": Figure(times["never sent"], "ms"), "its own again": Figure(own, "ms")},
    )
    difference = row.ratio("never sent") - 1
    row.aim = f"within {TENANT_AIM:.0%} of never sent; it is {difference:+.0%}", abs(difference) <= TENANT_AIM
    return row


async def contention(bench: ServiceBench) -> Row:
    prompt = random_tokens(CONTEXT_TOKENS)
    await bench.ask(prompt, 1)
    quiet = await bench.itl(prompt, NUM_TOKENS)
    with busy_core():
        await asyncio.sleep(1)  # until the scheduler has settled where it runs
        busy = await bench.itl(prompt, NUM_TOKENS)
    row = Row(f"ITL, {CONTEXT_TOKENS} tokens, one core kept busy", busy, {"quiet": quiet})
    row.aim = f"below {CONTENTION_AIM} x quiet", row.ratio("quiet") < CONTENTION_AIM
    return row


@contextmanager
def busy_core() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
