"""What the engine asks of a model on its device, whichever kernels compute it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.spec import DecoderSpec


class StepPlanner(Protocol):
    """Lays out the attention of one step. Engine thread only."""

    def plan(self, sequences: list[SequenceSlice]) -> Any:
        """Prepare what is the same for all layers of one step."""


class ForwardPass(Protocol):
    """A decoder over the page pool. Engine thread only."""

    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype

    @property
    def backend(self) -> StepPlanner:
        """Makes the `plan` of `forward`."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: Any,
        kv: torch.Tensor,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one step and write its K/V to the pool.

        Args:
            input_ids: `[num_rows]`, all sequences' new tokens one after another.
            positions: `[num_rows]`, each token's position in its own sequence.
            slot_mapping: `[num_rows]`, the slot that takes each token's K/V.
            plan: What `backend` made of this step's sequences.
            kv: `[num_layers, 2, num_slots, num_kv_heads, head_dim]`.
            output_rows: `[num_outputs]`, int64, ascending: all rows but the plan's unread ones, maybe none.

        Returns:
            The last layer's output of those rows, before the final norm: `[num_outputs, hidden_size]`.
        """

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm: `[n, hidden_size]` to the states that the LM head reads, same shape."""

    def logits(self, final_states: torch.Tensor) -> torch.Tensor:
        """Map final states `[n, hidden_size]` to float32 logits `[n, vocab_size]`."""
