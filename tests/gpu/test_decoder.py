"""The whole decoder on CUDA against transformers on CUDA: chunks, a shared prefix, and decodes in one batch."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from prefixcache.kv.layout import PAGE_SIZE, KVLayout
from prefixcache.kv.page_pool import PagePool
from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.attention.choose import choose_backend
from prefixcache.model.decoder import Decoder
from prefixcache.model.families import spec_from_config
from tests.support.models import FAMILIES, VOCAB_SIZE, tiny_model

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Served:
    """A decoder with a pool, and sequences that grow step by step."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        spec = spec_from_config(model.config)
        device = torch.device(DEVICE)
        weights = {name: weight.to(device, dtype) for name, weight in model.state_dict().items()}
        if spec.tied_embeddings:
            del weights["lm_head.weight"]
        backend = choose_backend(device, spec, PAGE_SIZE, dtype)
        self.decoder = Decoder(spec, weights, backend)
        self.pool = PagePool(KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype), 128, device)
        self.tables: list[list[int]] = []

    def step(self, *parts: tuple[int, list[int], int, int]) -> list[torch.Tensor]:
        """Compute tokens [start, end) of each (sequence, tokens, start, end); returns each part's logits."""
        slices: list[SequenceSlice] = []
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, tokens, start, end in parts:
            table = self.tables[sequence]
            table += self.pool.try_allocate(-(-end // PAGE_SIZE) - len(table)) or []
            slices.append(SequenceSlice(len(ids), end - start, start, table))
            ids += tokens[start:end]
            positions += range(start, end)
            slots += [table[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(start, end)]
        rows = torch.tensor((ids, positions, slots), device=DEVICE)
        hidden = self.decoder.forward(
            *rows, self.decoder.backend.plan(slices), self.pool.kv, torch.arange(len(ids), device=DEVICE)
        )
        logits = self.decoder.logits(self.decoder.final_states(hidden))
        return list(logits.split([part.num_queries for part in slices]))


def serve_and_compare(model: PreTrainedModel, dtype: torch.dtype, tolerance: float) -> None:
    """Serve three sequences, two with a common beginning, and compare the logits of every row."""
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return rng.choices(range(3, VOCAB_SIZE), k=length)

    first, short = draw(300), draw(61)
    other = first[: 12 * PAGE_SIZE] + draw(70)
    reference = type(model)(model.config).to(DEVICE).eval()
    reference.load_state_dict({name: weight.to(dtype).float() for name, weight in model.state_dict().items()})
    with torch.inference_mode():
        whole = [
            reference(input_ids=torch.tensor([t], device=DEVICE), use_cache=False).logits[0]
            for t in (first, short, other)
        ]

    served = Served(model, dtype)
    served.tables = [[], [], []]
    got: list[list[torch.Tensor]] = [[], [], []]

    def step(*parts: tuple[int, list[int], int, int]) -> None:
        for (sequence, _, _, _), logits in zip(parts, served.step(*parts), strict=True):
            got[sequence].append(logits)

    step((0, first, 0, 200))
    step((0, first, 200, 290), (1, short, 0, 51))
    served.tables[2] = served.tables[0][:12]
    got[2].append(got[0][0][: 12 * PAGE_SIZE])  # as computed for the first
    step((0, first, 290, 291), (1, short, 51, 52), (2, other, 12 * PAGE_SIZE, len(other) - 9))
    for i in range(1, 10):
        at = 12 * PAGE_SIZE + 70 - 10 + i
        step((0, first, 290 + i, 291 + i), (1, short, 51 + i, 52 + i), (2, other, at, at + 1))

    for logits, wanted in zip(got, whole, strict=True):
        torch.testing.assert_close(torch.cat(logits), wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32(family: str) -> None:
    serve_and_compare(tiny_model(family), torch.float32, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama-gqa", "llama-mqa-biases", "llama-mha-tied-llama3-rope", "qwen3"])
def test_sixteen_bit_with_heads_that_flashinfer_takes(family: str, dtype: torch.dtype) -> None:
    small = tiny_model(family)
    values = small.config.to_dict() | {"head_dim": 64, "initializer_range": 0.1}
    torch.manual_seed(0)
    model = type(small)(type(small.config)(**values)).eval()
    # logits have a standard deviation of about 1 here, and their rounding errors add up over the layers
    serve_and_compare(model, dtype, tolerance=0.02 if dtype == torch.float16 else 0.15)


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3"])
def test_sixteen_bit_with_heads_that_flashinfer_does_not_take(family: str) -> None:
    serve_and_compare(tiny_model(family), torch.bfloat16, tolerance=0.5)
