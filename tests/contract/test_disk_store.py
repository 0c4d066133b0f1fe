"""What the disk store promises beyond the contract: it lasts, it stays within its bound, and it has one owner."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prefixcache.errors import ConfigError
from prefixcache.store.base import StoreFull, ValueTooLarge
from prefixcache.store.disk import DiskStore
from prefixcache.store.lru_file import DiskUse, StoreInUse
from tests.support.disk_writer import MAX_BYTES, NUM_KEYS, key, value

MIB = 2**20
ROOT = Path(__file__).parents[2]


async def present(store: DiskStore, numbers: range) -> list[int]:
    """Returns which of the numbered values are there, without using them."""
    return [number for number in numbers if await store.count_leading([key(number)])]


async def test_values_survive_closing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 64 * MIB)
    await store.write([(key(number), value(number)) for number in range(20)])
    await store.close()
    store = DiskStore(tmp_path, 64 * MIB)
    assert await store.read([key(number) for number in range(20)]) == [value(number) for number in range(20)]
    await store.close()


async def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 16 * MIB)
    for number in range(100):
        await store.write([(key(number), value(number))])
    await store.read([key(number) for number in (3, 7, 0)])
    for number in range(100, 180):
        await store.write([(key(number), value(number))])
    there = await present(store, range(180))
    assert {0, 3, 7} <= set(there)
    oldest_unread = min(set(there) - {0, 3, 7})
    assert there == [0, 3, 7, *range(oldest_unread, 180)]
    assert oldest_unread > 7
    await store.close()


async def test_it_tells_how_much_it_holds(tmp_path: Path) -> None:
    seen: list[DiskUse] = []
    store = DiskStore(tmp_path, 16 * MIB, seen.append)
    assert seen[-1].num_values == 0
    await store.write([(key(number), value(number)) for number in range(10)])
    full = seen[-1]
    assert full.num_values == 10
    assert full.num_bytes > sum(len(value(number)) for number in range(10))
    await store.delete([key(number) for number in range(4)])
    assert seen[-1].num_values == 6
    assert seen[-1].num_bytes < full.num_bytes
    for number in range(10, 200):
        await store.write([(key(number), value(number))])
    assert max(use.num_bytes for use in seen) <= 16 * MIB
    await store.close()
    await DiskStore(tmp_path, 16 * MIB, seen.append).close()
    assert seen[-1] == seen[-2]


async def test_what_was_read_stays_recent_over_a_restart(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 16 * MIB)
    await store.write([(key(number), value(number)) for number in range(100)])
    await store.read([key(99)])  # the tail of a batch is the first to go, unless it is used
    await store.close()
    store = DiskStore(tmp_path, 16 * MIB)
    await store.write([(key(number), value(number)) for number in range(100, 180)])
    there = await present(store, range(100))
    assert 99 in there
    assert 98 not in there
    await store.close()


async def test_tails_make_room_before_heads(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 16 * MIB)
    run = range(60)
    await store.write([(key(number), value(number)) for number in run])
    await store.read([key(number) for number in run])
    for number in range(1000, 1100):
        await store.write([(key(number), value(number))])
        there = await present(store, run)
        assert there == list(range(len(there)))  # always a leading part of the run
    assert len(there) < len(run)
    await store.close()


async def test_many_reads_are_noted_without_a_write(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 64 * MIB)
    keys = [key(number) for number in range(20_000)]
    await store.write([(each, b"x") for each in keys])
    for start in range(0, len(keys), 1000):
        await store.read(keys[start : start + 1000])
    assert len(store._noted_reads) < 16_384
    await store.close()


@pytest.mark.parametrize(
    ("sizes", "rounds"), [((370_000,), 12), ((370_000, 120_000, 1_500_000, 900), 12), ((2_000, 9_000, 30_000), 2)]
)
async def test_the_file_never_outgrows_its_bound(tmp_path: Path, sizes: tuple[int, ...], rounds: int) -> None:
    bound = 64 * MIB
    store = DiskStore(tmp_path, bound)
    chance = random.Random(1)
    blob = memoryview(chance.randbytes(max(sizes)))
    written = number = 0
    recent: list[tuple[bytes, memoryview]] = []
    while written < rounds * bound:
        batch = []
        for _ in range(16):
            batch.append((key(number), blob[: chance.choice(sizes)]))
            number += 1
        recent = (recent + batch)[-32:]
        written += sum(len(each) for _, each in batch)
        await store.write(batch)
        if chance.random() < 0.3:
            await store.read([chance.choice(recent)[0] for _ in range(4)])
        if chance.random() < 0.1:
            await store.delete([chance.choice(recent)[0]])
            recent = batch
        assert (tmp_path / "data.mdb").stat().st_size <= bound
    num_there = len(await present(store, range(number)))
    assert num_there * sum(sizes) / len(sizes) > 0.6 * bound  # and it makes use of it
    await store.close()


async def test_overwriting_does_not_grow_the_file(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 64 * MIB)
    for version in range(60):
        await store.write([(key(number), value(version, 370_000)) for number in range(8)])
    assert (tmp_path / "data.mdb").stat().st_size < 24 * MIB
    assert await store.read([key(5)]) == [value(59, 370_000)]
    await store.close()


async def test_too_large_a_value_is_refused_and_the_rest_of_the_call_too(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 64 * MIB)
    await store.write([(key(0), bytes(2 * MIB))])
    with pytest.raises(ValueTooLarge):
        await store.write([(key(1), b"x"), (key(2), bytes(2 * MIB + 1))])
    assert await present(store, range(3)) == [0]
    await store.close()


OPENER = (
    "import sys, pathlib; from prefixcache.store.disk import DiskStore; DiskStore(pathlib.Path(sys.argv[1]), 2**24)"
)


def open_elsewhere(folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-c", OPENER, str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


async def test_one_owner(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 16 * MIB)
    with pytest.raises(StoreInUse, match=f"in use by process {os.getpid()}"):
        DiskStore(tmp_path, 16 * MIB)
    returncode, stderr = await asyncio.to_thread(open_elsewhere, tmp_path)
    assert returncode == 1
    assert f"StoreInUse: {tmp_path} is in use by process {os.getpid()}" in stderr
    await store.close()
    await DiskStore(tmp_path, 16 * MIB).close()


@pytest.mark.parametrize("max_bytes", [0, MIB])
def test_too_small_a_bound(tmp_path: Path, max_bytes: int) -> None:
    with pytest.raises(ConfigError, match="at least 16 MiB"):
        DiskStore(tmp_path, max_bytes)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot use"):
        DiskStore(tmp_path / "file" / "folder", 16 * MIB)


async def test_others_cannot_read_the_folder(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "made", 16 * MIB)
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0
    assert (tmp_path / "made" / "data.mdb").stat().st_mode & 0o077 == 0
    await store.close()


@pytest.mark.parametrize("damage", ["nonsense", "empty", "foreign version"])
async def test_a_file_that_cannot_be_read_is_left_behind(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 16 * MIB)
    await store.write([(key(1), value(1))])
    await store.close()
    file = tmp_path / "data.mdb"
    content = bytearray(file.read_bytes())
    if damage == "nonsense":
        content = bytearray(os.urandom(len(content)))
    elif damage == "empty":
        content.clear()
    else:
        for page in (0, 4096):
            content[page + 20] = 99  # the version that the pages at the front name
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        store = DiskStore(tmp_path, 16 * MIB)
    assert await store.read([key(1)]) == [None]
    await store.write([(key(1), value(1))])
    assert await store.read([key(1)]) == [value(1)]
    await store.close()
    assert ("starting empty" in caplog.text) == (damage != "empty")


async def test_a_smaller_bound_starts_empty_and_a_larger_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 64 * MIB)
    await store.write([(key(number), value(number, MIB)) for number in range(30)])
    await store.close()
    store = DiskStore(tmp_path, 128 * MIB)
    assert len(await present(store, range(30))) == 30
    await store.close()
    with caplog.at_level(logging.WARNING):
        store = DiskStore(tmp_path, 16 * MIB)
    assert "starting empty" in caplog.text
    assert await present(store, range(30)) == []
    await store.close()


async def test_a_full_disk_refuses_writes_and_nothing_else(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 64 * MIB)
    await store.write([(key(number), value(number)) for number in range(50)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * MIB, limits[1]))  # no file may grow beyond this
    try:
        with pytest.raises(StoreFull):
            await store.write([(key(number), value(number)) for number in range(50, 90)])
        expected = [value(number) for number in range(50)]
        assert await store.read([key(number) for number in range(50)]) == expected
        assert await present(store, range(50, 90)) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    await store.write([(key(number), value(number)) for number in range(50, 90)])
    assert await store.read([key(number) for number in range(90)]) == [value(number) for number in range(90)]
    await store.close()


async def test_the_loop_runs_on_while_the_disk_works(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 256 * MIB)
    gaps = []

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - before)

    watching, content = asyncio.create_task(watch()), value(0, MIB)
    for start in itertools.cycle(range(0, 64, 16)):
        await store.write([(key(number), content) for number in range(start, start + 16)])
        if len(gaps) > 50:
            break
    watching.cancel()
    assert sorted(gaps)[len(gaps) // 2] < 0.02
    await store.close()


def write_and_be_killed(folder: Path, seed: int, after_s: float) -> None:
    command = [sys.executable, "-m", "tests.support.disk_writer", str(folder), str(seed)]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"started\n"
    time.sleep(after_s)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()


async def test_killed_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(0)
    num_read = 0
    for round_number in range(20):
        await asyncio.to_thread(write_and_be_killed, tmp_path, round_number, chance.uniform(0.02, 0.4))
        store = DiskStore(tmp_path, MAX_BYTES)
        for number in range(NUM_KEYS):
            (read,) = await store.read([key(number)])
            if read is not None:
                assert read == value(number, len(read))
                num_read += 1
        await store.write([(key(1000), value(1000))])
        assert await store.read([key(1000)]) == [value(1000)]
        await store.close()
    assert num_read > 200
