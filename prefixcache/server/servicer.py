"""The Inference service: checks a request, hands it to the engine, and passes on what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from grpc.aio import ServicerContext

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache._pb.prefixcache.v1 import inference_pb2_grpc as pb_grpc
from prefixcache.engine.admission import Places
from prefixcache.engine.engine import Engine
from prefixcache.errors import InvalidRequest
from prefixcache.model.tokenizer import Tokenizer
from prefixcache.request import GenerateRequest
from prefixcache.server import convert, reply
from prefixcache.server.caller import TENANT
from prefixcache.server.convert import ChatPrompt, ModelLimits, Prompt, TextPrompt, TokenPrompt
from prefixcache.server.stream import TokenStream

TOKENIZER_RETRY_MS = 500

_T = TypeVar("_T")
_Context = ServicerContext[Any, Any]


class InferenceServicer(pb_grpc.InferenceServicer):
    """Serves `prefixcache.v1.Inference`.

    Event loop only. Text is tokenized on one thread beside the loop, so a long document delays no other stream;
    token ids need no such detour.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, model_info: pb.GetModelInfoResponse, max_message_bytes: int
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_info = model_info
        self._limits = ModelLimits(engine.limits.max_model_len, engine.limits.vocab_size)
        self._tokenizer_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._tokenizer_places = Places(
            "texts for the tokenizer", engine.limits.max_queue, engine.limits.max_tenant_queue, TOKENIZER_RETRY_MS
        )

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> AsyncIterator[pb.GenerateResponse]:
        accepted = await self._accept(request, context)
        with self._submitted(accepted) as stream:
            async for delta in stream:
                for message in reply.stream_messages(delta, accepted.prompt_token_ids):
                    yield message

    async def Complete(self, request: pb.GenerateRequest, context: _Context) -> pb.CompleteResponse:
        accepted = await self._accept(request, context)
        answer = reply.CompleteReply(accepted.num_samples, accepted.prompt_token_ids)
        with self._submitted(accepted) as stream:
            async for delta in stream:
                answer.add(delta)
        num_bytes = answer.message.ByteSize()
        if num_bytes > self._max_message_bytes:  # gRPC would refuse to send it, as if the server were overloaded
            raise InvalidRequest(
                "prompt_logprobs",
                f"the reply has {num_bytes} bytes, one message at most {self._max_message_bytes}; use Generate",
            )
        return answer.message

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        prompt = convert.check_tokenize(request, self._limits)
        return pb.TokenizeResponse(token_ids=await self._token_ids(prompt))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        token_ids = convert.check_detokenize(request, self._limits)
        skip_special_tokens = request.skip_special_tokens
        text = await self._beside_the_loop(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )
        return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: _Context) -> pb.GetModelInfoResponse:
        return self._model_info

    def close(self) -> None:
        """Ends the tokenizer's thread; no call may be open any more."""
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)

    async def _accept(self, request: pb.GenerateRequest, context: _Context) -> GenerateRequest:
        left_s: Any = context.time_remaining()  # None without a deadline, though its type does not say so
        deadline_s = None if left_s is None else time.monotonic() + left_s
        checked = convert.check(request, self._limits, TENANT.get())
        token_ids = await self._token_ids(checked.prompt)
        return convert.to_engine(checked, request.request_id, token_ids, self._limits, deadline_s)

    @contextmanager
    def _submitted(self, request: GenerateRequest) -> Iterator[TokenStream]:
        """Hands the request to the engine, and takes it back when the call ends early, for whatever reason."""
        stream = TokenStream()
        handle = self._engine.submit(request, stream)
        try:
            yield stream
        finally:
            self._engine.abort(handle)

    async def _token_ids(self, prompt: Prompt) -> list[int]:
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text, add_special_tokens):
                return await self._beside_the_loop(
                    lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
                )
            case ChatPrompt(messages):
                return await self._beside_the_loop(lambda: self._tokenizer.encode_chat(messages))

    async def _beside_the_loop(self, work: Callable[[], _T]) -> _T:
        """Runs tokenizer work on its thread; what waits there is bounded as the engine's queue is."""
        tenant = TENANT.get()
        self._tokenizer_places.take(tenant)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, work)
        finally:
            self._tokenizer_places.give_back(tenant)
