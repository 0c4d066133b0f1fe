import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.engine.sampler import FEW_TOKENS, SamplerState, adjust, draw, sample, token_logprobs
from prefixcache.engine.sequence import Sequence
from prefixcache.request import SamplingParams
from tests.support.sampling import candidates

VOCAB_SIZE = 600


def row(seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def state(params: SamplingParams, ending_ids: tuple[int, ...] = ()) -> SamplerState:
    return SamplerState(params, list(ending_ids), random.Random(f"{params.seed}/0"))


def sequence(prompt: list[int], output: list[int]) -> Sequence:
    made = Sequence(0, None, prompt, max_tokens=100)
    made.token_ids += output
    return made


def test_greedy_takes_the_largest_logit_of_each_row() -> None:
    logits = torch.stack([row(0), row(1)])
    params = SamplingParams(max_tokens=1, temperature=0)
    chosen = sample(logits, [state(params)] * 2, [sequence([1], [])] * 2)
    assert chosen == logits.argmax(dim=-1).tolist()


def test_rows_do_not_disturb_each_other() -> None:
    params = [SamplingParams(max_tokens=1, temperature=0.9, seed=n) for n in range(4)]
    logits = torch.stack([row(n) for n in range(4)])
    alone = [sample(logits[n : n + 1], [state(params[n])], [sequence([1], [])])[0] for n in range(4)]
    together = sample(logits, [state(p) for p in params], [sequence([1], [])] * 4)
    assert together == alone


@given(
    st.integers(0, 1000),
    st.floats(0.05, 3.0),
    st.sampled_from([0, 1, 5, FEW_TOKENS - 1, FEW_TOKENS + 50, VOCAB_SIZE + 1]),
    st.sampled_from([1.0, 0.9999, 0.9, 0.3, 0.01]),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    st.floats(0, 1, exclude_max=True),
)
def test_only_candidates_that_transformers_would_keep_are_drawn(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = row(seed)
    assert draw(scores, params, uniform) in candidates(params, scores.double().numpy())


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 12}, {"min_p": 0.05}])
def test_draws_follow_the_distribution(truncation: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=1, temperature=1.3, **truncation)
    scores = row(3)
    kept = sorted(candidates(params, scores.double().numpy()))
    expected = (scores[kept] / 1.3).softmax(dim=-1)
    source, count = random.Random(1), 4000
    drawn = Counter(draw(scores, params, source.random()) for _ in range(count))
    for token, probability in zip(kept, expected.tolist(), strict=True):
        assert abs(drawn[token] / count - probability) < 0.04


def test_presence_and_frequency_look_at_the_output_and_repetition_at_everything() -> None:
    scores = torch.tensor([2.0, -2.0, 2.0, 2.0])
    params = SamplingParams(
        max_tokens=9, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((3, 1.0),)
    )
    adjusted = adjust(scores, state(params), sequence([0, 1], [2, 2]))
    assert adjusted.tolist() == [1.0, -4.0, 1.0 - 0.5 - 0.5, 3.0]
    assert scores.tolist() == [2.0, -2.0, 2.0, 2.0], "the logits themselves must stay: logprobs come from them"


def test_ending_tokens_are_kept_out_until_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2)
    ending = state(params, ending_ids=(1, 2))
    assert adjust(torch.zeros(4), ending, sequence([0], [3])).tolist() == [0, float("-inf"), float("-inf"), 0]
    assert adjust(torch.zeros(4), ending, sequence([0], [3, 3])).tolist() == [0, 0, 0, 0]


def test_logprobs_are_those_of_the_unmodified_model() -> None:
    logits = torch.stack([row(0), row(1)])
    expected = logits.log_softmax(dim=-1)
    first, second = token_logprobs(logits, [7, 8], [0, 3])
    assert (first.token_id, first.top) == (7, ())
    assert first.logprob == pytest.approx(expected[0, 7].item())
    best = expected[1].topk(3)
    assert [token for token, _ in second.top] == best.indices.tolist()
    assert [value for _, value in second.top] == pytest.approx(best.values.tolist())
