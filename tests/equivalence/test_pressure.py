"""A cache that is too small: eviction and preemption change what is computed again, never the reply."""

from __future__ import annotations

import random

import pytest

from prefixcache.errors import InvalidRequest
from tests.support.checks import Known, assert_exact, oracle
from tests.support.in_process import UNLIMITED, InProcess, greedy, submit
from tests.support.models import FAMILIES
from tests.support.prompts import Prompts

FAMILY = "llama-gqa"
PAGE = 16


@pytest.mark.parametrize("family", FAMILIES)
def test_after_eviction(family: str) -> None:
    service, prompts, known = InProcess(family, num_pages=24), Prompts(1), Known()
    num_hits = 0
    for _ in range(15):
        stream = service.run_one(greedy(prompts.next(), prompts.between(1, 12)))
        assert_exact(stream, oracle(family))
        assert stream.cached_tokens <= known.num_cached_tokens(stream)
        num_hits += stream.cached_tokens > 0
        known.add(stream)
        prompts.tell(stream.request.prompt_token_ids, stream.token_ids)

    assert service.cache.num_evicted_pages > 0
    assert num_hits > 0


@pytest.mark.parametrize("chunk", [7, 16, 64, UNLIMITED])
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3"])
def test_after_preemption(family: str, chunk: int) -> None:
    service, prompts, known = InProcess(family, num_pages=16, chunk=chunk), Prompts(2), Known()
    for _ in range(2):
        shared = prompts.tokens(20)
        requests = [
            greedy(shared[: prompts.between(0, 20)] + prompts.tokens(prompts.between(1, 30)), prompts.between(40, 60))
            for _ in range(6)
        ]
        streams = service.run(*requests)
        for stream in streams:
            known.add(stream)
        for stream in streams:
            assert_exact(stream, oracle(family))
            assert stream.cached_tokens <= known.num_cached_tokens(stream)

    assert service.num_preemptions > 0


def test_a_preempted_sequence_keeps_its_penalties_and_its_seed() -> None:
    # Seeds for which no draw falls within rounding of where one token's share ends and the next one's begins: there the
    # order of additions would decide, which is another one after a preemption.
    requests = [
        greedy(Prompts(n).tokens(20), 70, temperature=0.8, seed=n, frequency_penalty=0.5, repetition_penalty=1.2)
        for n in range(10, 15)
    ]
    roomy, narrow = InProcess(FAMILY), InProcess(FAMILY, num_pages=16)

    undisturbed, preempted = roomy.run(*requests), narrow.run(*requests)

    assert narrow.num_preemptions > 0
    assert [stream.token_ids for stream in preempted] == [stream.token_ids for stream in undisturbed]


def test_what_is_found_counts_at_admission_not_at_arrival() -> None:
    """A prompt that was cached when it arrived waits for room while others push it out."""
    service, prompts = InProcess(FAMILY, num_pages=16), Prompts(8)
    prompt = prompts.tokens(60)
    service.run_one(greedy(prompt, 1))

    slow, *_, late = service.run(
        greedy(prompts.tokens(100), 100),
        *(greedy(prompts.tokens(50), 4) for _ in range(10)),
        greedy([*prompt, *prompts.tokens(5)], 6),
    )

    for stream in (slow, late):
        assert_exact(stream, oracle(FAMILY))
    assert late.cached_tokens in range(61)


def test_a_reply_grows_into_a_cache_full_of_idle_entries() -> None:
    service, prompts = InProcess(FAMILY, num_pages=16), Prompts(16)
    for _ in range(6):
        service.run_one(greedy(prompts.tokens(60), 4))
    assert service.cache.page_counts().free <= 3

    stream = service.run_one(greedy(prompts.tokens(10), 230))

    assert_exact(stream, oracle(FAMILY))
    assert service.num_preemptions == 0


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_request_of_exactly_the_caches_size(repeats: int) -> None:
    service, prompts = InProcess(FAMILY, num_pages=6), Prompts(15)
    prompt = prompts.tokens(6 * PAGE - 1)
    for _ in range(repeats):
        for tokens in (prompt, prompt[:50] + prompts.tokens(6 * PAGE - 51)):
            assert_exact(service.run_one(greedy(tokens, 1)), oracle(FAMILY))


def test_what_can_never_fit_is_refused_at_once_with_both_numbers() -> None:
    service, prompts = InProcess(FAMILY, num_pages=4), Prompts(11)
    with service.running() as engine:
        with pytest.raises(InvalidRequest, match=r"70.*64"):
            submit(engine, greedy(prompts.tokens(60), 10))
        assert_exact(submit(engine, greedy(prompts.tokens(54), 10)).wait(), oracle(FAMILY))


def test_a_long_prompt_that_was_passed_over_does_not_stop_a_younger_one_that_runs() -> None:
    """The old one waits for pages that the young one holds, half-way through its own prompt."""
    service, prompts = InProcess(FAMILY, num_pages=12, chunk=4, max_num_seqs=4), Prompts(31)

    streams = service.run(
        greedy(prompts.tokens(60), 30), greedy(prompts.tokens(130), 4), greedy(prompts.tokens(100), 4)
    )

    for stream in streams:
        assert stream.error is None
        assert_exact(stream, oracle(FAMILY))


def test_eviction_is_by_last_use_and_from_the_tails() -> None:
    """Against a model of a few lines: every cached page, named by the tokens that lead to it, and its last use."""
    num_pages = 13
    service, chooser, prompts = InProcess(FAMILY, num_pages), random.Random(11), Prompts(11)
    roots = [prompts.tokens(2 * PAGE) for _ in range(3)]
    all_prompts = [root + prompts.tokens(PAGE * length) for root in roots for length in (1, 2, 3)]
    last_used: dict[tuple[int, ...], int] = {}

    for now in range(1, 80):
        prompt = chooser.choice(all_prompts)
        path = [tuple(prompt[:end]) for end in range(PAGE, len(prompt) + 1, PAGE)]
        num_known = PAGE * sum(page in last_used for page in path)

        stream = service.run_one(greedy(prompt, 1))

        assert stream.cached_tokens == min(num_known, len(prompt) - 1)
        last_used.update(dict.fromkeys(path, now))
        others = sorted(last_used.keys() - path, key=lambda page: (last_used[page], -len(page)))
        for page in others[: max(0, len(last_used) - num_pages)]:
            del last_used[page]

    assert service.cache.num_evicted_pages > 50
