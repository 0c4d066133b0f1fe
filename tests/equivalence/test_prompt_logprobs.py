"""Prompt log-probabilities are computed for every position, whatever is cached: never partial, zero or stale."""

from __future__ import annotations

import pytest

from tests.support.checks import assert_exact, oracle
from tests.support.in_process import UNLIMITED, InProcess, Stream, greedy
from tests.support.prompts import Prompts

FAMILY = "qwen2-yarn-rope"


def assert_prompt_logprobs(stream: Stream) -> None:
    prompt = stream.request.prompt_token_ids
    first, *rest = stream.prompt_logprobs
    expected = oracle(FAMILY).prompt_logprobs(prompt)
    assert first is None
    assert [entry.token_id for entry in rest if entry] == prompt[1:]
    assert [entry.logprob for entry in rest if entry] == pytest.approx(expected[1:], abs=1e-4)
    for entry in rest:
        assert entry is not None
        assert len(entry.top) == stream.request.sampling.prompt_logprobs


@pytest.mark.parametrize("chunk", [7, 16, UNLIMITED])
def test_cold_cached_and_in_any_order(chunk: int) -> None:
    service, prompts = InProcess(FAMILY, chunk=chunk), Prompts(chunk)
    prompt = prompts.tokens(70)
    longer = prompt[:40] + prompts.tokens(30)
    streams = [
        service.run_one(greedy(prompt, 4, prompt_logprobs=2)),
        service.run_one(greedy(prompt, 4, prompt_logprobs=2)),
        service.run_one(greedy(longer, 4)),
        service.run_one(greedy(longer, 4, prompt_logprobs=0)),
        *service.run(*(greedy(p, 4, prompt_logprobs=1) for p in (prompt, longer, prompt, prompt[:1], longer[:33]))),
    ]
    for stream in streams:
        assert_exact(stream, oracle(FAMILY))
        if stream.request.sampling.prompt_logprobs is not None:
            assert_prompt_logprobs(stream)
            assert stream.cached_tokens == 0, "a position that is computed is not cached"


def test_what_such_a_request_computes_can_be_reused() -> None:
    service, prompts = InProcess(FAMILY), Prompts(22)
    prompt = prompts.tokens(50)
    service.run_one(greedy(prompt, 4, prompt_logprobs=0))

    stream = service.run_one(greedy([*prompt, *prompts.tokens(5)], 4))

    assert_exact(stream, oracle(FAMILY))
    assert stream.cached_tokens == 50


def test_beside_others_and_after_preemption() -> None:
    service, prompts = InProcess(FAMILY, num_pages=14, chunk=32), Prompts(23)
    prompt = prompts.tokens(10)
    requests = [greedy(prompt + prompts.tokens(20), 60, prompt_logprobs=1) for _ in range(4)]

    streams = service.run(*requests)

    assert service.num_preemptions > 0
    for stream in streams:
        assert_exact(stream, oracle(FAMILY))
        assert_prompt_logprobs(stream)


def test_samples_report_their_prompt_once() -> None:
    service, prompt = InProcess(FAMILY), Prompts(24).tokens(40)

    stream = service.run_one(greedy(prompt, 4, prompt_logprobs=1, num_samples=3))

    assert_prompt_logprobs(stream)
