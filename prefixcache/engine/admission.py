"""Who may wait: the bounds of a queue, and whether a request can still make its deadline.

Both only ever refuse early what would be refused, or be in vain, later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from prefixcache.errors import DeadlinePassed, Overloaded

# Admissions that the pace of the queue is measured by, and how many of them it takes to say anything.
NUM_ADMISSIONS, MIN_ADMISSIONS = 64, 4
# By how much an estimate must exceed the time that is left: a wrong refusal costs more than some work in vain.
CERTAINTY = 1.25


class Places:
    """Counts what waits in one queue, in all and for each tenant.

    One thread takes places, one (the same or another) gives them back; neither waits for the other.

    Args:
        what: What waits, in the plural, for people.
        max_waiting: Most places.
        max_share: Most places that one tenant may take, so that there are some left for the others.
        retry_after_ms: When it is worth to try again.
    """

    def __init__(self, what: str, max_waiting: int, max_share: int, retry_after_ms: int) -> None:
        self._what = what
        self._max_waiting = max_waiting
        self._max_share = max_share
        self._retry_after_ms = retry_after_ms
        self._num_taken = self._num_given_back = 0
        self._taken: Counter[str] = Counter()
        self._given_back: Counter[str] = Counter()

    def take(self, tenant: str) -> None:
        """Take a place; raises Overloaded if there is none left, or none for this tenant."""
        if self._num_taken - self._num_given_back >= self._max_waiting:
            raise Overloaded(f"the queue is full ({self._max_waiting} {self._what} wait)", self._retry_after_ms)
        if self._taken[tenant] - self._given_back[tenant] >= self._max_share:
            raise Overloaded(
                f"this tenant's share of the queue is full ({self._max_share} {self._what} wait)", self._retry_after_ms
            )
        self._num_taken += 1
        self._taken[tenant] += 1

    def give_back(self, tenant: str) -> None:
        """Give a place back."""
        self._num_given_back += 1
        self._given_back[tenant] += 1


class Pace:
    """How quickly the queue moves on, from when sequences left it while others stayed. Engine thread only."""

    def __init__(self) -> None:
        self._admissions_s: deque[float] = deque(maxlen=NUM_ADMISSIONS)

    def observe(self, num_admitted: int, num_waiting: int, now_s: float) -> None:
        """Note one step. A queue that has emptied says nothing about the next one."""
        if num_waiting == 0:
            self._admissions_s.clear()
        else:
            self._admissions_s.extend([now_s] * num_admitted)

    def seconds(self, num_ahead: int, now_s: float) -> float:
        """Estimate how long it takes until `num_ahead` others have left the queue; 0 while little has been seen."""
        if len(self._admissions_s) < MIN_ADMISSIONS:
            return 0.0
        return num_ahead * (now_s - self._admissions_s[0]) / len(self._admissions_s)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A sequence that will be computed before a new one.

    Attributes:
        prefix: Equal for those that may share what is computed.
        seconds: Estimate of what is left of its prompt.
        is_waiting: Whether it has not been admitted yet.
    """

    prefix: bytes
    seconds: float
    is_waiting: bool


def check_deadline(left_s: float, own_s: float, ahead: Iterable[Ahead], pace: Pace, now_s: float) -> None:
    """Refuse a request whose first token cannot come in time, as far as can be estimated.

    The estimate errs on the side of letting in: of prompts that may share a prefix only the longest counts, and the
    outputs of running sequences are not counted at all.

    Args:
        left_s: Until its deadline.
        own_s: What takes the part of its prompt that nobody else computes.
        ahead: What is computed first.
        pace: Of the queue.
        now_s: The time.

    Raises:
        DeadlinePassed: The deadline has passed.
        Overloaded: The deadline cannot be met. It says when to try again, if an empty queue could meet it.
    """
    if left_s <= 0:
        raise DeadlinePassed("the deadline has passed")
    if own_s > CERTAINTY * left_s:
        raise Overloaded(
            f"the deadline, in {left_s:.2f} s, cannot be met: what is not cached of the prompt takes {own_s:.2f} s",
            None,
        )
    longest: dict[bytes, float] = {}
    num_waiting = 0
    for other in ahead:
        longest[other.prefix] = max(longest.get(other.prefix, 0.0), other.seconds)
        num_waiting += other.is_waiting
    queue_s = max(sum(longest.values()), pace.seconds(num_waiting, now_s))
    if queue_s + own_s > CERTAINTY * left_s:
        late_s = queue_s + own_s - left_s
        raise Overloaded(
            f"the deadline, in {left_s:.2f} s, cannot be met: queue and prompt take {queue_s + own_s:.2f} s",
            round(late_s * 1000),
        )
