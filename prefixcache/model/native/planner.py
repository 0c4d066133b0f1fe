"""A step's attention as the kernels take it: parts, each some query rows and the pages that they see.

    decoding sequences that share a run of pages    their rows x that run, read once for all of them
    one decoding sequence                           its row x what is left of its pages, itself at the end
    one chunk of a prompt                           its rows x its pages, causal

The kernels cut parts into units of work, and merge what a row gets from several by their sums of exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.attention.grouping import shared_runs

# A shorter run costs more as a part of its own than reading it once for each sequence.
MIN_RUN_TOKENS = 128

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Queries:
    """Who attends to what.

    Attributes:
        num_rows: Query rows in all.
        parts: `[num_parts, 5]`: first index in `rows`, number of rows, first index in `pages`, tokens, causal or not.
        rows: Query rows of all parts.
        pages: Pages of all parts.
    """

    num_rows: int
    parts: Int32Array
    rows: Int32Array
    pages: Int32Array


class NativePlan(NamedTuple):
    """One step: `queries` in all layers but the last, and there `output_queries`, which count output rows only."""

    queries: Queries
    output_queries: Queries


class NativePlanner:
    """Lays out steps for the native kernels. Engine thread only."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def plan(self, sequences: list[SequenceSlice]) -> NativePlan:
        queries = self._queries(sequences)
        if not any(sequence.num_unread for sequence in sequences):
            return NativePlan(queries, queries)
        read: list[SequenceSlice] = []
        num_rows = 0
        for s in sequences:
            num_read = s.num_queries - s.num_unread
            if num_read:
                read.append(SequenceSlice(num_rows, num_read, s.context_len + s.num_unread, s.page_table))
                num_rows += num_read
        return NativePlan(queries, self._queries(read))

    def _queries(self, sequences: list[SequenceSlice]) -> Queries:
        size = self._page_size
        parts: list[tuple[int, int, int, int, int]] = []
        rows: list[int] = []
        pages: list[int] = []

        def add(part_rows: list[int], part_pages: list[int], num_tokens: int, is_causal: bool) -> None:
            parts.append((len(rows), len(part_rows), len(pages), num_tokens, is_causal))
            rows.extend(part_rows)
            pages.extend(part_pages)

        decoding = [s for s in sequences if s.num_queries == 1]
        num_shared = [0] * len(decoding)  # leading pages of each that some shared part covers
        whole_pages = [(s.context_len + 1) // size for s in decoding]  # a decoding row sees itself, in the pool by then
        for run in shared_runs([s.page_table for s in decoding], whole_pages, MIN_RUN_TOKENS // size):
            add([decoding[member].first_row for member in run.members], run.pages, len(run.pages) * size, False)
            for member in run.members:
                num_shared[member] += len(run.pages)
        for sequence, skipped in zip(decoding, num_shared, strict=True):
            num_tokens = sequence.context_len + 1 - skipped * size
            if num_tokens:
                add([sequence.first_row], self._pages(sequence, skipped), num_tokens, True)
        for sequence in sequences:
            if sequence.num_queries > 1:
                own_rows = list(range(sequence.first_row, sequence.first_row + sequence.num_queries))
                add(own_rows, self._pages(sequence, 0), sequence.context_len + sequence.num_queries, True)
        num_rows = sum(s.num_queries for s in sequences)
        return Queries(num_rows, *(np.array(numbers, dtype=np.int32) for numbers in (parts, rows, pages)))

    def _pages(self, sequence: SequenceSlice, first: int) -> list[int]:
        num_tokens = sequence.context_len + sequence.num_queries
        return sequence.page_table[first : -(-num_tokens // self._page_size)]
