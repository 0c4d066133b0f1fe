"""The cascade plan: by hand, and that every row meets every token that it may see exactly once."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.attention.cascade import MIN_RUN_TOKENS, PagedBatch, plan_cascade
from tests.support.attention import HeadShape, SequenceShape, make_case, sequence_shapes, token_slots

HALF_RUN = MIN_RUN_TOKENS // 2  # as page size: a shared run has two pages at least


def lists(batch: PagedBatch | None) -> tuple[list[int], list[int], list[int], list[int]]:
    assert batch is not None
    fields = (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.last_page_len)
    assert all(field.dtype == torch.int32 and field.device.type == "cpu" for field in fields)
    qo_indptr, kv_indptr, kv_indices, last_page_len = (field.tolist() for field in fields)
    return qo_indptr, kv_indptr, kv_indices, last_page_len


def test_the_example_of_the_docstring() -> None:
    size = HALF_RUN
    sequences = [
        SequenceSlice(0, 1, 6 * size + 4, [0, 1, 2, 3, 4, 5, 9]),
        SequenceSlice(1, 1, 8 * size, [0, 1, 2, 3, 4, 5, 7, 8, 10]),
        SequenceSlice(2, 1, 9 * size - 1, [0, 1, 2, 3, 4, 5, 7, 8, 12, 13]),  # its new token fills page 12; 13 is spare
        SequenceSlice(3, 5, size + 1, [20, 21]),
    ]

    plan = plan_cascade(sequences, size, min_saved_tokens=0)

    assert plan.num_decodes == 3
    assert lists(plan.decodes) == ([0, 1, 2, 3], [0, 1, 2, 3], [9, 10, 12], [5, 1, size])
    assert lists(plan.chunks) == ([0, 5], [0, 2], [20, 21], [6])
    assert lists(plan.shared) == ([0, 3, 5], [0, 6, 8], [0, 1, 2, 3, 4, 5, 7, 8], [size, size])
    assert plan.shared_rows.tolist() == [0, 1, 2, 1, 2]
    assert plan.levels == [slice(0, 3), slice(3, 5)]


def test_runs_are_merged_by_level_not_in_the_order_found() -> None:
    # families (0, 1, 2) with (0, 1) nested, and (3, 4): found as 0-1-2, 0-1, 3-4
    tables = [[0, 1, 2, 3, 30], [0, 1, 2, 3, 31], [0, 1, 32], [5, 6, 33], [5, 6, 34]]
    sequences = [SequenceSlice(i, 1, (len(t) - 1) * HALF_RUN, t) for i, t in enumerate(tables)]

    plan = plan_cascade(sequences, HALF_RUN, min_saved_tokens=0)

    assert plan.shared_rows.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert plan.levels == [slice(0, 5), slice(5, 7)]
    assert lists(plan.shared)[2] == [0, 1, 5, 6, 2, 3]


def test_a_single_query_behind_a_chunk_goes_with_the_chunks() -> None:
    sequences = [SequenceSlice(0, 1, 3, [0]), SequenceSlice(1, 2, 0, [1]), SequenceSlice(3, 1, 16, [2, 3])]

    plan = plan_cascade(sequences, 16, min_saved_tokens=0)

    assert plan.num_decodes == 1
    assert lists(plan.decodes) == ([0, 1], [0, 1], [0], [4])
    assert lists(plan.chunks) == ([0, 2, 3], [0, 1, 3], [1, 2, 3], [2, 1])


def test_only_decodes_or_only_chunks() -> None:
    decodes = plan_cascade([SequenceSlice(0, 1, 0, [4])], 16, min_saved_tokens=0)
    chunks = plan_cascade([SequenceSlice(0, 16, 0, [4])], 16, min_saved_tokens=0)

    assert (decodes.chunks, decodes.shared, decodes.levels) == (None, None, [])
    assert lists(decodes.decodes) == ([0, 1], [0, 1], [4], [1])
    assert (chunks.num_decodes, chunks.decodes, chunks.shared) == (0, None, None)
    assert lists(chunks.chunks) == ([0, 16], [0, 1], [4], [16])
    assert chunks.shared_rows.dtype == decodes.shared_rows.dtype == torch.int64


def test_sharing_that_saves_too_little_is_left_out() -> None:
    tables = [[0, 1, 2, 3, 10 + i] for i in range(3)]
    sequences = [SequenceSlice(i, 1, 4 * HALF_RUN, t) for i, t in enumerate(tables)]
    saved = 2 * 4 * HALF_RUN  # two of three need not read four pages

    assert plan_cascade(sequences, HALF_RUN, min_saved_tokens=saved).shared is not None
    alone = plan_cascade(sequences, HALF_RUN, min_saved_tokens=saved + 1)
    assert alone.shared is None
    assert lists(alone.decodes)[2] == [page for table in tables for page in table]


def groups(batch: PagedBatch | None, page_size: int) -> list[tuple[int, list[int]]]:
    """Each group's number of rows and the slots they see."""
    if batch is None:
        return []
    qo_indptr, kv_indptr, kv_indices, last_page_len = lists(batch)
    result = []
    for g, last in enumerate(last_page_len):
        assert 1 <= last <= page_size
        pages = kv_indices[kv_indptr[g] : kv_indptr[g + 1]]
        assert pages
        slots = [page * page_size + offset for page in pages for offset in range(page_size)]
        result.append((qo_indptr[g + 1] - qo_indptr[g], slots[: len(slots) - page_size + last]))
    return result


@settings(max_examples=80)
@given(
    shapes=sequence_shapes(16, max_context=1200, max_chunk=40),
    seed=st.integers(0, 1000),
    min_saved_tokens=st.sampled_from([0, 0, 2000]),
)
@example(shapes=[SequenceShape(1, 200, None), SequenceShape(1, 0, 0, 12)], seed=0, min_saved_tokens=0)
def test_every_row_meets_every_token_once(shapes: list[SequenceShape], seed: int, min_saved_tokens: int) -> None:
    sequences = make_case(HeadShape(1, 1, 1), 16, shapes, seed).sequences
    plan = plan_cascade(sequences, 16, min_saved_tokens)
    decodes, chunks = sequences[: plan.num_decodes], sequences[plan.num_decodes :]

    assert all(sequence.num_queries == 1 for sequence in decodes)
    assert not chunks or chunks[0].num_queries > 1
    assert groups(plan.chunks, 16) == [(s.num_queries, token_slots(s, 16)) for s in chunks]

    met = [Counter[int](slots) for num_rows, slots in groups(plan.decodes, 16) if num_rows == 1]
    assert len(met) == len(decodes)
    shared_rows = plan.shared_rows.tolist()
    start = 0
    for num_rows, slots in groups(plan.shared, 16):
        for row in shared_rows[start : start + num_rows]:
            met[row].update(slots)
        start += num_rows
    assert start == len(shared_rows)
    assert met == [Counter(token_slots(sequence, 16)) for sequence in decodes]

    assert [row for part in plan.levels for row in shared_rows[part]] == shared_rows
    for part in plan.levels:
        assert len(set(shared_rows[part])) == len(shared_rows[part]) > 0
