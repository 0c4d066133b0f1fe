import random
import threading

import pytest
import torch

from prefixcache.kv.codec import PageCodec
from prefixcache.kv.layout import KVLayout
from prefixcache.kv.page_pool import PagePool
from prefixcache.kv.transfer import CPUTransfer, PageTransfer, transfer_for
from tests.support.pages import FINGERPRINT, stored_pages

NUM_PAGES = 8
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
HEADER_BYTES = 37  # odd on purpose: payloads need no alignment


def random_pool(dtype: torch.dtype, seed: int = 0) -> PagePool:
    """A pool in which every bit pattern of the type may stand, NaNs with payloads included."""
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype=dtype, page_size=4)
    pool = PagePool(layout, NUM_PAGES, torch.device("cpu"))
    bits = random.Random(seed).randbytes(pool.kv.nbytes)
    pool.kv.view(torch.uint8).copy_(torch.frombuffer(bytearray(bits), dtype=torch.uint8).view(*pool.kv.shape[:4], -1))
    assert pool.kv.isnan().any()
    return pool


def page_of(pool: PagePool, page: int) -> torch.Tensor:
    """One page's bits, `[num_layers, 2, page_size, num_kv_heads, head_dim]`."""
    size = pool.page_size
    return pool.kv[:, :, page * size : (page + 1) * size].contiguous().view(INTEGERS[pool.kv.dtype])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_payloads_are_the_pages_own_bytes_in_the_documented_order(dtype: torch.dtype) -> None:
    pool = random_pool(dtype)
    transfer = transfer_for(pool)
    assert isinstance(transfer, CPUTransfer)
    buffer = transfer.new_buffer(4, HEADER_BYTES)
    buffer.rows.fill_(7)
    transfer.pages_to_buffer([5, 0, 6], buffer, transfer.fence())
    for index, page in enumerate([5, 0, 6]):
        value = buffer.value(index)
        expected = page_of(pool, page).numpy().tobytes()
        assert bytes(value[HEADER_BYTES:]) == expected
        assert set(value[:HEADER_BYTES]) == {7}, "the header's room is left alone"
    assert set(buffer.value(3)) == {7}


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_bit_comes_back(dtype: torch.dtype, kind: type) -> None:
    source, target = random_pool(dtype), random_pool(dtype, seed=1)
    untouched = [page_of(target, page) for page in range(NUM_PAGES)]
    transfer, back = transfer_for(source), transfer_for(target)
    buffer = transfer.new_buffer(3, HEADER_BYTES)
    transfer.pages_to_buffer([1, 2, 7], buffer, transfer.fence())
    payloads = [memoryview(kind(buffer.value(index)[HEADER_BYTES:])) for index in range(3)]
    back.payloads_to_pages(payloads, [4, 0, 3], back.fence())
    for page in range(NUM_PAGES):
        origin = {4: 1, 0: 2, 3: 7}.get(page)
        expected = untouched[page] if origin is None else page_of(source, origin)
        assert torch.equal(page_of(target, page), expected)


def test_a_buffer_can_be_used_again() -> None:
    pool = random_pool(torch.bfloat16)
    transfer: PageTransfer = transfer_for(pool)
    buffer = transfer.new_buffer(2, HEADER_BYTES)
    for pages in ([0, 1], [2], [3, 4]):
        transfer.pages_to_buffer(pages, buffer, None)
        for index, page in enumerate(pages):
            assert bytes(buffer.value(index)[HEADER_BYTES:]) == page_of(pool, page).numpy().tobytes()


def test_more_pages_than_a_buffer_holds_is_an_error() -> None:
    transfer = transfer_for(random_pool(torch.float32))
    with pytest.raises(AssertionError):
        transfer.pages_to_buffer([0, 1, 2], transfer.new_buffer(2, HEADER_BYTES), None)


def test_pool_to_value_to_pool_through_the_codec() -> None:
    """The whole way of a page out of one process and into another."""
    source, target = random_pool(torch.bfloat16), random_pool(torch.bfloat16, seed=1)
    payload_bytes = page_of(source, 0).nbytes
    codec = PageCodec(FINGERPRINT, source.page_size, payload_bytes)
    identities = [page.identity for page in stored_pages(3, seed=0)]
    transfer = transfer_for(source)
    buffer = transfer.new_buffer(3, codec.header_bytes)
    transfer.pages_to_buffer([2, 3, 4], buffer, transfer.fence())
    values = []
    for index, identity in enumerate(identities):
        codec.seal(buffer.value(index), identity)
        values.append(bytes(buffer.value(index)))
    payloads = [codec.verify(value, identity) for value, identity in zip(values, identities, strict=True)]
    assert all(isinstance(payload, memoryview) for payload in payloads)
    transfer_for(target).payloads_to_pages([p for p in payloads if isinstance(p, memoryview)], [7, 1, 5], None)
    for origin, page in ((2, 7), (3, 1), (4, 5)):
        assert torch.equal(page_of(target, page), page_of(source, origin))


def test_pages_can_be_copied_while_the_engine_writes_others() -> None:
    pool = random_pool(torch.float32)
    transfer = transfer_for(pool)
    expected = [page_of(pool, page).numpy().tobytes() for page in (0, 1)]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            pool.kv[:, :, 2 * pool.page_size :] = 1.0

    writer = threading.Thread(target=write)
    writer.start()
    try:
        buffer = transfer.new_buffer(2, HEADER_BYTES)
        for _ in range(200):
            transfer.pages_to_buffer([0, 1], buffer, None)
            assert [bytes(buffer.value(index)[HEADER_BYTES:]) for index in range(2)] == expected
    finally:
        stop.set()
        writer.join()
