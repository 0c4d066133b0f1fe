"""The shared store as a model: which blocks it holds, and a bandwidth that all transfers share alike."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable

from bench.replica_model import BLOCK_BYTES, INSTANT_S, Clock


class StoreModel:
    """One Redis, or several that share the keys alike.

    Every transfer gets an equal share of the store's bandwidth, but no more than one replica can take:

        rate of each of n transfers = min(one replica's bandwidth, the store's bandwidth / n)

    Args:
        clock: Time.
        num_blocks: Blocks that it holds; the least recently used ones go first.
        latency_s: From asking to the first byte.
        replica_bytes_per_s: Most that one transfer gets.
        bytes_per_s: Most that all transfers get together.
    """

    def __init__(
        self, clock: Clock, num_blocks: int, latency_s: float, replica_bytes_per_s: float, bytes_per_s: float
    ) -> None:
        self._clock = clock
        self._num_blocks = num_blocks
        self._latency_s = latency_s
        self._replica_bytes_per_s = replica_bytes_per_s
        self._bytes_per_s = bytes_per_s
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._transfers: list[tuple[float, int, Callable[[], None]]] = []
        self._served_bytes = 0.0  # what a transfer would have got that had run all the time
        self._last_s = 0.0
        self._version = 0
        self._serial = itertools.count()
        self.read_bytes = self.written_bytes = 0

    @property
    def num_held_blocks(self) -> int:
        return len(self._held)

    def num_known_blocks(self, blocks: bytes, start: int) -> int:
        """Count the blocks that it holds from block `start` on without a gap; this is a use of them."""
        count = 0
        for offset in range(start * BLOCK_BYTES, len(blocks), BLOCK_BYTES):
            block = blocks[offset : offset + BLOCK_BYTES]
            if block not in self._held:
                break
            self._held.move_to_end(block)
            count += 1
        return count

    def expected_s(self, num_bytes: int) -> float:
        """Estimate a transfer that starts now, if nothing else starts or ends."""
        return self._latency_s + num_bytes / self._rate(len(self._transfers) + 1)

    def read(self, num_bytes: int, done: Callable[[], None]) -> None:
        self.read_bytes += num_bytes
        self._transfer(num_bytes, done)

    def write(self, blocks: bytes, block_bytes: int, done: Callable[[], None]) -> bool:
        """Take in the blocks that it does not hold; False where it holds them all and nothing moves."""
        num_fresh = 0
        for offset in range(0, len(blocks), BLOCK_BYTES):
            block = blocks[offset : offset + BLOCK_BYTES]
            num_fresh += block not in self._held
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._num_blocks:
            self._held.popitem(last=False)
        if num_fresh:
            self.written_bytes += num_fresh * block_bytes
            self._transfer(num_fresh * block_bytes, done)
        return num_fresh > 0

    # --- shared bandwidth ----------------------------------------------------------------------------------------

    def _rate(self, num_transfers: int) -> float:
        return min(self._replica_bytes_per_s, self._bytes_per_s / num_transfers)

    def _transfer(self, num_bytes: int, done: Callable[[], None]) -> None:
        self._clock.at(self._clock.now_s + self._latency_s, lambda: self._start(num_bytes, done))

    def _start(self, num_bytes: int, done: Callable[[], None]) -> None:
        self._advance()
        heapq.heappush(self._transfers, (self._served_bytes + num_bytes, next(self._serial), done))
        self._go_on()

    def _advance(self) -> None:
        if self._transfers:
            self._served_bytes += self._rate(len(self._transfers)) * (self._clock.now_s - self._last_s)
        self._last_s = self._clock.now_s

    def _go_on(self) -> None:
        self._version += 1
        if self._transfers:
            version = self._version
            left_s = (self._transfers[0][0] - self._served_bytes) / self._rate(len(self._transfers))
            self._clock.at(self._clock.now_s + max(left_s, 0.0), lambda: self._wake(version))

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = []
        served = self._served_bytes + self._rate(max(len(self._transfers), 1)) * INSTANT_S
        while self._transfers and self._transfers[0][0] <= served:
            ended.append(heapq.heappop(self._transfers)[2])
        self._go_on()
        for done in ended:
            done()
