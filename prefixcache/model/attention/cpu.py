"""Attention on the CPU: few large calls of PyTorch's flash kernel, merged by log-sum-exp.

A step is cut into parts, and each query row meets every token of its context in exactly one of them:

    shared run   queries of all sequences that share a run of pages  x  that run, read in place, once
    own run      queries of one sequence                             x  a run of its own pages, or a gathered copy
    tails        one query of each decoding sequence                 x  its last few pages, gathered and padded
    diagonal     the new tokens of a prefill chunk                   x  themselves, causal

Softmax over the union of parts is the softmax of each, weighted by its share of the sum of exponentials, which the
kernel's log-sum-exp gives (online softmax, arXiv 1805.02867; cascade for shared prefixes, arXiv 2402.05099).

With grouped-query attention the queries of one K/V head's group are stacked as rows, so its K/V is read once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from prefixcache.kv.page_pool import page_runs
from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.attention.grouping import shared_runs

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# A run of at least this many tokens is read where it lies; shorter ones are gathered into one copy,
# since a call of the kernel with its merge costs about as much as copying this much.
MIN_RUN_TOKENS = 128
# A decoding sequence's own pages up to this many tokens go into the padded tails, all sequences in one call.
MAX_TAIL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Part:
    """Some query rows that all see the same slots.

    Attributes:
        rows: The query rows: a slice, or an index tensor `[num_queries]`.
        slots: The slots they see: a slice of the pool, or an index tensor `[num_tokens]`.
        is_first: Whether no earlier part has any of these rows, so that there is nothing to merge with.
    """

    rows: slice | torch.Tensor
    slots: slice | torch.Tensor
    is_first: bool


@dataclass(frozen=True, slots=True)
class Tails:
    """One query row for each of several sequences, each with slots of its own.

    Attributes:
        rows: `[num_sequences]`.
        slots: `[num_sequences * num_tokens]`, padded with any slot.
        mask: `[num_sequences, 1, 1, num_tokens]`, 0 for a real slot and -inf for padding.
        is_first: As for `Part`.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    is_first: bool


@dataclass(slots=True)
class CPUPlan:
    parts: list[Part] = field(default_factory=list)
    tails: Tails | None = None
    diagonals: list[slice] = field(default_factory=list)


class CPUAttention:
    """Attention back end for the CPU. Engine thread only.

    Args:
        num_heads: Query heads.
        num_kv_heads: K/V heads; `num_heads` is a multiple of it.
        page_size: Tokens in one page.
        dtype: The pool's element type, in which masks are made.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, page_size: int, dtype: torch.dtype) -> None:
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._page_size = page_size
        self._dtype = dtype

    # --- plan --------------------------------------------------------------------------------------------------

    def plan(self, sequences: list[SequenceSlice]) -> CPUPlan:
        plan = CPUPlan()
        self._plan_decodes(plan, [s for s in sequences if s.num_queries == 1])
        for sequence in sequences:
            if sequence.num_queries > 1:
                rows = slice(sequence.first_row, sequence.first_row + sequence.num_queries)
                plan.diagonals.append(rows)
                self._add_parts(plan, rows, self._own_slots(sequence.page_table, 0, sequence.context_len), False)
        return plan

    def _plan_decodes(self, plan: CPUPlan, sequences: list[SequenceSlice]) -> None:
        """Shared runs together, then what is left of each: long rests alone, short ones as padded tails."""
        size = self._page_size
        lengths = [s.context_len + 1 for s in sequences]  # a decoding row sees itself, in the pool by then
        num_done = [0] * len(sequences)  # tokens of each that some part covers already
        tables = [s.page_table for s in sequences]
        for run in shared_runs(tables, [n // size for n in lengths], MIN_RUN_TOKENS // size):
            rows = torch.tensor([sequences[member].first_row for member in run.members])
            is_first = num_done[run.members[0]] == 0
            self._add_parts(plan, rows, self._slots(run.pages, 0, len(run.pages) * size), is_first)
            for member in run.members:
                num_done[member] += len(run.pages) * size
        tails = []
        for index, sequence in enumerate(sequences):
            done, length = num_done[index], lengths[index]
            if len(sequences) == 1 or length - done > MAX_TAIL_TOKENS:
                rows_of_one = slice(sequence.first_row, sequence.first_row + 1)
                slots = self._own_slots(sequence.page_table, done, length)
                self._add_parts(plan, rows_of_one, slots, is_first=done == 0)
            elif done < length:
                tails.append((sequence, done, length))
        if tails:
            plan.tails = self._tails(tails)

    def _add_parts(
        self, plan: CPUPlan, rows: slice | torch.Tensor, slots: list[slice | torch.Tensor], is_first: bool
    ) -> None:
        for run in slots:
            plan.parts.append(Part(rows, run, is_first))
            is_first = False

    def _own_slots(self, page_table: list[int], start: int, end: int) -> list[slice | torch.Tensor]:
        """Name the slots of one sequence's tokens [start, end)."""
        size = self._page_size
        return self._slots(page_table[start // size : -(-end // size)], start % size, end - start)

    def _slots(self, pages: list[int], skip: int, num_tokens: int) -> list[slice | torch.Tensor]:
        """Name the slots of `num_tokens` tokens in `pages` after the first `skip`: long runs in place, rest copied."""
        size = self._page_size
        in_place: list[slice | torch.Tensor] = []
        gathered: list[torch.Tensor] = []
        runs = page_runs(pages)
        for first_page, num_pages in runs:
            start = first_page * size + skip
            length = min(num_pages * size - skip, num_tokens)
            skip, num_tokens = 0, num_tokens - length
            if length >= MIN_RUN_TOKENS or len(runs) == 1:
                in_place.append(slice(start, start + length))
            elif length:
                gathered.append(torch.arange(start, start + length))
        return [*in_place, torch.cat(gathered)] if gathered else in_place

    def _tails(self, tails: list[tuple[SequenceSlice, int, int]]) -> Tails:
        """Pad the tokens [start, end) of each sequence to one length."""
        size = self._page_size
        longest = max(end - start for _, start, end in tails)
        tokens = torch.arange(longest)
        slots, lengths = [], []
        for sequence, start, end in tails:
            pages = torch.tensor(sequence.page_table[start // size : -(-end // size)])
            index = (tokens + start % size).clamp_(max=end - 1 - start + start % size)
            slots.append(pages[index // size] * size + index % size)
            lengths.append(end - start)
        padding = tokens >= torch.tensor(lengths).unsqueeze(1)  # [num_sequences, num_tokens]
        mask = torch.zeros(padding.shape, dtype=self._dtype).masked_fill_(padding, float("-inf"))
        rows = torch.tensor([sequence.first_row for sequence, _, _ in tails])
        return Tails(rows, torch.cat(slots), mask[:, None, None, :], all(start == 0 for _, start, _ in tails))

    # --- attend ------------------------------------------------------------------------------------------------

    def attend(
        self, plan: CPUPlan, kv: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        merged = _Merge(query)
        for rows in plan.diagonals:
            merged.add(rows, *self._diagonal(query[rows], key[rows], value[rows]), is_first=True)
        for part in plan.parts:
            merged.add(part.rows, *self._part(query[part.rows], kv[:, part.slots]), is_first=part.is_first)
        if plan.tails is not None:
            merged.add(plan.tails.rows, *self._attend_tails(plan.tails, query, kv), is_first=plan.tails.is_first)
        return merged.output

    def _part(self, query: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All of `query` `[n, heads, dim]` against all of `kv` `[2, tokens, kv_heads, dim]`."""
        n, _, dim = query.shape
        heads, group = self._num_kv_heads, self._group
        stacked = query.view(n, heads, group, dim).permute(1, 2, 0, 3).reshape(1, heads, group * n, dim)
        keys, values = kv.transpose(1, 2).unsqueeze(1)  # each [1, kv_heads, tokens, dim]
        output, lse = _flash(stacked, keys, values)
        output = output.view(heads, group, n, dim).permute(2, 0, 1, 3).reshape(n, heads * group, dim)
        return output, lse.reshape(heads * group, n).t()

    def _diagonal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A chunk's new tokens among themselves. K/V heads are the batch; their group shares K/V by stride 0."""
        n, _, dim = query.shape
        heads, group = self._num_kv_heads, self._group
        grouped = query.view(n, heads, group, dim).permute(1, 2, 0, 3)
        keys = key.transpose(0, 1).unsqueeze(1).expand(heads, group, n, dim)
        values = value.transpose(0, 1).unsqueeze(1).expand(heads, group, n, dim)
        output, lse = _flash(grouped, keys, values, 0.0, True)
        return output.permute(2, 0, 1, 3).reshape(n, heads * group, dim), lse.reshape(heads * group, n).t()

    def _attend_tails(self, tails: Tails, query: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n, _, _, num_tokens = tails.mask.shape
        heads, group = self._num_kv_heads, self._group
        dim = query.shape[-1]
        keys, values = kv.index_select(1, tails.slots).view(2, n, num_tokens, heads, dim).transpose(2, 3)
        grouped = query[tails.rows].view(n, heads, group, dim)  # a group's queries as the rows of its K/V head
        output, lse = _flash(grouped, keys, values, attn_mask=tails.mask.expand(n, 1, group, num_tokens))
        return output.reshape(n, heads * group, dim), lse.reshape(n, heads * group)


class _Merge:
    """Adds up partial attention over disjoint sets of tokens, row by row, weighted by log-sum-exp."""

    def __init__(self, query: torch.Tensor) -> None:
        # a row that no part has met yet weighs nothing, whatever it is merged with
        self.output = torch.zeros_like(query)
        self._lse = torch.full(query.shape[:2], float("-inf"), dtype=torch.float32)

    def add(self, rows: slice | torch.Tensor, output: torch.Tensor, lse: torch.Tensor, *, is_first: bool) -> None:
        """Merge `output` `[n, heads, dim]` with `lse` `[n, heads]` into the rows."""
        if is_first:
            self.output[rows], self._lse[rows] = output, lse
            return
        old = self._lse[rows]
        total = torch.logaddexp(old, lse)
        merged = self.output[rows] * (old - total).exp_().unsqueeze(-1)
        merged += output * (lse - total).exp_().unsqueeze(-1)
        self.output[rows], self._lse[rows] = merged.to(output.dtype), total
