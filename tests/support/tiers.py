"""The in-process service with tiers below the device: real stores behind a real mover, one process after the other.

A `TieredService` is one life of a server: its pool, tree and memory end with it, what its stores hold does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from prefixcache.cache.mover import TierMover
from prefixcache.cache.planner import PrefillEstimate
from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.cache.tiers import WritePolicy
from prefixcache.config import Settings
from prefixcache.engine.engine import Engine, EngineLimits, Inbox, News
from prefixcache.engine.runner import Runner
from prefixcache.engine.scheduler import Scheduler
from prefixcache.kv.codec import FORMAT_VERSION, PageCodec
from prefixcache.kv.layout import PAGE_SIZE, KVLayout
from prefixcache.kv.page_pool import PagePool
from prefixcache.metrics import Metrics
from prefixcache.model.digest import weights_digest
from prefixcache.model.families import spec_from_config
from prefixcache.model.fingerprint import kv_fingerprint
from prefixcache.model.forward import ForwardPass
from prefixcache.request import Tier
from prefixcache.storage import Storage
from prefixcache.store.guard import Operation
from prefixcache.tree.eviction import LeastRecentlyUsed
from prefixcache.tree.radix import RadixTree
from tests.support import decoders
from tests.support.in_process import UNLIMITED, InProcess, Stream, tokenizer
from tests.support.models import MAX_MODEL_LEN, VOCAB_SIZE, tiny_model

TIMEOUT_S = 60.0
SLOW_TOKEN_S = 5.0


class TieredService(InProcess):
    """One life of a server; a context manager, at whose end the stores have been written to and closed.

    Args:
        model: A family of `tests.support.models.FAMILIES`, or a model.
        num_pages: Size of the device pool.
        dtype: Of weights and K/V.
        always_loads: The planner is to believe that computing takes for ever, so that it loads whatever is found;
            False to let it measure.
        settings: Of the tiers, as in Settings.
    """

    def __init__(
        self,
        model: str | PreTrainedModel = "llama-gqa",
        *,
        num_pages: int = 512,
        chunk: int = UNLIMITED,
        max_num_seqs: int = 64,
        dtype: torch.dtype = torch.float32,
        always_loads: bool = True,
        **settings: Any,
    ) -> None:
        decoder, digest = _decoder(tiny_model(model) if isinstance(model, str) else model, dtype, decoders.kernels)
        spec = decoder.spec
        layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
        self.num_pages = num_pages
        self.page_bytes = layout.bytes_per_page
        self.metrics = Metrics()
        self.pool = PagePool(layout, num_pages, torch.device("cpu"))
        self.tree = RadixTree(PAGE_SIZE, LeastRecentlyUsed())
        self.fingerprint = kv_fingerprint(spec, layout, digest, tokenizer().digest(), FORMAT_VERSION)
        self.codec = PageCodec(self.fingerprint, PAGE_SIZE, layout.bytes_per_page)
        self._inbox: Inbox = SimpleQueue()
        chosen = Settings(**settings)
        self.storage = Storage(chosen, self.fingerprint, self.pool, layout, self.metrics.tiers, self._inbox.put)
        self.mover: TierMover | None = self.storage.mover
        if self.mover is not None and always_loads:
            self.mover.prefill = SlowPrefill()
        self.cache = PrefixCache(
            self.tree,
            self.pool,
            None,
            self.storage.host,
            self.mover,
            self.fingerprint,
            write_policy=WritePolicy(chosen.write_policy),
        )
        self._runner = Runner(decoder, self.pool)
        self._max_num_seqs = min(max_num_seqs, chunk)
        self._chunk = chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.storage.close()

    def warm_up(self) -> None:
        """What a server does before it takes requests."""
        self._new_engine().warm_up()

    def check(self) -> None:
        """Waits for what is being written, and then checks every invariant of the idle cache."""
        self.settle()
        super().check()

    def settle(self) -> None:
        """Waits until all is written and has been acknowledged; only while no engine runs."""
        if self.mover is not None:
            assert self.mover.flush(TIMEOUT_S), "a write hangs"
        while not self._inbox.empty():
            message = self._inbox.get()
            assert callable(message)
            message()

    def missed(self, tier: Tier, reason: str) -> int:
        """Pages that were asked of a tier and not used, for one reason."""
        return self._count("tier_missed_pages_total", tier=tier.value, reason=reason)

    def not_saved(self, tier: Tier, reason: str) -> int:
        return self._count("tier_not_saved_pages_total", tier=tier.value, reason=reason)

    def num_calls(self, tier: Tier, operation: Operation) -> int:
        """Calls of one kind to a tier."""
        return self._count("store_call_seconds_count", tier=tier.value, operation=operation)

    @property
    def num_host_pages_reported(self) -> int:
        return self._count("pages", tier="host", state="cached")

    def _count(self, name: str, **labels: str) -> int:
        return int(self.metrics.registry.get_sample_value(f"prefixcache_{name}", labels) or 0)

    def _new_engine(self) -> Engine:
        limits = EngineLimits(
            MAX_MODEL_LEN, VOCAB_SIZE, PAGE_SIZE, self.num_pages, max_queue=10_000, max_tenant_queue=10_000
        )
        scheduler = Scheduler(self.cache, self._max_num_seqs, self._chunk)
        return Engine(self._runner, self.cache, scheduler, tokenizer(), limits, self.metrics, _publish, self._inbox)


class SlowPrefill(PrefillEstimate):
    """The estimate on a machine that computes so slowly that every load pays."""

    @property
    def is_known(self) -> bool:
        return True

    def seconds(self, num_tokens: int, context_len: int) -> float:
        return SLOW_TOKEN_S * max(0, num_tokens)


def cached_by_tier(stream: Stream) -> dict[Tier, int]:
    """Cached tokens by tier, those with any."""
    return {tier: count for tier, count in stream.usage.cached_tokens_by_tier.items() if count}


def whole_pages(num_tokens: int) -> int:
    """How many of a prompt's tokens lower tiers can give back: whole pages, and never the last token."""
    return (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE


def changed_model(family: str, change: Callable[[PreTrainedModel], None]) -> PreTrainedModel:
    """A copy of a family's model with something about it changed."""
    model = copy.deepcopy(tiny_model(family))
    change(model)
    return model


def disk_settings(folder: Path) -> dict[str, Any]:
    """Settings of a small disk tier."""
    return {"disk": str(folder), "disk_size": 64 * 2**20}


def _publish(news: list[News]) -> None:
    for sink, item in news:
        sink.put(item)


@cache
def _decoder(model: PreTrainedModel, dtype: torch.dtype, kernels: str) -> tuple[ForwardPass, bytes]:
    """A decoder of a model, which stays as it is, and the digest of its weights."""
    spec = spec_from_config(model.config)
    weights = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
    digest = weights_digest(weights)
    return decoders.decoder(spec, weights, dtype), digest
