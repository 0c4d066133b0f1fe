"""The CPU's attention against a plain softmax for each sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixcache.model.attention.cpu import MAX_TAIL_TOKENS, MIN_RUN_TOKENS, CPUAttention
from tests.support.attention import Case, HeadShape, SequenceShape, expected, make_case, run, sequence_shapes

PAGE = 16
HEADS = [HeadShape(6, 2, 16), HeadShape(4, 1, 8), HeadShape(3, 3, 16), HeadShape(9, 3, 64)]


def check(case: Case) -> None:
    heads = case.heads
    backend = CPUAttention(heads.num_heads, heads.num_kv_heads, case.page_size, torch.float32)
    torch.testing.assert_close(run(backend, case).double(), expected(case), atol=1e-5, rtol=1e-5)


NESTED = [
    SequenceShape(1, 100),
    SequenceShape(1, 900),  # a run of its own, longer than tails may be
    SequenceShape(1, 30, sharer=1, num_shared_pages=30),
    SequenceShape(1, 5, sharer=2, num_shared_pages=31),
    SequenceShape(1, 700, sharer=2, num_shared_pages=20),
    SequenceShape(40, 17, sharer=1, num_shared_pages=25),
    SequenceShape(1, 0),
    SequenceShape(2, 0),
]


@settings(max_examples=100)
@given(
    shapes=sequence_shapes(PAGE, max_context=1200, max_chunk=40),
    heads=st.sampled_from(HEADS),
    seed=st.integers(0, 1000),
)
@example(shapes=NESTED, heads=HEADS[0], seed=0)
@example(shapes=NESTED, heads=HEADS[1], seed=1)
@example(shapes=NESTED, heads=HEADS[2], seed=2)
@example(shapes=[SequenceShape(1, 0)], heads=HEADS[0], seed=0)
def test_random_steps(shapes: list[SequenceShape], heads: HeadShape, seed: int) -> None:
    check(make_case(heads, PAGE, shapes, seed))


@settings(max_examples=40)
@given(
    shapes=sequence_shapes(4, max_context=400, max_chunk=10),
    heads=st.sampled_from(HEADS),
    seed=st.integers(0, 1000),
)
def test_random_steps_with_small_pages(shapes: list[SequenceShape], heads: HeadShape, seed: int) -> None:
    check(make_case(heads, 4, shapes, seed))


BORDERS = sorted(
    {
        max(0, border + offset)
        for border in (0, PAGE, MIN_RUN_TOKENS, MAX_TAIL_TOKENS, MAX_TAIL_TOKENS + PAGE)
        for offset in (-2, -1, 0, 1)
    }
)


@pytest.mark.parametrize("context_len", BORDERS)
@pytest.mark.parametrize("num_queries", [1, 2, PAGE + 1])
def test_one_sequence_at_every_border(context_len: int, num_queries: int) -> None:
    for seed in range(3):
        check(make_case(HEADS[0], PAGE, [SequenceShape(num_queries, context_len)], seed))


@pytest.mark.parametrize("context_len", BORDERS)
def test_several_decodes_at_every_border(context_len: int) -> None:
    shapes = [SequenceShape(1, context_len), SequenceShape(1, 3), SequenceShape(1, context_len + 1)]
    for seed in range(3):
        check(make_case(HEADS[0], PAGE, shapes, seed))


@pytest.mark.parametrize("num_own", [0, 1, PAGE - 1, PAGE, MAX_TAIL_TOKENS, MAX_TAIL_TOKENS + PAGE])
def test_decodes_that_share_a_prefix(num_own: int) -> None:
    prefix = MIN_RUN_TOKENS + PAGE
    shapes = [SequenceShape(1, prefix + num_own)]
    shapes += [SequenceShape(1, num_own, sharer=0, num_shared_pages=prefix // PAGE) for _ in range(4)]
    for seed in range(3):
        check(make_case(HEADS[0], PAGE, shapes, seed))


def test_bfloat16_is_as_exact_as_its_rounding() -> None:
    case = make_case(HEADS[0], PAGE, NESTED, seed=5, dtype=torch.bfloat16)
    backend = CPUAttention(6, 2, PAGE, torch.bfloat16)
    torch.testing.assert_close(run(backend, case).double(), expected(case), atol=2e-2, rtol=2e-2)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    case = make_case(HEADS[0], PAGE, NESTED, seed=6)
    case.query.mul_(200.0)
    backend = CPUAttention(6, 2, PAGE, torch.float32)
    # scores of about 1,000 are rounded to 1e-4, and so are the weights that come of them
    torch.testing.assert_close(run(backend, case).double(), expected(case), atol=1e-3, rtol=1e-3)
