"""Runner: one step's work through the model, and the rows that tokens are sampled from."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from prefixcache.engine.batch import build_batch
from prefixcache.engine.scheduler import Work
from prefixcache.kv.page_pool import PagePool
from prefixcache.model.forward import ForwardPass

# Logits of prompt positions are made this many rows at a time: 64 rows of a 150,000-token vocabulary are 38 MB.
LOGITS_BLOCK = 64


class Runner:
    """Computes steps on one device. Engine thread only."""

    def __init__(self, decoder: ForwardPass, pool: PagePool) -> None:
        self._decoder = decoder
        self._pool = pool

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def forward(self, work: list[Work], num_outputs: list[int]) -> torch.Tensor:
        """Run the model over `work` and write the K/V of its tokens to the leased pages.

        Args:
            work: What is computed.
            num_outputs: Of how many of each item's tokens, the last ones, the output is wanted: from none to all.

        Returns:
            The last layer's output for those, `[sum(num_outputs), hidden_size]`, in the order of the work.
        """
        batch = build_batch(work, num_outputs, self._pool.page_size, self.device)
        plan = self._decoder.backend.plan(batch.slices)
        return self._decoder.forward(
            batch.input_ids, batch.positions, batch.slot_mapping, plan, self._pool.kv, batch.output_rows
        )

    def final_states(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Pick `rows` of a forward pass and bring them to where the LM head reads: `[len(rows), hidden_size]`."""
        return self._decoder.final_states(hidden[rows])

    def logits(self, final_states: torch.Tensor) -> torch.Tensor:
        """Map `[n, hidden_size]` to float32 logits `[n, vocab_size]`."""
        return self._decoder.logits(final_states)

    def logits_in_blocks(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits of all rows, a block at a time, so that long prompts need no `[rows, vocab_size]`."""
        for block in hidden.split(LOGITS_BLOCK):
            yield self._decoder.logits(self._decoder.final_states(block))
