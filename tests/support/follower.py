"""What a listener knows that is told nothing but the events: held against what the tree really has."""

from __future__ import annotations

from prefixcache.tree.events import Cleared, PageEvent, RemovedPages, StoredPages

Tokens = tuple[int, ...]


class Follower:
    """Replays events and is strict about them: parents come first, nothing comes twice, tails go before heads.

    Attributes:
        prefixes: Key of each page that is there -> all tokens from the prompt's beginning to the page's end.
        sequence: Number of the last batch.
    """

    def __init__(self, page_size: int, sequence: int, snapshot: list[PageEvent]) -> None:
        self.prefixes: dict[bytes, Tokens] = {}
        self.sequence = sequence
        self._page_size = page_size
        self._apply_all(snapshot)

    def apply(self, sequence: int, events: list[PageEvent]) -> None:
        assert sequence == self.sequence + 1, "a batch is missing"
        self.sequence = sequence
        self._apply_all(events)

    def _apply_all(self, events: list[PageEvent]) -> None:
        for event in events:
            match event:
                case StoredPages():
                    self._store(event)
                case RemovedPages():
                    self._remove(event)
                case Cleared():
                    self.prefixes.clear()

    def _store(self, event: StoredPages) -> None:
        tokens = tuple(memoryview(event.token_ids).cast("I"))
        assert len(tokens) == len(event.keys) * self._page_size > 0
        prefix = () if event.parent is None else self.prefixes[event.parent]
        for index, key in enumerate(event.keys):
            prefix += tokens[index * self._page_size : (index + 1) * self._page_size]
            assert key not in self.prefixes, "a page is stored twice"
            self.prefixes[key] = prefix

    def _remove(self, event: RemovedPages) -> None:
        assert event.keys
        for key in event.keys:
            prefix = self.prefixes.pop(key)
            longer = len(prefix) + self._page_size
            assert not any(len(other) == longer and other[: len(prefix)] == prefix for other in self.prefixes.values())
