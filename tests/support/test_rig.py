"""The rig itself: models that would show an error, and an oracle that agrees with `generate()` of transformers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from prefixcache.request import SamplingParams
from tests.support.models import FAMILIES, VOCAB_SIZE, tiny_model
from tests.support.oracle import Oracle
from tests.support.sampling import candidates, penalties


def random_tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_earlier_token_and_its_place_matter(family: str) -> None:
    oracle = Oracle(tiny_model(family))
    tokens = random_tokens(1, 120)
    changed = [*tokens[:5], (tokens[5] + 7) % VOCAB_SIZE, *tokens[6:]]
    swapped = [*tokens[:5], tokens[6], tokens[5], *tokens[7:]]

    last = oracle.logits(tokens)[-1]

    assert np.abs(oracle.logits(changed)[-1] - last).max() > 0.1
    assert np.abs(oracle.logits(swapped)[-1] - last).max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_rounding_stays_well_below_the_tolerance(family: str) -> None:
    tokens = random_tokens(2, 200)
    model = tiny_model(family)
    single = Oracle(model).logits(tokens)
    try:
        double = Oracle(model.double()).logits(tokens)
    finally:
        model.float()

    assert np.abs(single - double).max() < 5e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_oracle_agrees_with_cached_generation_of_transformers(family: str) -> None:
    model = tiny_model(family)
    prompt = random_tokens(3, 40)
    config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)

    with torch.inference_mode():
        generated = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
    expected = Oracle(model).generate(prompt, 20)

    assert expected.num_clear > 10
    assert list(expected.token_ids[: expected.num_clear]) == generated[: expected.num_clear]


def test_a_draft_right_or_wrong_changes_nothing() -> None:
    prompt = random_tokens(4, 30)
    plain = Oracle(tiny_model("llama-gqa")).generate(prompt, 12)

    for draft in (plain.token_ids, plain.token_ids[:5], (*plain.token_ids[:4], 3, 3, 3), (7,) * 20):
        drafted = Oracle(tiny_model("llama-gqa")).generate(prompt, 12, draft=draft)
        assert drafted.token_ids == plain.token_ids
        assert drafted.logprobs == pytest.approx(plain.logprobs, abs=2e-5)


def test_stop_token_ends_the_reply_and_is_part_of_it() -> None:
    oracle = Oracle(tiny_model("llama-gqa"))
    prompt = random_tokens(5, 30)
    free = oracle.generate(prompt, 12).token_ids
    stop = free[4]

    assert oracle.generate(prompt, 12, stop_token_ids={stop}).token_ids == free[: free.index(stop) + 1]


def test_repetition_penalty_is_the_one_of_transformers() -> None:
    model = tiny_model("qwen3")
    prompt = random_tokens(6, 40)
    config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)

    with torch.inference_mode():
        generated = model.generate(
            torch.tensor([prompt]),
            generation_config=config,
            logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty=1.7)]),
        )[0, len(prompt) :].tolist()
    sampling = SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=1.7)
    expected = Oracle(model).generate(prompt, 20, rescore=penalties(sampling))

    assert list(expected.token_ids[: expected.num_clear]) == generated[: expected.num_clear]
    assert expected.token_ids != Oracle(model).generate(prompt, 20).token_ids


def test_penalties_and_bias_by_hand() -> None:
    logits = np.array([2.0, 1.0, 0.5, -1.0])
    sampling = SamplingParams(
        max_tokens=8, min_tokens=3, presence_penalty=0.25, frequency_penalty=0.5, logit_bias=((3, 4.0),)
    )

    scores = penalties(sampling, stop_token_ids={0})(logits, [2], [1, 1])

    assert scores.tolist() == [-np.inf, 1.0 - 2 * 0.5 - 0.25, 0.5, 3.0]


def test_candidates_by_hand() -> None:
    scores = np.log([0.5, 0.3, 0.15, 0.05])

    assert candidates(SamplingParams(max_tokens=1), scores) == {0, 1, 2, 3}
    assert candidates(SamplingParams(max_tokens=1, top_k=3), scores) == {0, 1, 2}
    assert candidates(SamplingParams(max_tokens=1, top_p=0.7), scores) == {0, 1}
    assert candidates(SamplingParams(max_tokens=1, min_p=0.25), scores) == {0, 1, 2}
