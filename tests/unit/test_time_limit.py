"""A limit ends what takes too long, and blames nobody for time in which this process stood still."""

from __future__ import annotations

import asyncio
import time

import pytest

from prefixcache.store.time_limit import time_limit


async def test_what_takes_longer_is_ended():
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with time_limit(0.05):
            await asyncio.sleep(60)
    assert time.monotonic() - started_s >= 0.05


async def test_an_answer_that_came_while_the_process_stood_still_is_taken():
    async with time_limit(0.1):
        answer = asyncio.create_task(asyncio.sleep(0.05, "answer"))
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251  # both timers are due when the loop runs again
        assert await answer == "answer"


async def test_a_pause_puts_the_limit_off_and_does_not_lift_it():
    asyncio.get_running_loop().call_soon(time.sleep, 0.2)
    with pytest.raises(TimeoutError):
        async with time_limit(0.05):
            await asyncio.sleep(60)


async def test_a_loop_that_is_always_busy_does_not_lift_it():
    async def work() -> None:
        while True:
            time.sleep(0.015)  # noqa: ASYNC251
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10), time_limit(0.1):
            await asyncio.Event().wait()
    assert time.monotonic() - started_s < 5
    working.cancel()


async def test_each_restart_allows_the_time_anew():
    async with time_limit(0.5) as limit:
        for _ in range(6):
            await asyncio.sleep(0.1)
            limit.restart(0.5)


async def test_a_restart_may_shorten_it():
    async def wait() -> None:
        async with time_limit(60) as limit:
            limit.restart(0.01)
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await wait()


async def test_a_cancelled_wait_is_cancelled_and_leaves_no_timer():
    async def wait() -> None:
        async with time_limit(0.05):
            await asyncio.sleep(60)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.1)


async def test_what_is_done_in_time_is_not_ended_afterwards():
    async with time_limit(0.05):
        pass
    await asyncio.sleep(0.1)
