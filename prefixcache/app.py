"""Composition root: builds every object from Settings, starts them in order, and stops them in the reverse one.

start   HTTP ─▶ model ─▶ engine ─▶ gRPC ─▶ health SERVING, ready
stop    health NOT_SERVING, refuse new ─▶ streams finish (up to grace_s) ─▶ gRPC ─▶ engine ─▶ HTTP
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from prefixcache import __version__, storage
from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.cache.tiers import WritePolicy
from prefixcache.config import Settings
from prefixcache.engine.engine import Engine, EngineLimits, Inbox, News, Publish
from prefixcache.engine.runner import Runner
from prefixcache.engine.scheduler import Scheduler
from prefixcache.errors import ConfigError, NotServing
from prefixcache.kv.codec import FORMAT_VERSION
from prefixcache.kv.layout import KVLayout, MemoryPlan
from prefixcache.kv.page_pool import PagePool
from prefixcache.metrics import Metrics
from prefixcache.model.choose import build_decoder
from prefixcache.model.device import choose_device, choose_dtype, free_memory_bytes
from prefixcache.model.digest import weights_digest
from prefixcache.model.fingerprint import kv_fingerprint
from prefixcache.model.forward import ForwardPass
from prefixcache.model.loader import LoadedModel, load_model
from prefixcache.model.native import library
from prefixcache.model.spec import DecoderSpec
from prefixcache.model.tokenizer import Tokenizer
from prefixcache.server.api_keys import ApiKeys, read_keys
from prefixcache.server.event_log import EventLog
from prefixcache.server.grpc_server import build_grpc_server, listen
from prefixcache.server.health import HealthMonitor, Readiness
from prefixcache.server.http_endpoint import HttpEndpoint, serve_http
from prefixcache.server.intake import Intake
from prefixcache.server.interceptors import CallInterceptor
from prefixcache.server.servicer import InferenceServicer
from prefixcache.server.servicer_vllm import VllmServicer
from prefixcache.server.stream import dispatch
from prefixcache.server.tls import ServerCertificates
from prefixcache.tree.events import PageEvent, PageJournal
from prefixcache.tree.eviction import LeastRecentlyUsed
from prefixcache.tree.radix import RadixTree

# Streams above what the engine takes, so that an overloaded server can say so instead of letting calls wait unseen.
SPARE_STREAMS = 64
# From the moment that health says so, before gRPC itself stops and ends new calls without an answer: whoever watches
# health has gone elsewhere by then, and whoever does not is turned away properly.
TURN_AWAY_S = 0.1
LAST_WRITES_S = 5.0  # at most, for the final status of ended streams to reach their clients
ENGINE_STOP_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model ready to run, and the room for its K/V.

    Attributes:
        fingerprint: Names its K/V outside the process; empty where no tier needs it.
    """

    name: str
    decoder: ForwardPass
    tokenizer: Tokenizer
    plan: MemoryPlan
    fingerprint: bytes = b""

    @property
    def device(self) -> torch.device:
        """Where weights and K/V are."""
        return self.decoder.device

    @property
    def dtype_name(self) -> str:
        """Number format of weights and K/V, such as `float32`."""
        return str(self.decoder.dtype).removeprefix("torch.")

    def describe(self) -> str:
        """What is served, in a few words."""
        return (
            f"{self.name} in {self.dtype_name} on {self.device}, cache {self.plan.num_tokens:,} tokens "
            f"({self.plan.num_bytes / 2**20:,.0f} MiB)"
        )


def load(settings: Settings, progress: Callable[[str], None]) -> ServedModel:
    """Loads the model and plans its cache; `progress` hears what is being done.

    Raises:
        ModelError: The model or the device cannot be used.
        ConfigError: The settings do not go with the model.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    has_own_kernels = library.is_preferred(settings.kernels, device)
    dtype = choose_dtype(settings.dtype, device, has_own_kernels=has_own_kernels)
    model = load_model(settings.model, dtype, device, settings.cache_dir, progress)
    return prepare(model, settings, dtype, device)


def prepare(model: LoadedModel, settings: Settings, dtype: torch.dtype, device: torch.device) -> ServedModel:
    """Makes a decoder of a loaded model, whose weights it takes over, and plans the cache with what is then free."""
    spec = model.spec
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
    fingerprint = b""
    if storage.is_configured(settings):  # before the decoder repacks the weights
        fingerprint = kv_fingerprint(
            spec, layout, weights_digest(model.state_dict), model.tokenizer.digest(), FORMAT_VERSION
        )
    has_own_kernels = library.is_preferred(settings.kernels, device)
    decoder = build_decoder(spec, model.state_dict, device, dtype, has_own_kernels=has_own_kernels)
    plan = plan_memory(settings, spec, layout, device)
    return ServedModel(model.name, decoder, model.tokenizer, plan, fingerprint)


def plan_memory(settings: Settings, spec: DecoderSpec, layout: KVLayout, device: torch.device) -> MemoryPlan:
    """Turns the settings about memory into a number of pages, given what is free with the model loaded."""
    max_model_len = settings.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise ConfigError(f"max-model-len is {max_model_len}, but the model allows {spec.max_model_len}")
    if settings.cache_tokens is not None:
        plan = MemoryPlan.from_tokens(layout, settings.cache_tokens, max_model_len)
    else:
        num_bytes = settings.cache_memory_bytes(device.type, free_memory_bytes(device))
        plan = MemoryPlan.from_bytes(layout, num_bytes, max_model_len)
    if plan.num_tokens < max_model_len:
        _log.warning(
            "the cache holds %d tokens, less than the model's %d; requests must fit it", plan.num_tokens, max_model_len
        )
    return plan


def build_runner(served: ServedModel) -> tuple[Runner, PrefixCache]:
    """Puts model, page pool and tree together, and nothing below the device; the pages are allocated here."""
    pool = PagePool(served.plan.layout, served.plan.num_pages, served.device)
    return Runner(served.decoder, pool), PrefixCache(RadixTree(pool.page_size, LeastRecentlyUsed()), pool)


def build_engine(
    served: ServedModel, settings: Settings, metrics: Metrics, publish: Publish, journal: PageJournal
) -> tuple[Engine, storage.Storage]:
    """Puts the engine and the tiers together; the engine's thread is not started yet.

    Raises:
        ConfigError: A tier cannot be opened.
    """
    plan = served.plan
    inbox: Inbox = SimpleQueue()
    pool = PagePool(plan.layout, plan.num_pages, served.device)
    tiers = storage.Storage(settings, served.fingerprint, pool, plan.layout, metrics.tiers, inbox.put)
    cache = PrefixCache(
        RadixTree(pool.page_size, LeastRecentlyUsed()),
        pool,
        metrics.lookup_seconds.observe,
        tiers.host,
        tiers.mover,
        served.fingerprint,
        journal,
        WritePolicy(settings.write_policy),
    )
    engine = Engine(
        runner=Runner(served.decoder, pool),
        cache=cache,
        scheduler=Scheduler(cache, settings.max_num_seqs, settings.batched_tokens(served.device.type)),
        tokenizer=served.tokenizer,
        limits=EngineLimits(
            # A request longer than the whole cache could never run, so the cache's size bounds the length, too.
            max_model_len=min(plan.max_model_len, plan.num_tokens),
            vocab_size=served.decoder.spec.vocab_size,
            page_size=plan.layout.page_size,
            num_pages=plan.num_pages,
            max_queue=settings.max_queue,
            max_tenant_queue=settings.max_tenant_queue,
        ),
        metrics=metrics,
        publish=publish,
        inbox=inbox,
    )
    return engine, tiers


def model_info(served: ServedModel, engine: Engine) -> pb.GetModelInfoResponse:
    """What GetModelInfo answers."""
    spec, tokenizer, layout = served.decoder.spec, served.tokenizer, served.plan.layout
    return pb.GetModelInfoResponse(
        model=served.name,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_model_len=engine.limits.max_model_len,
        eos_token_ids=sorted(tokenizer.eos_token_ids),
        dtype=served.dtype_name,
        device=served.device.type,
        page_size=layout.page_size,
        cache_capacity_tokens=served.plan.num_tokens,
        kv_bytes_per_token=layout.bytes_per_token,
        version=__version__,
        has_chat_template=tokenizer.has_chat_template,
    )


def check_edge(settings: Settings) -> None:
    """Raises ConfigError for what is wrong with API keys and certificates, before anything else takes time."""
    if settings.api_keys is not None:
        read_keys(settings.api_keys)
    server_certificates(settings)


def server_certificates(settings: Settings) -> ServerCertificates | None:
    """Reads the certificates of the gRPC port, if it is to have TLS; raises ConfigError."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return ServerCertificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def start_http(settings: Settings, metrics: Metrics, readiness: Readiness) -> HttpEndpoint:
    """Starts to serve metrics and probes; raises ConfigError if the port is taken."""
    metrics.watch_ready(lambda: readiness.problem is None)
    try:
        return serve_http(metrics, readiness, settings.metrics_host, settings.metrics_port)
    except OSError as error:
        address = f"{settings.metrics_host}:{settings.metrics_port}"
        raise ConfigError(f"cannot serve metrics on {address}: {error.strerror}") from error


class Server:
    """One running server: engine, gRPC and health together. Event loop only.

    Attributes:
        engine: Runs the requests.
        health: What the health service says, and why.
        events: What subscribers are told of the cache.
        port: Where gRPC listens, once `start` has returned.
    """

    def __init__(self, served: ServedModel, settings: Settings, metrics: Metrics, readiness: Readiness) -> None:
        loop = asyncio.get_running_loop()

        def publish(items: list[News]) -> None:
            loop.call_soon_threadsafe(dispatch, items)

        metrics.set_build_info(
            version=__version__, model=served.name, device=served.device.type, dtype=served.dtype_name
        )
        metrics.page_bytes.set(served.plan.layout.bytes_per_page)
        self.port = 0
        self._settings = settings
        # above all numbers that an earlier process can have used, so that no subscriber mistakes one for the other
        first_sequence = time.time_ns() // 1000
        self.events = EventLog(first_sequence)

        def publish_events(sequence: int, batch: list[PageEvent]) -> None:
            loop.call_soon_threadsafe(self.events.append, sequence, batch)

        journal = PageJournal(first_sequence, publish_events)
        self.engine, self._storage = build_engine(served, settings, metrics, publish, journal)
        _log.info("tiers below the device: %s", self._storage.describe())
        self.health = HealthMonitor(self.engine, settings.stall_timeout_s, readiness)
        self._calls = CallInterceptor(metrics, None if settings.api_keys is None else ApiKeys(settings.api_keys))
        self._intake = Intake(self.engine, served.tokenizer)
        info = model_info(served, self.engine)
        self._grpc = build_grpc_server(
            InferenceServicer(self._intake, served.tokenizer, info, settings.max_message_bytes),
            VllmServicer(
                self.engine, self._intake, served.tokenizer, self.health, self.events, info, settings.max_num_seqs
            ),
            self.health,
            self._calls,
            max_message_bytes=settings.max_message_bytes,
            max_concurrent_streams=settings.max_queue + settings.max_num_seqs + SPARE_STREAMS,
        )

    async def start(self) -> None:
        """Takes the port, then starts the engine and the service; raises ConfigError if the port is taken."""
        certificates = server_certificates(self._settings)
        self.port = listen(self._grpc, self._settings.host, self._settings.port, certificates)
        if self._storage.mover is not None:  # it has to choose between loading and computing from the first prompt on
            self.engine.warm_up()
        self.engine.start()
        await self.health.check()
        await self._grpc.start()

    async def run_until(self, stopping: asyncio.Event) -> None:
        """Serves until `stopping` is set or the engine has failed, then stops in order."""
        watching = asyncio.create_task(self.health.watch())
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({watching, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.is_set():
            await self._drain()
        await asyncio.sleep(TURN_AWAY_S)
        self.events.close()
        await self._grpc.stop(LAST_WRITES_S)
        for task in (watching, waiting):
            task.cancel()
        await asyncio.to_thread(self.engine.stop, ENGINE_STOP_S)
        await asyncio.to_thread(self._storage.close)
        self._intake.close()

    async def _drain(self) -> None:
        """Turns away what is new, lets open calls finish, and after `grace_s` ends what is left."""
        await self.health.stop_serving()
        self.engine.drain()
        _log.info("draining: %d open calls, up to %g s", self._calls.num_open, self._settings.grace_s)
        try:
            async with asyncio.timeout(self._settings.grace_s):
                await self._calls.wait_until_idle()
        except TimeoutError:
            _log.warning("grace_s has passed: %d open calls are ended", self._calls.num_open)
            self.engine.fail_open_requests(NotServing("the server is shutting down"))


async def serve(
    served: ServedModel, settings: Settings, metrics: Metrics, readiness: Readiness, on_ready: Callable[[int], None]
) -> int:
    """Serves in the foreground until a signal comes or the engine fails, and returns the exit code.

    The first SIGTERM or SIGINT drains, a second one ends the process at once. `on_ready` hears the port.
    """
    server = Server(served, settings, metrics, readiness)
    stopping = _stop_on_signals()
    await server.start()
    gc.freeze()  # what exists now stays; without this a full collection walks all of torch, 0.3 s in mid-stream
    on_ready(server.port)
    await server.run_until(stopping)
    if server.engine.failure is not None:
        _log.error("exiting: %s", server.engine.failure)
        return 1
    return 0


def _stop_on_signals() -> asyncio.Event:
    stopping = asyncio.Event()

    def stop(signal_number: int) -> None:
        if stopping.is_set():
            os._exit(128 + signal_number)
        stopping.set()

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop, signal_number)
    return stopping
