"""The forward pass on our own CPU kernels, one call a step: weights and K/V float32 or bfloat16, the rest float32."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from prefixcache.kv.layout import PAGE_SIZE
from prefixcache.model.native import library
from prefixcache.model.native.library import Dims, LayerWeights, Step
from prefixcache.model.native.library import Queries as QueriesStruct
from prefixcache.model.native.planner import NativePlan, NativePlanner, Queries
from prefixcache.model.rope import rope_table
from prefixcache.model.spec import DecoderSpec

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
MULTIPLE = 16  # widths are whole panels of this many columns
NORMS = {
    "input_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
}
PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "gate": ("mlp.gate_proj",),
    "up": ("mlp.up_proj",),
    "down": ("mlp.down_proj",),
}


def obstacle(spec: DecoderSpec, dtype: torch.dtype) -> str | None:
    """Say in a few words why the kernels cannot serve this model, or return None."""
    if library.load() is None:
        return "they are not there"
    if dtype not in SUFFIXES:
        return f"they have no {str(dtype).removeprefix('torch.')}"
    if any(n % MULTIPLE for n in (spec.hidden_size, spec.intermediate_size, spec.head_dim)):
        return f"widths must be multiples of {MULTIPLE}"
    return None


class NativeDecoder:
    """Runs the model on one step's tokens. Engine thread only.

    A row's products do not depend on what it is computed together with; where its attention is cut does.

    Args:
        spec: The model's dimensions and constants, for which `obstacle` finds none.
        state_dict: Weights under transformers' names, all of one dtype, on the CPU. Entries are taken out as they are
            repacked, so that weights are not held twice.
    """

    def __init__(self, spec: DecoderSpec, state_dict: dict[str, torch.Tensor]) -> None:
        loaded = library.load()
        assert loaded is not None
        self.spec = spec
        self.backend = NativePlanner(PAGE_SIZE)
        self._embedding = state_dict.pop("model.embed_tokens.weight").contiguous()
        self.device, self.dtype = self._embedding.device, self._embedding.dtype
        suffix = SUFFIXES[self.dtype]
        self._forward = loaded.prefixcache_forward
        self._decoder = _Handle(_build(loaded, suffix, spec, state_dict), loaded.prefixcache_decoder_free)
        self._final_norm = state_dict.pop("model.norm.weight").float()
        head = self._embedding if spec.tied_embeddings else state_dict.pop("lm_head.weight").contiguous()
        pack = getattr(loaded, f"prefixcache_pack_{suffix}")
        self._multiply = getattr(loaded, f"prefixcache_multiply_{suffix}")
        self._head = _Handle(pack(*head.shape, head.data_ptr()), getattr(loaded, f"prefixcache_packed_free_{suffix}"))
        self._rope = rope_table(spec)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: NativePlan,
        kv: torch.Tensor,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one step and write its K/V to the pool; see `ForwardPass`. The result is float32."""
        assert kv.is_contiguous()
        assert kv.dtype == self.dtype
        assert plan.queries.num_rows == len(input_ids) == len(positions) == len(slot_mapping)
        assert plan.output_queries.num_rows == len(output_rows)
        hidden = F.embedding(input_ids, self._embedding).float()
        outputs = hidden.new_empty(len(output_rows), hidden.shape[1])
        # named, so that they outlive the call
        positions, slots, output_rows = (x.contiguous() for x in (positions, slot_mapping, output_rows))
        step = Step(
            hidden=hidden.data_ptr(),
            num_rows=hidden.shape[0],
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            rope=self._rope.data_ptr(),
            rope_length=self._rope.shape[1],
            kv=kv.data_ptr(),
            num_slots=kv.shape[2],
            queries=_addresses(plan.queries),
            outputs=outputs.data_ptr(),
            output_rows=output_rows.data_ptr(),
            num_outputs=len(outputs),
            output_queries=_addresses(plan.output_queries),
            num_threads=torch.get_num_threads(),
        )
        self._forward(self._decoder.address, ctypes.byref(step))
        return outputs

    @torch.inference_mode()
    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm: `[n, hidden_size]` to the states that the LM head reads, same shape."""
        return F.rms_norm(hidden, self._final_norm.shape, self._final_norm, self.spec.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, final_states: torch.Tensor) -> torch.Tensor:
        """Map final states `[n, hidden_size]` to float32 logits `[n, vocab_size]`."""
        states = final_states.contiguous()
        out = torch.empty(states.shape[0], self.spec.vocab_size)
        self._multiply(self._head.address, states.data_ptr(), len(states), out.data_ptr(), torch.get_num_threads())
        return out


class _Handle:
    """An object on the C side, freed with this one."""

    def __init__(self, address: int, free: Callable[[int], None]) -> None:
        self.address = address
        self._free = partial(free, address)

    def __del__(self) -> None:
        self._free()


def _addresses(queries: Queries) -> QueriesStruct:
    return QueriesStruct(
        queries.parts.ctypes.data, len(queries.parts), queries.rows.ctypes.data, queries.pages.ctypes.data
    )


def _build(loaded: ctypes.CDLL, suffix: str, spec: DecoderSpec, state_dict: dict[str, torch.Tensor]) -> int:
    """Make the C side's decoder and hand it one layer after another, which it copies."""
    dims = Dims(
        spec.num_layers,
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.rms_norm_eps,
    )
    address = int(getattr(loaded, f"prefixcache_decoder_{suffix}")(ctypes.byref(dims)))
    for index in range(spec.num_layers):
        tensors = _layer_tensors(state_dict, f"model.layers.{index}.")
        weights = LayerWeights(**{name: tensor.data_ptr() for name, tensor in tensors.items()})
        loaded.prefixcache_decoder_add_layer(address, ctypes.byref(weights))
    return address


def _layer_tensors(state_dict: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Take one layer's weights out of `state_dict`, under the names of `LayerWeights`; none for what it lacks."""
    tensors = {}
    for name, source in NORMS.items():
        weight = state_dict.pop(f"{prefix}{source}.weight", None)
        if weight is not None:
            tensors[name] = weight.float().contiguous()
    for name, sources in PRODUCTS.items():
        tensors[name] = torch.cat([state_dict.pop(f"{prefix}{source}.weight") for source in sources]).contiguous()
        biases = [state_dict.pop(f"{prefix}{source}.bias", None) for source in sources]
        found = [bias.float() for bias in biases if bias is not None]
        if found:
            tensors[f"{name}_bias"] = torch.cat(found)
    return tensors
