"""Picks what computes the forward pass, and says in the log which it is and why."""

from __future__ import annotations

import logging

import torch

from prefixcache.kv.layout import PAGE_SIZE
from prefixcache.model.attention.choose import choose_backend
from prefixcache.model.decoder import Decoder
from prefixcache.model.forward import ForwardPass
from prefixcache.model.native.decoder import NativeDecoder, obstacle
from prefixcache.model.spec import DecoderSpec

logger = logging.getLogger(__name__)


def build_decoder(
    spec: DecoderSpec,
    state_dict: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    *,
    has_own_kernels: bool,
) -> ForwardPass:
    """Build the quickest decoder for this model on this device; it takes the weights out of `state_dict`.

    Args:
        spec: The model's dimensions.
        state_dict: Weights under transformers' names, all of `dtype` and on `device`.
        device: Where weights and pool are.
        dtype: Element type of weights and pool.
        has_own_kernels: Whether our own kernels are wanted, and there for this device.
    """
    why_not = obstacle(spec, dtype) if has_own_kernels else None
    if has_own_kernels and why_not is None:
        logger.info("kernels: our own, a whole step in one call")
        return NativeDecoder(spec, state_dict)
    if why_not is not None:
        logger.warning("kernels: PyTorch's, not our own: %s", why_not)
    return Decoder(spec, state_dict, choose_backend(device, spec, PAGE_SIZE, dtype))
