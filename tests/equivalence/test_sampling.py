"""Penalties, limits and seeds see the whole token list, whether it was cached or not."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixcache.request import GenerateRequest, SamplingParams
from tests.support.checks import assert_exact, oracle
from tests.support.in_process import InProcess, Stream, greedy
from tests.support.models import FAMILIES
from tests.support.oracle import log_softmax
from tests.support.prompts import Prompts
from tests.support.sampling import candidates, penalties

FAMILY = "qwen3"


def random_penalties(chooser: random.Random) -> dict[str, Any]:
    """Settings that change the greedy choice; each may be left out."""
    settings: dict[str, Any] = {
        "repetition_penalty": chooser.choice((0.7, 1.3, 2.5)),
        "presence_penalty": chooser.choice((-1.5, 0.8, 2.0)),
        "frequency_penalty": chooser.choice((-0.5, 0.6, 1.9)),
        "logit_bias": tuple((chooser.randrange(512), chooser.uniform(-9.0, 9.0)) for _ in range(20)),
    }
    return {name: value for name, value in settings.items() if chooser.random() < 0.6}


@pytest.mark.parametrize("family", FAMILIES)
def test_penalties_cold_and_cached_and_batched(family: str) -> None:
    chooser, prompts = random.Random(16), Prompts(16)
    for _ in range(4):
        service = InProcess(family, chunk=chooser.choice((16, 64)))
        prompt = prompts.tokens(prompts.between(20, 80))
        requests = [greedy(prompt, 16, **random_penalties(chooser)) for _ in range(3)]

        cold = service.run_one(requests[0])
        warm = [service.run_one(request) for request in requests]
        together = service.run(*requests, greedy(prompt[:25] + prompts.tokens(9), 16))

        for stream in (cold, *warm, *together):
            assert_exact(stream, oracle(family), rescore=penalties(stream.request.sampling))
        assert cold.cached_tokens == 0
        assert [stream.cached_tokens for stream in warm] == [len(prompt) - 1] * 3


def test_repetition_penalty_covers_a_cached_prompt_word_for_word() -> None:
    """The bias makes one prompt token win; the penalty, applied to the prompt, must make it lose."""
    service, prompts = InProcess(FAMILY), Prompts(8)
    prompt = prompts.tokens(40)
    favourite = prompt[3]
    service.run_one(greedy(prompt, 1))

    plain = service.run_one(greedy(prompt, 6, logit_bias=((favourite, 20.0),)))
    penalised = service.run_one(greedy(prompt, 6, logit_bias=((favourite, 20.0),), repetition_penalty=100.0))

    assert plain.token_ids == [favourite] * 6
    assert favourite not in penalised.token_ids
    assert plain.cached_tokens == penalised.cached_tokens == 39


def test_min_tokens_holds_back_every_kind_of_stop_token() -> None:
    service, prompts = InProcess(FAMILY), Prompts(9)
    prompt = prompts.tokens(30)
    free = oracle(FAMILY).generate(prompt, 12).token_ids
    stops = frozenset(free[:4])
    sampling = SamplingParams(12, min_tokens=7, stop_token_ids=stops)

    for _ in range(2):
        stream = service.run_one(greedy(prompt, 12, min_tokens=7, stop_token_ids=stops))
        assert_exact(stream, oracle(FAMILY), rescore=penalties(sampling, stops), stop_token_ids=stops)
        assert len(stream.token_ids) >= 7
        assert not stops & set(stream.token_ids[:7])


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("settings", SAMPLED)
def test_a_seed_gives_one_reply_cold_cached_and_batched(settings: dict[str, Any]) -> None:
    prompts = Prompts(5)
    for seed in range(4):
        service = InProcess(FAMILY, chunk=16)
        prompt = prompts.tokens(prompts.between(10, 60))
        request = greedy(prompt, 10, **settings, seed=seed)
        others = [greedy(prompt[:9] + prompts.tokens(20), 10, temperature=1.0, seed=seed) for _ in range(3)]

        cold = service.run_one(request)
        warm = service.run_one(request)
        together = service.run(*others, request)[-1]
        alone_without_cache = service.run_one(replace(request, use_cache=False))

        for stream in (warm, together, alone_without_cache):
            assert stream.token_ids == cold.token_ids
        assert_drawn_fairly(cold)
        assert warm.cached_tokens == len(prompt) - 1


def assert_drawn_fairly(stream: Stream) -> None:
    """Every token is one that the settings allow, and its log-probability is the unmodified model's."""
    request = stream.request
    prompt, tokens = request.prompt_token_ids, stream.token_ids
    rescore = penalties(request.sampling)
    # a token on the very edge of top_p or min_p may fall either way
    loose = replace(
        request.sampling,
        top_p=min(request.sampling.top_p + 1e-5, 1.0),
        min_p=max(request.sampling.min_p - 1e-5, 0.0),
    )
    logits = oracle(FAMILY).logits([*prompt, *tokens])
    for step, token_id in enumerate(tokens):
        scores = rescore(logits[len(prompt) - 1 + step], prompt, tokens[:step])
        assert token_id in candidates(loose, scores)
    assert stream.logprobs == pytest.approx(oracle(FAMILY).logprobs_of(prompt, tokens), abs=1e-4)


def test_draws_from_one_cached_prompt_follow_the_distribution() -> None:
    """No sampled token and no state of a sampler is kept with a prefix."""
    service, prompt = InProcess(FAMILY), Prompts(6).tokens(30)
    request = greedy(prompt, 1, temperature=1.0, num_samples=16)
    streams = service.run(*(replace(request, sampling=replace(request.sampling, seed=seed)) for seed in range(64)))
    drawn = Counter(reply.token_ids[0] for stream in streams for reply in stream.replies)
    num_drawn = sum(drawn.values())

    probabilities = np.exp(log_softmax(oracle(FAMILY).logits(prompt)[-1]))

    assert num_drawn == 64 * 16
    for token_id in np.argsort(probabilities)[-8:]:
        share = probabilities[token_id]
        deviation = (share * (1 - share) / num_drawn) ** 0.5
        assert abs(drawn[int(token_id)] / num_drawn - share) < 5 * deviation


def test_samples_of_a_seeded_request_differ_and_come_again() -> None:
    service, prompt = InProcess(FAMILY), Prompts(7).tokens(30)
    request: GenerateRequest = greedy(prompt, 8, temperature=1.2, seed=11, num_samples=4)

    first, second = service.run_one(request), service.run_one(request)

    replies = [reply.token_ids for reply in first.replies]
    assert len({tuple(tokens) for tokens in replies}) == 4
    assert [reply.token_ids for reply in second.replies] == replies


def test_top_logprobs_are_the_models_own() -> None:
    service, prompt = InProcess(FAMILY), Prompts(14).tokens(30)
    service.run_one(greedy(prompt, 1))

    stream = service.run_one(greedy(prompt, 5, logprobs=10, repetition_penalty=1.5, logit_bias=((9, 30.0),)))

    rows = log_softmax(oracle(FAMILY).logits([*prompt, *stream.token_ids]))[len(prompt) - 1 : -1]
    for entry, row in zip(stream.replies[0].logprobs, rows, strict=True):
        assert [token_id for token_id, _ in entry.top] == np.argsort(-row)[:10].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:10], abs=1e-4)
