"""What the decoder asks of an attention back end.

A step's sequences lie one after another in one row of tokens, no padding:

    rows      │ seq 0: 1 query │ seq 1: 1 query │ seq 2: a chunk of 512 queries │
    context   │ 2,100 tokens   │ 2,064 tokens   │ 1,024 tokens, then itself     │

The back end turns that into a plan once a step, and runs the plan in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a step.

    Attributes:
        first_row: Index of its first query row.
        num_queries: Query rows, one for each new token.
        context_len: Tokens before the first query; their K/V is in the pool.
        page_table: Pages of context and new tokens, in token order.
        num_unread: So many of the first query rows are there for their K/V alone: nobody reads their output in the
            last layer. Attention may give anything for them there.
    """

    first_row: int
    num_queries: int
    context_len: int
    page_table: list[int]
    num_unread: int = 0


Plan = TypeVar("Plan")


class AttentionBackend(Protocol[Plan]):
    """Causal attention of a step's queries over the page pool. Engine thread only."""

    def plan(self, sequences: list[SequenceSlice]) -> Plan:
        """Prepare what is the same for all layers of one step."""

    def attend(
        self, plan: Plan, kv: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend in one layer.

        Args:
            plan: This step's plan.
            kv: The layer's pool memory, `[2, num_slots, num_kv_heads, head_dim]`; the new tokens' K/V is in it.
            query: `[num_rows, num_heads, head_dim]`.
            key: The new tokens' keys, `[num_rows, num_kv_heads, head_dim]`.
            value: The new tokens' values, same shape.

        Returns:
            `[num_rows, num_heads, head_dim]`.
        """
