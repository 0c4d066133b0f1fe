"""Sampler: from logits to the next token, one row for each sequence.

Order of operations: logit bias → penalties → minimum length → temperature → top-k → top-p → min-p → draw.
Everything depends on the request's own tokens and seed only, so a cached prefix cannot change what is chosen (I9).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from prefixcache.engine.sequence import Sequence
from prefixcache.request import SamplingParams, TokenLogprobs

# Top-p and min-p nearly always keep fewer tokens than this; looking at these first saves sorting the vocabulary.
FEW_TOKENS = 256


@dataclass(slots=True)
class SamplerState:
    """What one sequence needs for sampling beside its tokens. Engine thread only.

    Attributes:
        ending_ids: Tokens that would end the sequence, kept out until `min_tokens`.
        random: Its own source of random numbers: batches and other requests do not disturb it.
    """

    params: SamplingParams
    ending_ids: list[int]
    random: random.Random

    @property
    def adjusts(self) -> bool:
        """Whether anything changes the logits before the draw."""
        params = self.params
        return bool(
            params.logit_bias
            or params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
            or params.min_tokens
        )


def sample(logits: torch.Tensor, states: list[SamplerState], sequences: list[Sequence]) -> list[int]:
    """Choose the next token of each sequence.

    Args:
        logits: `[num_sequences, vocab_size]`, float32; left as they are.
        states: One for each row.
        sequences: Prompt and output of each row so far.
    """
    greedy = _largest_of_each(logits) if any(s.params.temperature == 0 for s in states) else []
    chosen: list[int] = []
    for row, (state, sequence) in enumerate(zip(states, sequences, strict=True)):
        is_greedy = state.params.temperature == 0
        if is_greedy and not state.adjusts:
            chosen.append(greedy[row])
            continue
        scores = adjust(logits[row], state, sequence) if state.adjusts else logits[row]
        chosen.append(int(scores.argmax()) if is_greedy else draw(scores, state.params, state.random.random()))
    return chosen


def _largest_of_each(logits: torch.Tensor) -> list[int]:
    """Find the first largest entry of each row; numpy takes a tenth of PyTorch's time on the CPU."""
    ids: list[int] = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    return ids


def adjust(logits: torch.Tensor, state: SamplerState, sequence: Sequence) -> torch.Tensor:
    """Apply bias, penalties and minimum length to a copy of one row `[vocab_size]`."""
    params, output = state.params, sequence.output_ids
    scores = logits.clone()
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        scores[list(token_ids)] += torch.tensor(biases, device=scores.device)
    if params.repetition_penalty != 1:
        seen = torch.tensor(list(set(sequence.token_ids)), device=scores.device)
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        seen, counts = torch.tensor(output, device=scores.device).unique(return_counts=True)
        scores[seen] -= params.presence_penalty + params.frequency_penalty * counts
    if len(output) < params.min_tokens and state.ending_ids:
        scores[state.ending_ids] = float("-inf")
    return scores


def draw(scores: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """Draw one token from a row `[vocab_size]` of adjusted logits, by inverting the cumulative distribution.

    Args:
        scores: Adjusted logits; temperature is applied here.
        params: Temperature (above 0) and truncation.
        uniform: A random number in [0, 1).
    """
    scores = scores / params.temperature
    if params.top_k == 0 and params.top_p >= 1 and params.min_p <= 0:
        return _invert(scores.softmax(dim=-1).double().cumsum(dim=-1), uniform)
    probabilities, ids = _largest(scores, params)
    cumulative = probabilities.cumsum(dim=-1)
    # a token stays while the mass before it is below top_p: the first always does
    keep = (cumulative - probabilities) < params.top_p
    keep &= probabilities >= params.min_p * probabilities[0]
    return int(ids[_invert(cumulative[: max(int(keep.sum()), 1)], uniform)])


def _invert(cumulative: torch.Tensor, uniform: float) -> int:
    """Find the first index whose cumulative mass exceeds that share of the whole."""
    index = int(torch.searchsorted(cumulative, uniform * cumulative[-1].item(), right=True))
    return min(index, cumulative.shape[-1] - 1)


def _largest(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the candidates that top-k leaves, best first: probabilities among them in float64, and their ids.

    Without top-k only as many as top-p or min-p can keep, which is nearly always few.
    """
    vocab_size = scores.shape[-1]
    if params.top_k:
        top, ids = scores.topk(min(params.top_k, vocab_size))
        return top.double().softmax(dim=-1), ids
    total = scores.logsumexp(dim=-1)
    top, ids = scores.topk(min(FEW_TOKENS, vocab_size))
    probabilities = (top.double() - total).exp()
    is_enough = probabilities.sum().item() >= params.top_p or probabilities[-1] < params.min_p * probabilities[0]
    if not is_enough:
        top, ids = scores.sort(descending=True)
        probabilities = (top.double() - total).exp()
    return probabilities, ids


def token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Report chosen tokens' log-probabilities under the unmodified model.

    Args:
        logits: `[n, vocab_size]`, float32.
        token_ids: The chosen token of each row.
        num_top: How many of the most likely tokens to name for each row.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    most = max(num_top)
    if most == 0:
        return [TokenLogprobs(token, value) for token, value in zip(token_ids, chosen, strict=True)]
    top_values, top_ids = (t.tolist() for t in logprobs.topk(most))
    return [
        TokenLogprobs(token, chosen[row], tuple(zip(top_ids[row][:n], top_values[row][:n], strict=True)))
        for row, (token, n) in enumerate(zip(token_ids, num_top, strict=True))
    ]
