"""RoPE's inverse frequencies, taken from transformers, and how far cached keys stay valid under them."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from prefixcache.errors import ModelError
from prefixcache.model.spec import DecoderSpec

logger = logging.getLogger(__name__)


class Rope(NamedTuple):
    """RoPE of one model: `head_dim // 2` inverse frequencies, the factor on cos and sin, the longest exact length."""

    inv_freq: tuple[float, ...]
    attention_scaling: float
    max_model_len: int


def rope_from_config(config: PreTrainedConfig, rotary_class: type[torch.nn.Module], head_dim: int) -> Rope:
    """Compute a model's RoPE with the functions that transformers itself would use.

    Raises:
        ModelError: The RoPE type is unknown, or it leaves part of each head unrotated.
    """
    parameters = config.rope_parameters or {}
    rope_type = parameters.get("rope_type")
    supported = ("default", *ROPE_INIT_FUNCTIONS)
    if rope_type not in supported:
        raise ModelError(f"RoPE type {rope_type!r} is not supported; supported are {', '.join(supported)}.")
    if rope_type != "proportional" and (parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("RoPE over only part of each head (partial_rotary_factor below 1) is not supported.")
    rotary: Any = rotary_class(config)
    inv_freq = tuple(rotary.inv_freq.tolist())
    if len(inv_freq) * 2 != head_dim:
        raise ModelError(f"RoPE rotates {len(inv_freq) * 2} of {head_dim} dimensions of each head; all are needed.")
    return Rope(inv_freq, float(rotary.attention_scaling), _exact_length(config, rope_type))


def rope_table(spec: DecoderSpec) -> torch.Tensor:
    """Cos and sin for every position: `[2, max_model_len, head_dim]`; sin's first half carries rotation's minus."""
    frequencies = torch.tensor(spec.inv_freq, dtype=torch.float32)
    angles = torch.arange(spec.max_model_len, dtype=torch.float32).unsqueeze(1) * frequencies
    cos, sin = angles.cos() * spec.attention_scaling, angles.sin() * spec.attention_scaling
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def _exact_length(config: PreTrainedConfig, rope_type: str) -> int:
    """Return the most tokens for which no cached key depends on how long its sequence becomes later."""
    parameters = config.rope_parameters
    limit = int(config.max_position_embeddings)
    if rope_type == "yarn":  # some checkpoints state the length before scaling, some the length after it
        return max(limit, int(parameters["original_max_position_embeddings"] * (parameters["factor"] or 1.0)))
    if rope_type == "dynamic":
        original, scaled = limit, int(limit * parameters["factor"])
    elif rope_type == "longrope":
        original, scaled = int(parameters["original_max_position_embeddings"]), limit
    else:
        return limit
    if scaled > original:
        logger.warning(
            "RoPE type %s changes the keys of all positions once a sequence grows beyond %d tokens; "
            "max_model_len is %d instead of %d, so that cached K/V stays exact",
            rope_type,
            original,
            original,
            scaled,
        )
    return original
