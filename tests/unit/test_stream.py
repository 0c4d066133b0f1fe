"""The event-loop end of one request."""

from __future__ import annotations

import asyncio

import pytest

from prefixcache.errors import EngineFailed
from prefixcache.request import Delta, Timings, Usage
from prefixcache.server.stream import TokenStream

LAST = Delta(0, usage=Usage(1, 0, 2), timings=Timings(1, 1, 1, 1))


async def test_deltas_come_in_order_and_end_after_the_one_with_usage():
    stream = TokenStream()
    deltas = [Delta(0, (1,), "a"), Delta(1, (2,), "b"), LAST]
    for delta in deltas:
        stream.put(delta)
    stream.put(Delta(0, (9,), "after the end"))
    assert [delta async for delta in stream] == deltas


async def test_it_waits_for_what_has_not_come_yet():
    stream = TokenStream()

    async def collect() -> list[Delta]:
        return [delta async for delta in stream]

    collecting = asyncio.create_task(collect())
    await asyncio.sleep(0)
    stream.put(Delta(0, (1,), "a"))
    await asyncio.sleep(0)
    assert not collecting.done()
    stream.put(LAST)
    assert [delta.token_ids for delta in await collecting] == [(1,), ()]


async def test_an_error_ends_it_after_what_came_before():
    stream = TokenStream()
    stream.put(Delta(0, (1,), "a"))
    stream.put(EngineFailed("boom"))
    deltas = aiter(stream)
    assert (await anext(deltas)).token_ids == (1,)
    with pytest.raises(EngineFailed, match="boom"):
        await anext(deltas)
