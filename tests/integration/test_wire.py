"""Calls as clients see them: a real gRPC server, a real engine, a tiny model."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prefixcache import __version__
from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache._pb.prefixcache.v1 import inference_pb2_grpc as pb_grpc
from prefixcache.client import AsyncClient, RequestFailed
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.oracle import Oracle
from tests.support.proxy import proxy
from tests.support.wire import WireServer, eventually, wire_server

PROMPT = [(7 * index + 3) % VOCAB_SIZE for index in range(40)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
async def server() -> AsyncIterator[WireServer]:
    async with wire_server() as running:
        yield running


@pytest.fixture
async def client(server: WireServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.target) as connected:
        yield connected


def expected_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    return list(Oracle(tiny_model("llama-gqa")).generate(prompt, num_tokens).token_ids)


# --- replies -------------------------------------------------------------------------------------------------------


async def test_a_stream_carries_the_models_tokens_and_ends_with_usage(client: AsyncClient):
    messages = [message async for message in client.generate(token_ids=PROMPT, max_tokens=12, **GREEDY)]
    token_ids = [token_id for message in messages for token_id in message.token_ids]
    assert token_ids == expected_tokens(PROMPT, 12)
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
    last = messages[-1]
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens) == (40, 0, 12)
    assert 0 <= last.timings.queue_ms <= last.timings.ttft_ms <= last.timings.total_ms
    assert last.timings.ttft_ms == pytest.approx(last.timings.queue_ms + last.timings.prefill_ms)


async def test_complete_gives_what_generate_streams_and_the_repetition_is_cached(client: AsyncClient):
    streamed = [message async for message in client.generate(token_ids=PROMPT, max_tokens=12, **GREEDY)]
    reply = await client.complete(token_ids=PROMPT, max_tokens=12, logprobs=3, **GREEDY)
    (sample,) = reply.samples
    assert list(sample.token_ids) == [token_id for message in streamed for token_id in message.token_ids]
    assert sample.text == "".join(message.text for message in streamed)
    assert sample.finish_reason == pb.FINISH_REASON_LENGTH
    assert reply.usage.cached_tokens == reply.usage.cached_tokens_by_tier.device == 39
    for entry, token_id in zip(sample.logprobs, sample.token_ids, strict=True):
        assert entry.token_id == token_id == entry.top_token_ids[0]
        assert entry.logprob == entry.top_logprobs[0]
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)


async def test_samples_are_told_apart(client: AsyncClient):
    messages = [message async for message in client.generate(token_ids=PROMPT, max_tokens=5, n=3, seed=1)]
    reply = await client.complete(token_ids=PROMPT, max_tokens=5, n=3, seed=1)
    for index, sample in enumerate(reply.samples):
        own = [message for message in messages if message.sample_index == index]
        assert [token_id for message in own for token_id in message.token_ids] == list(sample.token_ids)
        assert [message.finish_reason != pb.FINISH_REASON_UNSPECIFIED for message in own].count(True) == 1
    assert reply.usage.completion_tokens == sum(len(sample.token_ids) for sample in reply.samples)


async def test_a_stop_token_is_named(client: AsyncClient):
    tokens = expected_tokens(PROMPT, 12)
    stop = next(token for index, token in enumerate(tokens) if index >= 3 and token not in tokens[:index])
    reply = await client.complete(token_ids=PROMPT, max_tokens=12, stop_token_ids=[stop], **GREEDY)
    (sample,) = reply.samples
    assert sample.finish_reason == pb.FINISH_REASON_STOP
    assert sample.WhichOneof("matched") == "stop_token_id"
    assert sample.stop_token_id == stop
    assert list(sample.token_ids) == tokens[: tokens.index(stop) + 1]


async def test_a_stop_string_is_named_and_left_out(client: AsyncClient):
    whole = (await client.complete(token_ids=PROMPT, max_tokens=30, **GREEDY)).samples[0].text
    stop = whole[len(whole) // 2 :][:3]
    reply = await client.complete(token_ids=PROMPT, max_tokens=30, stop=[stop], **GREEDY)
    (sample,) = reply.samples
    assert sample.finish_reason == pb.FINISH_REASON_STOP
    assert sample.stop_string == stop
    assert sample.text == whole[: whole.index(stop)]


async def test_text_and_chat_use_the_ids_that_tokenize_shows(client: AsyncClient):
    text = "The quick brown fox, déjà vu 🦊"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    for prompt in ({"text": text}, {"messages": messages}):
        token_ids = await client.tokenize(**prompt)
        assert token_ids[0] == 1  # BOS
        assert 1 not in token_ids[1:]
        by_ids = await client.complete(token_ids=token_ids, max_tokens=4, **GREEDY)
        by_prompt = await client.complete(**prompt, max_tokens=4, **GREEDY)
        assert by_prompt.samples == by_ids.samples
        assert by_prompt.usage.prompt_tokens == len(token_ids)
        assert by_prompt.usage.cached_tokens == len(token_ids) - 1
    bare = await client.tokenize(text, add_special_tokens=False)
    assert [1, *bare] == await client.tokenize(text)
    assert await client.detokenize(bare) == text


async def test_model_info_says_what_is_served(client: AsyncClient):
    info = await client.model_info()
    assert (info.model, info.architecture, info.device, info.dtype) == ("tiny", "LlamaForCausalLM", "cpu", "float32")
    assert (info.vocab_size, info.max_model_len, info.page_size) == (VOCAB_SIZE, 2048, 16)
    assert info.cache_capacity_tokens == 4096
    assert info.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
    assert list(info.eos_token_ids) == [2]
    assert info.has_chat_template


async def test_a_cache_smaller_than_the_model_length_bounds_prompts_with_both_numbers():
    async with wire_server(cache_tokens=64) as server, AsyncClient(server.target) as client:
        assert (await client.model_info()).max_model_len == 64
        reply = await client.complete(token_ids=[5] * 60, **GREEDY)
        assert reply.usage.completion_tokens == 4
        with pytest.raises(RequestFailed, match=r"token_ids: the prompt has 64 tokens, .* length is 64"):
            await client.complete(token_ids=[5] * 64)


# --- bad input -----------------------------------------------------------------------------------------------------

BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("token_ids", {"token_ids": [1, -1]}),
    ("token_ids", {"token_ids": [VOCAB_SIZE]}),
    ("token_ids", {"token_ids": [2**31]}),
    ("token_ids", {"token_ids": [3] * 2048}),
    ("text", {}),
    ("text", {"text": ""}),
    ("text", {"text": "word " * 2048}),
    ("token_ids", {"text": "a", "token_ids": [1]}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
    ("max_tokens", {"token_ids": [1], "max_tokens": 0}),
    ("max_tokens", {"token_ids": [1], "max_tokens": -1}),
    ("max_tokens", {"token_ids": [1], "max_tokens": 2048}),
    ("temperature", {"token_ids": [1], "temperature": math.nan}),
    ("temperature", {"token_ids": [1], "temperature": -1.0}),
    ("top_p", {"token_ids": [1], "top_p": 0.0}),
    ("stop", {"token_ids": [1], "stop": ["x"] * 17}),
    ("stop_token_ids", {"token_ids": [1], "stop_token_ids": [2**31]}),
    ("logit_bias", {"token_ids": [1], "logit_bias": {-1: 1.0}}),
    ("n", {"token_ids": [1], "n": 17}),
]


async def test_bad_requests_are_refused_by_field_and_disturb_nobody(server: WireServer, client: AsyncClient):
    with server.held(num_steps=20) as is_held:
        good = asyncio.create_task(client.complete(token_ids=PROMPT, max_tokens=300, **GREEDY))
        await eventually(is_held.is_set)
        for field, fields in BAD_REQUESTS:
            with pytest.raises(RequestFailed) as caught:
                await client.complete(**fields)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT, fields
            assert caught.value.message.startswith(f"{field}: "), caught.value.message
    assert list((await good).samples[0].token_ids)[:50] == expected_tokens(PROMPT, 50)
    assert server.value("requests_total", outcome="invalid") == len(BAD_REQUESTS)
    assert server.value("prompt_tokens_total") == len(PROMPT)
    assert server.server.engine.num_open == 0


async def test_a_request_that_is_no_protobuf_is_the_clients_fault(server: WireServer):
    async with grpc.aio.insecure_channel(server.target) as channel:
        for method, multi_callable in (("Complete", channel.unary_unary), ("Generate", channel.unary_stream)):
            call = multi_callable(f"/prefixcache.v1.Inference/{method}")(b"\x0a\x02\xff\xff")  # text, not UTF-8
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == "request: is not a valid message of this call's type"


async def test_five_megabytes_of_ids_are_refused_for_their_number(client: AsyncClient):
    token_ids = [511] * 3_000_000
    assert pb.GenerateRequest(token_ids=token_ids).ByteSize() > 5_000_000
    with pytest.raises(RequestFailed) as caught:
        await client.complete(token_ids=token_ids)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "3000000 tokens, but the model's length is 2048" in caught.value.message


async def test_a_message_over_the_limit_is_refused_with_both_sizes():
    async with wire_server(max_message_bytes=100_000) as server, AsyncClient(server.target) as client:
        with pytest.raises(RequestFailed) as caught:
            await client.complete("x" * 200_000)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in caught.value.message
        assert "100000" in caught.value.message
        assert (await client.complete("x", max_tokens=1)).usage.completion_tokens == 1


async def test_a_default_client_can_read_megabytes_of_prompt_logprobs():
    async with (
        wire_server(max_model_len=8100, cache_tokens=8192) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        prompt = [(index * index + index) % VOCAB_SIZE for index in range(8000)]
        request = pb.GenerateRequest(token_ids=prompt, prompt_logprobs=64, max_tokens=1)
        messages = [message async for message in pb_grpc.InferenceStub(channel).Generate(request)]
    assert sum(message.ByteSize() for message in messages) > 3_000_000
    assert max(message.ByteSize() for message in messages) < 300_000
    entries = [entry for message in messages for entry in message.prompt_logprobs]
    assert [entry.token_id for entry in entries] == prompt
    assert not entries[0].HasField("logprob")
    assert all(len(entry.top_token_ids) == len(entry.top_logprobs) == 64 for entry in entries[1:])
    assert messages[-1].usage.cached_tokens == 0


# --- ends before the end -------------------------------------------------------------------------------------------


async def test_cancelling_a_stream_stops_the_work(server: WireServer, client: AsyncClient):
    with server.held(num_steps=20):
        stream = client.generate(token_ids=PROMPT, max_tokens=1500, **GREEDY)
        for _ in range(5):
            await anext(stream)
        await stream.aclose()
        await eventually(lambda: server.value("requests_total", outcome="cancelled") == 1)
    await eventually(lambda: server.server.engine.num_open == 0)
    num_generated = server.value("generated_tokens_total")
    await asyncio.sleep(0.1)
    assert server.value("generated_tokens_total") == num_generated <= 21  # with that of the step that was held
    await eventually(lambda: server.value("running_sequences") == 0)
    await eventually(lambda: server.value("pages", tier="device", state="in_use") == 0)


async def test_dropping_the_connection_stops_the_work(server: WireServer):
    channel = grpc.aio.insecure_channel(server.target)
    call = pb_grpc.InferenceStub(channel).Complete(pb.GenerateRequest(token_ids=PROMPT, max_tokens=1500, **GREEDY))
    with server.held(num_steps=1) as is_held:
        waiting = asyncio.ensure_future(call)
        await eventually(is_held.is_set)
        await channel.close()
        await eventually(lambda: server.value("requests_total", outcome="cancelled") == 1)
    await eventually(lambda: server.server.engine.num_open == 0)
    with pytest.raises((asyncio.CancelledError, grpc.RpcError)):
        await waiting


async def test_a_deadline_ends_running_and_queued_requests():
    async with wire_server(max_num_seqs=1) as server, AsyncClient(server.target) as client:
        with server.held(num_steps=1):
            running = client.generate(token_ids=PROMPT, max_tokens=1900, timeout_s=2.0, **GREEDY)
            await anext(running)
            with pytest.raises(RequestFailed) as queued:
                await client.complete(token_ids=PROMPT[::-1], max_tokens=5, timeout_s=0.1)
            assert queued.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            with pytest.raises(RequestFailed) as caught:
                async for _ in running:
                    pass
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await eventually(lambda: server.value("requests_total", outcome="deadline") == 2)
        await eventually(lambda: server.server.engine.num_open == 0)
        assert server.value("prompt_tokens_total") == len(PROMPT), "the queued request should never have started"


async def test_a_full_queue_pushes_back():
    async with wire_server(max_num_seqs=1, max_queue=2) as server, AsyncClient(server.target) as client:
        with server.held(num_steps=1):
            running = client.generate(token_ids=PROMPT, max_tokens=1000, **GREEDY)
            await anext(running)
            queued = [asyncio.create_task(client.complete(token_ids=[index], max_tokens=1)) for index in (5, 6)]
            await eventually(lambda: server.server.engine.num_open == 3)
            with pytest.raises(RequestFailed) as caught:
                await client.complete(token_ids=[7], max_tokens=1)
            assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.retry_after_ms is not None
            assert caught.value.retry_after_ms > 0
            assert server.value("requests_total", outcome="overloaded") == 1
            await running.aclose()
        for reply in await asyncio.gather(*queued):
            assert reply.usage.completion_tokens == 1


# --- figures -------------------------------------------------------------------------------------------------------


async def test_counters_agree_with_what_the_replies_said(server: WireServer, client: AsyncClient):
    three_pages = PROMPT[:8] + PROMPT
    longer = three_pages + list(range(100, 130))
    replies = [
        await client.complete(token_ids=prompt, max_tokens=6, n=n, **GREEDY)
        for prompt, n in ((three_pages, 1), (three_pages, 1), (longer, 1), (three_pages, 3))
    ]
    usages = [reply.usage for reply in replies]
    assert [usage.cached_tokens for usage in usages] == [0, 47, 48, 47]
    assert server.value("prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert server.value("cached_tokens_total", tier="device") == sum(usage.cached_tokens for usage in usages)
    assert server.value("generated_tokens_total") == sum(usage.completion_tokens for usage in usages)
    assert server.value("prefilled_tokens_total") == 48 + 30
    assert server.value("requests_total", outcome="ok") == 4
    assert [server.value("ttft_seconds_count", hit=hit) for hit in ("cold", "partial", "full")] == [1, 1, 2]
    assert server.value("lookup_seconds_count") >= 4
    assert server.value("build_info", version=__version__, model="tiny", device="cpu", dtype="float32") == 1
    await eventually(lambda: server.value("pages", tier="device", state="in_use") == 0)
    assert (
        server.value("pages", tier="device", state="free") + server.value("pages", tier="device", state="cached")
        == 4096 // 16
    )


# --- names and logs ------------------------------------------------------------------------------------------------


async def test_every_call_has_an_id_in_trailing_metadata_and_one_log_line(
    server: WireServer, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "prefixcache.requests")
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = pb_grpc.InferenceStub(channel)
        secret = "correct horse battery staple"

        async def id_of(call: Any) -> str:
            await call.code()
            return dict(await call.trailing_metadata())["x-request-id"]

        own = stub.Complete(pb.GenerateRequest(text=secret, request_id="mine", max_tokens=1, cache_salt="pepper"))
        assert await id_of(own) == "mine"
        metadata = (("x-request-id", "from-proxy"),)
        assert (
            await id_of(stub.Complete(pb.GenerateRequest(text=secret, max_tokens=1), metadata=metadata)) == "from-proxy"
        )
        stream = stub.Generate(pb.GenerateRequest(text=secret, max_tokens=1))
        assert [message.HasField("usage") async for message in stream] == [True]
        made_up = await id_of(stream)
        assert len(made_up) == 32
        refused = stub.Complete(pb.GenerateRequest(text=secret, request_id="too long " * 20))
        assert len(await id_of(refused)) == 32
        assert await refused.code() is grpc.StatusCode.INVALID_ARGUMENT

    lines = [record.fields for record in caplog.records if record.name == "prefixcache.requests"]
    assert [line["request_id"] for line in lines[:3]] == ["mine", "from-proxy", made_up]
    assert [line["outcome"] for line in lines] == ["ok", "ok", "ok", "invalid"]
    assert lines[2]["cached_tokens"] == lines[2]["prompt_tokens"] - 1
    assert secret not in caplog.text + str(lines)
    assert "pepper" not in caplog.text + str(lines)


async def test_two_requests_of_one_name_do_not_meet(server: WireServer, client: AsyncClient):
    doomed = client.generate(token_ids=PROMPT, max_tokens=1000, request_id="same", **GREEDY)
    other = asyncio.create_task(client.complete(token_ids=PROMPT[::-1], max_tokens=40, request_id="same", **GREEDY))
    await anext(doomed)
    await doomed.aclose()
    assert list((await other).samples[0].token_ids) == expected_tokens(PROMPT[::-1], 40)


async def test_health_and_reflection_are_there(server: WireServer):
    async with grpc.aio.insecure_channel(server.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "prefixcache.v1.Inference"):
            response = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        await call.done_writing()
        assert {"prefixcache.v1.Inference", "grpc.health.v1.Health"} <= names


async def test_pings_every_few_seconds_are_accepted_in_silence(server: WireServer):
    options = [("grpc.keepalive_time_ms", 5_500), ("grpc.http2.max_pings_without_data", 0)]
    async with grpc.aio.insecure_channel(server.target, options=options) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        started_at = time.monotonic()
        with pytest.raises(TimeoutError):  # three pings and nothing else; by default gRPC would close on the third
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(watch.read())), 18)
        assert time.monotonic() - started_at >= 18
        watch.cancel()


async def test_a_server_that_is_slow_to_greet_is_waited_for(server: WireServer):
    """A long line, or a busy machine: setting the connection up takes a while, and that is no failure."""
    async with proxy(server.server.port) as line:
        line.delay_s = 0.5
        async with AsyncClient(f"127.0.0.1:{line.port}") as client:
            assert await client.tokenize("hello")
