"""LruFile: values by key in one LMDB file that never outgrows its bound; the least recently used make room.

    values  key  -> value
    ages    tick -> key       a tick is taken at each use, so that the smallest tick is the value used longest ago
    ticks   key  -> tick

LMDB copies on write: a reader sees one moment of the file and never waits for the writer, and whatever stops the
writer, the file holds what was committed before. `metasync` is off: a commit syncs its pages before the one that makes
them count, so that even a power cut loses at most the last commit and never the file, at one sync of the disk and not
two. `writemap` is off too: with it, a full disk would be a signal that kills the process and not an error.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb

from prefixcache.errors import ConfigError
from prefixcache.store.base import StoreFull, Value, ValueTooLarge

MIB = 2**20
MIN_BYTES = 16 * MIB
MAX_COMMIT_BYTES = 32 * MIB
COMMITS_PER_FILE = 32  # a commit is at most this part of the file: what it frees is reused two commits later
USABLE = 7 / 8  # of the file; the rest is what those commits need
MAX_TRIES = 8  # to find room in a file that values of other sizes have left in pieces; the last frees all there is
TICK_BYTES = 8
MAP_GRAIN_BYTES = 64 * 1024  # a multiple of every system's page size
UNREADABLE = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)

logger = logging.getLogger(__name__)


class StoreInUse(ConfigError):
    """Another process has this folder open."""


class DiskUse(NamedTuple):
    """What a file holds: bytes, of which a value takes more than its own length, and values."""

    num_bytes: int
    num_values: int


class _Aged(NamedTuple):
    key: bytes
    value: Value
    tick: int


class LruFile:
    """The file and its lock. Blocking. Reads may come from any thread, everything else from one at a time.

    Every method may raise lmdb.Error.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Opens the folder, makes it if need be, and starts empty where what it holds cannot be used.

        Raises:
            StoreInUse: Another process, or this one, has it open.
            ConfigError: The folder cannot be used, or the bound is too small.
        """
        if max_bytes < MIN_BYTES:
            raise ConfigError(f"the disk store needs at least {MIN_BYTES // MIB} MiB, not {max_bytes} bytes")
        self._folder = folder
        self._max_bytes = max_bytes // MAP_GRAIN_BYTES * MAP_GRAIN_BYTES
        self.max_value_bytes = min(MAX_COMMIT_BYTES, self._max_bytes // COMMITS_PER_FILE)
        self._lock = _take_lock(folder)
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """Returns how many of the first keys are there without a gap. Touches no value."""
        with self._environment.begin() as txn:
            for index, key in enumerate(keys):
                if txn.get(key, db=self._ticks) is None:
                    return index
        return len(keys)

    def read(self, keys: Sequence[bytes]) -> list[Value | None]:
        """Returns the values, each copied once, out of the mapped file.

        A view into the file would be valid until the transaction ends only, and until then keep LMDB from reusing
        what is freed. py-lmdb brings a value in from the disk without the interpreter's lock, before it copies it.
        """
        with self._environment.begin() as txn:
            return [txn.get(key, db=self._values) for key in keys]

    def write(self, entries: Sequence[tuple[bytes, Value]]) -> None:
        """Stores the values. Of what is written together, the last is the first to make room (I6).

        Raises:
            ValueTooLarge: One is above `max_value_bytes`; nothing was written.
            StoreFull: There is no room even without what could go.
        """
        largest = max((len(value) for _, value in entries), default=0)
        if largest > self.max_value_bytes:
            raise ValueTooLarge(f"a value of {largest} bytes; {self._folder} takes at most {self.max_value_bytes}")
        ticks = reversed(self._take_ticks(len(entries)))
        aged = [_Aged(key, value, tick) for (key, value), tick in zip(entries, ticks, strict=True)]
        for batch in self._in_commits(aged):
            self._commit(batch)

    def note_use(self, keys: Sequence[bytes]) -> None:
        """Makes these the ones used last, in this order; keys that are no longer there are passed over."""
        with self._environment.begin(write=True) as txn:
            for key, tick in zip(keys, self._take_ticks(len(keys)), strict=True):
                if txn.get(key, db=self._ticks) is not None:
                    self._set_tick(txn, key, tick)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Removes what is there."""
        with self._environment.begin(write=True) as txn:
            for key in keys:
                self._remove(txn, key)

    def use(self) -> DiskUse:
        """Returns how much of the bound is taken."""
        with self._environment.begin() as txn:
            num_values: int = txn.stat(self._values)["entries"]
            return DiskUse(self._pages_in_use(txn) * self._page_bytes, num_values)

    def close(self) -> None:
        """Closes the file and lets the next process in."""
        self._environment.close()
        os.close(self._lock)

    def _open(self) -> None:
        file = self._folder / "data.mdb"
        if file.exists() and file.stat().st_size > self._max_bytes:  # LMDB never makes a file smaller
            logger.warning("disk store %s is larger than %d bytes: starting empty", self._folder, self._max_bytes)
            file.unlink()
        try:
            try:
                self._open_databases()
            except lmdb.Error as error:
                if not isinstance(error, UNREADABLE) and error.code != 0:  # 0: a format of another LMDB
                    raise
                logger.warning("disk store %s cannot be read (%s): starting empty", self._folder, error)
                file.unlink()
                self._open_databases()
        except lmdb.Error as error:
            raise ConfigError(f"the disk store cannot use {self._folder}: {error}") from error

    def _open_databases(self) -> None:
        self._environment = lmdb.open(
            str(self._folder), map_size=self._max_bytes, max_dbs=3, metasync=False, mode=0o600, max_spare_txns=2
        )
        try:
            self._values, self._ages, self._ticks = (
                self._environment.open_db(name) for name in (b"values", b"ages", b"ticks")
            )
            with self._environment.begin() as txn, txn.cursor(self._ages) as cursor:
                self._next_tick = int.from_bytes(cursor.key()) + 1 if cursor.last() else 0
            page_bytes = self._environment.stat()["psize"]
        except lmdb.Error:
            self._environment.close()
            raise
        self._page_bytes = page_bytes
        self._usable_pages = int(self._max_bytes * USABLE) // page_bytes

    def _in_commits(self, entries: Sequence[_Aged]) -> Iterator[Sequence[_Aged]]:
        start = num_bytes = 0
        for index, entry in enumerate(entries):
            if index > start and num_bytes + len(entry.value) > self.max_value_bytes:
                yield entries[start:index]
                start, num_bytes = index, 0
            num_bytes += len(entry.value)
        if entries:
            yield entries[start:]

    def _commit(self, entries: Sequence[_Aged]) -> None:
        num_pages = sum(len(entry.value) // self._page_bytes + 2 for entry in entries)  # last page, part of the tree
        for num_failed in range(MAX_TRIES):
            try:
                with self._environment.begin(write=True) as txn:
                    self._make_room(txn, num_pages)
                    for entry in entries:
                        txn.put(entry.key, entry.value, db=self._values)
                        self._set_tick(txn, entry.key, entry.tick)
                return
            except lmdb.MapFullError:  # what is free lies in pieces: free more, for a later commit to reuse
                with self._environment.begin(write=True) as txn:
                    self._make_room(txn, num_pages << num_failed + 1)
        raise StoreFull(f"no room in {self._folder} for {len(entries)} values together")

    def _make_room(self, txn: lmdb.Transaction, num_pages: int) -> None:
        """Removes what was used longest ago until `num_pages` more are within the bound."""
        with txn.cursor(self._ages) as cursor:
            while self._pages_in_use(txn) + num_pages > self._usable_pages and cursor.first():
                self._remove(txn, bytes(cursor.value()))

    def _pages_in_use(self, txn: lmdb.Transaction) -> int:
        stats = (txn.stat(db) for db in (self._values, self._ages, self._ticks))
        return sum(stat["leaf_pages"] + stat["branch_pages"] + stat["overflow_pages"] for stat in stats)

    def _take_ticks(self, count: int) -> range:
        self._next_tick += count
        return range(self._next_tick - count, self._next_tick)

    def _set_tick(self, txn: lmdb.Transaction, key: bytes, tick: int) -> None:
        packed = tick.to_bytes(TICK_BYTES)
        earlier = txn.replace(key, packed, db=self._ticks)
        if earlier is not None:
            txn.delete(earlier, db=self._ages)
        txn.put(packed, key, db=self._ages)

    def _remove(self, txn: lmdb.Transaction, key: bytes) -> None:
        tick = txn.pop(key, db=self._ticks)
        if tick is not None:
            txn.delete(tick, db=self._ages)
            txn.delete(key, db=self._values)


def _take_lock(folder: Path) -> int:
    """Returns a descriptor that holds the folder for as long as it is open, and no longer than this process lives."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "in-use", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"the disk store cannot use {folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(lock, 20).decode(errors="replace")
        os.close(lock)
        raise StoreInUse(f"{folder} is in use by process {owner}; give each server a folder of its own") from error
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    return lock
