"""Waiting for something that happens soon, without a fixed pause."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 30.0


def until(is_true: Callable[[], bool]) -> None:
    """Returns once it is true; fails if that takes too long."""
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
