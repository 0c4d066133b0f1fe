"""The forward pass: a Llama-family decoder over the page pool, on packed rows without padding.

Covers what Llama, Mistral, Qwen2 and Qwen3 differ in: number of K/V heads, biases, q/k norms, RoPE tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from prefixcache.model.attention.base import AttentionBackend
from prefixcache.model.linear import Linear
from prefixcache.model.rope import rope_table
from prefixcache.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder block's weights; q, k, v and gate, up are fused along their output dimension."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Runs the model on one step's tokens. Engine thread only.

    Args:
        spec: The model's dimensions and constants.
        state_dict: Weights under transformers' names, all of one dtype and on one device. Entries are taken out as
            they are repacked, so that weights are not held twice.
        backend: Attention for that device.
    """

    def __init__(
        self, spec: DecoderSpec, state_dict: dict[str, torch.Tensor], backend: AttentionBackend[object]
    ) -> None:
        self.spec = spec
        self.backend = backend
        self._embedding = state_dict.pop("model.embed_tokens.weight")
        self.device, self.dtype = self._embedding.device, self._embedding.dtype
        self._layers = [self._build_layer(state_dict, f"model.layers.{index}.") for index in range(spec.num_layers)]
        self._final_norm = state_dict.pop("model.norm.weight")
        self._lm_head = Linear(self._embedding if spec.tied_embeddings else state_dict.pop("lm_head.weight"))
        self._rope = rope_table(spec).to(device=self.device, dtype=self.dtype)

    # --- forward -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: object,
        kv: torch.Tensor,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one step and write its K/V to the pool; see `ForwardPass`."""
        cos, sin = self._rope[:, positions].unsqueeze(2)  # each [num_rows, 1, head_dim]
        hidden = F.embedding(input_ids, self._embedding)
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            normed = self._norm(hidden, layer.input_norm)
            attended = self._attend(layer, normed, cos, sin, slot_mapping, plan, layer_kv)
            if layer is self._layers[-1] and len(output_rows) < len(hidden):
                hidden, attended = hidden[output_rows], attended[output_rows]
            hidden = hidden + layer.attention_out(attended)
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return hidden

    @torch.inference_mode()
    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm: `[n, hidden_size]` to the states that the LM head reads, same shape."""
        return self._norm(hidden, self._final_norm)

    @torch.inference_mode()
    def logits(self, final_states: torch.Tensor) -> torch.Tensor:
        """Map final states `[n, hidden_size]` to float32 logits `[n, vocab_size]`."""
        return self._lm_head(final_states).float()

    def _attend(
        self,
        layer: Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: object,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        spec = self.spec
        qkv = layer.qkv(x).view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, value = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
            query, key = _rotate(self._norm(q, layer.q_norm), cos, sin), _rotate(self._norm(k, layer.k_norm), cos, sin)
        else:  # q and k lie side by side: one rotation does both
            qk, value = qkv.split((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
            query, key = _rotate(qk, cos, sin).split((spec.num_heads, spec.num_kv_heads), dim=1)
        kv[0].index_copy_(0, slot_mapping, key)
        kv[1].index_copy_(0, slot_mapping, value)
        attended = self.backend.attend(plan, kv, query, key, value)
        return attended.reshape(-1, spec.num_heads * spec.head_dim)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.rms_norm_eps)

    # --- weights -----------------------------------------------------------------------------------------------

    def _build_layer(self, state_dict: dict[str, torch.Tensor], prefix: str) -> Layer:
        def fused(*names: str) -> Linear:
            weights = [state_dict.pop(f"{prefix}{name}.weight") for name in names]
            biases = [state_dict.pop(f"{prefix}{name}.bias", None) for name in names]
            bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
            return Linear(torch.cat(weights) if len(weights) > 1 else weights[0], bias)

        def norm(name: str) -> torch.Tensor:
            return state_dict.pop(f"{prefix}{name}.weight")

        has_qk_norm = self.spec.has_qk_norm
        return Layer(
            input_norm=norm("input_layernorm"),
            qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            q_norm=norm("self_attn.q_norm") if has_qk_norm else None,
            k_norm=norm("self_attn.k_norm") if has_qk_norm else None,
            attention_out=fused("self_attn.o_proj"),
            mlp_norm=norm("post_attention_layernorm"),
            gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
            down=fused("mlp.down_proj"),
        )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to `[num_rows, heads, head_dim]` in the half-split form that these checkpoints use."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
