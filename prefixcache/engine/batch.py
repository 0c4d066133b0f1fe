"""From a step plan to the tensors that the model takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefixcache.engine.scheduler import Work
from prefixcache.model.attention.base import SequenceSlice


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over the new tokens of several sequences, laid one after another.

    Attributes:
        input_ids: `[num_rows]`.
        positions: `[num_rows]`, each token's place in its own sequence.
        slot_mapping: `[num_rows]`, where each token's K/V goes.
        slices: Which rows belong to which sequence, in the order of the work.
        output_rows: `[num_outputs]`, the rows whose output is wanted.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    slices: list[SequenceSlice]
    output_rows: torch.Tensor


def build_batch(work: list[Work], num_outputs: list[int], page_size: int, device: torch.device) -> Batch:
    """Lay out `work`, every item of which computes at least one token and wants the output of its last few."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    slices: list[SequenceSlice] = []
    output_rows: list[int] = []
    for item, num_wanted in zip(work, num_outputs, strict=True):
        sequence = item.sequence
        assert sequence.lease is not None
        page_table = sequence.lease.page_table
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + item.num_tokens
        num_unread = item.num_tokens - num_wanted
        slices.append(SequenceSlice(len(input_ids), item.num_tokens, start, page_table, num_unread))
        output_rows += range(len(input_ids) + num_unread, len(input_ids) + item.num_tokens)
        input_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        slots += [page_table[p // page_size] * page_size + p % page_size for p in range(start, end)]
    ids, places, targets = torch.tensor((input_ids, positions, slots), dtype=torch.int64).to(device)
    return Batch(ids, places, targets, slices, torch.tensor(output_rows, dtype=torch.int64).to(device))
