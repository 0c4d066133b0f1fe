"""Cold = device = host = disk = Redis: wherever a prompt's beginning comes from, the answer stays the same (EQ)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from prefixcache.cache.tiers import Load, TierRun
from prefixcache.request import Namespace, Tier
from prefixcache.tree.node import token_key
from tests.equivalence.conftest import StoreSettings
from tests.support.checks import assert_exact, common_length, oracle
from tests.support.in_process import greedy
from tests.support.models import FAMILIES
from tests.support.prompts import Prompts
from tests.support.redis_server import RedisServer
from tests.support.tiers import TieredService, cached_by_tier, disk_settings, whole_pages

FAMILY = "llama-gqa"
PAGE = 16


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tier_gives_the_answer_of_a_cold_run(family: str, tmp_path: Path, server: RedisServer) -> None:
    disk, redis, host = disk_settings(tmp_path / "disk"), {"redis": server.url}, {"host_memory": 4 * 2**20}
    prompt = Prompts(1).tokens(83)
    with TieredService(family, num_pages=12, **disk, **redis, **host) as service:
        cold = service.run_one(greedy(prompt, 5))
        device = service.run_one(greedy(prompt, 5))
        service.run_one(greedy(Prompts(2).tokens(185), 2))  # takes every page of the device
        from_host = service.run_one(greedy(prompt, 5))
    with TieredService(family, **disk) as service:
        from_disk = service.run_one(greedy(prompt, 5))
    with TieredService(family, **redis) as service:
        from_redis = service.run_one(greedy(prompt, 5))

    streams = [cold, device, from_host, from_disk, from_redis]
    for stream in streams:
        assert_exact(stream, oracle(family))
    assert [cached_by_tier(stream) for stream in streams] == [
        {},
        {Tier.DEVICE: 82},
        {Tier.HOST: 80},
        {Tier.DISK: 80},
        {Tier.REMOTE: 80},
    ]


@pytest.mark.parametrize("length", [1, 16, 17, 31, 32, 33, 48, 100, 160, 161])
def test_prompts_that_end_anywhere_in_a_page(length: int, store: StoreSettings) -> None:
    tier, settings = store
    prompts = Prompts(length)
    prompt = prompts.tokens(length)
    with TieredService(FAMILY, **settings) as service:
        assert_exact(service.run_one(greedy(prompt, 20)), oracle(FAMILY))
    with TieredService(FAMILY, **settings) as service:
        again = service.run_one(greedy(prompt, 6))
        warm = service.run_one(greedy(prompt, 6))
        assert service.num_prefilled_tokens == length - whole_pages(length)

    for stream in (again, warm):
        assert_exact(stream, oracle(FAMILY))
    assert again.cached_tokens == cached_by_tier(again).get(tier, 0) == whole_pages(length)
    assert cached_by_tier(warm) == ({Tier.DEVICE: length - 1} if length > 1 else {})


def test_extended_and_partly_shared_prompts(store: StoreSettings) -> None:
    tier, settings = store
    prompts = Prompts(3)
    prompt = prompts.tokens(100)
    with TieredService(FAMILY, **settings) as service:
        first = service.run_one(greedy(prompt, 40))
    turn = prompt + first.token_ids
    variants = [
        turn + prompts.tokens(30),  # generated tokens are found, too
        prompt[:71] + prompts.tokens(40),
        prompt[:16],
        prompt[:5] + prompts.tokens(60),
        prompts.tokens(50) + prompt[50:],  # equal pages behind another beginning are other pages
    ]
    for variant in variants:
        with TieredService(FAMILY, **settings) as service:
            stream = service.run_one(greedy(variant, 6))
        assert_exact(stream, oracle(FAMILY))
        known = min(common_length(variant, turn[:-1]), len(variant) - 1) // PAGE * PAGE
        assert stream.cached_tokens == cached_by_tier(stream).get(tier, 0) == known


def test_a_prompt_whose_pages_lie_on_every_tier(tmp_path: Path, server: RedisServer) -> None:
    disk, redis = disk_settings(tmp_path / "disk"), {"redis": server.url}
    prompt = Prompts(4).tokens(300)
    with TieredService(FAMILY, **disk) as service:
        service.run_one(greedy(prompt[:150], 1))
    with TieredService(FAMILY, **redis) as service:
        service.run_one(greedy(prompt, 1))
    with TieredService(FAMILY, **disk, **redis) as service:
        service.run_one(greedy(prompt[:50], 1))
        stream = service.run_one(greedy(prompt, 6))

    assert_exact(stream, oracle(FAMILY))
    # the device has 50 tokens, the last two of them in a page that the disk has whole
    assert cached_by_tier(stream) == {Tier.DEVICE: 50, Tier.DISK: 94, Tier.REMOTE: 144}


def test_a_device_too_small_for_what_is_asked(store: StoreSettings) -> None:
    tier, settings = store
    prompts = Prompts(5)
    asked = [prompts.tokens(100) for _ in range(4)]
    with TieredService(FAMILY, num_pages=9, **settings) as service:
        for round_ in range(3):
            for prompt in asked:
                stream = service.run_one(greedy(prompt, 6))
                assert_exact(stream, oracle(FAMILY))
                assert cached_by_tier(stream) == ({tier: 96} if round_ else {})
        assert service.cache.num_evicted_pages > 0


@pytest.mark.parametrize("chunk", [16, 40, 64])
def test_many_at_once_on_all_tiers_with_a_real_planner(chunk: int, tmp_path: Path, server: RedisServer) -> None:
    settings = {**disk_settings(tmp_path / "disk"), "redis": server.url, "host_memory": 100_000}
    prompts = Prompts(6)
    num_lower = 0
    for _ in range(3):
        with TieredService(FAMILY, num_pages=40, chunk=chunk, always_loads=False, **settings) as service:
            for _ in range(4):
                streams = service.run(*(greedy(prompts.next(), prompts.between(1, 8)) for _ in range(6)))
                for stream in streams:
                    assert stream.error is None
                    assert_exact(stream, oracle(FAMILY))
                    assert stream.cached_tokens < len(stream.request.prompt_token_ids)
                    num_lower += sum(n for tier, n in cached_by_tier(stream).items() if tier is not Tier.DEVICE)
                    prompts.tell(stream.request.prompt_token_ids, stream.token_ids)
    assert num_lower > 0


def test_host_memory_gives_back_what_the_device_had_to_give_up() -> None:
    prompts = Prompts(7)
    asked = [prompts.tokens(70) for _ in range(5)]
    with TieredService(FAMILY, num_pages=8, host_memory=4 * 2**20) as service:
        for round_ in range(4):
            for prompt in asked:
                stream = service.run_one(greedy(prompt, 6))
                assert_exact(stream, oracle(FAMILY))
                assert cached_by_tier(stream) == ({Tier.HOST: 64} if round_ else {})


@pytest.mark.parametrize("num_pages", [1, 3, 6])
def test_host_memory_that_is_too_small(num_pages: int) -> None:
    """It keeps what fits, and the beginning of a prompt longest (I6)."""
    prompts = Prompts(8)
    asked = [prompts.tokens(70) for _ in range(3)]
    with TieredService(FAMILY, num_pages=8) as plain:
        page_bytes = plain.page_bytes
    with TieredService(FAMILY, num_pages=8, host_memory=num_pages * page_bytes) as service:
        for _ in range(5):
            for prompt in asked:
                assert_exact(service.run_one(greedy(prompt, 6)), oracle(FAMILY))
        assert service.storage.host is not None
        assert service.storage.host.num_pages == num_pages
        assert service.num_host_pages_reported == num_pages


def test_bfloat16_comes_back_bit_for_bit(store: StoreSettings) -> None:
    tier, settings = store
    prompt = Prompts(9).tokens(96)
    with TieredService(FAMILY, dtype=torch.bfloat16, **settings) as service:
        service.run_one(greedy(prompt, 3))
        device = service.run_one(greedy([*prompt[:81], 5], 6))
        before = _pages(service, prompt[:80])
    with TieredService(FAMILY, dtype=torch.bfloat16, **settings) as service:
        again = service.run_one(greedy([*prompt[:81], 5], 6))
        after = _pages(service, prompt[:80])

    assert cached_by_tier(again) == {tier: 80}
    assert before.dtype == torch.bfloat16
    assert torch.equal(before.view(torch.int16), after.view(torch.int16))
    assert before.float().abs().sum() > 0
    assert again.token_ids == device.token_ids


def test_requests_that_stay_out_of_the_cache_are_not_written(store: StoreSettings) -> None:
    _, settings = store
    prompts = Prompts(10)
    alone, several = prompts.tokens(64), prompts.tokens(64)
    requests = [greedy(alone, 4, use_cache=False), greedy(several, 4, use_cache=False, num_samples=3)]
    with TieredService(FAMILY, **settings) as service:
        for request in requests:
            assert service.run_one(request).cached_tokens == 0
    with TieredService(FAMILY, **settings) as service:
        for prompt in (alone, several):
            stream = service.run_one(greedy([*prompt, 7], 4))
            assert_exact(stream, oracle(FAMILY))
            assert stream.cached_tokens == 0
        for request in requests:  # nor do they read what others wrote
            assert service.run_one(request).cached_tokens == 0


def test_prompt_logprobs_compute_everything_and_store_it(store: StoreSettings) -> None:
    tier, settings = store
    prompt = Prompts(11).tokens(64)
    with TieredService(FAMILY, **settings) as service:
        assert service.run_one(greedy(prompt, 4, prompt_logprobs=0)).cached_tokens == 0
    with TieredService(FAMILY, **settings) as service:
        stream = service.run_one(greedy(prompt, 4, prompt_logprobs=0))
        assert stream.cached_tokens == 0
        exact = oracle(FAMILY).prompt_logprobs(prompt)[1:]
        assert [each.logprob for each in stream.prompt_logprobs[1:] if each] == pytest.approx(exact, abs=1e-4)
    with TieredService(FAMILY, **settings) as service:
        stream = service.run_one(greedy(prompt, 4))
        assert_exact(stream, oracle(FAMILY))
        assert cached_by_tier(stream) == {tier: 48}


def _pages(service: TieredService, tokens: list[int]) -> torch.Tensor:
    """The K/V of whole pages on the device, copied in the order of their tokens."""
    match = service.tree.match(Namespace(), token_key(tokens))
    assert match.num_tokens == len(tokens)
    assert match.node is not None
    pages = service.tree.path_pages(match.node)[: len(tokens) // PAGE]
    return torch.cat([service.pool.kv[:, :, page * PAGE : (page + 1) * PAGE] for page in pages], dim=2)


def test_samples_of_a_prompt_that_nobody_knows_report_nothing_as_cached(store: StoreSettings) -> None:
    """The first sample asks the stores; the others must not compute the prompt meanwhile and then pass for a hit."""
    _, settings = store
    with TieredService(FAMILY, **settings) as service:
        stream = service.run_one(greedy(Prompts(17).tokens(90), 3, num_samples=3))
        assert service.num_prefilled_tokens == 90
    assert stream.cached_tokens == 0


def test_a_load_that_ends_between_two_looks_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store thread may bring the page that the known tokens end in while the engine thread decides what to do."""
    prompt = Prompts(18).tokens(100)
    with TieredService(FAMILY, **disk_settings(tmp_path)) as service:
        service.run_one(greedy(prompt, 1))
    with TieredService(FAMILY, **disk_settings(tmp_path)) as service:
        service.run_one(greedy(prompt[:35], 1))
        mover = service.mover
        assert mover is not None
        look = mover.computable_tokens

        def look_when_all_is_there(load: Load, num_computed_tokens: int) -> int | None:
            deadline_s = time.monotonic() + 10
            while load.low > load.start:
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            return look(load, num_computed_tokens)

        monkeypatch.setattr(mover, "computable_tokens", look_when_all_is_there)
        stream = service.run_one(greedy(prompt, 5))
    assert_exact(stream, oracle(FAMILY))
    assert cached_by_tier(stream) == {Tier.DEVICE: 35, Tier.DISK: 96 - 35}


class ArrivesMeanwhile(Load):
    """A load of which all has come once it was looked at so many times."""

    num_looks = 0

    @property
    def low(self) -> int:  # type: ignore[override]
        self.num_looks -= 1
        return self.start if self.num_looks < 0 else self.end

    @low.setter
    def low(self, value: int) -> None:
        pass


@pytest.mark.parametrize("num_looks", range(6))
def test_a_load_that_ends_during_one_look_at_it(num_looks: int, tmp_path: Path) -> None:
    load = ArrivesMeanwhile([TierRun(Tier.DISK, 0, 4)], time.monotonic(), 1.0, {}, low=4, floor=0)
    load.num_looks = num_looks
    with TieredService(FAMILY, **disk_settings(tmp_path)) as service:
        assert service.mover is not None
        assert not service.mover.computable_tokens(load, 0)


def test_what_came_once_is_not_written_where_only_reused_pages_are(store: StoreSettings) -> None:
    tier, settings = store
    prompts = Prompts(900)
    once, twice = prompts.tokens(100), prompts.tokens(100)
    with TieredService(FAMILY, write_policy="reused", **settings) as service:
        service.run(greedy(once, 1), greedy(twice, 1))
        service.run_one(greedy([*twice[:70], *prompts.tokens(40)], 1))
        answer = service.run_one(greedy(once[:50], 20)).token_ids
    with TieredService(FAMILY, write_policy="reused", **settings) as service:
        found = [service.run_one(greedy(prompt, 4)) for prompt in (twice, once, [*once[:50], *answer])]
    for stream in found:
        assert_exact(stream, oracle(FAMILY))
    assert [stream.usage.cached_tokens_by_tier.get(tier, 0) for stream in found] == [64, 48, 0]
