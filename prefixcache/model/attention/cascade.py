"""A step's attention as FlashInfer takes it: groups of query rows, each with the pages that its rows see.

    A, B, C decode and share pages 0-5; B and C go on together with 7-8; D is a prompt's chunk

    decodes   row A x page 9 │ row B x page 10 │ row C x page 12      what no other sequence sees
    shared    rows A B C x pages 0-5 │ rows B C x pages 7-8           read once for all its rows
    chunks    rows of D x pages of D                                  causal

Softmax over the union of pages is the softmax of each part, weighted by its share of the sum of exponentials, so the
shared parts are merged into the decodes by their log-sum-exp (cascade attention, arXiv 2402.05099). A row stands in
`shared` once for each run that it sees; runs are sorted into levels, and in one level no row stands twice.

Chunks read what they share each for itself: with many queries the K/V is a small part of the work.

Python and index tensors on the CPU; nothing here knows FlashInfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import torch

from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.attention.grouping import SharedRun, shared_runs

# A shorter shared run stays with each of its sequences: FlashInfer does not cut K/V finer than this either.
MIN_RUN_TOKENS = 128


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Groups of query rows that lie one after another, and each group's pages; all int32.

    Attributes:
        qo_indptr: `[num_groups + 1]`, where each group's rows begin, and the end.
        kv_indptr: `[num_groups + 1]`, where each group's pages begin in `kv_indices`, and the end.
        kv_indices: `[kv_indptr[-1]]`, page ids.
        last_page_len: `[num_groups]`, tokens in each group's last page, from 1 to the page size.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """One step's attention in at most three batches.

    Attributes:
        num_decodes: The first so many rows are the decodes' groups of one; the rest are the chunks' rows.
        shared_rows: The decode row that each row of `shared` stands for, `[shared.qo_indptr[-1]]`.
        levels: Parts of `shared_rows`, in the order in which they are to be merged.
    """

    num_decodes: int
    decodes: PagedBatch | None
    chunks: PagedBatch | None
    shared: PagedBatch | None
    shared_rows: torch.Tensor
    levels: list[slice]


def plan_cascade(sequences: list[SequenceSlice], page_size: int, min_saved_tokens: int) -> CascadePlan:
    """Arrange a step.

    Args:
        sequences: All of the step, in the order of their rows. Those up to the first with several queries are the
            decodes; a single query behind it goes with the chunks, where it is as right and nearly as quick.
        page_size: Tokens in one page.
        min_saved_tokens: Shared runs are read apart if that saves reading at least so many tokens in each layer.
    """
    decoding = list(takewhile(lambda sequence: sequence.num_queries == 1, sequences))
    chunks = _Groups(page_size)
    for sequence in sequences[len(decoding) :]:
        chunks.add(sequence.num_queries, sequence.page_table, sequence.context_len + sequence.num_queries)

    lengths = [sequence.context_len + 1 for sequence in decoding]  # a decoding row sees itself
    tables = [sequence.page_table for sequence in decoding]
    runs = shared_runs(tables, [length // page_size for length in lengths], MIN_RUN_TOKENS // page_size)
    if sum((len(run.members) - 1) * len(run.pages) for run in runs) * page_size < min_saved_tokens:
        runs = []

    num_shared_pages = [0] * len(decoding)
    levels = _sort_into_levels(runs, num_shared_pages)
    shared = _Groups(page_size)
    rows: list[int] = []
    parts: list[slice] = []
    for level in levels:
        start = len(rows)
        for run in level:
            shared.add(len(run.members), run.pages, len(run.pages) * page_size)
            rows += run.members
        parts.append(slice(start, len(rows)))

    decodes = _Groups(page_size)
    for table, length, num_shared in zip(tables, lengths, num_shared_pages, strict=True):
        decodes.add(1, table[num_shared:], length - num_shared * page_size)
    index = torch.tensor(rows, dtype=torch.int64)
    return CascadePlan(len(decoding), decodes.batch(), chunks.batch(), shared.batch(), index, parts)


def _sort_into_levels(runs: list[SharedRun], num_shared_pages: list[int]) -> list[list[SharedRun]]:
    """Group runs by how many runs lie before them, and add up each sequence's pages in `num_shared_pages`."""
    levels: list[list[SharedRun]] = []
    depth = [0] * len(num_shared_pages)
    for run in runs:
        level = depth[run.members[0]]
        if level == len(levels):
            levels.append([])
        levels[level].append(run)
        for member in run.members:
            depth[member] = level + 1
            num_shared_pages[member] += len(run.pages)
    return levels


class _Groups:
    """Collects the groups of one batch."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._qo_indptr = [0]
        self._kv_indptr = [0]
        self._kv_indices: list[int] = []
        self._last_page_len: list[int] = []

    def add(self, num_rows: int, pages: list[int], num_tokens: int) -> None:
        """Add a group of rows that see the first `num_tokens` tokens, one at least, in `pages`."""
        num_pages = -(-num_tokens // self._page_size)
        self._qo_indptr.append(self._qo_indptr[-1] + num_rows)
        self._kv_indptr.append(self._kv_indptr[-1] + num_pages)
        self._kv_indices += pages[:num_pages]
        self._last_page_len.append((num_tokens - 1) % self._page_size + 1)

    def batch(self) -> PagedBatch | None:
        """Return the batch, or None if there are no groups."""
        if not self._last_page_len:
            return None
        fields = (self._qo_indptr, self._kv_indptr, self._kv_indices, self._last_page_len)
        return PagedBatch(*(torch.tensor(field, dtype=torch.int32) for field in fields))
