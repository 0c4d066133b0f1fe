"""Random steps for attention back ends, and what they must give: a plain softmax for each sequence, in float64.

shapes   how long each sequence is, with whom and how far it shares pages   (drawn by hypothesis, shrinks well)
case     pages laid out in a pool, tensors                                   (made from the shapes and a seed)
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from prefixcache.model.attention.base import AttentionBackend, SequenceSlice


@dataclass(frozen=True)
class SequenceShape:
    """One sequence of a step.

    Attributes:
        num_queries: 1 for a decode, more for a chunk.
        num_own: Tokens of its context that it shares with nobody before it.
        sharer: Index of an earlier sequence, or None.
        num_shared_pages: How many of that one's leading pages it shares, if that one has so many full ones.
    """

    num_queries: int
    num_own: int
    sharer: int | None = None
    num_shared_pages: int = 0


@dataclass(frozen=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    """One step in one layer."""

    heads: HeadShape
    page_size: int
    sequences: list[SequenceSlice]
    kv: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def sequence_shapes(page_size: int, max_context: int, max_chunk: int, max_sequences: int = 8) -> st.SearchStrategy[Any]:
    """Steps of decodes and chunks in any order, with lengths that crowd around page borders."""
    max_pages = max_context // page_size
    short = st.one_of(st.integers(0, 3), _near_border(page_size, 2), st.integers(0, 4 * page_size))
    long = st.one_of(_near_border(page_size, max_pages), st.integers(max_context // 2, max_context))
    queries = st.one_of(st.just(1), st.integers(2, max_chunk))

    @st.composite
    def mixed(draw: st.DrawFn) -> list[SequenceShape]:
        shapes: list[SequenceShape] = []
        for index in range(draw(st.integers(1, max_sequences))):
            sharer = draw(st.sampled_from([None, *range(index)]))
            num_pages = 0 if sharer is None else draw(st.integers(1, max_pages))
            shapes.append(SequenceShape(draw(queries), draw(st.one_of(short, long)), sharer, num_pages))
        return shapes

    @st.composite
    def crowd(draw: st.DrawFn) -> list[SequenceShape]:
        """Mostly decodes, all with a long beginning in common and many with a longer one."""
        shapes = [SequenceShape(1, draw(st.integers(max_context // 2, max_context)))]
        for index in range(1, draw(st.integers(3, max_sequences))):
            num_pages = draw(st.one_of(st.just(max_pages), st.integers(max_pages // 4, max_pages)))
            own = draw(st.one_of(short, short, long))
            shapes.append(SequenceShape(draw(st.just(1) | queries), own, draw(st.integers(0, index - 1)), num_pages))
        return shapes

    return mixed() | crowd()


def _near_border(page_size: int, max_pages: int) -> st.SearchStrategy[int]:
    pages, offset = st.integers(0, max_pages), st.sampled_from([-1, 0, 1])
    return st.builds(lambda p, o: max(0, p * page_size + o), pages, offset)


def make_case(
    heads: HeadShape,
    page_size: int,
    shapes: list[SequenceShape],
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    unused: float = float("nan"),
) -> Case:
    """Lay the sequences out in a pool and fill it.

    Args:
        heads: Heads of query and K/V.
        page_size: Tokens in one page.
        shapes: The sequences.
        seed: Chooses pages and numbers.
        dtype: Element type of all tensors.
        device: Where they are.
        unused: What stands in the slots that no sequence has; a back end that looks there gives it away.
    """
    rng = random.Random(seed)
    sequences, num_pages = _lay_out(shapes, page_size, rng)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    slots = [token_slots(sequence, page_size) for sequence in sequences]
    kv = torch.full((2, num_pages * page_size, heads.num_kv_heads, heads.head_dim), unused)
    used = sorted({slot for some in slots for slot in some})
    kv[:, used] = noise(2, len(used), heads.num_kv_heads, heads.head_dim)
    new = [slot for some, sequence in zip(slots, sequences, strict=True) for slot in some[sequence.context_len :]]
    # as in the decoder, query and key are parts of one tensor, so neither is contiguous
    packed = noise(len(new), heads.num_heads + heads.num_kv_heads, heads.head_dim)
    packed[:, heads.num_heads :] = kv[0, new]
    packed, kv = packed.to(device, dtype), kv.to(device, dtype)
    query, key = packed.split((heads.num_heads, heads.num_kv_heads), dim=1)
    return Case(heads, page_size, sequences, kv, query, key, kv[1, new])


def token_slots(sequence: SequenceSlice, page_size: int) -> list[int]:
    """Slots of a sequence's tokens, one by one."""
    num_tokens = sequence.context_len + sequence.num_queries
    return [sequence.page_table[t // page_size] * page_size + t % page_size for t in range(num_tokens)]


def run(backend: AttentionBackend[Any], case: Case) -> torch.Tensor:
    """Plan and attend as the decoder does."""
    plan = backend.plan(case.sequences)
    with torch.inference_mode():
        return backend.attend(plan, case.kv, case.query, case.key, case.value)


def expected(case: Case) -> torch.Tensor:
    """Softmax over all earlier tokens, sequence by sequence, in float64 on the CPU: `[rows, heads, head_dim]`."""
    kv, query = case.kv.double().cpu(), case.query.double().cpu()
    group = case.heads.num_heads // case.heads.num_kv_heads
    rows = []
    for sequence in case.sequences:
        keys, values = kv[:, token_slots(sequence, case.page_size)].repeat_interleave(group, dim=2)
        n = sequence.num_queries
        scores = torch.einsum("nhd,thd->hnt", query[sequence.first_row : sequence.first_row + n], keys)
        unseen = torch.ones(n, len(keys), dtype=torch.bool).triu(sequence.context_len + 1)
        weights = (scores / math.sqrt(case.heads.head_dim)).masked_fill(unseen, float("-inf")).softmax(-1)
        rows.append(torch.einsum("hnt,thd->nhd", weights, values))
    return torch.cat(rows)


def _lay_out(shapes: list[SequenceShape], page_size: int, rng: random.Random) -> tuple[list[SequenceSlice], int]:
    """Give every sequence its pages: the shared ones as they are, its own in runs scattered over the pool."""
    context_lens: list[int] = []
    num_shared: list[int] = []
    for shape in shapes:
        # a page may be shared only if it is full, and nobody shares what a sequence is about to write
        pages = 0 if shape.sharer is None else min(shape.num_shared_pages, context_lens[shape.sharer] // page_size)
        num_shared.append(pages)
        context_lens.append(pages * page_size + shape.num_own)
    spare = [rng.randrange(3) for _ in shapes]  # pages that are leased already, for tokens to come
    num_own = [
        -(-(context + shape.num_queries) // page_size) - shared + more
        for shape, context, shared, more in zip(shapes, context_lens, num_shared, spare, strict=True)
    ]
    free = _scattered(sum(num_own) + rng.randrange(8), rng)
    num_pages = len(free)
    sequences: list[SequenceSlice] = []
    first_row = 0
    for shape, context, shared, own in zip(shapes, context_lens, num_shared, num_own, strict=True):
        table = [] if shape.sharer is None else sequences[shape.sharer].page_table[:shared]
        table = table + [free.pop() for _ in range(own)]
        sequences.append(SequenceSlice(first_row, shape.num_queries, context, table))
        first_row += shape.num_queries
    return sequences, num_pages


def _scattered(num_pages: int, rng: random.Random) -> list[int]:
    """All page ids in an order that mixes long runs, short runs and single pages."""
    cuts = sorted(rng.sample(range(num_pages + 1), k=min(num_pages, rng.choice([0, 2, 6, num_pages]))))
    runs = [list(range(a, b)) for a, b in zip([0, *cuts], [*cuts, num_pages], strict=True)]
    rng.shuffle(runs)
    return [page for run in runs for page in run][::-1]  # taken from the end, hence upwards
