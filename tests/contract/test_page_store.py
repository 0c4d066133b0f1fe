"""What every PageStore must do, on real files and servers."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from prefixcache.store.base import PageStore, StoreClosed
from tests.contract.conftest import NewKeys

MIB = 2**20


async def test_values_come_back_in_the_order_of_the_keys(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(50)
    values = [os.urandom(100 + index) for index in range(50)]
    await store.write(list(zip(keys, values, strict=True)))
    order = random.Random(0).sample(range(50), 50)
    assert await store.read([keys[index] for index in order]) == [values[index] for index in order]


async def test_what_is_not_there_is_none(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(5)
    await store.write([(keys[1], b"one"), (keys[3], b"three")])
    assert await store.read(keys) == [None, b"one", None, b"three", None]


async def test_only_the_leading_run_counts(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(6)
    assert await store.count_leading(keys) == 0
    await store.write([(key, b"x") for key in keys[1:]])
    assert await store.count_leading(keys) == 0  # a gap at the front
    await store.write([(keys[0], b"x")])
    assert await store.count_leading(keys) == 6
    await store.delete([keys[2]])
    assert await store.count_leading(keys) == 2  # a gap in the middle
    assert await store.count_leading(keys[3:]) == 3


async def test_counting_many_keys(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(2500)
    await store.write([(key, b"x") for key in keys[:2100]])
    assert await store.count_leading(keys) == 2100
    assert await store.count_leading(keys[:2100]) == 2100
    assert await store.count_leading(keys[:1024]) == 1024


async def test_writing_again_replaces(store: PageStore, new_keys: NewKeys) -> None:
    (key,) = new_keys(1)
    for value in (b"short", os.urandom(MIB), b"", os.urandom(5000), os.urandom(5000)):
        await store.write([(key, value)])
        assert await store.read([key]) == [value]


async def test_the_last_of_equal_keys_counts(store: PageStore, new_keys: NewKeys) -> None:
    (key,) = new_keys(1)
    await store.write([(key, b"first"), (key, b"last")])
    assert await store.read([key, key]) == [b"last", b"last"]


async def test_delete(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(4)
    await store.write([(key, b"x") for key in keys[:3]])
    await store.delete([keys[0], keys[3]])  # one that is there and one that is not
    assert await store.read(keys) == [None, b"x", b"x", None]
    await store.delete(keys)
    assert await store.read(keys) == [None] * 4


async def test_nothing_to_do(store: PageStore) -> None:
    assert await store.count_leading([]) == 0
    assert await store.read([]) == []
    await store.write([])
    await store.delete([])


async def test_an_empty_value_is_a_value(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(2)
    await store.write([(keys[0], b"")])
    assert await store.read(keys) == [b"", None]
    assert await store.count_leading(keys) == 1


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 65_536, 370_000, 16 * MIB])
async def test_every_bit_comes_back(store: PageStore, new_keys: NewKeys, num_bytes: int) -> None:
    (key,) = new_keys(1)
    value = os.urandom(num_bytes)
    await store.write([(key, value)])
    (read,) = await store.read([key])
    assert read is not None
    assert bytes(read) == value


async def test_bytes_that_mean_something_elsewhere(store: PageStore, new_keys: NewKeys) -> None:
    values = [
        bytes(range(256)),
        b"\r\n$5\r\nhello\r\n",
        b"-ERR no\r\n",
        b"*0\r\n",
        b"\0" * 1000,
        "ü€😀".encode(),
        b"\xff\xfe",
    ]
    keys = new_keys(len(values))
    await store.write(list(zip(keys, values, strict=True)))
    assert await store.read(keys) == values


async def test_any_kind_of_buffer_can_be_written(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(3)
    buffer = os.urandom(300_000)
    await store.write([(keys[0], buffer), (keys[1], bytearray(buffer)), (keys[2], memoryview(buffer)[1000:-1000])])
    assert await store.read(keys) == [buffer, buffer, buffer[1000:-1000]]


async def test_a_run_of_pages(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(64)
    values = [os.urandom(370_000) for _ in keys]
    await store.write(list(zip(keys, values, strict=True)))
    assert await store.count_leading(keys) == 64
    assert await store.read(keys) == values


async def test_readers_and_writers_at_the_same_time(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(16)
    old, new = [[bytes([version]) * 50_000 for _ in keys] for version in (1, 2)]
    await store.write(list(zip(keys, old, strict=True)))

    async def read() -> None:
        for value in await store.read(keys):
            assert value in (old[0], new[0])  # whole, whichever it is

    await asyncio.gather(
        *(read() for _ in range(10)), store.write(list(zip(keys, new, strict=True))), *(read() for _ in range(10))
    )
    assert await store.read(keys) == new


async def test_a_cancelled_call_leaves_the_store_working(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(8)
    values = [bytes([index]) * 500_000 for index in range(8)]
    await store.write(list(zip(keys, values, strict=True)))
    for delay_ms in range(12):
        abandoned = asyncio.create_task(store.read(keys))
        await asyncio.sleep(delay_ms / 1000)
        abandoned.cancel()
        assert await store.read(keys[:2]) == values[:2]
    assert await store.read(keys) == values


async def test_after_close(store: PageStore, new_keys: NewKeys) -> None:
    keys = new_keys(1)
    await store.write([(keys[0], b"x")])
    await store.close()
    with pytest.raises(StoreClosed):
        await store.read(keys)
    with pytest.raises(StoreClosed):
        await store.count_leading(keys)
    with pytest.raises(StoreClosed):
        await store.write([(keys[0], b"x")])
    with pytest.raises(StoreClosed):
        await store.delete(keys)
    await store.close()
