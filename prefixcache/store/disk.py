"""DiskStore: pages in a file of this machine, kept while the service restarts. One process has it at a time.

LMDB blocks, so that reads and writes have a thread each: a read never waits for a commit to reach the disk. That a
value was read is noted in memory and written down with the next commit, so that reading writes nothing.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import lmdb

from prefixcache.store.base import StoreClosed, StoreDamaged, StoreError, StoreFull, Value
from prefixcache.store.lru_file import UNREADABLE, DiskUse, LruFile

P = ParamSpec("P")
T = TypeVar("T")

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # LMDB calls it EIO when part of a write fitted
MAX_NOTED_READS = 16_384  # then they are written down without waiting for a write


class DiskStore:
    """A PageStore in one folder. Event loop only, but for the constructor, which blocks while it opens the file."""

    def __init__(self, folder: Path, max_bytes: int, observe: Callable[[DiskUse], None] = lambda _: None) -> None:
        """Opens or makes the folder; its file never takes more than `max_bytes`.

        `observe` is told what the file holds: now, and after each change, on the thread that writes.

        Raises:
            ConfigError: The folder cannot be used, or is in use (StoreInUse).
        """
        self._folder = folder
        self._file = LruFile(folder, max_bytes)
        self._reader = ThreadPoolExecutor(1, "disk-read")
        self._writer = ThreadPoolExecutor(1, "disk-write")
        self._noted_reads: dict[bytes, None] = {}  # oldest first
        self._is_closed = False
        self._observe = observe
        observe(self._file.use())

    def __repr__(self) -> str:
        return f"DiskStore({self._folder})"

    async def count_leading(self, keys: Sequence[bytes]) -> int:
        return await self._run(self._reader, self._file.count_leading, keys)

    async def read(self, keys: Sequence[bytes]) -> list[Value | None]:
        values = await self._run(self._reader, self._file.read, keys)
        for key, value in zip(reversed(keys), reversed(values), strict=True):  # I6: tails make room before heads
            if value is not None:
                self._noted_reads.pop(key, None)
                self._noted_reads[key] = None
        if len(self._noted_reads) > MAX_NOTED_READS:
            self._writer.submit(self._file.note_use, self._take_noted_reads())
        return values

    async def write(self, entries: Sequence[tuple[bytes, Value]]) -> None:
        if self._noted_reads:
            await self._run(self._writer, self._file.note_use, self._take_noted_reads())
        await self._run(self._writer, self._change, self._file.write, entries)

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self._run(self._writer, self._change, self._file.delete, keys)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._reader.shutdown()
        self._writer.submit(self._file.note_use, self._take_noted_reads())
        self._writer.shutdown()
        self._file.close()

    def _change(self, change: Callable[[Sequence[T]], None], items: Sequence[T]) -> None:
        change(items)
        self._observe(self._file.use())

    def _take_noted_reads(self) -> list[bytes]:
        noted, self._noted_reads = list(self._noted_reads), {}
        return noted

    async def _run(self, thread: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._is_closed:
            raise StoreClosed(f"{self!r} is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, lambda: function(*args, **kwargs))
        except (*UNREADABLE, lmdb.PanicError) as error:
            raise StoreDamaged(f"{self!r} cannot be read: {error}") from error
        except lmdb.Error as error:
            if isinstance(error, lmdb.MapFullError) or error.code in NO_SPACE:
                raise StoreFull(f"no room left for {self!r}: {error}") from error
            raise StoreError(f"{self!r} failed: {error}") from error
