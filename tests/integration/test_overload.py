"""What is refused at once when there is too much to do, over the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixcache.client import AsyncClient, RequestFailed
from prefixcache.engine.scheduler import Work
from prefixcache.server.api_keys import key_digest, new_key
from tests.support.models import VOCAB_SIZE
from tests.support.wire import eventually, wire_server

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Tokens that share no prefix with another seed's."""
    return [(seed * 31 + index * (seed + 7)) % (VOCAB_SIZE - 3) + 3 for index in range(num_tokens)]


async def refusal_of(call: Any) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        await call
    return caught.value


async def test_a_prompt_that_takes_longer_than_its_deadline_is_not_begun():
    async with wire_server() as server, AsyncClient(server.target) as client:
        with server.slowed(2.0):
            for seed in (1, 2, 3):  # teach it how long that takes
                await client.complete(token_ids=prompt(seed, 300), max_tokens=1, timeout_s=30, **GREEDY)
        prefilled = server.value("prefilled_tokens_total")
        refusal = await refusal_of(client.complete(token_ids=prompt(9, 400), max_tokens=1, timeout_s=1.5, **GREEDY))
        assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "cannot be met: what is not cached of the prompt takes " in refusal.message
        assert refusal.retry_after_ms is None
        assert server.value("prefilled_tokens_total") == prefilled
        assert server.value("requests_total", outcome="overloaded") == 1
        assert server.server.engine.num_open == 0
        # what is cached takes next to nothing
        await client.complete(token_ids=prompt(3, 300), max_tokens=1, timeout_s=1.5, **GREEDY)


async def test_a_queue_that_is_too_long_for_a_deadline_says_when_to_come_back():
    async with wire_server(max_num_seqs=1) as server, AsyncClient(server.target) as client:
        with server.slowed(0.2):
            calls = [
                asyncio.create_task(client.complete(token_ids=prompt(seed, 40), max_tokens=1, **GREEDY))
                for seed in range(40)
            ]
            await eventually(lambda: server.value("requests_total", outcome="ok") >= 6)
            late = client.complete(token_ids=prompt(99, 60), max_tokens=1, timeout_s=2.0, **GREEDY)
            refusal = await refusal_of(late)
        assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "queue and prompt take" in refusal.message
        assert refusal.retry_after_ms is not None
        patient = await client.complete(token_ids=prompt(98, 60), max_tokens=1, timeout_s=60, **GREEDY)
        assert patient.usage.completion_tokens == 1
        await asyncio.gather(*calls)


async def test_one_tenant_cannot_fill_the_queue_nor_hold_up_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    greedy_key, modest_key = new_key(), new_key()
    (tmp_path / "keys").write_text(f"{key_digest(greedy_key)} greedy\n{key_digest(modest_key)} modest\n")
    async with (
        wire_server(max_num_seqs=1, max_queue=60, api_keys=tmp_path / "keys") as server,
        AsyncClient(server.target, api_key=greedy_key) as greedy,
        AsyncClient(server.target, api_key=modest_key) as modest,
    ):
        engine, served = server.server.engine, list[str]()
        forward = engine._runner.forward

        def noting_forward(work: list[Work], num_outputs: list[int]) -> Any:
            served.extend(item.sequence.tenant for item in work)
            return forward(work, num_outputs)

        monkeypatch.setattr(engine._runner, "forward", noting_forward)
        with server.held():
            calls = [
                asyncio.create_task(greedy.complete(token_ids=prompt(seed, 40), max_tokens=1, **GREEDY))
                for seed in range(60)
            ]
            await eventually(lambda: server.value("requests_total", outcome="overloaded") > 0)
            late = asyncio.create_task(modest.complete(token_ids=prompt(99, 200), max_tokens=1, **GREEDY))
            await eventually(lambda: "modest" in [each.request.namespace.tenant for each in list(engine._open)])
        assert (await late).usage.completion_tokens == 1
        assert served.index("modest") < 10, "the other tenant's went first"
        ended = await asyncio.gather(*calls, return_exceptions=True)
        refused = [reply for reply in ended if isinstance(reply, RequestFailed)]
        assert refused
        assert all("this tenant's share of the queue is full (30 requests wait)" in call.message for call in refused)
