"""The outer edge of every call: says who calls, names and counts the call, leaves its log line, and turns its error
into a status.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import ServerInterceptor, ServicerContext
from smg_grpc_proto import vllm_engine_pb2 as vllm

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.errors import InvalidRequest, PrefixCacheError, Unauthenticated
from prefixcache.log import RequestLine, log_request
from prefixcache.metrics import Metrics
from prefixcache.server.api_keys import ApiKeys
from prefixcache.server.caller import TENANT
from prefixcache.server.convert import is_request_id
from prefixcache.server.status import CANCELLED, DEADLINE_EXCEEDED, OK, Status, status_of

REQUEST_ID_KEY = "x-request-id"
SERVICE_PREFIXES = ("/prefixcache.v1.", "/vllm.grpc.engine.")
# What a gateway asks all the time, or keeps open for good: no lines in the log, and nothing that a drain waits for.
BACKGROUND_METHODS = frozenset({"HealthCheck", "GetLoads", "SubscribeKvEvents"})
DEADLINE_SLACK_S, DEADLINE_SLACK = 0.05, 0.02
COUNTED_METHODS = frozenset({"Generate", "Complete"})

_log = logging.getLogger(__name__)


class Call:
    """What is known about one call while it runs."""

    def __init__(self, method: str, tenant: str, context: ServicerContext[Any, Any]) -> None:
        self.method = method
        self.tenant = tenant
        self.peer = context.peer()
        self.request_id = _metadata_request_id(context) or uuid.uuid4().hex
        self.started_at = time.monotonic()
        self.usage: pb.Usage | None = None
        self.timings: pb.Timings | None = None

    def parse(self, deserializer: Callable[[bytes], Any], payload: bytes) -> Any:
        """The request message; it leaves with a request id, and the call goes by the one it came with, if any."""
        try:
            request = deserializer(payload)
        except DecodeError as error:
            raise InvalidRequest("request", "is not a valid message of this call's type") from error
        if isinstance(request, pb.GenerateRequest | vllm.GenerateRequest):
            if is_request_id(request.request_id):
                self.request_id = request.request_id
            elif not request.request_id:
                request.request_id = self.request_id
        return request

    def observe(self, response: Any) -> None:
        """Remembers the token counts and timings of the answer, if this message has them."""
        if isinstance(response, pb.GenerateResponse | pb.CompleteResponse) and response.HasField("usage"):
            self.usage, self.timings = response.usage, response.timings
        elif isinstance(response, vllm.GenerateResponse) and response.HasField("complete"):  # one for each sample
            complete, so_far = response.complete, self.usage.completion_tokens if self.usage else 0
            self.usage = pb.Usage(
                prompt_tokens=complete.prompt_tokens,
                cached_tokens=complete.cached_tokens,
                completion_tokens=so_far + complete.completion_tokens,
            )


class CallInterceptor(ServerInterceptor):  # type: ignore[type-arg]  # generic only in its type stubs
    """Wraps every call of our own services; health and reflection pass through, without a key. Event loop only.

    Args:
        metrics: Where calls are counted.
        keys: Known API keys; None to let everyone in.

    Attributes:
        num_open: Calls that have not ended yet, including what is still to be written to their clients; without those
            in the background.
    """

    def __init__(self, metrics: Metrics, keys: ApiKeys | None = None) -> None:
        self._keys = keys
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._metrics = metrics

    async def wait_until_idle(self) -> None:
        """Returns as soon as no call is open."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(SERVICE_PREFIXES):
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        try:
            tenant = "" if self._keys is None else self._keys.tenant_of(handler_call_details.invocation_metadata)
        except Unauthenticated as error:
            return grpc.stream_stream_rpc_method_handler(self._refusing(method, error))
        # Without a deserializer the handlers get bytes, so that even a request that cannot be parsed is accounted for.
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(method, tenant, handler), response_serializer=handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, tenant, handler), response_serializer=handler.response_serializer
        )

    def _refusing(self, method: str, error: Unauthenticated) -> Any:
        # As a stream, whatever the method is: the request, which may be large, is then never read.
        async def respond(_: object, context: ServicerContext[Any, Any]) -> None:
            async with self._accounted(method, "", context):
                raise error

        return respond

    def _unary(self, method: str, tenant: str, handler: Any) -> Any:
        async def respond(payload: bytes, context: ServicerContext[Any, Any]) -> Any:
            async with self._accounted(method, tenant, context) as call:
                request = call.parse(handler.request_deserializer, payload)
                response = await handler.unary_unary(request, context)
                call.observe(response)
            return response

        return respond

    def _streaming(self, method: str, tenant: str, handler: Any) -> Any:
        # A coroutine that writes, not a generator that yields: a cancelled call then always ends in here, and
        # `aclosing` lets the servicer clean up at once instead of when its generator is collected.
        async def respond(payload: bytes, context: ServicerContext[Any, Any]) -> None:
            async with self._accounted(method, tenant, context) as call:
                request = call.parse(handler.request_deserializer, payload)
                async with aclosing(handler.unary_stream(request, context)) as responses:
                    async for response in responses:
                        call.observe(response)
                        await context.write(response)

        return respond

    @asynccontextmanager
    async def _accounted(self, method: str, tenant: str, context: ServicerContext[Any, Any]) -> AsyncIterator[Call]:
        call = Call(method, tenant, context)
        TENANT.set(tenant)  # of this task, which serves this call alone
        status = OK
        is_background = method in BACKGROUND_METHODS
        if not is_background:
            self.num_open += 1
            self._idle.clear()
        try:
            yield call
        except asyncio.CancelledError:
            status = DEADLINE_EXCEEDED if _is_past_deadline(call, context) else CANCELLED
            raise
        except Exception as error:
            status = status_of(error, call.request_id)
            if not isinstance(error, PrefixCacheError):
                _log.exception("unexpected error, id=%s", call.request_id)
        finally:
            if not is_background:
                self.num_open -= 1
                if self.num_open == 0:
                    self._idle.set()
                self._finish(call, status)
        metadata = ((REQUEST_ID_KEY, call.request_id), *status.metadata)
        if status is not OK:
            await context.abort(status.code, status.message, metadata)
        context.set_trailing_metadata(metadata)

    def _finish(self, call: Call, status: Status) -> None:
        if call.method in COUNTED_METHODS:
            self._metrics.requests[status.outcome].inc()
        usage, timings = call.usage, call.timings
        log_request(
            RequestLine(
                request_id=call.request_id,
                method=call.method,
                outcome=status.outcome.value,
                code=status.code.name,
                peer=call.peer,
                tenant=call.tenant or None,
                total_ms=(time.monotonic() - call.started_at) * 1000,
                queue_ms=timings.queue_ms if timings else None,
                prefill_ms=timings.prefill_ms if timings else None,
                ttft_ms=timings.ttft_ms if timings else None,
                prompt_tokens=usage.prompt_tokens if usage else None,
                cached_tokens=usage.cached_tokens if usage else None,
                completion_tokens=usage.completion_tokens if usage else None,
            )
        )


def _metadata_request_id(context: ServicerContext[Any, Any]) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and is_request_id(value):
            return value
    return None


def _is_past_deadline(call: Call, context: ServicerContext[Any, Any]) -> bool:
    """Whether a cancelled call ran out of time, which on the wire looks the same as a client that gave up.

    Both sides watch the deadline. The client cancels when its own clock says so, a little before ours does, also
    because gRPC rounds the time up by as much as one percent on its way.
    """
    remaining_s: Any = context.time_remaining()  # None without a deadline, though its type does not say so
    if remaining_s is None:
        return False
    allowed_s = time.monotonic() - call.started_at + remaining_s
    return bool(remaining_s <= max(DEADLINE_SLACK_S, DEADLINE_SLACK * allowed_s))
