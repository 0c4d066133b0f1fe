"""Tiny random models, one per supported family: small enough for hundreds of cases, sharp enough to show an error.

Weights are drawn here rather than by transformers, for two reasons. Biases and norms must differ from their neutral
initial values, or a decoder that forgets them would still pass. And the scale of every projection is chosen so that
the next token depends on the whole context: `tests/unit/support/test_models.py` holds the models to that.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 512
EOS_TOKEN_ID = 2
MAX_MODEL_LEN = 2048

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "tie_word_embeddings": False,
}


def _rope(rope_type: str = "default", **settings: float) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **settings}


_FAMILIES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, Any]]] = {
    "llama-gqa": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 2, "rope_parameters": _rope()},
    ),
    "llama-mqa-biases": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "rope_parameters": _rope()},
    ),
    "llama-mha-tied-llama3-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=256,
            ),
        },
    ),
    "mistral": (
        MistralForCausalLM,
        MistralConfig,
        {"num_key_value_heads": 3, "sliding_window": None, "rope_parameters": _rope()},
    ),
    "qwen2-yarn-rope": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            "num_key_value_heads": 2,
            "rope_parameters": _rope("yarn", factor=4.0, original_max_position_embeddings=512),
        },
    ),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"num_key_value_heads": 2, "head_dim": 32, "rope_parameters": _rope()},
    ),
    "llama-linear-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 2, "rope_parameters": _rope("linear", factor=4.0)},
    ),
}

FAMILIES = tuple(_FAMILIES)


@cache
def tiny_model(family: str) -> PreTrainedModel:
    """The random float32 model of one family; built once per process, and the same in every process.

    Args:
        family: One of `FAMILIES`.
    """
    return _build(family)


@cache
def slow_model() -> PreTrainedModel:
    """One that computes for much longer than its K/V takes to load, so that a server loads whatever it finds."""
    return _build("llama-gqa", intermediate_size=8192)


def slow_server_flags(model_folder: Path, cache_tokens: int = 2048) -> tuple[str, ...]:
    """Settings of a server that is to load K/V: on our own kernels, computing it would be quicker."""
    model = ("--model", str(model_folder), "--cache-tokens", str(cache_tokens))
    return (*model, "--threads", "1", "--kernels", "torch", "--dtype", "float32")


def _build(family: str, **changes: int) -> PreTrainedModel:
    model_class, config_class, settings = _FAMILIES[family]
    config = config_class(**_COMMON | settings | changes)
    config._attn_implementation = "eager"  # plain matrix products: no kernel that the code under test might share
    model = model_class(config).eval().requires_grad_(False)
    _draw_weights(model)
    return model


def _draw_weights(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(20_240_607)
    for name, weight in model.named_parameters():  # a tied head is listed once, as the embedding
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        weight.copy_(_scaled(name, noise))


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name == "model.norm.weight":
        return 3.0 * (1.0 + 0.2 * noise)  # sets the spread of the logits, for tied and untied heads alike
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return noise * noise.shape[-1] ** -0.5
    gain = 0.8 if "q_proj" in name or "k_proj" in name else 1.0
    return gain * noise * noise.shape[-1] ** -0.5
