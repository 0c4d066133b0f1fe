"""The numbers that define a decoder, independent of where its weights came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and constants of one Llama-family decoder.

    Attributes:
        inv_freq: RoPE's inverse frequencies, `head_dim // 2` of them, after any scaling.
        attention_scaling: Factor on RoPE's cos and sin (YaRN, LongRoPE); 1.0 for the others.
        max_model_len: Most tokens (prompt and output) for which cached K/V stays exact.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    inv_freq: tuple[float, ...]
    attention_scaling: float
    max_model_len: int
    has_qk_norm: bool
    tied_embeddings: bool
