"""Our own kernels against PyTorch's: the same steps, the same pool, the same numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prefixcache.errors import ModelError
from prefixcache.kv.layout import PAGE_SIZE
from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.attention.cpu import CPUAttention
from prefixcache.model.decoder import Decoder
from prefixcache.model.families import spec_from_config
from prefixcache.model.native import build, library
from prefixcache.model.native.decoder import NativeDecoder, obstacle
from prefixcache.model.native.planner import NativePlanner
from prefixcache.model.spec import DecoderSpec
from tests.support.models import FAMILIES, VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
NUM_PAGES = 256

needs_kernels = pytest.mark.skipif(library.load() is None, reason="our own kernels are not compiled here")


@pytest.fixture(autouse=True, params=(1, 2, 5))  # five threads on fewer cores: some are put aside all the time
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Pair:
    """One model on both kinds of kernels, each with a pool of its own that holds the same."""

    def __init__(self, family: str, dtype: torch.dtype) -> None:
        model = tiny_model(family)
        self.spec: DecoderSpec = spec_from_config(model.config)
        weights = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
        shape = (self.spec.num_layers, 2, NUM_PAGES * PAGE_SIZE, self.spec.num_kv_heads, self.spec.head_dim)
        self.own_kv = torch.randn(shape).to(dtype)
        self.torch_kv = self.own_kv.float()
        attention = CPUAttention(self.spec.num_heads, self.spec.num_kv_heads, PAGE_SIZE, torch.float32)
        self.torch = Decoder(self.spec, {name: weight.float() for name, weight in weights.items()}, attention)
        self.own = NativeDecoder(self.spec, weights)

    def step(
        self, sequences: list[tuple[list[int], int, int]], num_unread: list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of one step over (page table, context, new tokens) of each sequence: ours, and PyTorch's.

        The first `num_unread` rows of each sequence are left out; PyTorch's, also, once computed and then dropped.
        """
        slices: list[SequenceSlice] = []
        positions: list[int] = []
        slots: list[int] = []
        read: list[int] = []
        for (table, context_len, num_new), unread in zip(sequences, num_unread or [0] * len(sequences), strict=True):
            slices.append(SequenceSlice(len(positions), num_new, context_len, table, unread))
            read += range(len(positions) + unread, len(positions) + num_new)
            places = range(context_len, context_len + num_new)
            positions += places
            slots += [table[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE for place in places]
        ids = torch.randint(VOCAB_SIZE, (len(positions),))
        rows = (ids, torch.tensor(positions), torch.tensor(slots))
        all_rows, output_rows = torch.arange(len(ids)), torch.tensor(read, dtype=torch.int64)
        own = self.own.forward(*rows, self.own.backend.plan(slices), self.own_kv, output_rows)
        plan = self.torch.backend.plan(slices)
        other = self.torch.forward(*rows, plan, self.torch_kv, all_rows)[output_rows]
        torch.testing.assert_close(self.torch.forward(*rows, plan, self.torch_kv, output_rows), other)
        return self.own.logits(self.own.final_states(own)), self.torch.logits(self.torch.final_states(other))


def tables() -> Iterator[list[int]]:
    """Page tables of 12 pages that have none in common, in no order."""
    yield from torch.randperm(NUM_PAGES)[: NUM_PAGES // 12 * 12].view(-1, 12).tolist()


def mixed_step() -> list[tuple[list[int], int, int]]:
    """Nested sharing (a run of all four, one of two of them, tails), sequences alone, and chunks of prompts."""
    free = tables()
    root, branch = next(free), next(free)
    return [
        (root + branch + next(free), 390, 1),
        (root + branch + next(free), 400, 1),
        (root + next(free), 192, 1),  # its new token begins a page: nothing of its own is known
        (root + next(free), 207, 1),
        (next(free), 0, 1),  # a first token
        (next(free), 15, 1),
        (next(free), 0, 100),
        (root + next(free), 192, 67),
        (next(free), 77, 2),
    ]


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_what_pytorch_computes(family: str) -> None:
    torch.manual_seed(1)
    pair = Pair(family, torch.float32)
    own, expected = pair.step(mixed_step())
    assert expected.std() > 0.5
    torch.testing.assert_close(own, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(pair.own_kv, pair.torch_kv, atol=2e-5, rtol=0)


@needs_kernels
@pytest.mark.parametrize("num_read", [(1,) * 9, (0, 1, 0, 1, 1, 0, 100, 1, 2), (1, 1, 1, 1, 1, 1, 0, 5, 1), (0,) * 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_nobody_reads_leave_their_kv_and_no_trace_in_the_others(
    family: str, num_read: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    pair, sequences = Pair(family, torch.float32), mixed_step()
    unread = [num_new - wanted for (_, _, num_new), wanted in zip(sequences, num_read, strict=True)]
    own, expected = pair.step(sequences, unread)
    assert own.shape == (sum(num_read), VOCAB_SIZE)
    torch.testing.assert_close(own, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(pair.own_kv, pair.torch_kv, atol=2e-5, rtol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [6, 7, 12, 24, 25, 64, 65, 126, 127, 300])  # around blocks of rows
def test_a_chunk_of_any_size(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    pair, free = Pair("llama-gqa", dtype), tables()
    own, expected = pair.step([(next(free) + next(free), 52, num_rows)])
    torch.testing.assert_close(own, expected, atol=2e-4 if dtype is torch.float32 else 0.15, rtol=0)


@needs_kernels
def test_scores_far_apart() -> None:
    """Most weights are too small for a float, and one token outweighs all others."""
    torch.manual_seed(5)
    pair = Pair("llama-gqa", torch.float32)
    for kv in (pair.own_kv, pair.torch_kv):
        kv[:, 0] *= 100
    own, expected = pair.step(mixed_step())
    torch.testing.assert_close(own, expected, atol=2e-3, rtol=0)


@needs_kernels
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3"])
def test_bfloat16_differs_from_float32_arithmetic_by_the_rounding_of_new_kv(family: str) -> None:
    torch.manual_seed(2)
    pair = Pair(family, torch.bfloat16)
    own, expected = pair.step(mixed_step())
    torch.testing.assert_close(own, expected, atol=0.15, rtol=0)
    assert (own.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95


@needs_kernels
def test_what_lies_behind_a_sequences_last_token_does_not_matter() -> None:
    torch.manual_seed(3)
    pair = Pair("llama-gqa", torch.float32)
    first, second = list(tables())[:2]
    for kv in (pair.own_kv, pair.torch_kv):
        kv.view(*kv.shape[:2], NUM_PAGES, PAGE_SIZE, *kv.shape[3:])[:, :, first[3], 5:] = math.nan
    own, expected = pair.step([(first, 52, 1), (second, 0, 40)])
    torch.testing.assert_close(own, expected, atol=2e-4, rtol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_logits_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    decoder = Pair("llama-gqa", dtype).own
    states = torch.randn(300, decoder.spec.hidden_size)
    together = decoder.logits(states)
    for row in (0, 5, 6, 125, 126, 299):
        assert torch.equal(decoder.logits(states[row : row + 1]), together[row : row + 1])
    for num_rows in (7, 12, 24, 25, 127):
        assert torch.equal(decoder.logits(states[:num_rows]), together[:num_rows])


@needs_kernels
def test_kv_is_rounded_to_bfloat16_as_pytorch_rounds() -> None:
    torch.manual_seed(4)
    half, full = Pair("llama-gqa", torch.bfloat16), Pair("llama-gqa", torch.float32)
    rounded = {name: weight.bfloat16().float() for name, weight in tiny_model("llama-gqa").state_dict().items()}
    full.own = NativeDecoder(full.spec, rounded)
    ids, positions, table = torch.randint(VOCAB_SIZE, (48,)), torch.arange(48), [0, 1, 2]
    for pair in (half, full):
        plan = pair.own.backend.plan([SequenceSlice(0, 48, 0, table)])
        pair.own.forward(ids, positions, positions, plan, pair.own_kv, positions)
    assert torch.equal(half.own_kv[0, :, :48], full.own_kv[0, :, :48].bfloat16())  # layer 0 has the same input in both


def test_shared_pages_are_planned_once() -> None:
    free = tables()
    root = next(free)
    tails = [next(free) for _ in range(3)]
    sequences = [SequenceSlice(row, 1, 200, root + tail) for row, tail in enumerate(tails)]
    plan = NativePlanner(PAGE_SIZE).plan(sequences).queries
    assert plan.parts.tolist() == [[0, 3, 0, 192, 0], [3, 1, 12, 9, 1], [4, 1, 13, 9, 1], [5, 1, 14, 9, 1]]
    assert plan.rows.tolist() == [0, 1, 2, 0, 1, 2]
    assert plan.pages.tolist() == [*root, *(tail[0] for tail in tails)]


def test_where_there_is_a_compiler_the_kernels_are_there() -> None:
    if build.obstacle() is not None or torch.backends.cpu.get_cpu_capability() not in library.X86_LEVELS:
        pytest.skip("no compiler, or not a CPU for the kernels")
    assert library.load() is not None, "run `make setup`"


def test_what_the_kernels_cannot_serve_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = spec_from_config(tiny_model("llama-gqa").config)
    if library.load() is not None:
        assert obstacle(spec, torch.float16) == "they have no float16"
    library.load.cache_clear()
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "kernels.so")
    try:
        assert obstacle(spec, torch.float32) == "they are not there"
        assert not library.is_preferred("auto", CPU)
        with pytest.raises(ModelError, match="kernels is native"):
            library.is_preferred("native", CPU)
        library.LIBRARY.write_bytes(b"not a library")
        library.load.cache_clear()
        assert library.load() is None
    finally:
        library.load.cache_clear()


def test_torch_means_torch() -> None:
    assert not library.is_preferred("torch", CPU)
