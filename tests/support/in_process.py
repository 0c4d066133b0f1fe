"""Engine and cache on a tiny model, in this process: everything of the service but gRPC.

    run(request, request, …)      all are in the inbox before the engine's thread starts: they arrive together
    with running() as engine: …   a running engine, as the server has it: requests come, go and are cancelled

Both may be used one after the other; the cache stays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.engine.engine import Engine, EngineLimits, News
from prefixcache.engine.open_request import OpenRequest
from prefixcache.engine.runner import Runner
from prefixcache.engine.scheduler import Scheduler
from prefixcache.errors import PrefixCacheError
from prefixcache.kv.layout import PAGE_SIZE, KVLayout
from prefixcache.kv.page_pool import PagePool
from prefixcache.metrics import Metrics
from prefixcache.model.families import spec_from_config
from prefixcache.model.forward import ForwardPass
from prefixcache.model.tokenizer import Tokenizer
from prefixcache.request import Delta, Finish, GenerateRequest, Namespace, SamplingParams, TokenLogprobs, Usage
from prefixcache.tree.eviction import LeastRecentlyUsed
from prefixcache.tree.radix import RadixTree
from tests.support import decoders
from tests.support.models import MAX_MODEL_LEN, VOCAB_SIZE, tiny_model
from tests.support.tokenizers import byte_level

UNLIMITED = 1 << 20
TIMEOUT_S = 60.0


def greedy(prompt: Sequence[int], max_tokens: int, **settings: Any) -> GenerateRequest:
    """A request at temperature 0 that reports log-probabilities and does not stop at EOS.

    Args:
        prompt: Token ids.
        max_tokens: How many tokens to generate.
        settings: Fields of SamplingParams or GenerateRequest that differ from that.
    """
    outer = {name: settings.pop(name) for name in ("namespace", "use_cache", "num_samples") if name in settings}
    sampling = SamplingParams(max_tokens, **{"temperature": 0.0, "logprobs": 0, "ignore_eos": True} | settings)
    return GenerateRequest("test", list(prompt), sampling, **outer)


@dataclass
class Reply:
    """All that came back for one sample."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


class Stream:
    """Collects a request's deltas, and holds them to I8: one end for each sample, one last message, one error at most.

    Attributes:
        replies: One for each sample.
        num_deltas: How many messages have come so far.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.replies = [Reply() for _ in range(request.num_samples)]
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.error: PrefixCacheError | None = None
        self.handle: OpenRequest | None = None
        self.num_deltas = 0
        self._usage: Usage | None = None
        self._ended = threading.Event()

    def put(self, item: Delta | PrefixCacheError) -> None:
        assert not self._ended.is_set(), "I8: something came after the end"
        if isinstance(item, PrefixCacheError):
            self.error = item
            self._ended.set()
            return
        self.num_deltas += 1
        reply = self.replies[item.sample_index]
        assert reply.finish is None, "a sample went on after its end"
        reply.token_ids += item.token_ids
        reply.text += item.text
        reply.logprobs += item.logprobs
        reply.finish = item.finish
        self.prompt_logprobs += item.prompt_logprobs
        if item.usage is not None:
            assert item.timings is not None
            assert all(reply.finish for reply in self.replies)
            self._usage = item.usage
            self._ended.set()

    def wait(self) -> Stream:
        """Blocks until the request has ended, whichever way."""
        assert self._ended.wait(TIMEOUT_S), "the request hangs"
        return self

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def usage(self) -> Usage:
        assert self._usage is not None, f"no usage: {self.error}"
        return self._usage

    @property
    def token_ids(self) -> list[int]:
        (reply,) = self.replies
        return reply.token_ids

    @property
    def logprobs(self) -> list[float]:
        (reply,) = self.replies
        return [entry.logprob for entry in reply.logprobs]

    @property
    def cached_tokens(self) -> int:
        return self.usage.cached_tokens


class InProcess:
    """One cache with one model, and an engine whenever one is wanted.

    Args:
        family: One of `tests.support.models.FAMILIES`.
        num_pages: Size of the cache.
        chunk: Token budget of one step.
        max_num_seqs: Most sequences that run at once.
    """

    def __init__(
        self, family: str = "llama-gqa", num_pages: int = 512, chunk: int = UNLIMITED, max_num_seqs: int = 64
    ) -> None:
        decoder = _decoder(family, decoders.kernels)
        spec = decoder.spec
        layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32)
        self.num_pages = num_pages
        self.pool = PagePool(layout, num_pages, torch.device("cpu"))
        self.tree = RadixTree(PAGE_SIZE, LeastRecentlyUsed())
        self.cache = PrefixCache(self.tree, self.pool)
        self.metrics = Metrics()
        self._runner = Runner(decoder, self.pool)
        self._max_num_seqs = min(max_num_seqs, chunk)  # the budget is never below one token for each sequence
        self._chunk = chunk
        self._engine: Engine | None = None

    def run(self, *requests: GenerateRequest) -> list[Stream]:
        """Serves requests that arrive together, to the end of the last, and checks the cache once all is quiet."""
        engine = self._new_engine()
        streams = [submit(engine, request) for request in requests]
        engine.start()
        for stream in streams:
            stream.wait()
        engine.stop(TIMEOUT_S)
        assert engine.failure is None
        self.check()
        return streams

    def run_one(self, request: GenerateRequest) -> Stream:
        """Serves one request alone."""
        (stream,) = self.run(request)
        assert stream.error is None
        return stream

    @contextmanager
    def running(self) -> Iterator[Engine]:
        """An engine that runs until every request of the block has ended; checks the cache there."""
        engine = self._new_engine()
        engine.start()
        try:
            yield engine
            deadline_s = time.monotonic() + TIMEOUT_S
            while engine.num_open and engine.failure is None:
                assert time.monotonic() < deadline_s, "a request hangs"
                time.sleep(0.001)
        finally:
            engine.stop(TIMEOUT_S)
        assert engine.failure is None
        self.check()

    def check(self) -> None:
        """Every invariant of the idle cache: nothing is in use and nothing is lost (I1 to I3)."""
        self.cache.check()
        counts = self.cache.page_counts()
        assert counts.in_use == 0
        assert counts.free + counts.cached == self.num_pages

    def forget(self) -> None:
        """Empties the default namespace; only while no engine runs."""
        self.cache.drop(Namespace())

    @property
    def num_prefilled_tokens(self) -> int:
        """Prompt tokens that went through the model so far."""
        return int(self.metrics.prefilled_tokens._value.get())

    @property
    def num_preemptions(self) -> int:
        return int(self.metrics.preemptions._value.get())

    def _new_engine(self) -> Engine:
        limits = EngineLimits(
            MAX_MODEL_LEN, VOCAB_SIZE, PAGE_SIZE, self.num_pages, max_queue=10_000, max_tenant_queue=10_000
        )
        scheduler = Scheduler(self.cache, self._max_num_seqs, self._chunk)
        return Engine(self._runner, self.cache, scheduler, tokenizer(), limits, self.metrics, _publish, SimpleQueue())


def submit(engine: Engine, request: GenerateRequest) -> Stream:
    """Hands a request to an engine and returns what collects its reply."""
    stream = Stream(request)
    stream.handle = engine.submit(request, stream)
    return stream


def _publish(news: list[News]) -> None:
    for sink, item in news:
        sink.put(item)


@cache
def _decoder(family: str, kernels: str) -> ForwardPass:  # kernels is what sets cached ones apart
    model = tiny_model(family)
    return decoders.decoder(spec_from_config(model.config), dict(model.state_dict()), torch.float32)


@cache
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer with fewer tokens than the models have; ids beyond it decode to nothing."""
    return byte_level()
