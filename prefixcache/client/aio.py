"""The asyncio client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache._pb.prefixcache.v1 import inference_pb2_grpc as pb_grpc
from prefixcache.client.connection import Tls, key_metadata
from prefixcache.client.errors import translated_errors
from prefixcache.client.requests import (
    CHANNEL_OPTIONS,
    DEFAULT_TARGET,
    GenerateOptions,
    Message,
    generate_request,
    tokenize_request,
)


class AsyncClient:
    """The same as `Client`, for asyncio; belongs to the event loop it was made on.

    async with AsyncClient("127.0.0.1:50051") as client:
        async for delta in client.generate("Once upon a time", max_tokens=50):
            print(delta.text, end="", flush=True)
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, tls: Tls | None = None, api_key: str | None = None) -> None:
        if tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, tls.credentials(), options=CHANNEL_OPTIONS)
        self._metadata = key_metadata(api_key)
        self._inference = pb_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Starts to generate, and returns what comes back piece by piece; closing the generator cancels the call."""
        request = generate_request(text, messages, token_ids, options)
        return _iterate(self._inference.Generate(request, timeout=timeout_s, metadata=self._metadata))

    async def complete(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> pb.CompleteResponse:
        """Generates, and returns everything at once."""
        request = generate_request(text, messages, token_ids, options)
        with translated_errors():
            return await self._inference.Complete(request, timeout=timeout_s, metadata=self._metadata)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids that `generate` would use for this text or chat."""
        request = tokenize_request(text, messages, add_special_tokens)
        with translated_errors():
            response = await self._inference.Tokenize(request, timeout=timeout_s, metadata=self._metadata)
        return list(response.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        with translated_errors():
            response = await self._inference.Detokenize(request, timeout=timeout_s, metadata=self._metadata)
        return response.text

    async def model_info(self, *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """Describes the model that is served and its cache."""
        with translated_errors():
            return await self._inference.GetModelInfo(
                pb.GetModelInfoRequest(), timeout=timeout_s, metadata=self._metadata
            )

    async def wait_until_serving(self, timeout_s: float) -> None:
        """Returns as soon as the server is there and healthy; raises RequestFailed if it isn't in time."""
        call: Any = self._health.Watch(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
        with translated_errors():
            async for response in call:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    call.cancel()
                    return

    async def close(self) -> None:
        """Closes the connection; open calls are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


async def _iterate(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
) -> AsyncGenerator[pb.GenerateResponse]:
    try:
        with translated_errors():
            async for response in call:
                yield response
    finally:
        call.cancel()
