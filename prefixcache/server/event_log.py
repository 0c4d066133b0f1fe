"""What has been published of pages lately, for subscribers that read at their own speed.

engine thread ── publish ──▶ append ──▶ [ batch 41 │ 42 │ 43 │ 44 ]     one bounded history for all
                                            ▲               ▲
                                     slow subscriber     quick one      a subscriber is a cursor, and nothing else

A subscriber that the history has left behind is cut off and begins again with a snapshot, so no subscriber costs
memory, whatever it does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator

from smg_grpc_proto.generated import common_pb2

from prefixcache.errors import CursorExpired, EventsLost, NotServing
from prefixcache.request import Tier
from prefixcache.tree.events import MAX_BATCH_PAGES, Cleared, PageEvent, RemovedPages, StoredPages, batches
from prefixcache.tree.node import BYTES_PER_TOKEN

HISTORY_BYTES = 16 * 2**20

_TIERS = {
    Tier.DEVICE: common_pb2.KV_CACHE_TIER_DEVICE,
    Tier.HOST: common_pb2.KV_CACHE_TIER_HOST,
    Tier.DISK: common_pb2.KV_CACHE_TIER_DISK,
    Tier.REMOTE: common_pb2.KV_CACHE_TIER_EXTERNAL,
}


class EventLog:
    """The last batches, by number. Event loop only.

    Args:
        sequence: Number that the first batch follows on.
        max_bytes: Most bytes of batches that are kept, as they go over the wire.
    """

    def __init__(self, sequence: int, max_bytes: int = HISTORY_BYTES) -> None:
        self._batches: deque[tuple[common_pb2.KvEventBatch, int]] = deque()
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._last = sequence
        self._news = asyncio.Event()
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """How much is kept."""
        return self._num_bytes

    def append(self, sequence: int, events: list[PageEvent]) -> None:
        """Takes the next batch, and forgets the oldest ones where there are too many."""
        assert sequence == self._last + 1
        batch = _batch(sequence, events)
        size = batch.ByteSize()
        self._batches.append((batch, size))
        self._last = sequence
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._batches.popleft()[1]
        self._wake_all()

    def close(self) -> None:
        """Ends every subscription, those to come too."""
        self._is_closed = True
        self._wake_all()

    def check_cursor(self, cursor: int) -> None:
        """Raises CursorExpired unless all that follows on batch `cursor` is here."""
        if not self._last - len(self._batches) <= cursor <= self._last:
            raise CursorExpired(
                f"batch {cursor} is not one of the {len(self._batches)} kept here, of which the last is {self._last}; "
                "subscribe with 0 to begin with a snapshot"
            )

    async def next_after(self, cursor: int) -> common_pb2.KvEventBatch:
        """Waits for the batch that follows on batch `cursor`.

        Raises:
            EventsLost: It is forgotten already.
            NotServing: The log is closed.
        """
        while cursor == self._last and not self._is_closed:
            await self._news.wait()
        if self._is_closed:
            raise NotServing("the server is shutting down")
        index = cursor - self._last
        if -index > len(self._batches):
            raise EventsLost("read too slowly: events are lost; subscribe with 0 to begin with a snapshot")
        return self._batches[index][0]

    def _wake_all(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def snapshot_batches(sequence: int, events: list[PageEvent]) -> Iterator[common_pb2.KvEventBatch]:
    """Says what is there as the chunks of one snapshot, the last of which has the number `sequence`."""
    chunks = list(batches([Cleared(), *events], MAX_BATCH_PAGES))
    num_pages = sum(len(event.keys) for event in events if isinstance(event, StoredPages))
    for index, chunk in enumerate(chunks):
        batch = _batch(sequence - len(chunks) + 1 + index, chunk)
        batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks = index, len(chunks), num_pages
        yield batch


def _batch(sequence: int, events: list[PageEvent]) -> common_pb2.KvEventBatch:
    batch = common_pb2.KvEventBatch(sequence_number=sequence, timestamp=time.time(), dp_rank=0)
    for event in events:
        _add(batch.events.add(), event)
    return batch


def _add(message: common_pb2.KvCacheEvent, event: PageEvent) -> None:
    match event:
        case StoredPages(tier, parent, keys, token_ids):
            stored = message.stored
            stored.tier = _TIERS[tier]
            if parent is not None:
                stored.parent_block_hash = block_hash(parent)
            tokens = memoryview(token_ids).cast("I")
            size = len(token_ids) // BYTES_PER_TOKEN // len(keys)
            for index, key in enumerate(keys):
                stored.blocks.add(
                    block_hash=block_hash(key), token_ids=tokens[index * size : (index + 1) * size], block_size=size
                )
        case RemovedPages(tier, keys):
            message.removed.tier = _TIERS[tier]
            message.removed.block_hashes.extend(block_hash(key) for key in keys)
        case Cleared():
            message.cleared.SetInParent()


def block_hash(key: bytes) -> int:
    """The beginning of a page's key, as the number that the gateway's protocol has room for."""
    return int.from_bytes(key[:8], "big", signed=True)
