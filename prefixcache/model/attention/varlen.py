"""Attention on CUDA without FlashInfer: gather each sequence's K/V, then PyTorch's FlashAttention on ragged batches.

    slots of A │ slots of B │ …   ──gather──▶   K, V [tokens of A + tokens of B + …]   ──▶   varlen_attn

PyTorch's kernel reads pages in place only with FlashAttention 3 installed, hence the copy: one layer's at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.attention.varlen import varlen_attn

from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.attention.slots import token_slots

# Most tokens that are gathered at once, unless one sequence alone has more: 256 MiB with 8 K/V heads of 128 in 16 bit.
MAX_GATHERED_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Neighbouring sequences that one call attends.

    Attributes:
        rows: Their query rows.
        slots: `[num_tokens]`, the slots of all their tokens, one sequence after another.
        cu_seqlens_q: `[num_sequences + 1]` int32, where each one's rows begin, from 0, and the end.
        cu_seqlens_k: The same for their tokens.
        max_seqlen_q: Most rows of one.
        max_seqlen_k: Most tokens of one.
    """

    rows: slice
    slots: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class VarlenAttention:
    """Attention back end for CUDA by `varlen_attn`. Engine thread only.

    FlashAttention 2 takes float16 and bfloat16, head dims that are multiples of 8 up to 256, from Ampere on.

    Args:
        page_size: Tokens in one page.
        device: A CUDA device.
    """

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device

    def plan(self, sequences: list[SequenceSlice]) -> list[RaggedBatch]:
        return [self._batch(neighbours) for neighbours in _neighbours(sequences)]

    def _batch(self, sequences: list[SequenceSlice]) -> RaggedBatch:
        first_row = sequences[0].first_row
        num_rows = [s.num_queries for s in sequences]
        slots = [token_slots(s, self._page_size) for s in sequences]
        num_tokens = [len(s) for s in slots]
        return RaggedBatch(
            rows=slice(first_row, first_row + sum(num_rows)),
            slots=torch.cat(slots).to(self._device),
            cu_seqlens_q=self._cumulative(num_rows),
            cu_seqlens_k=self._cumulative(num_tokens),
            max_seqlen_q=max(num_rows),
            max_seqlen_k=max(num_tokens),
        )

    def _cumulative(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self._device)

    def attend(
        self, plan: list[RaggedBatch], kv: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        output = query.new_empty(query.shape)
        for batch in plan:
            keys, values = kv.index_select(1, batch.slots)
            attended = varlen_attn(
                query[batch.rows],
                keys,
                values,
                batch.cu_seqlens_q,
                batch.cu_seqlens_k,
                batch.max_seqlen_q,
                batch.max_seqlen_k,
                # Causal; with fewer rows than tokens FlashAttention lets the last row see all (bottom-right aligned).
                # One row sees all its tokens anyway, and without a mask the heads of a group can share a block.
                window_size=(-1, 0) if batch.max_seqlen_q > 1 else (-1, -1),
                enable_gqa=True,
            )
            assert isinstance(attended, torch.Tensor)  # a pair only if the log-sum-exp is asked for
            output[batch.rows] = attended
        return output


def _neighbours(sequences: list[SequenceSlice]) -> Iterator[list[SequenceSlice]]:
    """Cut the step into runs of decodes and runs of chunks, none with too many tokens to gather."""
    batch: list[SequenceSlice] = []
    num_gathered = 0
    for sequence in sequences:
        num_tokens = sequence.context_len + sequence.num_queries
        is_other_kind = bool(batch) and (batch[0].num_queries == 1) != (sequence.num_queries == 1)
        if batch and (is_other_kind or num_gathered + num_tokens > MAX_GATHERED_TOKENS):
            yield batch
            batch, num_gathered = [], 0
        batch.append(sequence)
        num_gathered += num_tokens
    if batch:
        yield batch
