"""Penalties and candidate sets by their published definitions, independent of the engine's sampler.

Where transformers has a logits processor for a setting, that processor is used; the rest is a line of numpy each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefixcache.request import SamplingParams
from tests.support.oracle import Rescore, Row


def penalties(sampling: SamplingParams, stop_token_ids: Collection[int] = ()) -> Rescore:
    """The scores from which the next token is chosen: bias, minimum length, then penalties.

    Args:
        sampling: The request's settings.
        stop_token_ids: Tokens that would end the reply, forbidden until `min_tokens` are there.
    """

    def rescore(logits: Row, prompt: Sequence[int], output: Sequence[int]) -> Row:
        scores = logits.copy()
        for token_id, bias in sampling.logit_bias:
            scores[token_id] += bias
        if len(output) < sampling.min_tokens:
            scores[list(stop_token_ids)] = -np.inf
        if sampling.repetition_penalty != 1.0:
            repetition = RepetitionPenaltyLogitsProcessor(penalty=sampling.repetition_penalty)
            scores = _process(repetition, [*prompt, *output], scores)
        for token_id, count in Counter(output).items():
            scores[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
        return scores

    return rescore


def candidates(sampling: SamplingParams, scores: Row) -> set[int]:
    """Tokens that may be drawn from penalised scores, after temperature, top_k, top_p and min_p."""
    scores = _process(TemperatureLogitsWarper(sampling.temperature), [], scores)
    if sampling.top_k > 0:
        scores = _process(TopKLogitsWarper(top_k=sampling.top_k), [], scores)
    if sampling.top_p < 1.0:
        scores = _process(TopPLogitsWarper(top_p=sampling.top_p), [], scores)
    if sampling.min_p > 0.0:
        scores = _process(MinPLogitsWarper(min_p=sampling.min_p), [], scores)
    return set(np.flatnonzero(np.isfinite(scores)).tolist())


def _process(processor: LogitsProcessor, token_ids: Sequence[int], scores: Row) -> Row:
    input_ids = torch.tensor([list(token_ids)], dtype=torch.long)
    result: Row = processor(input_ids, torch.from_numpy(scores)[None].clone())[0].numpy()
    return result
