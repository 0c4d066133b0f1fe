"""The FlashInfer back end with plain matrix products in FlashInfer's place: all of it but the kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support import plain_flashinfer
from tests.support.attention import HeadShape, SequenceShape, expected, make_case, run, sequence_shapes

PAGE = 16
BACKEND = "prefixcache.model.attention.flashinfer"
HEADS = [HeadShape(6, 2, 16), HeadShape(4, 1, 8), HeadShape(3, 3, 16)]


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    """The back end, imported with the plain package under FlashInfer's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", plain_flashinfer)
        patch.delitem(sys.modules, BACKEND, raising=False)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        module = importlib.import_module(BACKEND)
        patch.setattr(module, "MIN_WORKSPACE_BYTES", 1 << 10)
        yield module
        del sys.modules[BACKEND]


def build(module: ModuleType, heads: HeadShape) -> Any:
    return module.FlashInferAttention(
        heads.num_heads, heads.num_kv_heads, heads.head_dim, PAGE, torch.float32, torch.device("cpu")
    )


CROWD = [
    SequenceShape(1, 700),
    SequenceShape(1, 300, sharer=0, num_shared_pages=30),
    SequenceShape(1, 200, sharer=1, num_shared_pages=48),
    SequenceShape(1, 0, sharer=2, num_shared_pages=60),
    SequenceShape(20, 5, sharer=0, num_shared_pages=40),
    SequenceShape(1, 9),
]


@settings(max_examples=50)
@given(
    shapes=sequence_shapes(PAGE, max_context=1000, max_chunk=40),
    heads=st.sampled_from(HEADS),
    seed=st.integers(0, 1000),
    min_saved_bytes=st.sampled_from([0, 0, 1 << 18]),
)
@example(shapes=CROWD, heads=HEADS[0], seed=0, min_saved_bytes=0)
def test_random_steps(
    module: ModuleType, shapes: list[SequenceShape], heads: HeadShape, seed: int, min_saved_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_SAVED_BYTES", min_saved_bytes)
        backend = build(module, heads)
    case = make_case(heads, PAGE, shapes, seed)
    torch.testing.assert_close(run(backend, case).double(), expected(case), atol=1e-5, rtol=1e-5)


def test_one_plan_serves_all_layers(module: ModuleType) -> None:
    backend = build(module, HEADS[0])
    case = make_case(HEADS[0], PAGE, CROWD, seed=1)
    plan = backend.plan(case.sequences)
    first = backend.attend(plan, case.kv, case.query, case.key, case.value)
    other_kv = case.kv.flip(2)

    assert torch.equal(backend.attend(plan, case.kv, case.query, case.key, case.value), first)
    assert not torch.allclose(backend.attend(plan, other_kv, case.query, case.key, case.value), first)


def test_every_kernel_is_used_before_the_first_request(module: ModuleType) -> None:
    backend = build(module, HEADS[0])

    assert [w.num_plans for w in (backend._decodes, backend._shared, backend._chunks)] == [1, 1, 1]
