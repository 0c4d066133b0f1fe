"""Picks the attention back end for a device, and says in the log which one and why."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch

from prefixcache.model.attention.base import AttentionBackend
from prefixcache.model.attention.cpu import CPUAttention
from prefixcache.model.attention.sdpa import SDPAAttention
from prefixcache.model.attention.varlen import VarlenAttention
from prefixcache.model.spec import DecoderSpec

INSTALL_FLASHINFER = "pip install 'prefixcache[cuda]'"
FLASHINFER_HEAD_DIMS = (64, 128, 256)
AMPERE = (8, 0)
TURING = (7, 5)

logger = logging.getLogger(__name__)


def choose_backend(
    device: torch.device, spec: DecoderSpec, page_size: int, dtype: torch.dtype
) -> AttentionBackend[Any]:
    """Build the quickest back end that serves this model on this device.

    On CUDA this may compile kernels, which takes minutes the first time, and takes device memory for work space: call
    it before the free memory is shared out.

    Args:
        device: Where weights and pool are.
        spec: The model's dimensions.
        page_size: Tokens in one page.
        dtype: Element type of weights and pool.
    """
    if device.type == "cpu":
        logger.info("attention: PyTorch's flash kernel for the CPU, on pages in place")
        return CPUAttention(spec.num_heads, spec.num_kv_heads, page_size, dtype)

    capability = torch.cuda.get_device_capability(device)
    why_not_flashinfer = flashinfer_obstacle(spec.head_dim, dtype, capability)
    if why_not_flashinfer is None:
        try:
            return _build_flashinfer(device, spec, page_size, dtype)
        except (ImportError, OSError, RuntimeError) as error:  # no compiler for its kernels, say
            logger.warning("FlashInfer is installed but does not work here: %s", error)
            why_not_flashinfer = "it failed"

    why_not_varlen = varlen_obstacle(spec.head_dim, dtype, capability)
    if why_not_varlen is None:
        logger.info("attention: FlashAttention on gathered K/V; not FlashInfer: %s", why_not_flashinfer)
        return VarlenAttention(page_size, device)
    logger.info(
        "attention: SDPA, one sequence at a time; not FlashInfer: %s; not FlashAttention: %s",
        why_not_flashinfer,
        why_not_varlen,
    )
    return SDPAAttention(spec.num_heads, spec.num_kv_heads, page_size, device)


def flashinfer_obstacle(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Say in a few words why FlashInfer cannot be used, or return None if nothing speaks against it."""
    obstacle = _sixteen_bit_obstacle(dtype, capability, oldest=TURING)
    if obstacle is None and head_dim not in FLASHINFER_HEAD_DIMS:
        obstacle = f"it has no kernels for heads of {head_dim}"
    if obstacle is None and find_spec("flashinfer") is None:
        obstacle = f"it is not installed ({INSTALL_FLASHINFER})"
    return obstacle


def varlen_obstacle(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Say in a few words why PyTorch's FlashAttention cannot be used, or return None."""
    obstacle = _sixteen_bit_obstacle(dtype, capability, oldest=AMPERE)
    if obstacle is None and (head_dim % 8 or head_dim > 256):
        obstacle = f"it has no kernels for heads of {head_dim}"
    if obstacle is None and not torch.backends.cuda.is_flash_attention_available():
        obstacle = "this PyTorch is built without it"
    return obstacle


def _sixteen_bit_obstacle(dtype: torch.dtype, capability: tuple[int, int], oldest: tuple[int, int]) -> str | None:
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {str(dtype).removeprefix('torch.')}"
    needed = AMPERE if dtype == torch.bfloat16 else oldest
    if capability < needed:
        return f"it needs compute capability {needed[0]}.{needed[1]} for this type, not {capability[0]}.{capability[1]}"
    return None


def _build_flashinfer(
    device: torch.device, spec: DecoderSpec, page_size: int, dtype: torch.dtype
) -> AttentionBackend[Any]:
    # Here and not at the top: the module cannot be imported where the optional package is missing.
    from prefixcache.model.attention.flashinfer import FlashInferAttention  # noqa: PLC0415

    logger.info("attention: FlashInfer, on pages in place; its kernels are built now if they never were")
    return FlashInferAttention(spec.num_heads, spec.num_kv_heads, spec.head_dim, page_size, dtype, device)
