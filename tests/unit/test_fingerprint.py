import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from prefixcache.kv.codec import FORMAT_VERSION
from prefixcache.kv.layout import KVLayout
from prefixcache.model import fingerprint
from prefixcache.model.fingerprint import kv_fingerprint
from prefixcache.model.spec import DecoderSpec

SPEC = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    inv_freq=tuple(10_000.0 ** (-2 * i / 32) for i in range(16)),
    attention_scaling=1.0,
    max_model_len=2048,
    has_qk_norm=False,
    tied_embeddings=True,
)
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, dtype=torch.bfloat16)
WEIGHTS, TOKENIZER = b"w" * 32, b"t" * 32


def of(
    spec: DecoderSpec = SPEC,
    layout: KVLayout = LAYOUT,
    weights: bytes = WEIGHTS,
    tokenizer: bytes = TOKENIZER,
    format_version: int = FORMAT_VERSION,
) -> bytes:
    return kv_fingerprint(spec, layout, weights, tokenizer, format_version)


def changed(value: Any) -> Any:
    """A value of the same type, as near as that type allows."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return math.nextafter(value, math.inf)
        case str():
            return value + "2"
        case torch.dtype():
            return torch.float16  # as wide as bfloat16
    raise AssertionError(value)


def test_equal_models_have_one_fingerprint() -> None:
    assert of() == of(replace(SPEC), replace(LAYOUT))
    assert len(of()) == 32


@pytest.mark.parametrize("name", [field.name for field in fields(DecoderSpec) if field.name != "inv_freq"])
def test_every_field_of_the_spec_counts(name: str) -> None:
    assert of(replace(SPEC, **{name: changed(getattr(SPEC, name))})) != of()


def test_every_bit_of_every_frequency_counts() -> None:
    seen = {of()}
    for i, frequency in enumerate(SPEC.inv_freq):
        seen.add(of(replace(SPEC, inv_freq=(*SPEC.inv_freq[:i], changed(frequency), *SPEC.inv_freq[i + 1 :]))))
    seen.add(of(replace(SPEC, inv_freq=SPEC.inv_freq[:-1])))
    seen.add(of(replace(SPEC, inv_freq=SPEC.inv_freq[::-1])))
    assert len(seen) == 1 + len(SPEC.inv_freq) + 2


@pytest.mark.parametrize("name", [field.name for field in fields(KVLayout)])
def test_every_field_of_the_layout_counts(name: str) -> None:
    assert of(layout=replace(LAYOUT, **{name: changed(getattr(LAYOUT, name))})) != of()


def test_weights_tokenizer_format_and_byte_order_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {
        of(),
        of(weights=TOKENIZER),
        of(tokenizer=WEIGHTS),
        of(weights=TOKENIZER, tokenizer=WEIGHTS),
        of(format_version=FORMAT_VERSION + 1),
    }
    monkeypatch.setattr(fingerprint.sys, "byteorder", "middle")
    assert len(seen | {of()}) == 6
