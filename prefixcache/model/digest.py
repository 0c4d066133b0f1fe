"""Digests of what a model is made of, from the content alone: no file name, no revision, no time of change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerBase
from xxhash import xxh3_128

from prefixcache.framing import framed

PIECE_BYTES = 64 << 20  # what a tensor on another device is copied in


def weights_digest(state_dict: Mapping[str, torch.Tensor]) -> bytes:
    """Return 32 bytes that stand for every weight: name, dtype, shape and bits, in whatever order and on any device."""
    tensors = {
        name: (str(tensor.dtype), tuple(tensor.shape), _content_digest(tensor))
        for name, tensor in sorted(state_dict.items())
    }
    return hashlib.sha256(framed("weights", tensors)).digest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Return 32 bytes that stand for how a fast tokenizer turns text into ids; chat templates are not part of it."""
    serialised = json.loads(tokenizer.backend_tokenizer.to_str())
    # These two change with how the object was called before, and this server never truncates or pads.
    for setting in ("truncation", "padding"):
        serialised.pop(setting, None)
    return hashlib.sha256(json.dumps(serialised, sort_keys=True).encode()).digest()


def _content_digest(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    content = xxh3_128()
    for piece in raw.split(PIECE_BYTES):
        content.update(piece.cpu().numpy())
    return content.digest()
