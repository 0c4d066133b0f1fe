"""How much memory K/V takes, and how many pages a given amount of memory makes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefixcache.errors import ConfigError

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Dimensions of one model's K/V.

    Attributes:
        bytes_per_token: layers x 2 (K and V) x K/V heads x head dim x bytes per element.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int = PAGE_SIZE

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a cache of `num_pages` pages can hold."""

    layout: KVLayout
    num_pages: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.layout.page_size

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.bytes_per_page

    @property
    def num_full_sequences(self) -> float:
        """How many sequences of the model's full length fit at once."""
        return self.num_tokens / self.max_model_len

    @staticmethod
    def from_tokens(layout: KVLayout, num_tokens: int, max_model_len: int) -> MemoryPlan:
        """Plan for at least `num_tokens` tokens."""
        return MemoryPlan(layout, -(-num_tokens // layout.page_size), max_model_len)

    @staticmethod
    def from_bytes(layout: KVLayout, num_bytes: int, max_model_len: int) -> MemoryPlan:
        """Plan for at most `num_bytes` bytes; raises ConfigError where not even two pages fit."""
        num_pages = num_bytes // layout.bytes_per_page
        if num_pages < 2:
            raise ConfigError(
                f"cache-memory: {num_bytes} bytes hold less than two pages of {layout.bytes_per_page} bytes; "
                "give the cache more memory"
            )
        return MemoryPlan(layout, num_pages, max_model_len)
