"""Pages off and onto a CUDA device, against plain slices of the pool."""

from __future__ import annotations

import pytest
import torch

from prefixcache.kv.layout import KVLayout
from prefixcache.kv.page_pool import PagePool
from prefixcache.kv.transfer import CUDATransfer, transfer_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_PAGES = 200
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)


def random_pool(seed: int) -> PagePool:
    pool = PagePool(LAYOUT, NUM_PAGES, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(seed)
    bits = pool.kv.view(torch.int16)
    bits.copy_(torch.randint(-(2**15), 2**15, bits.shape, generator=generator, device="cuda", dtype=torch.int16))
    return pool


def page_bytes(pool: PagePool, page: int) -> bytes:
    strips = pool.kv.view(torch.int16)[:, :, page * pool.page_size : (page + 1) * pool.page_size]
    return strips.contiguous().cpu().numpy().tobytes()


def test_pages_go_out_and_come_back_bit_by_bit() -> None:
    source, target = random_pool(0), random_pool(1)
    transfer = transfer_for(source)
    assert isinstance(transfer, CUDATransfer)
    pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(0)).tolist()[:100]
    buffer = transfer.new_buffer(len(pages), header_bytes=224)
    transfer.pages_to_buffer(pages, buffer, transfer.fence())
    payloads = [buffer.value(index)[224:] for index in range(len(pages))]
    assert all(payload == page_bytes(source, page) for payload, page in zip(payloads, pages, strict=True))

    expected = {page: page_bytes(target, page) for page in range(NUM_PAGES)}
    targets = pages[::-1]
    expected |= {page: bytes(payload) for page, payload in zip(targets, payloads, strict=True)}
    back = transfer_for(target)
    back.payloads_to_pages(payloads, targets, back.fence())
    assert all(page_bytes(target, page) == expected[page] for page in range(NUM_PAGES))


def test_a_copy_comes_after_the_work_before_its_fence() -> None:
    """The pages are written by kernels that are still queued when the copy is asked for."""
    pool = random_pool(0)
    transfer = transfer_for(pool)
    buffer = transfer.new_buffer(1, header_bytes=0)
    for value in range(20):
        torch.cuda._sleep(20_000_000)
        pool.kv[:, :, : pool.page_size] = float(value)
        transfer.pages_to_buffer([0], buffer, transfer.fence())
        assert bool((buffer.payloads[0].view(torch.bfloat16) == float(value)).all())


def test_a_page_is_written_only_after_its_last_use_before_the_fence() -> None:
    pool = random_pool(0)
    transfer = transfer_for(pool)
    before = page_bytes(pool, 3)
    torch.cuda._sleep(200_000_000)
    read = pool.kv[:, :, 3 * pool.page_size : 4 * pool.page_size].clone()
    transfer.payloads_to_pages([memoryview(bytes(LAYOUT.bytes_per_page))], [3], transfer.fence())
    assert read.view(torch.int16).cpu().numpy().tobytes() == before
    assert page_bytes(pool, 3) == bytes(LAYOUT.bytes_per_page)
