"""Engines that are stopped or slowed down between two steps: what runs then still runs, however slow the test is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefixcache.engine.runner import Runner

LIMIT_S = 60.0


@contextmanager
def held(runner: Runner, num_steps: int = 0) -> Iterator[threading.Event]:
    """Lets so many steps of the engine run meanwhile, and no more; the event is set when one is held."""
    forward, is_held, go_on = runner.forward, threading.Event(), threading.Event()
    steps_left = num_steps

    def step(*arguments: Any) -> Any:
        nonlocal steps_left
        steps_left -= 1
        if steps_left < 0:
            is_held.set()
            go_on.wait(LIMIT_S)
        return forward(*arguments)

    runner.forward = step  # type: ignore[method-assign]
    try:
        yield is_held
    finally:
        runner.forward = forward  # type: ignore[method-assign]
        go_on.set()


@contextmanager
def slowed(runner: Runner, seconds: float) -> Iterator[None]:
    """Makes each step of the engine take longer by so much meanwhile."""
    forward = runner.forward

    def step(*arguments: Any) -> Any:
        time.sleep(seconds)
        return forward(*arguments)

    runner.forward = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        runner.forward = forward  # type: ignore[method-assign]
