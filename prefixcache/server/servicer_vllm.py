"""The protocol by which the gateway smg talks to its workers, in front of the same engine.

It only converts: requests are checked, tokenized, submitted and taken back as those of our own service. The engine
does not know who asks.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

from google.protobuf.message import Message
from grpc.aio import ServicerContext
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from smg_grpc_proto.generated import common_pb2

from prefixcache import __version__
from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.engine.engine import Engine, EngineLoad
from prefixcache.errors import Aborted, InvalidRequest, NotServing, Unsupported
from prefixcache.model.tokenizer import Tokenizer
from prefixcache.server import convert
from prefixcache.server.caller import TENANT
from prefixcache.server.convert_vllm import to_generate_request, with_room_for_output
from prefixcache.server.event_log import EventLog, snapshot_batches
from prefixcache.server.health import HealthMonitor
from prefixcache.server.intake import Intake, deadline_of
from prefixcache.server.reply_vllm import VllmReply
from prefixcache.server.stream import TokenStream

TOKENIZER_CHUNK_BYTES = 64 * 1024
MAX_FLUSH_TIMEOUT_S = 600.0
FLUSH_RETRY_S = 0.05
# Over what time the tokens a second that GetLoads reports are counted, at least.
RATE_S = 2.0

_Context = ServicerContext[Message, Message]


@dataclass(frozen=True, slots=True, eq=False)
class _OpenCall:
    tenant: str
    request_id: str
    stream: TokenStream


class VllmServicer(vllm_grpc.VllmEngineServicer):  # type: ignore[misc]  # the package has no types
    """Serves `vllm.grpc.engine.VllmEngine`. Event loop only."""

    def __init__(
        self,
        engine: Engine,
        intake: Intake,
        tokenizer: Tokenizer,
        health: HealthMonitor,
        events: EventLog,
        model: pb.GetModelInfoResponse,
        max_num_seqs: int,
    ) -> None:
        self._engine = engine
        self._intake = intake
        self._tokenizer = tokenizer
        self._health = health
        self._events = events
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._open: dict[_OpenCall, None] = {}
        self._started_s = time.monotonic()
        self._rate = _Rate()
        self._bundle: bytes | None = None

    # --- generation --------------------------------------------------------------------------------------------

    async def Generate(self, request: vllm.GenerateRequest, context: _Context) -> AsyncIterator[vllm.GenerateResponse]:
        deadline_s = deadline_of(context)
        own_request = to_generate_request(request)
        checked = convert.check(own_request, self._intake.limits, TENANT.get())
        token_ids = await self._intake.token_ids(checked.prompt, checked.namespace)
        checked = with_room_for_output(checked, len(token_ids), self._intake.limits)
        accepted = convert.to_engine(checked, own_request.request_id, token_ids, self._intake.limits, deadline_s)
        reply = VllmReply(accepted, is_stream=request.stream)
        with self._intake.submitted(accepted) as stream:
            call = _OpenCall(TENANT.get(), request.request_id, stream)
            self._open[call] = None
            try:
                async for delta in stream:
                    for message in reply.messages(delta):
                        yield message
            finally:
                del self._open[call]

    async def Abort(self, request: vllm.AbortRequest, context: _Context) -> vllm.AbortResponse:
        """Ends the caller's own calls with these ids; unknown ones are fine, since calls end by themselves, too.

        The gateway sends this where a client has left in mid-stream, and does not cancel the call.
        """
        request_ids = set(request.request_ids)
        for call in self._open:
            if call.request_id in request_ids and call.tenant == TENANT.get():
                self._intake.abort(call.stream, Aborted("aborted on request"))
        return vllm.AbortResponse()

    async def Embed(self, request: vllm.EmbedRequest, context: _Context) -> vllm.EmbedResponse:
        raise Unsupported("this server generates text; it has no embeddings")

    # --- about the server --------------------------------------------------------------------------------------

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: _Context) -> vllm.HealthCheckResponse:
        """Fails while the server is not ready: at registration the gateway looks at the status alone."""
        if (problem := self._health.problem) is not None:
            raise NotServing(problem)
        return vllm.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: _Context) -> vllm.GetModelInfoResponse:
        model = self._model
        return vllm.GetModelInfoResponse(
            model_path=model.model,
            served_model_name=model.model,
            is_generation=True,
            architectures=[model.architecture],
            max_context_length=model.max_model_len,
            max_req_input_len=model.max_model_len - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=self._tokenizer.bos_token_id or 0,
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: _Context) -> vllm.GetServerInfoResponse:
        return vllm.GetServerInfoResponse(
            active_requests=self._engine.num_open,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type=f"prefixcache {__version__}",
            data_parallel_size=1,
            block_size=self._model.page_size,
            max_num_seqs=self._max_num_seqs,
            model_dtype=f"torch.{self._model.dtype}",
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: _Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        if self._bundle is None:
            self._bundle = await self._intake.beside_the_loop(lambda: _zipped(self._tokenizer.files()))
        bundle = self._bundle
        for start in range(0, len(bundle), TOKENIZER_CHUNK_BYTES):
            end = min(start + TOKENIZER_CHUNK_BYTES, len(bundle))
            is_last = end == len(bundle)
            yield common_pb2.GetTokenizerChunk(
                data=bundle[start:end], sha256=hashlib.sha256(bundle).hexdigest() if is_last else ""
            )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: _Context) -> vllm.GetLoadsResponse:
        now_s = time.monotonic()
        load = self._engine.load()
        num_tokens = self._model.cache_capacity_tokens
        hit_rate = load.num_cached_tokens / load.num_prompt_tokens if load.num_prompt_tokens else 0.0
        return vllm.GetLoadsResponse(
            timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            version=__version__,
            dp_rank_count=1,
            loads=[
                vllm.SchedulerLoad(
                    num_running_reqs=load.num_running_requests,
                    num_waiting_reqs=load.num_waiting_requests,
                    num_total_reqs=load.num_running_requests + load.num_waiting_requests,
                    token_usage=load.usage,
                    utilization=load.usage,
                    num_used_tokens=round(load.usage * num_tokens),
                    max_total_num_tokens=num_tokens,
                    max_running_requests=self._max_num_seqs,
                    cache_hit_rate=hit_rate,
                    num_waiting_uncached_tokens=round(load.num_waiting_tokens * (1 - hit_rate)),
                    gen_throughput=self._rate.at(now_s, load),
                )
            ],
        )

    # --- the cache ---------------------------------------------------------------------------------------------

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: _Context
    ) -> common_pb2.FlushCacheResponse:
        """Forgets what is on the device and in host memory and not in use, trying again for up to `timeout_s`."""
        if TENANT.get():
            raise Unsupported("the cache is shared by all tenants, and none of them may empty it for the others")
        if not 0 <= request.timeout_s <= MAX_FLUSH_TIMEOUT_S:  # written so that NaN fails it
            raise InvalidRequest("timeout_s", f"must be from 0 to {MAX_FLUSH_TIMEOUT_S:g}; got {request.timeout_s}")
        deadline_s = time.monotonic() + request.timeout_s
        num_device_pages = num_host_pages = 0
        while True:
            flushed = await asyncio.wrap_future(self._engine.call(PrefixCache.flush))
            num_device_pages += flushed.num_device_pages
            num_host_pages += flushed.num_host_pages
            if flushed.num_pages_in_use == 0 or time.monotonic() >= deadline_s:
                break
            await asyncio.sleep(FLUSH_RETRY_S)
        return common_pb2.FlushCacheResponse(
            success=flushed.num_pages_in_use == 0,
            message=f"{num_device_pages} pages dropped on the device and {num_host_pages} in host memory; "
            f"{flushed.num_pages_in_use} are in use and stay; disk and Redis are left alone",
        )

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: _Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        cursor = request.start_sequence_number
        if cursor:
            self._events.check_cursor(cursor)
        # gRPC would keep the headers until there is an event, and the gateway takes a silent worker for a broken one
        await context.send_initial_metadata(())
        if not cursor:
            snapshot = await asyncio.wrap_future(self._engine.call(PrefixCache.snapshot))
            for batch in snapshot_batches(snapshot.sequence, snapshot.events):
                yield batch
            cursor = snapshot.sequence
        while True:
            batch = await self._events.next_after(cursor)
            yield batch
            cursor = batch.sequence_number

    # --- profiling ---------------------------------------------------------------------------------------------

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: _Context
    ) -> common_pb2.ProfileResponse:
        raise Unsupported("this server has no profiler to start; attach one, such as py-spy, from outside")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: _Context
    ) -> common_pb2.ProfileResponse:
        raise Unsupported("this server has no profiler to stop")


class _Rate:
    """Tokens a second, between now and the last time that was asked at least `RATE_S` ago."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._since_tokens = 0
        self._latest = 0.0

    def at(self, now_s: float, load: EngineLoad) -> float:
        if now_s - self._since_s >= RATE_S:
            self._latest = (load.num_generated_tokens - self._since_tokens) / (now_s - self._since_s)
            self._since_s, self._since_tokens = now_s, load.num_generated_tokens
        return self._latest


def _zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()
