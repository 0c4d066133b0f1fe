"""Where in the pool a sequence's tokens lie."""

from __future__ import annotations

import torch

from prefixcache.model.attention.base import SequenceSlice


def token_slots(sequence: SequenceSlice, page_size: int) -> torch.Tensor:
    """List the slots of a sequence's context and new tokens, in token order: `[context_len + num_queries]`."""
    num_tokens = sequence.context_len + sequence.num_queries
    pages = torch.tensor(sequence.page_table[: -(-num_tokens // page_size)])
    return (pages.unsqueeze(1) * page_size + torch.arange(page_size)).flatten()[:num_tokens]
