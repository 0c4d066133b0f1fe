"""Attention by PyTorch's `scaled_dot_product_attention`, one sequence at a time, on a gathered copy of its K/V.

The slowest back end and the one that takes everything: float32, any head dim, any GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.attention.slots import token_slots


@dataclass(frozen=True, slots=True)
class Gathered:
    """One sequence's part of a step.

    Attributes:
        rows: Its query rows.
        slots: `[num_tokens]`, the slots of context and new tokens.
        mask: `[num_queries, num_tokens]`, True where a query may look; None where all may look everywhere.
    """

    rows: slice
    slots: torch.Tensor
    mask: torch.Tensor | None


class SDPAAttention:
    """Attention back end for any device. Engine thread only.

    Args:
        num_heads: Query heads.
        num_kv_heads: K/V heads; `num_heads` is a multiple of it.
        page_size: Tokens in one page.
        device: Where the pool is.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, page_size: int, device: torch.device) -> None:
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._page_size = page_size
        self._device = device

    def plan(self, sequences: list[SequenceSlice]) -> list[Gathered]:
        return [
            Gathered(
                rows=slice(sequence.first_row, sequence.first_row + sequence.num_queries),
                slots=token_slots(sequence, self._page_size).to(self._device),
                mask=self._mask(sequence),
            )
            for sequence in sequences
        ]

    def _mask(self, sequence: SequenceSlice) -> torch.Tensor | None:
        """Let query i see the context and the new tokens up to itself, which `is_causal` does not mean in SDPA."""
        n, context_len = sequence.num_queries, sequence.context_len
        if n == 1:
            return None
        return torch.ones(n, context_len + n, dtype=torch.bool, device=self._device).tril_(diagonal=context_len)

    def attend(
        self, plan: list[Gathered], kv: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        output = query.new_empty(query.shape)
        for part in plan:
            output[part.rows] = self._attend_one(query[part.rows], kv.index_select(1, part.slots), part.mask)
        return output

    def _attend_one(self, query: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend `query` `[n, heads, dim]` to `kv` `[2, tokens, kv_heads, dim]`; K/V heads are the batch."""
        n, num_heads, dim = query.shape
        heads, group = self._num_kv_heads, self._group
        grouped = query.view(n, heads, group, dim).permute(1, 2, 0, 3)
        # stride 0 shares K/V within a group: `enable_gqa` would rule out the kernel that needs no score matrix
        keys, values = kv.transpose(1, 2).unsqueeze(2).expand(2, heads, group, kv.shape[1], dim)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return output.permute(2, 0, 1, 3).reshape(n, num_heads, dim)
