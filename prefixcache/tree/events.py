"""What happens to published pages, said so that others can follow: which prefixes are here, and which no longer are.

    commit ──▶ StoredPages ─┐
    evict  ──▶ RemovedPages ┼─▶ PageJournal ── once a step ──▶ publish(sequence, events)
    flush  ──▶ Cleared      ┘

Only the default namespace is told of. The tokens of the others are nobody's business but their owners', and whoever
listens has no salt to look them up with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prefixcache.request import DEFAULT_NAMESPACE, Namespace, Tier
from prefixcache.tree.node import BYTES_PER_TOKEN, PageDigest
from prefixcache.tree.radix import Evicted

# Pages in one batch: what a message of some hundred kilobytes holds.
MAX_BATCH_PAGES = 4096


class StoredPages(NamedTuple):
    """Whole pages that can be matched now, each the continuation of the one before it.

    Attributes:
        tier: Where they are.
        parent: Key of the page before the first one; None where a prompt begins.
        keys: One for each page.
        token_ids: Their tokens, as `token_key` encodes them.
    """

    tier: Tier
    parent: bytes | None
    keys: list[bytes]
    token_ids: bytes


class RemovedPages(NamedTuple):
    """Pages that can't be matched any more, those at the end of a prompt before those in front of them."""

    tier: Tier
    keys: list[bytes]


class Cleared(NamedTuple):
    """Whatever was stored before is gone."""


PageEvent = StoredPages | RemovedPages | Cleared
Publish = Callable[[int, list[PageEvent]], None]


class PageJournal:
    """Numbers what happens to pages and hands it on. Engine thread only.

    It does nothing until somebody wants to know (`start`), and from then on records for good, so that a listener that
    comes back can be told what it missed.

    Args:
        first_sequence: Number that the first batch follows on. A process should begin above all numbers of the one
            before it, so that no listener takes the successor's batches for the predecessor's.
        publish: Takes a batch and its number, which is one above that of the batch before.

    Attributes:
        is_recording: Whether anybody wants to know.
        sequence: Number of the last batch.
    """

    def __init__(self, first_sequence: int, publish: Publish) -> None:
        self.is_recording = False
        self.sequence = first_sequence
        self._publish = publish
        self._events: list[PageEvent] = []

    def start(self) -> None:
        """Record from now on."""
        self.is_recording = True

    def stored(
        self, namespace: Namespace, parent: PageDigest | None, pages: list[PageDigest], token_ids: bytes
    ) -> None:
        """Note pages that have just been published on the device."""
        if self.is_recording and namespace == DEFAULT_NAMESPACE:
            self._events.append(stored_event(Tier.DEVICE, parent, pages, token_ids))

    def removed(self, evicted: Evicted) -> None:
        """Note pages that have just left the tree."""
        if self.is_recording and evicted.namespace == DEFAULT_NAMESPACE and evicted.digests:
            self._events.append(RemovedPages(Tier.DEVICE, [digest.key for digest in reversed(evicted.digests)]))

    def replace(self, events: list[PageEvent]) -> None:
        """Say instead of what was noted since the last batch: all is gone, but for the pages of these events."""
        if self.is_recording:
            self._events = [Cleared(), *events]

    def flush(self) -> None:
        """Publish what was noted; does nothing where that is nothing."""
        if self._events:
            events, self._events = self._events, []
            for batch in batches(events, MAX_BATCH_PAGES):
                self.sequence += 1
                self._publish(self.sequence, batch)


def stored_event(tier: Tier, parent: PageDigest | None, pages: list[PageDigest], token_ids: bytes) -> StoredPages:
    """Say that pages are there."""
    return StoredPages(tier, None if parent is None else parent.key, [page.key for page in pages], token_ids)


def batches(events: list[PageEvent], max_pages: int) -> Iterator[list[PageEvent]]:
    """Cut events into batches of at most `max_pages` pages each, in order; a long event is cut, too."""
    batch: list[PageEvent] = []
    num_pages = 0
    for event in events:
        for piece in _pieces(event, max_pages):
            count = 0 if isinstance(piece, Cleared) else len(piece.keys)
            if batch and num_pages + count > max_pages:
                yield batch
                batch, num_pages = [], 0
            batch.append(piece)
            num_pages += count
    if batch:
        yield batch


def _pieces(event: PageEvent, max_pages: int) -> Iterator[PageEvent]:
    if isinstance(event, Cleared) or len(event.keys) <= max_pages:
        yield event
        return
    for start in range(0, len(event.keys), max_pages):
        keys = event.keys[start : start + max_pages]
        if isinstance(event, RemovedPages):
            yield RemovedPages(event.tier, keys)
        else:
            size = len(event.token_ids) // len(event.keys)
            assert size % BYTES_PER_TOKEN == 0
            parent = event.keys[start - 1] if start else event.parent
            yield StoredPages(event.tier, parent, keys, event.token_ids[start * size : (start + len(keys)) * size])
