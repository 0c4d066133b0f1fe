"""The reply depends on the request alone, never on what was cached (I9): every family, at every chunk size."""

from __future__ import annotations

import pytest

from tests.support.checks import Known, assert_exact, oracle
from tests.support.in_process import UNLIMITED, InProcess, greedy
from tests.support.models import FAMILIES
from tests.support.prompts import Prompts

CHUNKS = (7, 16, 64, UNLIMITED)
NUM_ALONE = 14
BATCH_SIZES = (2, 3, 5)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_after_another(family: str, chunk: int) -> None:
    service, prompts, known = InProcess(family, chunk=chunk), Prompts(chunk), Known()
    num_hits = 0

    for _ in range(NUM_ALONE):
        stream = service.run_one(greedy(prompts.next(), prompts.between(1, 12)))
        assert_exact(stream, oracle(family))
        assert stream.cached_tokens == known.num_cached_tokens(stream)
        num_hits += stream.cached_tokens > 0
        known.add(stream)
        prompts.tell(stream.request.prompt_token_ids, stream.token_ids)

    assert num_hits >= NUM_ALONE // 3


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_several_at_once(family: str, chunk: int) -> None:
    service, prompts, known = InProcess(family, chunk=chunk), Prompts(chunk + 1), Known()
    num_hits = 0

    for size in BATCH_SIZES:
        streams = service.run(*(greedy(prompts.next(), prompts.between(1, 12)) for _ in range(size)))
        at_least = [known.num_cached_tokens(stream) for stream in streams]
        for stream in streams:
            known.add(stream)
            prompts.tell(stream.request.prompt_token_ids, stream.token_ids)
        for stream, least in zip(streams, at_least, strict=True):
            assert_exact(stream, oracle(family))
            assert least <= stream.cached_tokens <= known.num_cached_tokens(stream)
            num_hits += stream.cached_tokens > 0

    assert num_hits >= sum(BATCH_SIZES) // 3


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_cache_nothing_is_read_or_left_behind(family: str) -> None:
    service, prompts = InProcess(family), Prompts(3)
    prompt = prompts.tokens(50)
    service.run_one(greedy(prompt, 4))
    num_cached_pages = service.cache.page_counts().cached

    stream = service.run_one(greedy([*prompt, *prompts.tokens(30)], 8, use_cache=False))

    assert_exact(stream, oracle(family))
    assert stream.cached_tokens == 0
    assert service.cache.page_counts().cached == num_cached_pages
