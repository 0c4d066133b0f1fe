"""The Inference service: checks a request, hands it to the engine, and passes on what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from grpc.aio import ServicerContext

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache._pb.prefixcache.v1 import inference_pb2_grpc as pb_grpc
from prefixcache.errors import InvalidRequest
from prefixcache.model.tokenizer import Tokenizer
from prefixcache.request import GenerateRequest, Namespace
from prefixcache.server import convert, reply
from prefixcache.server.caller import TENANT
from prefixcache.server.intake import Intake, deadline_of

_Context = ServicerContext[Any, Any]


class InferenceServicer(pb_grpc.InferenceServicer):
    """Serves `prefixcache.v1.Inference`. Event loop only."""

    def __init__(
        self, intake: Intake, tokenizer: Tokenizer, model_info: pb.GetModelInfoResponse, max_message_bytes: int
    ) -> None:
        self._intake = intake
        self._limits = intake.limits
        self._tokenizer = tokenizer
        self._model_info = model_info
        self._max_message_bytes = max_message_bytes

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> AsyncIterator[pb.GenerateResponse]:
        accepted = await self._accept(request, context)
        with self._intake.submitted(accepted) as stream:
            async for delta in stream:
                for message in reply.stream_messages(delta, accepted.prompt_token_ids):
                    yield message

    async def Complete(self, request: pb.GenerateRequest, context: _Context) -> pb.CompleteResponse:
        accepted = await self._accept(request, context)
        answer = reply.CompleteReply(accepted.num_samples, accepted.prompt_token_ids)
        with self._intake.submitted(accepted) as stream:
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
        return pb.TokenizeResponse(token_ids=await self._intake.token_ids(prompt, Namespace(TENANT.get())))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        token_ids = convert.check_detokenize(request, self._limits)
        skip_special_tokens = request.skip_special_tokens
        text = await self._intake.beside_the_loop(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )
        return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: _Context) -> pb.GetModelInfoResponse:
        return self._model_info

    async def _accept(self, request: pb.GenerateRequest, context: _Context) -> GenerateRequest:
        deadline_s = deadline_of(context)
        checked = convert.check(request, self._limits, TENANT.get())
        token_ids = await self._intake.token_ids(checked.prompt, checked.namespace)
        return convert.to_engine(checked, request.request_id, token_ids, self._limits, deadline_s)
