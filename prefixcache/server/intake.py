"""What every service that generates does on the way to the engine: tokenize, submit, take back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from grpc.aio import ServicerContext

from prefixcache.engine.admission import Places
from prefixcache.engine.engine import Engine
from prefixcache.engine.open_request import OpenRequest
from prefixcache.errors import PrefixCacheError
from prefixcache.model.tokenizer import Tokenizer
from prefixcache.request import GenerateRequest, Namespace
from prefixcache.server.caller import TENANT
from prefixcache.server.convert import ChatPrompt, ModelLimits, Prompt, TextPrompt, TokenPrompt
from prefixcache.server.stream import TokenStream

TOKENIZER_RETRY_MS = 500

_T = TypeVar("_T")


class Intake:
    """The way in, shared by all services.

    Event loop only. Text is tokenized on one thread beside the loop, so a long document delays no other stream;
    token ids need no such detour.

    Attributes:
        limits: What requests are checked against.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.limits = ModelLimits(engine.limits.max_model_len, engine.limits.vocab_size)
        self._engine = engine
        self._tokenizer = tokenizer
        self._tokenizer_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._tokenizer_places = Places(
            "texts for the tokenizer", engine.limits.max_queue, engine.limits.max_tenant_queue, TOKENIZER_RETRY_MS
        )
        self._open: dict[TokenStream, OpenRequest] = {}

    async def token_ids(self, prompt: Prompt, namespace: Namespace) -> list[int]:
        """The tokens of a prompt, which is remembered for `namespace` alone."""
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text, add_special_tokens):
                return await self.beside_the_loop(
                    lambda: self._tokenizer.encode(text, namespace, add_special_tokens=add_special_tokens)
                )
            case ChatPrompt(messages):
                return await self.beside_the_loop(lambda: self._tokenizer.encode_chat(messages, namespace))

    @contextmanager
    def submitted(self, request: GenerateRequest) -> Iterator[TokenStream]:
        """Hands the request to the engine, and takes it back when the call ends early, for whatever reason."""
        stream = TokenStream()
        handle = self._open[stream] = self._engine.submit(request, stream)
        try:
            yield stream
        finally:
            del self._open[stream]
            self._engine.abort(handle)

    def abort(self, stream: TokenStream, error: PrefixCacheError) -> None:
        """Stops the work on an open request at once; its stream ends with `error` when it has been read so far."""
        self._engine.abort(self._open[stream])
        stream.put(error)

    async def beside_the_loop(self, work: Callable[[], _T]) -> _T:
        """Runs tokenizer work on its thread; what waits there is bounded as the engine's queue is."""
        tenant = TENANT.get()
        self._tokenizer_places.take(tenant)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, work)
        finally:
            self._tokenizer_places.give_back(tenant)

    def close(self) -> None:
        """Ends the tokenizer's thread; no call may be open any more."""
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)


def deadline_of(context: ServicerContext[Any, Any]) -> float | None:
    """When the caller stops waiting, by this machine's monotonic clock; None if it did not say."""
    left_s: Any = context.time_remaining()  # None without a deadline, though its type does not say so
    return None if left_s is None else time.monotonic() + left_s
