"""Builds the tiers below the device from Settings, and takes them down again in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch

from prefixcache.cache.host_tier import HostTier
from prefixcache.cache.mover import MISS_REASONS, NOT_SAVED_REASONS, Post, StoreTier, TierMover
from prefixcache.cache.planner import TransferEstimate
from prefixcache.config import Settings
from prefixcache.errors import ConfigError
from prefixcache.kv.codec import PageCodec
from prefixcache.kv.layout import KVLayout
from prefixcache.kv.page_pool import PagePool
from prefixcache.kv.transfer import transfer_for
from prefixcache.metrics import TierMetrics
from prefixcache.request import Tier
from prefixcache.store.base import ERROR_KINDS, PageStore
from prefixcache.store.breaker import BreakerState
from prefixcache.store.disk import DiskStore
from prefixcache.store.guard import CallEnded, Event, GuardedStore, GuardLimits, Operation, StateChanged
from prefixcache.store.redis import RedisStore
from prefixcache.store.redis_url import parse_redis_url
from prefixcache.store.worker import StoreWorker

# What a tier is believed to do before anything was measured: modest, so that the first loads are quick to prove it.
DISK_ESTIMATE = (0.001, 1 / 500e6)
REDIS_ESTIMATE = (0.002, 1 / 200e6)
FLUSH_S = 30.0
STOP_S = 5.0

_log = logging.getLogger(__name__)


class Storage:
    """The tiers below the device; empty where none is configured. Made and closed on the main thread.

    Attributes:
        host: Host memory, or None.
        mover: Reaches disk and Redis, or None.
        fingerprint: Names the model and the layout of its K/V outside the process.
    """

    def __init__(
        self, settings: Settings, fingerprint: bytes, pool: PagePool, layout: KVLayout, metrics: TierMetrics, post: Post
    ) -> None:
        self.fingerprint = fingerprint
        self.host = _build_host(settings, pool, layout, metrics)
        self.mover: TierMover | None = None
        self._worker = StoreWorker()
        codec = PageCodec(fingerprint, layout.page_size, layout.bytes_per_page)
        self._stores = _build_stores(settings, codec.header_bytes + codec.payload_bytes, metrics)
        if self._stores:
            self._worker.start()
            self.mover = TierMover(
                self._stores, self._worker, transfer_for(pool), codec, fingerprint, layout.page_size, post, metrics
            )

    def describe(self) -> str:
        """Name what is there, in a few words."""
        names = [f"host memory ({self.host.capacity_pages} pages)"] if self.host is not None else []
        names += [tier.tier.value for tier in self._stores]
        return ", ".join(names) or "none"

    def close(self) -> None:
        """Finish what is queued for writing, as far as there is time, then let the stores go. The engine has ended."""
        if self.mover is None:
            return
        if not self.mover.flush(FLUSH_S):
            _log.warning("not everything could be written to the stores within %g s", FLUSH_S)
        for tier in self._stores:
            try:
                self._worker.run(tier.store.close()).result(STOP_S)
            except Exception as error:  # the others are closed all the same
                _log.warning("the %s store could not be closed: %r", tier.tier.value, error)
        self._worker.stop(STOP_S)


def is_configured(settings: Settings) -> bool:
    """Whether any tier below the device is asked for."""
    return any((settings.host_memory, settings.disk, settings.redis))


def _build_host(settings: Settings, pool: PagePool, layout: KVLayout, metrics: TierMetrics) -> HostTier | None:
    if settings.host_memory is None:
        return None
    num_pages = settings.host_memory // layout.bytes_per_page
    if num_pages < 1:
        raise ConfigError(f"host-memory is less than one page of {layout.bytes_per_page} bytes")
    return HostTier(PagePool(layout, num_pages, torch.device("cpu"), pinned=pool.kv.is_cuda), pool, metrics)


def _build_stores(settings: Settings, value_bytes: int, metrics: TierMetrics) -> list[StoreTier]:
    tiers: list[StoreTier] = []

    def add(tier: Tier, store: PageStore, estimate: tuple[float, float]) -> None:
        observe: Callable[[Event], None] = partial(_observe, metrics, tier)
        guarded = GuardedStore(tier.value, store, value_bytes, GuardLimits(), observe)
        tiers.append(StoreTier(tier, guarded, TransferEstimate(*estimate)))
        metrics.open_store(
            tier,
            operations=get_args(Operation),
            errors=ERROR_KINDS,
            miss_reasons=MISS_REASONS,
            not_saved_reasons=NOT_SAVED_REASONS,
        )

    if settings.disk_folder is not None:
        metrics.set_disk_size(settings.disk_size)
        disk = DiskStore(
            settings.disk_folder, settings.disk_size, lambda use: metrics.set_disk(use.num_values, use.num_bytes)
        )
        add(Tier.DISK, disk, DISK_ESTIMATE)
    if settings.redis is not None:
        target = parse_redis_url(settings.redis.get_secret_value(), settings.redis_password)
        add(Tier.REMOTE, RedisStore(target, settings.redis_ttl_s), REDIS_ESTIMATE)
    return tiers


def _observe(metrics: TierMetrics, tier: Tier, event: Event) -> None:
    match event:
        case CallEnded(operation, seconds, _, outcome):
            metrics.store_called(tier, operation, seconds, outcome)
        case StateChanged(side, state):
            metrics.store_state(tier, side, is_up=state is BreakerState.CLOSED)
