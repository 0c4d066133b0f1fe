"""Copies between a page pool and the bytes that stores read and write.

    pool     kv[layer, K|V, slot, kv_head, head_dim]        a page is one strip in every layer's K and V
    buffer   header room | payload of page a                a value lies in one piece, ready to be sent
             header room | payload of page b
             …

A payload is one page as `[num_layers, 2, page_size, num_kv_heads, head_dim]` in the memory's own bytes, so bfloat16
and NaNs pass unchanged. Whoever copies holds a lease on the source pages, and owns the target pages alone: nothing
here is locked, and the engine may run meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from prefixcache.kv.page_pool import PagePool

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class PageBuffer:
    """Host memory for `capacity` stored values, header room and payload of each side by side.

    Attributes:
        rows: The memory, `[capacity, header_bytes + payload_bytes]`, uint8; pinned where a CUDA device copies into it.
    """

    def __init__(self, capacity: int, header_bytes: int, payload_bytes: int, *, pinned: bool) -> None:
        self.capacity = capacity
        self.rows = torch.empty((capacity, header_bytes + payload_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._header_bytes = header_bytes
        self._array = self.rows.numpy()

    def value(self, index: int) -> memoryview:
        """Return one value, header and payload, without a copy."""
        return memoryview(self._array[index])

    @property
    def payloads(self) -> torch.Tensor:
        """The payloads, `[capacity, payload_bytes]`."""
        return self.rows[:, self._header_bytes :]


class PageTransfer(Protocol):
    """Copies pages of one pool. Any thread, one call at a time; a call returns when the bytes are there."""

    def new_buffer(self, capacity: int, header_bytes: int) -> PageBuffer:
        """Allocate a buffer that this transfer can copy into; to be kept and used again."""
        ...

    def fence(self) -> torch.cuda.Event | None:
        """Mark the work that the device has been given so far, for copies to come after it. Engine thread only."""
        ...

    def pages_to_buffer(self, pages: Sequence[int], buffer: PageBuffer, fence: torch.cuda.Event | None) -> None:
        """Copy pages into the first payloads of `buffer`, after `fence`, which came after the pages were written."""
        ...

    def payloads_to_pages(
        self, payloads: Sequence[memoryview], pages: Sequence[int], fence: torch.cuda.Event | None
    ) -> None:
        """Copy one payload into each page, after `fence`, which came after the pages were last used otherwise."""
        ...


def transfer_for(pool: PagePool) -> PageTransfer:
    """Make the transfer for where the pool's memory is."""
    return CUDATransfer(pool) if pool.kv.is_cuda else CPUTransfer(pool)


class CPUTransfer:
    """Copies within main memory, without the GIL and at roughly three quarters of memcpy's rate.

    One strided numpy assignment a page: gathering many pages in one torch call (`index_select` and a transposed copy)
    took ten times as long.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pages: Bytes = _by_page(pool).view(torch.uint8).numpy()  # [page, layer and K|V, bytes]
        self._strips = self._pages.shape[1:]

    def new_buffer(self, capacity: int, header_bytes: int) -> PageBuffer:
        return PageBuffer(capacity, header_bytes, self._pages[0].size, pinned=False)

    def fence(self) -> None:
        """Mark nothing: what the engine thread does on the CPU is done when it says so."""

    def pages_to_buffer(self, pages: Sequence[int], buffer: PageBuffer, fence: torch.cuda.Event | None) -> None:
        assert len(pages) <= buffer.capacity
        for payload, page in zip(buffer.payloads.numpy(), pages, strict=False):
            payload.reshape(self._strips)[:] = self._pages[page]

    def payloads_to_pages(
        self, payloads: Sequence[memoryview], pages: Sequence[int], fence: torch.cuda.Event | None
    ) -> None:
        for payload, page in zip(payloads, pages, strict=True):
            self._pages[page] = np.frombuffer(payload, np.uint8).reshape(self._strips)


class CUDATransfer:
    """Copies between device and pinned host memory on a stream of its own.

    Pages are gathered into one piece on the device, for the bus is slow with thousands of short strips. Not yet run on
    a device.
    """

    STAGING_PAGES = 32

    def __init__(self, pool: PagePool) -> None:
        self._pages = _by_page(pool)  # [page, layer and K|V, elements]
        self._device = pool.kv.device
        self._stream = torch.cuda.Stream(self._device)
        self._staging = self.new_buffer(self.STAGING_PAGES, header_bytes=0)

    def new_buffer(self, capacity: int, header_bytes: int) -> PageBuffer:
        return PageBuffer(capacity, header_bytes, self._pages[0].nbytes, pinned=True)

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def pages_to_buffer(self, pages: Sequence[int], buffer: PageBuffer, fence: torch.cuda.Event | None) -> None:
        assert len(pages) <= buffer.capacity
        with torch.cuda.stream(self._stream):
            self._wait(fence)
            gathered = self._pages[self._ids(pages)].flatten(1).view(torch.uint8)
            for payload, page in zip(buffer.payloads, gathered, strict=False):  # each in one piece, so no copy waits
                payload.copy_(page, non_blocking=True)
        self._finish()

    def payloads_to_pages(
        self, payloads: Sequence[memoryview], pages: Sequence[int], fence: torch.cuda.Event | None
    ) -> None:
        staging = self._staging.rows
        for start in range(0, len(pages), len(staging)):
            batch = payloads[start : start + len(staging)]
            for row, payload in zip(staging.numpy(), batch, strict=False):
                row[:] = np.frombuffer(payload, np.uint8)
            with torch.cuda.stream(self._stream):
                self._wait(fence)
                landed = staging[: len(batch)].to(self._device, non_blocking=True)
                ids = self._ids(pages[start : start + len(batch)])
                self._pages[ids] = landed.view(self._pages.dtype).view(-1, *self._pages.shape[1:])
            self._finish()  # the staging rows are free again

    def _wait(self, fence: torch.cuda.Event | None) -> None:
        if fence is not None:
            self._stream.wait_event(fence)

    def _ids(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, device=self._device)

    def _finish(self) -> None:
        """Wait for this stream alone, letting other threads run."""
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        done.synchronize()


def _by_page(pool: PagePool) -> torch.Tensor:
    """View the pool's memory as `[num_pages, num_layers * 2, elements of a page in one layer's K or V]`."""
    return pool.kv.view(pool.kv.shape[0] * 2, pool.num_pages, -1).transpose(0, 1)
