"""Every CUDA attention back end against a plain softmax for each sequence, on random steps."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from prefixcache.model.attention.base import AttentionBackend
from prefixcache.model.attention.cascade import CascadePlan
from prefixcache.model.attention.sdpa import SDPAAttention
from prefixcache.model.attention.varlen import VarlenAttention
from tests.support.attention import HeadShape, SequenceShape, expected, make_case, run, sequence_shapes

DEVICE = "cuda"
PAGE = 16
HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_flashinfer = pytest.mark.skipif(not HAS_FLASHINFER, reason="needs FlashInfer: pip install 'prefixcache[cuda]'")

# What rounding inputs, weights and output to a type with so many bits leaves of a mean over standard normal values.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIXTEEN_BIT = [torch.float16, torch.bfloat16]

MANY_TOKENS = [
    SequenceShape(1, 9000),
    *(SequenceShape(1, 40 * i, sharer=0, num_shared_pages=500) for i in range(12)),
    *(SequenceShape(1, i, sharer=12, num_shared_pages=520) for i in range(5)),
    SequenceShape(700, 1000),
    SequenceShape(300, 0),
    SequenceShape(65, 200, sharer=0, num_shared_pages=300),
    SequenceShape(1, 77),
]
steps = given(
    shapes=sequence_shapes(PAGE, max_context=1500, max_chunk=150, max_sequences=12), seed=st.integers(0, 1000)
)
# building a back end may compile kernels, which takes long and is no part of the test
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(backend: AttentionBackend[Any], heads: HeadShape, shapes: list[SequenceShape], seed: int, dtype: Any) -> None:
    # the pool promises that what a kernel reads too much is no NaN, not that it is small
    case = make_case(heads, PAGE, shapes, seed, dtype=dtype, device=DEVICE, unused=1000.0)
    output = run(backend, case)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double().cpu(), expected(case), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# --- FlashInfer ------------------------------------------------------------------------------------------------------


@cache
def flashinfer_backend(heads: HeadShape, dtype: torch.dtype) -> AttentionBackend[CascadePlan]:
    """A back end that reads shared runs apart however little that saves."""
    # the module cannot be imported where FlashInfer is missing
    from prefixcache.model.attention import flashinfer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "MIN_SAVED_BYTES", 0)
        device = torch.device(DEVICE)
        return flashinfer.FlashInferAttention(heads.num_heads, heads.num_kv_heads, heads.head_dim, PAGE, dtype, device)


@needs_flashinfer
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize(
    "heads",
    [HeadShape(9, 3, 64), HeadShape(8, 8, 64), HeadShape(14, 2, 64), HeadShape(8, 1, 128), HeadShape(32, 8, 128)],
)
@few
@steps
@example(shapes=MANY_TOKENS, seed=0)
def test_flashinfer(heads: HeadShape, dtype: torch.dtype, shapes: list[SequenceShape], seed: int) -> None:
    check(flashinfer_backend(heads, dtype), heads, shapes, seed, dtype)


@needs_flashinfer
def test_flashinfer_with_heads_of_256() -> None:
    heads = HeadShape(4, 2, 256)
    check(flashinfer_backend(heads, torch.bfloat16), heads, MANY_TOKENS, 1, torch.bfloat16)


@needs_flashinfer
def test_flashinfer_shares_what_the_test_means_it_to_share() -> None:
    heads = HeadShape(9, 3, 64)
    case = make_case(heads, PAGE, MANY_TOKENS, 0, dtype=torch.bfloat16, device=DEVICE)
    assert len(flashinfer_backend(heads, torch.bfloat16).plan(case.sequences).levels) >= 2


# --- the others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("heads", [HeadShape(9, 3, 64), HeadShape(4, 1, 80), HeadShape(3, 3, 16), HeadShape(8, 2, 256)])
@few
@steps
@example(shapes=MANY_TOKENS, seed=0)
def test_varlen(heads: HeadShape, dtype: torch.dtype, shapes: list[SequenceShape], seed: int) -> None:
    check(VarlenAttention(PAGE, torch.device(DEVICE)), heads, shapes, seed, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [HeadShape(9, 3, 64), HeadShape(4, 1, 20), HeadShape(3, 3, 16)])
@few
@steps
@example(shapes=MANY_TOKENS, seed=0)
def test_sdpa(heads: HeadShape, dtype: torch.dtype, shapes: list[SequenceShape], seed: int) -> None:
    backend = SDPAAttention(heads.num_heads, heads.num_kv_heads, PAGE, torch.device(DEVICE))
    check(backend, heads, shapes, seed, dtype)
