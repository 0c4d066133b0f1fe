"""The event-loop end of one request: what the engine publishes goes in, the servicer iterates over it.

engine thread ── one call_soon_threadsafe per step ──▶ dispatch ── put ──▶ TokenStream ── async for ──▶ servicer
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from prefixcache.engine.engine import News
from prefixcache.errors import PrefixCacheError
from prefixcache.request import Delta


class TokenStream:
    """A queue of deltas that ends after the one that carries the usage, or with an error (I8).

    Event loop only. The queue has no bound of its own: a request never has more deltas than tokens.
    """

    def __init__(self) -> None:
        self._items: asyncio.Queue[Delta | PrefixCacheError] = asyncio.Queue()

    def put(self, item: Delta | PrefixCacheError) -> None:
        """Takes one delta, or the error that ends the stream."""
        self._items.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yields the deltas as they come; raises the error if one ends the stream."""
        while True:
            item = await self._items.get()
            if isinstance(item, PrefixCacheError):
                raise item
            yield item
            if item.usage is not None:
                return


def dispatch(items: list[News]) -> None:
    """Hands what one engine step has published to its streams. Event loop only."""
    for sink, item in items:
        sink.put(item)
