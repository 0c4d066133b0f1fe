"""A real server on loopback in this process: tiny model, real engine, real gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from prefixcache.app import ServedModel, Server, prepare
from prefixcache.config import Settings
from prefixcache.metrics import Metrics
from prefixcache.model.families import spec_from_config
from prefixcache.model.loader import LoadedModel
from prefixcache.server.health import Readiness
from tests.support.held import held, slowed
from tests.support.models import tiny_model
from tests.support.tiers import SlowPrefill
from tests.support.tokenizers import byte_level


class WireServer:
    """A running server and what tests look at beside it."""

    def __init__(self, server: Server, metrics: Metrics, readiness: Readiness, stopping: asyncio.Event) -> None:
        self.server = server
        self.metrics = metrics
        self.readiness = readiness
        self.stopping = stopping

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def value(self, name: str, **labels: str) -> float:
        """A metric's present value."""
        value = self.metrics.registry.get_sample_value(f"prefixcache_{name}", labels)
        assert value is not None
        return value

    def held(self, num_steps: int = 0) -> AbstractContextManager[threading.Event]:
        """Lets so many steps of the engine run meanwhile, and no more, so that what is open stays open."""
        return held(self.server.engine._runner, num_steps)

    def slowed(self, seconds: float) -> AbstractContextManager[None]:
        """Makes each step of the engine take longer by so much meanwhile."""
        return slowed(self.server.engine._runner, seconds)


@asynccontextmanager
async def wire_server(max_model_len: int | None = None, **settings: Any) -> AsyncIterator[WireServer]:
    """Runs a server on this event loop; `settings` are those of Settings."""
    chosen = Settings(**{"host": "127.0.0.1", "port": 0, "cache_tokens": 4096, "grace_s": 5.0} | settings)
    metrics, readiness = Metrics(), Readiness()
    server = Server(served_model(chosen, max_model_len), chosen, metrics, readiness)
    stopping = asyncio.Event()
    await server.start()
    if server._storage.mover is not None:
        server._storage.mover.prefill = SlowPrefill()  # what is stored gets loaded, also where this process is held up
    running = asyncio.create_task(server.run_until(stopping))
    try:
        yield WireServer(server, metrics, readiness, stopping)
    finally:
        stopping.set()
        await running


@contextmanager
def wire_server_thread(**settings: Any) -> Iterator[WireServer]:
    """Runs a server on an event loop in a thread, for blocking clients."""
    started: list[WireServer] = []
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        async with wire_server(**settings) as server:
            started.append(server)
            ready.set()
            await server.stopping.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(60), "the server did not start"
        yield started[0]
    finally:
        loops[0].call_soon_threadsafe(started[0].stopping.set)
        thread.join()


def served_model(settings: Settings, max_model_len: int | None = None) -> ServedModel:
    """A tiny model with a tokenizer, and room for its K/V."""
    model = tiny_model("llama-gqa")
    spec = spec_from_config(model.config)
    spec = replace(spec, max_model_len=max_model_len or spec.max_model_len)
    loaded = LoadedModel("tiny", spec, dict(model.state_dict()), byte_level())
    return prepare(loaded, settings, torch.float32, torch.device("cpu"))


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Waits until something is so, and fails if that takes too long."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # what is looked at tells nobody when it changes
            await asyncio.sleep(0.005)
