"""Loads the compiled kernels and declares what they take. The C side is kernels.cpp and decoder.h."""

from __future__ import annotations

import ctypes
import logging
import platform
from ctypes import CDLL, POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch

from prefixcache.errors import ModelError
from prefixcache.model.native.build import LIBRARY

logger = logging.getLogger(__name__)

ABI = 2
X86_LEVELS = {"AVX2", "AVX512"}  # what PyTorch calls CPUs that have at least x86-64-v3


class Dims(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden_size", "intermediate_size")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
        ("rms_norm_eps", c_float),
    )


class LayerWeights(Structure):
    """Addresses of one layer's weights, row-major; 0 for what a model lacks. Norms and biases are float32."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("input_norm", "q_norm", "k_norm", "mlp_norm"),
            *("qkv", "attention_out", "gate", "up", "down"),
            *("qkv_bias", "attention_out_bias", "gate_bias", "up_bias", "down_bias"),
        )
    )


class Queries(Structure):
    """A plan of attention; attention.h describes the fields."""

    _fields_ = (("parts", c_void_p), ("num_parts", c_int64), ("rows", c_void_p), ("pages", c_void_p))


class Step(Structure):
    """One forward pass; decoder.h describes the fields."""

    _fields_ = (
        ("hidden", c_void_p),
        ("num_rows", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("rope", c_void_p),
        ("rope_length", c_int64),
        ("kv", c_void_p),
        ("num_slots", c_int64),
        ("queries", Queries),
        ("outputs", c_void_p),
        ("output_rows", c_void_p),
        ("num_outputs", c_int64),
        ("output_queries", Queries),
        ("num_threads", c_int32),
    )


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "prefixcache_abi": (c_int32, []),
    "prefixcache_decoder_f32": (c_void_p, [POINTER(Dims)]),
    "prefixcache_decoder_bf16": (c_void_p, [POINTER(Dims)]),
    "prefixcache_decoder_add_layer": (None, [c_void_p, POINTER(LayerWeights)]),
    "prefixcache_decoder_free": (None, [c_void_p]),
    "prefixcache_forward": (None, [c_void_p, POINTER(Step)]),
    "prefixcache_pack_f32": (c_void_p, [c_int64, c_int64, c_void_p]),
    "prefixcache_pack_bf16": (c_void_p, [c_int64, c_int64, c_void_p]),
    "prefixcache_packed_free_f32": (None, [c_void_p]),
    "prefixcache_packed_free_bf16": (None, [c_void_p]),
    "prefixcache_multiply_f32": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int32]),
    "prefixcache_multiply_bf16": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int32]),
}


def is_preferred(choice: str, device: torch.device) -> bool:
    """Tell whether `choice` (`auto`, `native` or `torch`) means our own kernels on this device.

    Raises:
        ModelError: `native` was asked for and cannot be had.
    """
    if choice == "native" and (device.type != "cpu" or load() is None):
        raise ModelError("kernels is native, but there are none for this device; the log says why. Use --kernels auto.")
    if choice == "torch" or device.type != "cpu":
        return False
    return choice == "native" or (torch.backends.cpu.get_cpu_capability() == "AVX2" and load() is not None)


@cache
def load() -> CDLL | None:
    """Load the kernels, or return None and log why they cannot be used. Any thread."""
    level = torch.backends.cpu.get_cpu_capability()
    if platform.machine() == "x86_64" and level not in X86_LEVELS:
        logger.info("own kernels: this CPU lacks AVX2 (PyTorch calls it %s)", level)
        return None
    if not LIBRARY.exists():
        logger.info("own kernels: not compiled; `make setup` does it where there is a C++ compiler")
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))  # after torch, whose OpenMP runtime it then shares
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        abi = int(library.prefixcache_abi())
    except (OSError, AttributeError) as error:
        logger.warning("own kernels: cannot be loaded: %s", error)
        return None
    if abi != ABI:
        logger.warning("own kernels: compiled from another version; run `make setup` again")
        return None
    return library
