"""What a prompt's search of the lower tiers has found, and what its load has brought so far.

page     0 … shared │ computed from the front ──▶          ◀── loaded from the back │ end
                      ▲ start        floor ▲     ▲ low                              ▲ end
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import StrEnum

from prefixcache.request import Tier
from prefixcache.tree.hashing import DigestChain


class WritePolicy(StrEnum):
    """Which published pages the stores are to write."""

    ALWAYS = "always"  # all of them, once their prompt or answer is computed
    REUSED = "reused"  # those that a later prompt has used


@dataclass(frozen=True, slots=True)
class TierRun:
    """Pages [start, end) of one prompt that a tier said it has. A hint: only what is loaded and verified counts."""

    tier: Tier
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Search:
    """One prompt's names outside the process, and where its pages were seen. Engine thread only.

    Attributes:
        chain: The digests of its whole pages.
        runs: Unbroken from the first page that the device does not have; None until the stores have answered.
    """

    chain: DigestChain
    runs: list[TierRun] | None = None

    @property
    def is_pending(self) -> bool:
        return self.runs is None


@dataclass(slots=True, eq=False)
class Load:
    """Pages on their way into a lease's private pages, the last ones first.

    The engine thread computes pages from the front and the store thread fills them from the back. `lock` decides page
    by page who writes: the one claims by raising `floor`, the other by lowering `low` as it copies.

    Attributes:
        runs: Which pages come from which tier, in page order.
        started_s: When it was given to the stores.
        expected_s: What the planner thought that all of it would take.
        first_batch: How many pages each tier is first asked for at once.
        low: Pages [low, end) are there and verified.
        floor: Pages below it are the computation's; none of them is written by the store thread any more.
        is_done: Nothing more will come. Engine thread only.
    """

    runs: list[TierRun]
    started_s: float
    expected_s: float
    first_batch: dict[Tier, int]
    low: int
    floor: int
    is_done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def start(self) -> int:
        return self.runs[0].start

    @property
    def end(self) -> int:
        return self.runs[-1].end

    def claim(self, page: int) -> int:
        """Reserve the pages before `page` for the computation, as far as they are not loaded; return how far that is.

        Engine thread only. May wait for the copy of one batch.
        """
        with self.lock:
            self.floor = max(self.floor, min(page, self.low))
            return self.floor

    def abandon(self) -> None:
        """Let nothing more be written; from now on the pages may be used otherwise. Engine thread only."""
        with self.lock:
            self.floor = self.end

    def tokens_by_tier(self, start_token: int, page_size: int) -> dict[Tier, int]:
        """Count the tokens from `start_token` to the load's end by the tier that they come from."""
        counts: dict[Tier, int] = {}
        for run in self.runs:
            num_tokens = run.end * page_size - max(run.start * page_size, start_token)
            if num_tokens > 0:
                counts[run.tier] = counts.get(run.tier, 0) + num_tokens
        return counts
