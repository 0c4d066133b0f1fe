"""Configs to decoder specs: every family, every RoPE type, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import (
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from prefixcache.errors import ModelError
from prefixcache.model.families import spec_from_config
from tests.support import models

TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i / 8 for i in range(8)],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**TINY, **changes})


def with_rope(rope_type: str, **changes: Any) -> LlamaConfig:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPE[rope_type]}
    return llama(rope_parameters={**rope, **changes.pop("rope", {})}, **changes)


def test_every_family_of_the_test_models_is_described() -> None:
    for name in models.FAMILIES:
        model = models.tiny_model(name)
        spec = spec_from_config(model.config)
        weights = model.state_dict()
        query = weights["model.layers.0.self_attn.q_proj.weight"]
        key = weights["model.layers.0.self_attn.k_proj.weight"]
        assert tuple(query.shape) == (spec.num_heads * spec.head_dim, spec.hidden_size)
        assert tuple(key.shape) == (spec.num_kv_heads * spec.head_dim, spec.hidden_size)
        assert weights["model.layers.0.mlp.up_proj.weight"].shape[0] == spec.intermediate_size
        assert spec.has_qk_norm == ("model.layers.0.self_attn.q_norm.weight" in weights)
        assert spec.tied_embeddings == model.config.tie_word_embeddings


def test_every_rope_type_of_transformers_is_covered() -> None:
    assert set(ROPE) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("rope_type", ROPE)
def test_rope_is_what_the_transformers_model_uses(rope_type: str) -> None:
    config = with_rope(rope_type)
    spec = spec_from_config(config)
    rotary = LlamaForCausalLM(config).model.rotary_emb
    assert torch.equal(torch.tensor(spec.inv_freq), rotary.inv_freq)
    assert spec.attention_scaling == rotary.attention_scaling
    assert len(spec.inv_freq) == spec.head_dim // 2


def test_rope_frequencies_have_their_known_values() -> None:
    assert spec_from_config(with_rope("default")).inv_freq[1] == pytest.approx(10000.0 ** (-2 / 16))
    assert spec_from_config(with_rope("linear")).inv_freq[1] == pytest.approx(10000.0 ** (-2 / 16) / 4)
    assert spec_from_config(with_rope("longrope")).inv_freq[1] == pytest.approx(10000.0 ** (-2 / 16) / 1.125)


@pytest.mark.parametrize(
    ("config", "max_model_len"),
    [
        (with_rope("default"), 1024),
        (with_rope("linear"), 1024),
        (with_rope("llama3"), 1024),
        (with_rope("yarn"), 1024),
        (with_rope("yarn", max_position_embeddings=256), 1024),  # the config states the length before scaling
    ],
)
def test_fixed_rope_serves_the_whole_length(
    config: PreTrainedConfig, max_model_len: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert spec_from_config(config).max_model_len == max_model_len
    assert not caplog.records


@pytest.mark.parametrize(("rope_type", "exact", "scaled"), [("dynamic", 1024, 4096), ("longrope", 256, 1024)])
def test_rope_that_depends_on_the_length_is_capped_where_it_changes(
    rope_type: str, exact: int, scaled: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_rope(rope_type)
    with caplog.at_level(logging.WARNING):
        assert spec_from_config(config).max_model_len == exact
    assert f"{exact} instead of {scaled}" in caplog.text
    rotary = LlamaForCausalLM(config).model.rotary_emb  # the cap is the last length with the same frequencies
    cached = rotary.inv_freq.clone()
    rotary(torch.zeros(1), torch.arange(exact)[None])
    assert torch.equal(rotary.inv_freq, cached)
    rotary(torch.zeros(1), torch.arange(exact + 1)[None])
    assert not torch.equal(rotary.inv_freq, cached)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**TINY), "MistralForCausalLM.*sliding window of 4096"),
        (Qwen2Config(**TINY, use_sliding_window=True, max_window_layers=1), "Qwen2ForCausalLM.*sliding_attention"),
        (Qwen3Config(**TINY, use_sliding_window=True, max_window_layers=0), "Qwen3ForCausalLM.*sliding_attention"),
        (Qwen3Config(**TINY, layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
        (MixtralConfig(**TINY), "mixtral"),
        (GemmaConfig(**TINY), "gemma"),
        (llama(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (llama(architectures=["LlavaForConditionalGeneration"]), "LlavaForConditionalGeneration"),
        (llama(hidden_act="gelu"), "'gelu'"),
        (llama(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
        (with_rope("default", rope={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (with_rope("linear", rope={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (llama(rope_parameters={"rope_type": "mrope", "rope_theta": 1e4}), "mrope"),
        (llama(num_key_value_heads=3), "3 K/V heads"),
    ],
)
def test_what_the_decoder_cannot_run_is_refused_by_name(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        spec_from_config(config)
    assert "Supported: Llama, Mistral without a sliding window, Qwen2 and Qwen3" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**TINY, sliding_window=None, architectures=["MistralForCausalLM"]),
        Qwen2Config(**TINY, use_sliding_window=False, sliding_window=128),
        Qwen2Config(**TINY, use_sliding_window=True, max_window_layers=2),  # no layer is left to use the window
        Qwen3Config(**TINY, head_dim=32),
        llama(head_dim=32),
        llama(num_key_value_heads=1),
    ],
)
def test_full_attention_in_every_layer_is_accepted(config: PreTrainedConfig) -> None:
    spec = spec_from_config(config)
    assert spec.max_model_len == 1024
    assert spec.head_dim == (getattr(config, "head_dim", None) or 16)
