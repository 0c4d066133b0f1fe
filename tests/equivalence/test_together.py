"""Requests that arrive together: rows of one batch keep apart, and what they share is computed once."""

from __future__ import annotations

import time

import pytest

from tests.support.checks import assert_exact, oracle
from tests.support.held import held
from tests.support.in_process import TIMEOUT_S, UNLIMITED, InProcess, greedy, submit
from tests.support.models import FAMILIES
from tests.support.prompts import Prompts

FAMILY = "llama-gqa"
PAGE = 16


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_different_cached_lengths(family: str) -> None:
    service, prompts = InProcess(family), Prompts(18)
    prefixes = [prompts.tokens(length) for length in (0, 16, 31, 80)]
    for prefix in prefixes[1:]:
        service.run_one(greedy(prefix, 1))

    streams = service.run(
        *(greedy([*prefix, *prompts.tokens(20)], 8) for prefix in prefixes),
        greedy(prompts.tokens(1), 8),
        greedy(prompts.tokens(100), 8),
    )

    for stream in streams:
        assert_exact(stream, oracle(family))
    assert [stream.cached_tokens for stream in streams] == [0, 16, 31, 80, 0, 0]


def test_a_partial_match_brings_nothing_of_the_other_prompts_tail() -> None:
    service, prompts = InProcess(FAMILY), Prompts(6)
    for _ in range(4):
        shared = prompts.tokens(40)
        streams = service.run(*(greedy([*shared, *prompts.tokens(30)], 8) for _ in range(16)))
        for stream in streams:
            assert_exact(stream, oracle(FAMILY))
        assert len({tuple(stream.token_ids) for stream in streams}) > 8
        # whoever waited for the first found what it had published, page by page or to its end
        assert sum(stream.cached_tokens >= 32 for stream in streams) == 15


@pytest.mark.parametrize("chunk", [64, 512, UNLIMITED])
def test_a_new_prefix_of_many_requests_is_prefilled_once(chunk: int) -> None:
    service, prompts = InProcess(FAMILY, num_pages=2048, chunk=chunk), Prompts(32)
    prefix = prompts.tokens(512)
    num_suffix = 10

    streams = service.run(*(greedy([*prefix, *prompts.tokens(num_suffix)], 4) for _ in range(32)))

    assert service.num_prefilled_tokens <= 512 + 32 * (num_suffix + PAGE)
    for stream in streams[::8]:
        assert_exact(stream, oracle(FAMILY))


def test_identical_requests_at_once_are_computed_once() -> None:
    service, prompt = InProcess(FAMILY, chunk=64), Prompts(33).tokens(256)

    streams = service.run(*(greedy(prompt, 4) for _ in range(16)))

    assert service.num_prefilled_tokens <= 256 + 16
    assert_exact(streams[0], oracle(FAMILY))
    assert all(stream.token_ids == streams[0].token_ids for stream in streams)


def test_a_follower_takes_over_from_a_cancelled_leader() -> None:
    service, prompts = InProcess(FAMILY, num_pages=512, chunk=16), Prompts(34)
    prefix = prompts.tokens(900)
    with service.running() as engine:
        with held(service._runner, num_steps=20) as is_held:
            leader = submit(engine, greedy(prefix, 8))
            followers = [submit(engine, greedy([*prefix, *prompts.tokens(5)], 8)) for _ in range(3)]
            assert is_held.wait(TIMEOUT_S)
            assert leader.handle is not None
            engine.abort(leader.handle)
        for follower in followers:
            assert_exact(follower.wait(), oracle(FAMILY))

    assert not leader.has_ended
    assert service.num_prefilled_tokens <= 900 + 4 * (5 + PAGE)


def test_requests_that_join_and_leave_a_running_batch() -> None:
    service, prompts = InProcess(FAMILY, chunk=32), Prompts(35)
    with service.running() as engine:
        streams = []
        for _ in range(30):
            streams.append(submit(engine, greedy(prompts.next(), prompts.between(1, 25))))
            time.sleep(prompts.between(0, 15) / 1000)
        for stream in streams:
            assert_exact(stream.wait(), oracle(FAMILY))


def test_a_generation_survives_the_split_of_its_prefix_and_a_flood() -> None:
    service, prompts = InProcess(FAMILY, num_pages=28, chunk=64), Prompts(36)
    prompt = prompts.tokens(90)
    with service.running() as engine:
        held = submit(engine, greedy(prompt, 100))
        while held.num_deltas < 5:
            time.sleep(0.001)
        others = [submit(engine, greedy(prompt[:20] + prompts.tokens(30), 4))]
        others += [submit(engine, greedy(prompts.tokens(100), 4)) for _ in range(6)]
        for stream in (held, *others):
            assert_exact(stream.wait(), oracle(FAMILY))
    assert service.cache.num_evicted_pages > 0
