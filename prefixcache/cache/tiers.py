"""What a prompt's search of the lower tiers has found, and what its load has brought so far.

    page     0 … shared │ computed from the front ──▶          ◀── loaded from the back │ end
                          ▲ start                    ▲ low                                ▲ end

Both objects belong to the engine thread; the store thread reports to it and reads only what is marked so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixcache.request import Tier
from prefixcache.tree.hashing import DigestChain


@dataclass(frozen=True, slots=True)
class TierRun:
    """Pages [start, end) of one prompt that a tier said it has. A hint: only what is loaded and verified counts."""

    tier: Tier
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Search:
    """One prompt's names outside the process, and where its pages were seen.

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

    Attributes:
        runs: Which pages come from which tier, in page order.
        started_s: When it was given to the stores.
        low: Pages [low, end) are there and verified.
        floor: Pages below it are not wanted any more; read by the store thread before each batch.
        expected_s: What the planner thought that all of it would take.
        is_done: The store thread writes to no page of it any more.
    """

    runs: list[TierRun]
    started_s: float
    low: int
    floor: int
    expected_s: float
    is_done: bool = False
    loaded_pages: dict[Tier, int] = field(default_factory=dict)

    @property
    def start(self) -> int:
        return self.runs[0].start

    @property
    def end(self) -> int:
        return self.runs[-1].end

    def tier_of(self, page: int) -> Tier:
        return next(run.tier for run in self.runs if run.start <= page < run.end)
