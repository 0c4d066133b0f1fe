"""Every metric of the server. `server/http_endpoint.py` serves them; `docs/operations.md` has a table of them.

There is one `Metrics` object per server, made by `app.py` and handed to whoever counts; nothing is registered
globally. Labels come from closed enumerations only, so no client can add a series. Children of labelled metrics
are looked up once, here, because `labels()` costs more than the increment itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from prefixcache.request import Tier

# The time at which each series began would be a series of its own, half as many again, that nothing here looks at.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Outcome(StrEnum):
    """How a Generate or Complete call ended."""

    OK = "ok"
    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    OVERLOADED = "overloaded"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"
    NOT_SERVING = "not_serving"


class HitKind(StrEnum):
    """How much of a prompt was known when it was admitted; `full` means no token had to be prefilled."""

    COLD = "cold"
    PARTIAL = "partial"
    FULL = "full"


class Direction(StrEnum):
    """Which way pages move: `load` is towards the device."""

    LOAD = "load"
    SAVE = "save"


class PageState(StrEnum):
    """Where a page of a pool stands: nobody's, known and evictable, or needed by a running sequence."""

    FREE = "free"
    CACHED = "cached"
    IN_USE = "in_use"


TTFT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
LOOKUP_BUCKETS_S = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
QUEUE_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
BATCH_TOKENS_BUCKETS = tuple(2**power for power in range(15))
BATCH_SEQUENCES_BUCKETS = tuple(2**power for power in range(9))
TRANSFER_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class TierMetrics:
    """What is counted of the tiers below the device. Any thread.

    Labels are closed sets: tiers, operations, and the reasons and error kinds that cache and stores define. A tier's
    series exist from `open_store` on, so that the first error of a kind is an increase and not a new series.

    Attributes:
        suspended: Stores, or their writes, that a circuit breaker keeps away from: (tier, side).
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"prefixcache_{name}_total", help_text, ["tier", *labels], registry=registry)

        self._missed = counter("tier_missed_pages", "Pages asked of a tier and not used, by why not.", "reason")
        self._loaded = counter("tier_loaded_bytes", "Bytes of verified pages brought to the device.")
        self._saved = counter("tier_saved_bytes", "Bytes of pages written.")
        self._not_saved = counter("tier_not_saved_pages", "Pages that were not written, by why not.", "reason")
        self._expected = counter("tier_load_expected_seconds", "What the planner expected finished loads to take.")
        self._actual = counter("tier_load_actual_seconds", "What the same loads took.")
        self._errors = counter("store_errors", "Store calls that failed, by kind.", "kind")
        self._calls = Histogram(
            "prefixcache_store_call_seconds",
            "Time of one store call.",
            ["tier", "operation"],
            buckets=TRANSFER_BUCKETS_S,
            registry=registry,
        )
        self._up = Gauge(
            "prefixcache_store_up",
            "1 while the store is in use, 0 while its circuit breaker keeps away from it; for all of it, or writes.",
            ["tier", "side"],
            registry=registry,
        )
        self._in_flight = Gauge(
            "prefixcache_tier_pages_in_flight",
            "Pages on their way to the device, or waiting to be written.",
            ["tier", "direction"],
            registry=registry,
        )
        self._disk_pages = Gauge("prefixcache_disk_pages", "Pages held on disk.", registry=registry)
        self._disk_bytes = Gauge("prefixcache_disk_bytes", "Bytes that they take there.", registry=registry)
        self._disk_size = Gauge("prefixcache_disk_size_bytes", "Most bytes that they may take.", registry=registry)
        self.suspended: set[tuple[Tier, str]] = set()

    def open_store(
        self,
        tier: Tier,
        *,
        operations: Iterable[str],
        errors: Iterable[str],
        miss_reasons: Iterable[str],
        not_saved_reasons: Iterable[str],
    ) -> None:
        """Makes the series of one store, at 0, with every label value that they can have."""
        for metric in (self._loaded, self._saved, self._expected, self._actual):
            metric.labels(tier.value)
        for metric, values in ((self._missed, miss_reasons), (self._not_saved, not_saved_reasons)):
            for value in values:
                metric.labels(tier.value, value)
        for operation in operations:
            self._calls.labels(tier.value, operation)
        for kind in errors:
            self._errors.labels(tier.value, kind)
        for side in ("store", "writes"):
            self.store_state(tier, side, is_up=True)
        for direction in Direction:
            self._in_flight.labels(tier.value, direction.value)

    def missed(self, tier: Tier, reason: str, num_pages: int) -> None:
        self._missed.labels(tier.value, reason).inc(num_pages)

    def loaded(self, tier: Tier, num_bytes: int) -> None:
        self._loaded.labels(tier.value).inc(num_bytes)

    def saved(self, tier: Tier, num_bytes: int) -> None:
        self._saved.labels(tier.value).inc(num_bytes)

    def not_saved(self, tier: Tier, reason: str, num_pages: int) -> None:
        self._not_saved.labels(tier.value, reason).inc(num_pages)

    def load_finished(self, tier: Tier, expected_s: float, actual_s: float) -> None:
        self._expected.labels(tier.value).inc(expected_s)
        self._actual.labels(tier.value).inc(actual_s)

    def store_called(self, tier: Tier, operation: str, seconds: float, outcome: str) -> None:
        self._calls.labels(tier.value, operation).observe(seconds)
        if outcome not in {"ok", "cancelled"}:
            self._errors.labels(tier.value, outcome).inc()

    def store_state(self, tier: Tier, side: str, *, is_up: bool) -> None:
        self._up.labels(tier.value, side).set(is_up)
        (self.suspended.discard if is_up else self.suspended.add)((tier, side))

    def moving(self, tier: Tier, direction: Direction, num_pages: int) -> None:
        """Adds pages to those on their way; a negative number takes them off."""
        self._in_flight.labels(tier.value, direction.value).inc(num_pages)

    def set_disk(self, num_pages: int, num_bytes: int) -> None:
        self._disk_pages.set(num_pages)
        self._disk_bytes.set(num_bytes)

    def set_disk_size(self, num_bytes: int) -> None:
        self._disk_size.set(num_bytes)


class Metrics:
    """All counters, gauges and histograms of one server.

    Any thread. Requests are counted by the server at the end of a call; everything else is counted by the engine
    thread, tokens of a prompt once, at admission, so that a preempted sequence is not counted twice.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tiers = TierMetrics(self.registry)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

        requests = Counter(
            "prefixcache_requests_total", "Generate and Complete calls by outcome.", ["outcome"], registry=self.registry
        )
        self.requests = {outcome: requests.labels(outcome.value) for outcome in Outcome}

        ttft = Histogram(
            "prefixcache_ttft_seconds",
            "Time from submission to the first token, by how much of the prompt was known.",
            ["hit"],
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.ttft_seconds = {kind: ttft.labels(kind.value) for kind in HitKind}
        self.itl_seconds = Histogram(
            "prefixcache_itl_seconds",
            "Time between two consecutive tokens of one sample.",
            buckets=ITL_BUCKETS_S,
            registry=self.registry,
        )

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        cached = Counter(
            "prefixcache_cached_tokens_total",
            "Prompt tokens of admitted requests whose K/V earlier requests had computed, by the tier it was found on.",
            ["tier"],
            registry=self.registry,
        )
        self.cached_tokens = {tier: cached.labels(tier.value) for tier in Tier}
        self.generated_tokens = self._counter("generated_tokens", "Tokens sampled.")
        self.prefilled_tokens = self._counter(
            "prefilled_tokens", "Prompt tokens run through the model, those of preempted sequences each time again."
        )

        self.prefill_seconds = self._counter(
            "prefill_seconds", "Time of engine steps, as far as it went into prompt tokens: their share of the batch."
        )

        self.queue_seconds = Histogram(
            "prefixcache_queue_seconds",
            "Time from submission until the first sample began to be computed or loaded.",
            buckets=QUEUE_BUCKETS_S,
            registry=self.registry,
        )
        self.queue_depth = self._gauge("queue_depth", "Samples that wait to be computed, preempted ones among them.")
        self.running_sequences = self._gauge("running_sequences", "Sequences that hold pages and are computed.")
        self.preemptions = self._counter("preemptions", "Running sequences put back into the queue for lack of pages.")

        pages = Gauge("prefixcache_pages", "Pages by tier and state.", ["tier", "state"], registry=self.registry)
        self.pages = {state: pages.labels(Tier.DEVICE.value, state.value) for state in PageState}
        self.host_pages = {
            state: pages.labels(Tier.HOST.value, state.value) for state in (PageState.FREE, PageState.CACHED)
        }
        self.page_bytes = self._gauge("page_bytes", "Bytes of K/V in one page.")
        evicted = Counter(
            "prefixcache_evicted_pages_total",
            "Cached pages given up to make room, by the tier that they left.",
            ["tier"],
            registry=self.registry,
        )
        self.evicted_pages = {tier: evicted.labels(tier.value) for tier in (Tier.DEVICE, Tier.HOST)}

        self.lookup_seconds = Histogram(
            "prefixcache_lookup_seconds",
            "Time to find the longest known prefix of one prompt.",
            buckets=LOOKUP_BUCKETS_S,
            registry=self.registry,
        )
        self.step_seconds = Histogram(
            "prefixcache_step_seconds",
            "Time of one engine step that computed something.",
            buckets=STEP_BUCKETS_S,
            registry=self.registry,
        )
        self.batch_tokens = Histogram(
            "prefixcache_batch_tokens",
            "Tokens computed in one engine step.",
            buckets=BATCH_TOKENS_BUCKETS,
            registry=self.registry,
        )
        self.batch_sequences = Histogram(
            "prefixcache_batch_sequences",
            "Sequences computed in one engine step.",
            buckets=BATCH_SEQUENCES_BUCKETS,
            registry=self.registry,
        )
        self._ready = self._gauge("ready", "1 while /readyz says so: the model is loaded, the engine comes round.")
        self._build = Info("prefixcache_build", "What is running.", registry=self.registry)

    def set_build_info(self, *, version: str, model: str, device: str, dtype: str) -> None:
        """Publishes what is running as the labels of `prefixcache_build_info`."""
        self._build.info({"version": version, "model": model, "device": device, "dtype": dtype})

    def watch_ready(self, is_ready: Callable[[], bool]) -> None:
        """Has each scrape ask whether the server is ready."""
        self._ready.set_function(is_ready)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"prefixcache_{name}_total", help_text, registry=self.registry)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"prefixcache_{name}", help_text, registry=self.registry)
