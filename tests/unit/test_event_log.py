"""Batches of cache events: how they are cut, kept and forgotten."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from prefixcache.errors import CursorExpired, EventsLost, NotServing
from prefixcache.request import Tier
from prefixcache.server.event_log import EventLog, block_hash, snapshot_batches
from prefixcache.tree.events import Cleared, PageEvent, RemovedPages, StoredPages, batches
from prefixcache.tree.node import token_key
from tests.support.follower import Follower

PAGE = 4
FIRST = 1000


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(8)


def run(start: int, count: int, parent: int | None = None) -> StoredPages:
    """Pages with these numbers as keys, and tokens that follow from them."""
    tokens = token_key(range(start * PAGE, (start + count) * PAGE))
    keys = [key(number) for number in range(start, start + count)]
    return StoredPages(Tier.DEVICE, None if parent is None else key(parent), keys, tokens)


def num_pages(event: PageEvent) -> int:
    return 0 if isinstance(event, Cleared) else len(event.keys)


@pytest.mark.parametrize("max_pages", [1, 2, 3, 7, 100])
def test_cut_events_say_the_same_in_the_same_order(max_pages: int):
    removed = RemovedPages(Tier.DEVICE, [key(number) for number in range(14, 7, -1)])
    events: list[PageEvent] = [Cleared(), run(1, 5), run(6, 1, 5), run(7, 8, 6), removed]
    whole = Follower(PAGE, FIRST, [])
    whole.apply(FIRST + 1, events)

    cut = list(batches(events, max_pages))

    assert all(sum(map(num_pages, batch)) <= max_pages for batch in cut)
    follower = Follower(PAGE, FIRST, [])
    for sequence, batch in enumerate(cut, FIRST + 1):
        follower.apply(sequence, batch)
    assert follower.prefixes == whole.prefixes


def test_a_snapshot_ends_with_the_number_it_was_taken_at():
    chunks = list(snapshot_batches(FIRST, [run(1, 5000), run(5001, 5000, 5000)]))
    assert [chunk.sequence_number for chunk in chunks] == [FIRST - 3, FIRST - 2, FIRST - 1, FIRST][-len(chunks) :]
    assert [(chunk.snapshot.index, chunk.snapshot.count) for chunk in chunks] == [
        (index, len(chunks)) for index in range(len(chunks))
    ]
    assert {chunk.snapshot.blocks for chunk in chunks} == {10_000}
    assert chunks[0].events[0].HasField("cleared")
    hashes = [block.block_hash for chunk in chunks for event in chunk.events for block in event.stored.blocks]
    assert hashes == [block_hash(key(number)) for number in range(1, 10_001)]
    assert all(chunk.ByteSize() < 1_000_000 for chunk in chunks)


async def test_a_cursor_reads_on_and_waits_for_what_comes():
    log = EventLog(FIRST)
    log.check_cursor(FIRST)
    log.append(FIRST + 1, [run(1, 2)])
    assert (await log.next_after(FIRST)).sequence_number == FIRST + 1
    waiting = asyncio.create_task(log.next_after(FIRST + 1))
    await asyncio.sleep(0)
    log.append(FIRST + 2, [run(3, 2, 2)])
    assert (await waiting).events[0].stored.parent_block_hash == block_hash(key(2))


async def test_the_history_is_bounded_and_those_it_leaves_behind_are_told():
    log = EventLog(FIRST, max_bytes=1000)
    for number in itertools.count(1):
        log.append(FIRST + number, [run(number, 1)])
        if number == 50:
            break
    assert 500 < log.num_bytes <= 1000
    with pytest.raises(EventsLost):
        await log.next_after(FIRST)
    for cursor in (FIRST, FIRST + 51, 7):
        with pytest.raises(CursorExpired):
            log.check_cursor(cursor)
    log.check_cursor(FIRST + 50)
    assert (await log.next_after(FIRST + 49)).sequence_number == FIRST + 50


async def test_a_closed_log_ends_every_wait():
    log = EventLog(FIRST)
    waiting = asyncio.create_task(log.next_after(FIRST))
    await asyncio.sleep(0)
    log.close()
    with pytest.raises(NotServing):
        await waiting
    with pytest.raises(NotServing):
        await log.next_after(FIRST)
