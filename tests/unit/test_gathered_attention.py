"""The back ends that gather K/V. SDPA runs as it is; `varlen_attn` has no CPU kernel, so plain products stand in."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn

from prefixcache.model.attention import varlen
from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.attention.sdpa import SDPAAttention
from prefixcache.model.attention.varlen import VarlenAttention
from tests.support.attention import HeadShape, SequenceShape, expected, make_case, run, sequence_shapes

PAGE = 16
CPU = torch.device("cpu")
HEADS = [HeadShape(6, 2, 16), HeadShape(4, 1, 8), HeadShape(3, 3, 20)]
MIXED = [
    SequenceShape(1, 0),
    SequenceShape(1, 100),
    SequenceShape(17, 0),
    SequenceShape(2, 31),
    SequenceShape(1, 15, sharer=1, num_shared_pages=6),
    SequenceShape(PAGE, PAGE),
]


@settings(max_examples=40)
@given(
    shapes=sequence_shapes(PAGE, max_context=600, max_chunk=40),
    heads=st.sampled_from(HEADS),
    seed=st.integers(0, 1000),
)
@example(shapes=MIXED, heads=HEADS[0], seed=0)
def test_sdpa_on_random_steps(shapes: list[SequenceShape], heads: HeadShape, seed: int) -> None:
    case = make_case(heads, PAGE, shapes, seed)
    backend = SDPAAttention(heads.num_heads, heads.num_kv_heads, PAGE, CPU)
    torch.testing.assert_close(run(backend, case).double(), expected(case), atol=1e-5, rtol=1e-5)


def plain_varlen_attn(*args: Any, **kwargs: Any) -> torch.Tensor:
    """What `varlen_attn` documents, and FlashAttention's bottom-right alignment of a causal mask."""
    call = inspect.signature(varlen_attn).bind(*args, **kwargs)
    call.apply_defaults()
    a = call.arguments
    query, cu_q, cu_k = a["query"], a["cu_seq_q"], a["cu_seq_k"]
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (a["max_q"], a["max_k"])
    assert (int(cu_q[-1]), int(cu_k[-1])) == (len(query), len(a["key"]))
    group = query.shape[1] // a["key"].shape[1]
    assert group == 1 or a["enable_gqa"]
    parts = []
    for i in range(len(cu_q) - 1):
        q = query[cu_q[i] : cu_q[i + 1]].double()
        k, v = (a[x][cu_k[i] : cu_k[i + 1]].double().repeat_interleave(group, dim=1) for x in ("key", "value"))
        scores = torch.einsum("nhd,thd->hnt", q, k) / math.sqrt(q.shape[-1])
        if a["window_size"] == (-1, 0):
            unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
            scores = scores.masked_fill(unseen, float("-inf"))
        else:
            assert a["window_size"] == (-1, -1)
        parts.append(torch.einsum("hnt,thd->nhd", scores.softmax(-1), v))
    return torch.cat(parts).to(query.dtype)


@settings(max_examples=40)
@given(
    shapes=sequence_shapes(PAGE, max_context=600, max_chunk=40),
    heads=st.sampled_from(HEADS),
    seed=st.integers(0, 1000),
    max_gathered=st.sampled_from([1, 500, 1 << 16]),
)
@example(shapes=MIXED, heads=HEADS[0], seed=0, max_gathered=200)
def test_varlen_on_random_steps(shapes: list[SequenceShape], heads: HeadShape, seed: int, max_gathered: int) -> None:
    case = make_case(heads, PAGE, shapes, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", plain_varlen_attn)
        patch.setattr(varlen, "MAX_GATHERED_TOKENS", max_gathered)
        output = run(VarlenAttention(PAGE, CPU), case)
    torch.testing.assert_close(output.double(), expected(case), atol=1e-5, rtol=1e-5)


def test_varlen_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "MAX_GATHERED_TOKENS", 10)
    sequences = [
        SequenceSlice(0, 1, 2, [5]),
        SequenceSlice(1, 1, 4, [1, 0]),
        SequenceSlice(2, 1, 3, [7]),  # would be the 12th token
        SequenceSlice(3, 3, 0, [2]),  # a chunk: another kind
        SequenceSlice(6, 2, 20, [9, 8, 4, 3, 10, 11]),  # too long for any limit, so alone
    ]

    plan = VarlenAttention(4, CPU).plan(sequences)

    assert [batch.rows for batch in plan] == [slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 8)]
    assert [batch.cu_seqlens_q.tolist() for batch in plan] == [[0, 1, 2], [0, 1], [0, 3], [0, 2]]
    assert [batch.cu_seqlens_k.tolist() for batch in plan] == [[0, 3, 8], [0, 4], [0, 3], [0, 22]]
    assert [(batch.max_seqlen_q, batch.max_seqlen_k) for batch in plan] == [(1, 5), (1, 4), (3, 3), (2, 22)]
    assert plan[0].slots.tolist() == [20, 21, 22, 4, 5, 6, 7, 0]
    assert plan[3].slots.tolist()[-3:] == [43, 44, 45]
