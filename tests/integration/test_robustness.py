"""Faults that one odd model, one odd request or one stuck step must not turn into everybody's."""

import asyncio
import threading

import grpc
import pytest

from prefixcache.client import AsyncClient, RequestFailed
from prefixcache.model.tokenizer import Tokenizer
from tests.support import wire
from tests.support.models import VOCAB_SIZE
from tests.support.tokenizers import byte_level
from tests.support.wire import eventually, wire_server


async def test_text_with_tokens_beyond_the_models_vocabulary_is_refused(monkeypatch):
    tokenizer = byte_level()
    tokenizer._backend.add_tokens([f"<extra{n}>" for n in range(200)])  # more than the model has embeddings for
    monkeypatch.setattr(wire, "byte_level", lambda: tokenizer)
    async with wire_server() as server, AsyncClient(server.target) as client:
        for prompt in ({"text": "<extra199>"}, {"messages": [{"role": "user", "content": "<extra199>"}]}):
            with pytest.raises(RequestFailed) as caught:
                await client.complete(max_tokens=2, **prompt)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert server.server.engine.failure is None


async def test_an_eos_beyond_the_vocabulary_is_harmless(monkeypatch):
    tokenizer = Tokenizer(byte_level()._chat_tokenizer, VOCAB_SIZE, frozenset({-1, 2, 600}))
    monkeypatch.setattr(wire, "byte_level", lambda: tokenizer)
    async with wire_server() as server, AsyncClient(server.target) as client:
        await client.complete(token_ids=[5, 6, 7], max_tokens=4, min_tokens=2)
    assert server.server.engine.failure is None


async def test_a_complete_reply_that_is_too_large_is_a_clear_error():
    async with wire_server(max_message_bytes="200KiB") as server, AsyncClient(server.target) as client:
        with pytest.raises(RequestFailed) as caught:
            await client.complete(token_ids=[n % 500 for n in range(1500)], max_tokens=1, prompt_logprobs=64)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.message.startswith("prompt_logprobs")
        assert caught.value.request_id is not None


async def test_a_stuck_engine_gets_each_request_back_once(monkeypatch):
    async with wire_server(stall_timeout_s=0.3) as server, AsyncClient(server.target) as client:
        engine, runner = server.server.engine, server.server.engine._runner
        forward, go_on = runner.forward, threading.Event()
        monkeypatch.setattr(runner, "forward", lambda *step: go_on.wait(30) and forward(*step))
        calls = [asyncio.create_task(client.complete(token_ids=[5, 6, n], max_tokens=3)) for n in range(20)]
        await asyncio.gather(*calls, return_exceptions=True)
        num_messages = engine._inbox.qsize()
        await asyncio.sleep(0.5)
        assert engine._inbox.qsize() == num_messages
        go_on.set()
        await eventually(lambda: engine.num_open == 0)
        assert engine.failure is None
