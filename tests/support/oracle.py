"""What a reply must be, by plain `transformers` without any cache.

    tokens   p p p p p g g g          one forward over the whole list, use_cache=False
    row i    scores what follows tokens[: i + 1]

A causal model's row i depends on tokens up to i only, so one forward over prompt and reply scores every step of the
reply at once. `generate` therefore takes a draft (most often the reply of the code under test): where the oracle
agrees with it, the step is already paid for; at the first token where it does not, the oracle goes on alone, token
by token. A draft changes how long the answer takes, never what it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

Row = NDArray[np.float64]
"""Scores of the whole vocabulary, [vocab]."""

Rescore = Callable[[Row, Sequence[int], Sequence[int]], Row]
"""(logits, prompt, output so far) -> the scores whose maximum is the next token."""

CLEAR_GAP = 1e-3
"""Rounding may decide between two tokens that are closer than this."""

_MAX_FORWARDS_KEPT = 256


def unchanged(logits: Row, _prompt: Sequence[int], _output: Sequence[int]) -> Row:
    """Greedy decoding with no penalty."""
    return logits


@dataclass(frozen=True, slots=True)
class Expected:
    """The oracle's reply to one request.

    Attributes:
        token_ids: Generated tokens, with the stop token if one ended the reply.
        logprobs: Log-probability of each under the unmodified model.
        gaps: Distance of each from the runner-up, after penalties.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]

    @property
    def min_gap(self) -> float:
        """Smallest distance between winner and runner-up over the whole reply."""
        return min(self.gaps, default=float("inf"))

    @property
    def num_clear(self) -> int:
        """How many leading tokens no rounding error can change."""
        return next((step for step, gap in enumerate(self.gaps) if gap <= CLEAR_GAP), len(self.gaps))


class Oracle:
    """Answers for one model, by whole forward passes; keeps the latest of them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._forwards: OrderedDict[tuple[int, ...], NDArray[np.float64]] = OrderedDict()

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Unmodified logits after every prefix of a token list, [len(token_ids), vocab]."""
        key = tuple(token_ids)
        if key not in self._forwards:
            with torch.inference_mode():
                logits = self._model(input_ids=torch.tensor([key]), use_cache=False).logits[0]
            self._forwards[key] = logits.double().numpy()
            if len(self._forwards) > _MAX_FORWARDS_KEPT:
                self._forwards.popitem(last=False)
        self._forwards.move_to_end(key)
        return self._forwards[key]

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        rescore: Rescore = unchanged,
        stop_token_ids: Collection[int] = (),
        draft: Sequence[int] = (),
    ) -> Expected:
        """Continues a prompt greedily, by the scores that `rescore` makes of the logits."""
        output: list[int] = []
        logprobs: list[float] = []
        gaps: list[float] = []
        ahead = self.logits([*prompt, *draft])
        while len(output) < max_tokens and not (output and output[-1] in stop_token_ids):
            if output != list(draft[: len(output)]):  # the draft was wrong, or is used up
                ahead = self.logits([*prompt, *output])
            row = ahead[len(prompt) + len(output) - 1]
            scores = rescore(row, prompt, output)
            winner = int(np.argmax(scores))
            gaps.append(float(scores[winner] - np.partition(scores, -2)[-2]))
            logprobs.append(float(log_softmax(row)[winner]))
            output.append(winner)
        return Expected(tuple(output), tuple(logprobs), tuple(gaps))

    def logprobs_of(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Log-probability, under the unmodified model, of each token of a reply that came about in any way."""
        rows = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        return [float(log_softmax(row)[token_id]) for row, token_id in zip(rows, output, strict=True)]

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float | None]:
        """Log-probability of each prompt token given those before it; None for the first."""
        return [None, *self.logprobs_of(prompt[:1], prompt[1:])]


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-probabilities over the last dimension."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
