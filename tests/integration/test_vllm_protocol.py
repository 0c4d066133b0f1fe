"""The protocol of the gateway's workers, call by call, on a real server; the gateway itself is in test_gateway.py."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import math
import random
import time
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from transformers import AutoTokenizer

from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.client import AsyncClient
from prefixcache.request import Tier
from prefixcache.server.api_keys import key_digest, new_key
from prefixcache.tree.events import Cleared, PageEvent, RemovedPages, StoredPages
from prefixcache.tree.node import token_key
from tests.support.follower import Follower
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.oracle import Oracle
from tests.support.tokenizers import CHAT_TEMPLATE, byte_level
from tests.support.wire import WireServer, eventually, wire_server

PAGE = 16
PROMPT = [(7 * index + 3) % VOCAB_SIZE for index in range(40)]


@pytest.fixture
async def server() -> AsyncIterator[WireServer]:
    async with wire_server() as running:
        yield running


@pytest.fixture
async def stub(server: WireServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.target) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def request(prompt: list[int] = PROMPT, *, stream: bool = True, request_id: str = "", **params: Any) -> Any:
    """A greedy request, as the gateway would write it."""
    sampling = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "n": 1, "ignore_eos": True} | params
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(input_ids=prompt),
        sampling_params=vllm.SamplingParams(**sampling),
        stream=stream,
    )


async def answers(stub: Any, sent: Any) -> tuple[list[Any], list[Any]]:
    """The chunks and the summaries of one call."""
    messages = [message async for message in stub.Generate(sent)]
    return (
        [message.chunk for message in messages if message.HasField("chunk")],
        [message.complete for message in messages if message.HasField("complete")],
    )


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """How a call ends that must not succeed; of a stream, what it brings before that is read."""
    try:
        if hasattr(call, "__aiter__"):
            _ = [message async for message in call]
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call has succeeded")


# --- generation ----------------------------------------------------------------------------------------------------


async def test_a_stream_is_deltas_and_one_summary_and_unary_is_the_summary_alone(stub: Any):
    expected = list(Oracle(tiny_model("llama-gqa")).generate(PROMPT, 12).token_ids)
    chunks, completes = await answers(stub, request(max_tokens=12))
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected
    assert len(chunks) == 12
    (summary,) = completes
    assert (summary.prompt_tokens, summary.cached_tokens, summary.completion_tokens) == (40, 0, 12)
    assert summary.finish_reason == "length"
    assert summary.WhichOneof("matched_stop") is None

    chunks, completes = await answers(stub, request(stream=False, max_tokens=12))
    assert not chunks
    assert list(completes[0].output_ids) == expected
    assert completes[0].cached_tokens == 39


async def test_samples_come_with_their_index_and_all_summaries_know_what_was_cached(stub: Any):
    await answers(stub, request(max_tokens=1))
    chunks, completes = await answers(stub, request(max_tokens=6, n=3, temperature=1.0, seed=1))
    assert [complete.index for complete in completes] == [0, 1, 2]
    for complete in completes:
        own = [token_id for chunk in chunks if chunk.index == complete.index for token_id in chunk.token_ids]
        assert own == list(complete.output_ids)
        assert (complete.prompt_tokens, complete.cached_tokens, complete.completion_tokens) == (40, 39, 6)
    assert len({tuple(complete.output_ids) for complete in completes}) == 3


async def test_the_worker_stops_by_itself_and_says_at_what(stub: Any):
    tokens = list(Oracle(tiny_model("llama-gqa")).generate(PROMPT, 30).token_ids)
    stop_id = next(token for index, token in enumerate(tokens) if index >= 3 and token not in tokens[:index])
    _, (complete,) = await answers(stub, request(max_tokens=30, stop_token_ids=[stop_id]))
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", stop_id)
    assert list(complete.output_ids) == tokens[: tokens.index(stop_id) + 1]

    text = byte_level().decode(tokens, skip_special_tokens=True)
    stop = text[len(text) // 2 :][:3]
    _, (complete,) = await answers(stub, request(max_tokens=30, stop=[stop], skip_special_tokens=True))
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)
    assert len(complete.output_ids) < 30


async def test_the_models_own_end_matches_nothing(stub: Any):
    bias = {tiny_model("llama-gqa").config.eos_token_id: 100.0}
    _, (complete,) = await answers(stub, request(ignore_eos=False, logit_bias=bias))
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("stop", None)
    assert list(complete.output_ids) == [tiny_model("llama-gqa").config.eos_token_id]


async def test_logprobs_of_output_and_prompt_in_both_forms(stub: Any):
    chunks, _ = await answers(stub, request(max_tokens=3, logprobs=2, prompt_logprobs=1))
    _, (complete,) = await answers(stub, request(stream=False, max_tokens=3, logprobs=2, prompt_logprobs=1))
    streamed = [(c.output_logprobs.token_ids[0], c.output_logprobs.token_logprobs[0]) for c in chunks]
    whole = complete.output_logprobs
    assert streamed == list(zip(whole.token_ids, whole.token_logprobs, strict=True))
    assert [len(top.values) for top in whole.top_logprobs] == [2, 2, 2]
    assert [top.token_ids[0] for top in whole.top_logprobs] == list(complete.output_ids)  # greedy
    assert list(complete.input_logprobs.token_ids) == PROMPT
    assert [value.HasField("value") for value in complete.input_logprobs.token_logprobs] == [False] + [True] * 39
    assert chunks[0].input_logprobs == complete.input_logprobs
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])


async def test_output_may_fill_the_context_and_is_cut_there(stub: Any):
    for params in ({}, {"max_tokens": 2**32 - 1, "top_k": 2**32 - 1}):
        _, (complete,) = await answers(stub, request(list(range(3, 403)) * 5 + [3] * 40, **params))
        assert (complete.completion_tokens, complete.finish_reason) == (8, "length")


BAD_REQUESTS: list[tuple[str, Any]] = [
    ("tokenized.input_ids", request([])),
    ("tokenized.input_ids", vllm.GenerateRequest()),
    ("token_ids", request([VOCAB_SIZE])),
    ("token_ids", request([3] * 2048)),
    ("temperature", request(temperature=math.nan)),
    ("top_p", request(top_p=1.5)),
    ("max_tokens", request(max_tokens=0)),
    ("n", request(n=2**32 - 1)),
    ("min_tokens", request(min_tokens=2**32 - 1)),
    ("json_schema", request(json_schema="{}")),
    ("truncate_prompt_tokens", request(truncate_prompt_tokens=5)),
    ("mm_inputs", vllm.GenerateRequest(mm_inputs=vllm.MultimodalInputs())),
    ("data_parallel_rank", vllm.GenerateRequest(data_parallel_rank=1)),
]


async def test_bad_requests_are_refused_by_field(server: WireServer, stub: Any):
    for field, sent in BAD_REQUESTS:
        error = await failure(stub.Generate(sent))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (field, error.details())
        assert error.details().startswith(f"{field}: "), error.details()
    assert server.value("requests_total", outcome="invalid") == len(BAD_REQUESTS)
    assert server.server.engine.num_open == 0


async def test_work_stops_within_two_steps_of_an_abort_and_of_a_cancelled_call(server: WireServer, stub: Any):
    for num_cancelled, is_abort in ((1, True), (2, False)):
        with server.held(num_steps=5) as is_held:
            call = stub.Generate(request(request_id="chatcmpl-1", max_tokens=1500))
            await anext(aiter(call))
            await eventually(is_held.is_set)
            num_generated = server.value("generated_tokens_total")
            if is_abort:
                await stub.Abort(vllm.AbortRequest(request_ids=["chatcmpl-1", "never seen"]))
            else:
                call.cancel()
            await eventually(lambda n=num_cancelled: server.value("requests_total", outcome="cancelled") == n)
        await eventually(lambda: server.server.engine.num_open == 0)
        await asyncio.sleep(0.05)
        assert server.value("generated_tokens_total") <= num_generated + 2
    assert await stub.Abort(vllm.AbortRequest(request_ids=["chatcmpl-1"])) == vllm.AbortResponse()


async def test_an_id_longer_than_ours_still_names_the_call_for_abort(server: WireServer, stub: Any):
    with server.held(num_steps=1):
        call = stub.Generate(request(request_id="x" * 300, max_tokens=1500))
        await anext(aiter(call))
        await stub.Abort(vllm.AbortRequest(request_ids=["x" * 300]))
        assert (await failure(call)).code() is grpc.StatusCode.CANCELLED


async def test_headers_wait_for_the_first_token_so_that_errors_come_without(stub: Any):
    error = stub.Generate(request([VOCAB_SIZE]))
    assert await error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not await error.initial_metadata()


async def test_the_log_has_a_line_for_each_generation_and_none_for_polls(stub: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "prefixcache.requests")
    await stub.HealthCheck(vllm.HealthCheckRequest())
    await stub.GetLoads(vllm.GetLoadsRequest())
    await answers(stub, request(request_id="cmpl-7", max_tokens=2, n=2))
    (line,) = [record.fields for record in caplog.records if record.name == "prefixcache.requests"]
    counts = (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"])
    assert (line["request_id"], line["outcome"], counts) == ("cmpl-7", "ok", (40, 0, 4))


# --- about the server ----------------------------------------------------------------------------------------------


async def test_it_says_what_it_serves(stub: Any):
    assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (model.served_model_name, model.model_path, model.tokenizer_path) == ("tiny", "tiny", "")
    assert (model.max_context_length, model.vocab_size, list(model.eos_token_ids)) == (2048, VOCAB_SIZE, [2])
    info = await stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert (info.block_size, info.data_parallel_size, info.max_num_seqs) == (PAGE, 1, 64)


async def test_the_tokenizer_comes_in_small_chunks_and_is_the_same(stub: Any, tmp_path: Path):
    chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert all(len(chunk.data) <= 64 * 1024 for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {"tokenizer.json", "tokenizer_config.json"} <= set(archive.namelist())
        assert not any("/" in name for name in archive.namelist())
        archive.extractall(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Grüße, 你好 🦊 and so on"
    assert loaded.encode(text) == byte_level().encode(text)
    assert loaded.chat_template == CHAT_TEMPLATE


async def test_what_there_is_nothing_behind_says_so(stub: Any):
    for call in (
        stub.Embed(vllm.EmbedRequest()),
        stub.StartProfile(common_pb2.StartProfileRequest()),
        stub.StopProfile(common_pb2.StopProfileRequest()),
    ):
        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "this server" in error.details()


async def test_load_counts_only_what_can_not_be_given_up(server: WireServer, stub: Any):
    for index in range(4):
        await answers(stub, request([index + 3] * 500, stream=False, max_tokens=1))
    (load,) = (await stub.GetLoads(vllm.GetLoadsRequest(include=["core"]))).loads
    await eventually(lambda: server.value("pages", tier="device", state="cached") > 100)
    assert (load.token_usage, load.num_total_reqs, load.max_total_num_tokens) == (0.0, 0, 4096)

    with server.held(num_steps=1):
        call = stub.Generate(request([3] * 500, max_tokens=1500))
        await anext(aiter(call))
        (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.num_waiting_reqs) == (1, 0)
        assert 0.1 < load.token_usage < 0.25
        assert load.cache_hit_rate == pytest.approx(500 / 2500, abs=0.01)
        call.cancel()


# --- the cache -----------------------------------------------------------------------------------------------------


async def test_a_flush_says_what_it_dropped_and_what_it_had_to_leave(server: WireServer, stub: Any):
    await answers(stub, request(stream=False, max_tokens=1))
    flushed = await stub.FlushCache(common_pb2.FlushCacheRequest())
    assert flushed.success
    assert flushed.message.startswith("3 pages dropped on the device and 0 in host memory; 0 are in use")
    await eventually(lambda: server.value("pages", tier="device", state="cached") == 0)
    _, (complete,) = await answers(stub, request(stream=False, max_tokens=1))
    assert complete.cached_tokens == 0

    with server.slowed(0.01):  # or the call might have ended before it is cancelled
        call = stub.Generate(request([5] * 64, max_tokens=1500))
        await anext(aiter(call))
        flushed = await stub.FlushCache(common_pb2.FlushCacheRequest())
        assert not flushed.success
        assert "are in use and stay" in flushed.message
        waiting = asyncio.create_task(_flush(stub, 30.0))
        await asyncio.sleep(0.1)
        call.cancel()
        assert (await waiting).success
    await eventually(lambda: server.value("pages", tier="device", state="free") == 4096 / PAGE)
    assert (
        (await failure(stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=math.nan))))
        .details()
        .startswith("timeout_s: ")
    )


async def _flush(stub: Any, timeout_s: float) -> Any:
    return await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s))


async def test_both_services_share_one_cache(server: WireServer, stub: Any):
    async with AsyncClient(server.target) as client:
        await client.complete(token_ids=PROMPT, max_tokens=1, temperature=0.0)
        _, (complete,) = await answers(stub, request(stream=False, max_tokens=1))
        assert complete.cached_tokens == 39


# --- tenants -------------------------------------------------------------------------------------------------------


async def test_with_api_keys_nobody_gets_in_without_and_tenants_leave_each_other_alone(tmp_path: Path):
    keys = {name: new_key() for name in ("alice", "bob")}
    (tmp_path / "keys").write_text("".join(f"{key_digest(key)} {name}\n" for name, key in keys.items()))
    alice, bob = ((("authorization", f"Bearer {key}"),) for key in keys.values())
    async with wire_server(api_keys=tmp_path / "keys") as server, grpc.aio.insecure_channel(server.target) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert (await failure(stub.Generate(request()))).code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await failure(Subscriber(stub).call)).code() is grpc.StatusCode.UNAUTHENTICATED
        call = stub.Generate(request(request_id="same", max_tokens=200), metadata=alice)
        await anext(aiter(call))
        await stub.Abort(vllm.AbortRequest(request_ids=["same"]), metadata=bob)
        flush = stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=bob)
        assert (await failure(flush)).code() is grpc.StatusCode.UNIMPLEMENTED
        assert [message async for message in call][-1].complete.completion_tokens == 200
        subscription = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=bob)
        snapshot = await anext(aiter(subscription))
        assert snapshot.snapshot.blocks == 0
        assert [event.WhichOneof("data") for event in snapshot.events] == ["cleared"]


# --- events --------------------------------------------------------------------------------------------------------


class Subscriber:
    """One stream of events, read into a `Follower`."""

    def __init__(self, stub: Any, cursor: int = 0) -> None:
        self.call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=cursor))
        self.batches: list[Any] = []
        self.follower: Follower | None = None

    async def read_snapshot(self) -> None:
        """Reads the whole snapshot."""
        events: list[PageEvent] = []
        while True:
            batch = await anext(aiter(self.call))
            self.batches.append(batch)
            events += [page_event(event) for event in batch.events]
            if batch.snapshot.index == batch.snapshot.count - 1:
                break
        assert isinstance(events[0], Cleared)
        self.follower = Follower(PAGE, batch.sequence_number, events)

    async def read_until(self, prefixes: Callable[[set[tuple[int, ...]]], bool]) -> None:
        """Reads on until what the follower knows is as it should be."""
        assert self.follower is not None
        async with asyncio.timeout(30):
            while not prefixes(set(self.follower.prefixes.values())):
                batch = await anext(aiter(self.call))
                self.batches.append(batch)
                self.follower.apply(batch.sequence_number, [page_event(event) for event in batch.events])


def page_event(message: Any) -> PageEvent:
    """Takes a message back to what it was made of, with hashes for keys."""
    kind = message.WhichOneof("data")
    if kind == "stored":
        stored = message.stored
        assert stored.tier == common_pb2.KV_CACHE_TIER_DEVICE
        assert all(block.block_size == len(block.token_ids) == PAGE for block in stored.blocks)
        parent = name(stored.parent_block_hash) if stored.HasField("parent_block_hash") else None
        tokens = [token_id for block in stored.blocks for token_id in block.token_ids]
        return StoredPages(Tier.DEVICE, parent, [name(block.block_hash) for block in stored.blocks], token_key(tokens))
    if kind == "removed":
        return RemovedPages(Tier.DEVICE, [name(each) for each in message.removed.block_hashes])
    return Cleared()


def name(block_hash: int) -> bytes:
    return block_hash.to_bytes(8, "big", signed=True)


async def pages_of(server: WireServer) -> set[tuple[int, ...]]:
    """What the tree has now, asked of the engine."""
    snapshot = await asyncio.wrap_future(server.server.engine.call(PrefixCache.snapshot))
    return set(Follower(PAGE, snapshot.sequence, snapshot.events).prefixes.values())


def whole_pages(*prompts: list[int]) -> set[tuple[int, ...]]:
    return {tuple(prompt[:end]) for prompt in prompts for end in range(PAGE, len(prompt) + 1, PAGE)}


async def compute(stub: Any, prompt: list[int]) -> Any:
    _, (complete,) = await answers(stub, request(prompt, stream=False, max_tokens=1))
    return complete


async def test_headers_of_a_subscription_come_at_once_and_the_snapshot_has_what_is_there(stub: Any):
    await compute(stub, PROMPT)
    subscriber = Subscriber(stub)
    async with asyncio.timeout(10):  # there is no event that they could come with
        await subscriber.call.initial_metadata()
    await subscriber.read_snapshot()
    assert set(subscriber.follower.prefixes.values()) == whole_pages(PROMPT)
    idle = Subscriber(stub, subscriber.follower.sequence)
    async with asyncio.timeout(10):
        await idle.call.initial_metadata()


async def test_events_follow_the_pages_through_eviction_restore_and_flush(tmp_path: Path):
    settings = {"cache_tokens": 1024, "disk": str(tmp_path), "disk_size": 2**26, "host_memory": 2**20}
    source = random.Random(3)
    documents = [source.choices(range(3, VOCAB_SIZE), k=source.randrange(100, 400)) for _ in range(8)]
    async with wire_server(**settings) as server, grpc.aio.insecure_channel(server.target) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        early = Subscriber(stub)
        await early.read_snapshot()
        num_restored = 0
        for _ in range(40):
            prompt = source.choice(documents)[: source.randrange(20, 400)] + source.choices(range(3, 500), k=20)
            complete = await compute(stub, prompt)
            num_restored += complete.cached_tokens > 0
        late = Subscriber(stub)
        await late.read_snapshot()
        for document in documents:
            await compute(stub, document)
        assert server.value("evicted_pages_total", tier="device") > 100
        assert num_restored > 5
        there = await pages_of(server)
        await early.read_until(lambda pages: pages == there)
        await late.read_until(lambda pages: pages == there)
        assert early.follower.sequence == late.follower.sequence

        await _flush(stub, 10.0)
        await early.read_until(lambda pages: not pages)
        await compute(stub, documents[0])
        await early.read_until(lambda pages: pages == whole_pages(documents[0]))


async def test_a_subscriber_goes_on_where_it_left_off(stub: Any):
    first = Subscriber(stub)
    await first.read_snapshot()
    await compute(stub, PROMPT)
    await first.read_until(lambda pages: pages == whole_pages(PROMPT))
    cursor = first.follower.sequence
    first.call.cancel()
    other = [5] * 64
    await compute(stub, other)
    again = Subscriber(stub, cursor)
    again.follower = first.follower
    await again.read_until(lambda pages: pages == whole_pages(PROMPT, other))
    assert again.batches[0].sequence_number == cursor + 1


async def test_a_cursor_of_another_life_is_refused_before_the_headers(stub: Any):
    await Subscriber(stub).read_snapshot()
    for cursor in (1, 6, 2**60):
        call = Subscriber(stub, cursor).call
        assert await call.code() is grpc.StatusCode.OUT_OF_RANGE
        assert not await call.initial_metadata()


async def test_numbers_grow_from_one_life_to_the_next():
    sequences = []
    for _ in range(2):
        async with wire_server() as server, grpc.aio.insecure_channel(server.target) as channel:
            subscriber = Subscriber(vllm_engine_pb2_grpc.VllmEngineStub(channel))
            await subscriber.read_snapshot()
            sequences.append(subscriber.follower.sequence)
    assert sequences[0] < sequences[1]


async def test_a_subscriber_that_does_not_read_costs_no_memory_and_is_cut_off(
    server: WireServer, monkeypatch: pytest.MonkeyPatch
):
    log = server.server.events
    monkeypatch.setattr(log, "_max_bytes", 20_000)
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]  # or gRPC would read it all for us
    async with grpc.aio.insecure_channel(server.target, options) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        slow = Subscriber(stub)
        await slow.read_snapshot()
        for index in range(60):
            await compute(stub, [index + 200] * 700)
            assert log.num_bytes <= 20_000
        assert (await failure(slow.call)).code() is grpc.StatusCode.DATA_LOSS
        again = Subscriber(stub)
        await again.read_snapshot()
        assert set(again.follower.prefixes.values()) == await pages_of(server)


async def test_nobody_hears_of_a_salted_prompt(server: WireServer, stub: Any):
    async with AsyncClient(server.target) as client:
        early = Subscriber(stub)
        await early.read_snapshot()
        await client.complete(token_ids=PROMPT, max_tokens=1, cache_salt="pepper")
        late = Subscriber(stub)
        await late.read_snapshot()
        assert not late.follower.prefixes
        await compute(stub, [5] * 32)
        await early.read_until(lambda pages: pages == whole_pages([5] * 32))


async def test_a_drain_ends_subscriptions_and_does_not_wait_for_them():
    async with wire_server(grace_s=30.0) as server, grpc.aio.insecure_channel(server.target) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        subscriber = Subscriber(stub)
        await subscriber.read_snapshot()
        started_s = time.monotonic()
        server.stopping.set()
        assert (await failure(subscriber.call)).code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - started_s < 10.0


async def test_while_it_drains_it_is_neither_healthy_nor_taken_in_by_a_gateway(server: WireServer, stub: Any):
    with server.held(num_steps=1):
        call = stub.Generate(request(max_tokens=100))
        await anext(aiter(call))
        server.stopping.set()
        await eventually(lambda: server.server.health.problem is not None)
        assert (await failure(stub.HealthCheck(vllm.HealthCheckRequest()))).code() is grpc.StatusCode.UNAVAILABLE
        assert (await failure(stub.Generate(request()))).code() is grpc.StatusCode.UNAVAILABLE
    assert [message async for message in call][-1].complete.completion_tokens == 100
