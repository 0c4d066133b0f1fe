"""The model families that the decoder can run, and the checks that a config really is one of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from prefixcache.errors import ModelError
from prefixcache.model.rope import rope_from_config
from prefixcache.model.spec import DecoderSpec

SUPPORTED = (
    "Llama, Mistral without a sliding window, Qwen2 and Qwen3, dense, unquantised, full attention in every layer"
)


@dataclass(frozen=True, slots=True)
class Family:
    """One supported family.

    Attributes:
        window_by_layer: The config's `layer_types` say which layers use `sliding_window`; otherwise all of them do.
    """

    architecture: str
    rotary_class: type[torch.nn.Module]
    has_qk_norm: bool = False
    window_by_layer: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", LlamaRotaryEmbedding),
    "mistral": Family("MistralForCausalLM", MistralRotaryEmbedding),
    "qwen2": Family("Qwen2ForCausalLM", Qwen2RotaryEmbedding, window_by_layer=True),
    "qwen3": Family("Qwen3ForCausalLM", Qwen3RotaryEmbedding, has_qk_norm=True, window_by_layer=True),
}


def spec_from_config(config: PreTrainedConfig) -> DecoderSpec:
    """Describe the decoder that a transformers config stands for.

    Raises:
        ModelError: The decoder would not compute what the model computes; names the architecture and the reason.
    """
    architecture = (config.architectures or [config.model_type])[0]
    family = FAMILIES.get(config.model_type)
    if family is None or architecture not in (family.architecture, config.model_type):
        raise _unsupported(architecture, f"model type {config.model_type!r} is not one of the supported families")
    _check_attention(config, family)
    if config.hidden_act != "silu":
        raise _unsupported(architecture, f"its activation is {config.hidden_act!r}, not 'silu'")
    if getattr(config, "quantization_config", None) is not None:
        raise _unsupported(architecture, "its weights are quantised")

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % 2 or config.num_attention_heads % config.num_key_value_heads:
        raise _unsupported(
            architecture,
            f"{config.num_attention_heads} heads of {head_dim} over {config.num_key_value_heads} K/V heads do not fit",
        )
    try:
        rope = rope_from_config(config, family.rotary_class, head_dim)
    except ModelError as error:
        raise _unsupported(architecture, str(error)) from error
    return DecoderSpec(
        architecture=family.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        inv_freq=rope.inv_freq,
        attention_scaling=rope.attention_scaling,
        max_model_len=rope.max_model_len,
        has_qk_norm=family.has_qk_norm,
        tied_embeddings=bool(config.tie_word_embeddings),
    )


def _check_attention(config: PreTrainedConfig, family: Family) -> None:
    """Refuse a config in which any layer sees less than all earlier tokens."""
    layer_types = getattr(config, "layer_types", None) or ()
    other_types = sorted(set(layer_types) - {"full_attention"})
    if other_types:
        raise _unsupported(family.architecture, f"some of its layers use {', '.join(other_types)}")
    window = getattr(config, "sliding_window", None)
    if window is not None and not family.window_by_layer:
        raise _unsupported(family.architecture, f"it attends to a sliding window of {window} tokens")


def _unsupported(architecture: str, reason: str) -> ModelError:
    return ModelError(f"Architecture {architecture} cannot be served as it is here: {reason}. Supported: {SUPPORTED}.")
