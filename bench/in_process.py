"""The engine with its tiers in this process, with no gRPC around it, and a Redis of one's own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from pydantic import SecretStr

from prefixcache import app
from prefixcache.cache.planner import PrefillEstimate
from prefixcache.config import Settings
from prefixcache.engine.engine import News
from prefixcache.errors import PrefixCacheError
from prefixcache.metrics import Metrics
from prefixcache.request import Delta, GenerateRequest, SamplingParams, Tier, Usage
from prefixcache.tree.events import PageJournal

REQUEST_LIMIT_S = 300.0
WRITE_LIMIT_S = 60.0
START_LIMIT_S = 10.0


@dataclass
class Answer:
    """What one request with one token of output took, and where its prompt's K/V came from."""

    sent_s: float = field(default_factory=time.perf_counter)
    ttft_ms: float = 0.0
    usage: Usage | None = None
    error: PrefixCacheError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def put(self, item: Delta | PrefixCacheError) -> None:
        if isinstance(item, PrefixCacheError):
            self.error = item
        else:
            self.ttft_ms = (time.perf_counter() - self.sent_s) * 1e3
            self.usage = item.usage
        self.ended.set()

    def cached(self, tier: Tier) -> int:
        assert self.usage is not None
        return self.usage.cached_tokens_by_tier.get(tier, 0)


class Service:
    """One life of the engine and its tiers; a context manager. At its end all is written.

    Args:
        served: The model.
        settings: Of the server.
        tiers: Settings that differ, those of the tiers above all.
    """

    def __init__(self, served: app.ServedModel, settings: Settings, **tiers: Any) -> None:
        self.metrics = Metrics()
        changed = settings.model_copy(update=tiers)
        self._engine, self._storage = app.build_engine(
            served, changed, self.metrics, _publish, PageJournal(0, lambda sequence, events: None)
        )
        self.mover = self._storage.mover

    def ask(self, tokens: list[int], *, use_cache: bool = True) -> Answer:
        """Send one request alone and wait for its token."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        answer = Answer()
        self._engine.submit(GenerateRequest("bench", tokens, sampling, use_cache=use_cache), answer)
        assert answer.ended.wait(REQUEST_LIMIT_S), "a request hangs"
        assert answer.error is None, answer.error
        return answer

    def settle(self) -> None:
        """Wait until what is to be written is written."""
        if self.mover is not None:
            assert self.mover.flush(WRITE_LIMIT_S), "a write hangs"

    def total(self, name: str, tier: Tier) -> float:
        """Read one of the counters of a tier."""
        return self.metrics.registry.get_sample_value(f"prefixcache_{name}_total", {"tier": tier.value}) or 0.0

    def __enter__(self) -> Self:
        if self.mover is not None:
            self._engine.warm_up()
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.stop(REQUEST_LIMIT_S)
        self._storage.close()


class LoadsEverything(PrefillEstimate):
    """The estimate of a machine that takes for ever to compute: everything that a tier has is loaded."""

    @property
    def is_known(self) -> bool:
        return True

    def seconds(self, num_tokens: int, context_len: int) -> float:
        return 1e3 * max(0, num_tokens)


def redis_url(port: int) -> SecretStr:
    return SecretStr(f"redis://127.0.0.1:{port}")


@contextmanager
def redis_server() -> Iterator[int]:
    """Run a `redis-server` that saves nothing, on a free port, for as long as the block lasts."""
    binary = shutil.which("redis-server")
    if binary is None:
        sys.exit("This needs redis-server: apt-get install redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline_s = time.monotonic() + START_LIMIT_S
            while not _answers(port):
                assert time.monotonic() < deadline_s, "redis-server does not start"
                time.sleep(0.02)
            yield port
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _publish(news: list[News]) -> None:
    for sink, item in news:
        sink.put(item)
