"""Decoders of the tiny models on the kernels that the running test asks for."""

from __future__ import annotations

from typing import Literal

import torch

from prefixcache.model.choose import build_decoder
from prefixcache.model.forward import ForwardPass
from prefixcache.model.spec import DecoderSpec

CPU = torch.device("cpu")

kernels: Literal["torch", "native"] = "torch"  # the equivalence suite sets it, for each test twice


def decoder(spec: DecoderSpec, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> ForwardPass:
    """Build a decoder; `weights` is emptied, its tensors stay as they are."""
    return build_decoder(spec, weights, CPU, dtype, has_own_kernels=kernels == "native")
