"""API keys over the wire: who is let in, and that tenants share nothing, in any tier."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache._pb.prefixcache.v1 import inference_pb2_grpc as pb_grpc
from prefixcache.server.api_keys import key_digest, new_key
from tests.support.models import VOCAB_SIZE
from tests.support.redis_server import redis_server
from tests.support.wire import WireServer, wire_server

ALICE, ALICES_OTHER, BOB = new_key(), new_key(), new_key()
PROMPT = random.Random(5).choices(range(3, VOCAB_SIZE), k=200)
OK = grpc.StatusCode.OK
Metadata = tuple[tuple[str, str], ...]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{key_digest(ALICE)} alice\n{key_digest(ALICES_OTHER)} alice\n{key_digest(BOB)} bob\n")
    return path


@pytest.fixture
async def server(keys: Path) -> AsyncIterator[WireServer]:
    async with wire_server(api_keys=keys) as running:
        yield running


def bearer(key: str) -> Metadata:
    return (("authorization", f"Bearer {key}"),)


class Caller:
    """Calls one server on one channel, with this key or that."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = pb_grpc.InferenceStub(channel)

    async def cached(self, key: str | None, tier: str | None = None, **fields: Any) -> int:
        """Completes the prompt; how many of its tokens were cached, in one tier or in all."""
        request = pb.GenerateRequest(token_ids=PROMPT, max_tokens=2, temperature=0.0, ignore_eos=True, **fields)
        usage = (await self.stub.Complete(request, metadata=bearer(key) if key else None)).usage
        return getattr(usage.cached_tokens_by_tier, tier) if tier else usage.cached_tokens


async def code_of(call: Any) -> grpc.StatusCode:
    return await call.code()


async def test_without_a_known_key_every_call_is_refused_and_counted(server: WireServer):
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = pb_grpc.InferenceStub(channel)
        for metadata in (None, bearer("wrong"), (("authorization", f"Basic {ALICE}"),), bearer(ALICE) * 2):
            generate = pb.GenerateRequest(token_ids=[5], max_tokens=1)
            for call in (
                stub.Complete(generate, metadata=metadata),
                stub.Generate(generate, metadata=metadata),
                stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata),
                stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]), metadata=metadata),
                stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata),
            ):
                assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED
                assert dict(await call.trailing_metadata())["x-request-id"]
        assert server.value("requests_total", outcome="unauthenticated") == 4 * 2
        assert (await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=bearer(ALICE))).model == "tiny"


async def test_health_needs_no_key(server: WireServer):
    async with grpc.aio.insecure_channel(server.target) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_what_a_stranger_sends_is_not_even_read(server: WireServer):
    """A message above the server's limit would be refused as too large if it were."""
    async with grpc.aio.insecure_channel(server.target) as channel:
        call = pb_grpc.InferenceStub(channel).Complete(pb.GenerateRequest(text="x" * (17 << 20)))
        assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_tenants_share_nothing_whatever_salt_they_choose(server: WireServer):
    async with grpc.aio.insecure_channel(server.target) as channel:
        cached = Caller(channel).cached
        for salt in ("", "pepper", "alice"):
            assert await cached(ALICE, cache_salt=salt) == 0
            assert await cached(BOB, cache_salt=salt) == 0
            for key in (ALICE, ALICES_OTHER, BOB):
                assert await cached(key, cache_salt=salt) == len(PROMPT) - 1


@pytest.mark.parametrize("tier", ["disk", "remote"])
async def test_tenants_share_nothing_that_is_stored_and_no_key_finds_what_no_key_has_stored(
    keys: Path, tmp_path: Path, tier: str
):
    whole_pages = len(PROMPT) // 16 * 16
    with redis_server(tmp_path) as redis:
        store = {"disk": str(tmp_path / "disk"), "disk_size": "64MiB"} if tier == "disk" else {"redis": redis.url}
        for callers, found in (
            ([None], 0),
            ([ALICE, BOB], 0),
            ([BOB, ALICES_OTHER], whole_pages),
            ([None], whole_pages),
        ):
            settings = store if callers == [None] else store | {"api_keys": keys}
            async with (
                wire_server(**settings) as server,
                grpc.aio.insecure_channel(server.target) as channel,
            ):
                for key in callers:
                    assert await Caller(channel).cached(key, tier) == found


async def test_a_key_that_is_taken_out_of_the_file_is_refused_soon(server: WireServer, keys: Path):
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = pb_grpc.InferenceStub(channel)
        await asyncio.to_thread(keys.write_text, f"{key_digest(BOB)} bob\n")

        async def code_with(key: str) -> grpc.StatusCode:
            return await code_of(stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=bearer(key)))

        async with asyncio.timeout(5):
            while await code_with(ALICE) is OK:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await code_with(BOB) is OK


async def test_the_tenant_is_in_the_log_line_and_in_no_metric(server: WireServer, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "prefixcache.requests")
    async with grpc.aio.insecure_channel(server.target) as channel:
        await Caller(channel).cached(ALICE)
        await code_of(pb_grpc.InferenceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), metadata=bearer("wrong")))
    lines = [record.fields for record in caplog.records if record.name == "prefixcache.requests"]
    assert [(line["tenant"], line["outcome"]) for line in lines] == [("alice", "ok"), (None, "unauthenticated")]
    assert ALICE not in str(lines)
    labels = [sample.labels for metric in server.metrics.registry.collect() for sample in metric.samples]
    assert not any("alice" in values.values() for values in labels)
