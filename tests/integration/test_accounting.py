"""Counters add up to what replies said, whatever happened on the way; and no client adds a series."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.client import AsyncClient, RequestFailed
from prefixcache.engine.engine import Engine
from prefixcache.engine.open_request import OpenRequest
from prefixcache.request import Tier
from tests.support.models import VOCAB_SIZE
from tests.support.wire import WireServer, eventually, wire_server

NUM_REQUESTS = 48
SHARED = [(7 * index + 3) % VOCAB_SIZE for index in range(40)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Client:
    """Sends requests, tries again where it is told to, gives some up, and keeps what came of it all."""

    def __init__(self, client: AsyncClient, chooser: random.Random) -> None:
        self._client = client
        self._chooser = chooser
        self.replies: list[pb.CompleteResponse] = []
        self.num_refused = self.num_cancelled = 0

    async def send(self) -> None:
        chooser = self._chooser
        prompt = SHARED[: chooser.randint(0, 40)] + chooser.choices(range(3, VOCAB_SIZE), k=chooser.randint(1, 20))
        options = {"max_tokens": chooser.randint(40, 90), "use_cache": chooser.random() < 0.9, **GREEDY}
        if chooser.random() < 0.25:
            options["max_tokens"] = 300  # far from its end when it is given up
            await self._cancel(prompt, chooser.randint(1, 5), options)
            return
        while True:
            try:
                self.replies.append(
                    await self._client.complete(token_ids=prompt, n=chooser.choice([1, 1, 2]), **options)
                )
                return
            except RequestFailed as error:
                await self._note_refusal(error)

    async def _cancel(self, prompt: list[int], num_deltas: int, options: dict[str, Any]) -> None:
        while True:
            try:
                async with aclosing(self._client.generate(token_ids=prompt, **options)) as stream:
                    async for _ in stream:
                        num_deltas -= 1
                        if num_deltas == 0:
                            self.num_cancelled += 1
                            return
            except RequestFailed as error:
                await self._note_refusal(error)

    async def _note_refusal(self, error: RequestFailed) -> None:
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        self.num_refused += 1
        await asyncio.sleep(0.02)


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OpenRequest]]:
    """Every request that the engine has accepted, to know what became of those that got no last message."""
    accepted: list[OpenRequest] = []
    submit = Engine.submit

    def submit_and_note(engine: Engine, *arguments: Any) -> OpenRequest:
        accepted.append(submit(engine, *arguments))
        return accepted[-1]

    monkeypatch.setattr(Engine, "submit", submit_and_note)
    return accepted


async def test_sums_of_usage_are_the_counters_with_retries_preemptions_and_cancels(handles: list[OpenRequest]):
    async with wire_server(cache_tokens=24 * 16, max_num_seqs=8, max_queue=4) as server:
        async with AsyncClient(server.target) as channel:
            client = Client(channel, random.Random(5))
            with server.slowed(0.002):  # the engine must not run far ahead of the clients, which share one loop
                await asyncio.gather(*(client.send() for _ in range(NUM_REQUESTS)))
            await eventually(lambda: server.server.engine.num_open == 0)
            await eventually(lambda: server.value("requests_total", outcome="cancelled") == client.num_cancelled)

        assert client.num_refused > 0
        assert client.num_cancelled > 0
        assert server.value("preemptions_total") > 0
        counted = [handle.usage() for handle in handles if handle.first_token_s is not None]
        finished = [handle.usage() for handle in handles if handle.num_unfinished == 0]
        assert len(finished) == len(client.replies) == server.value("requests_total", outcome="ok")
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            replied = sum(getattr(reply.usage, name) for reply in client.replies)
            assert replied == sum(getattr(usage, name) for usage in finished), name

        assert server.value("prompt_tokens_total") == sum(usage.prompt_tokens for usage in counted)
        assert server.value("generated_tokens_total") == sum(usage.completion_tokens for usage in counted)
        for tier in Tier:
            by_tier = sum(usage.cached_tokens_by_tier.get(tier, 0) for usage in counted)
            assert server.value("cached_tokens_total", tier=tier) == by_tier
        hits = sum(server.value("ttft_seconds_count", hit=hit) for hit in ("cold", "partial", "full"))
        assert hits == len(counted)
        assert server.value("queue_seconds_count") == sum(handle.admitted_s is not None for handle in handles)
        assert server.value("requests_total", outcome="overloaded") == client.num_refused
        assert 0 < server.value("prefill_seconds_total") <= server.value("step_seconds_sum")
        assert server.value("batch_tokens_sum") >= server.value("prefilled_tokens_total")


def series_of(server: WireServer) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    return {
        (sample.name, frozenset(sample.labels.items()))
        for family in server.metrics.registry.collect()
        for sample in family.samples
    }


async def test_nothing_that_clients_send_becomes_a_series():
    async with wire_server() as server, AsyncClient(server.target) as client:
        before, chooser = series_of(server), random.Random(6)
        for number in range(100):
            odd = f"{number}-{chooser.random()}"
            options = {"request_id": odd, "cache_salt": odd, "stop": [odd], "seed": number}
            await client.complete(token_ids=[5, 6, number], max_tokens=1, **options)
            with pytest.raises(RequestFailed):
                await client.complete(token_ids=[VOCAB_SIZE + number], max_tokens=1, request_id=odd)
        assert series_of(server) == before
