"""How the bench against peers puts its rows together."""

from __future__ import annotations

import pytest

from bench.peers import AIMS, summarize
from bench.workload import NEW_TOKENS, NUM_CLIENTS, PREFIX_TOKENS, Job, build_jobs


def test_every_aim_has_its_jobs() -> None:
    jobs = build_jobs(list(range(100, 20_000)), [512, 2048, 7500], repeat=2, seed=1)
    results = [{"ttft_ms": 10.0, "itl_ms": 5.0, "wall_ms": 1000.0}] * len(jobs)
    rows = summarize(jobs, {"prefixcache": results, "openvino": results})
    assert [row["what"] for row in rows] == list(AIMS)
    assert all(row["systems"]["prefixcache"]["runs"] == 2 for row in rows)
    assert all(row["ratio_to_better_peer"] == 1 for row in rows)


def test_prompts_are_what_their_kind_says() -> None:
    jobs = build_jobs(list(range(100, 20_000)), [512], repeat=1, seed=1)
    by_kind = {job.kind: job for job in jobs}
    assert by_kind["cold-512"].prompts == by_kind["again-512"].prompts
    assert [len(prompt) for prompt in by_kind["extended"].prompts] == [PREFIX_TOKENS + NEW_TOKENS]
    shared = by_kind["shared"].prompts
    assert len(shared) == NUM_CLIENTS
    assert len({tuple(prompt[:PREFIX_TOKENS]) for prompt in shared}) == 1
    assert len({tuple(prompt) for prompt in shared}) == NUM_CLIENTS
    assert by_kind["extended"].prompts[0][:PREFIX_TOKENS] == shared[0][:PREFIX_TOKENS]


def test_ours_is_compared_with_the_better_peer() -> None:
    jobs = [Job("cold-512", [[1]], 1), Job("shared", [[1]] * 16, 10)]

    def results(ttft_ms: float, wall_ms: float) -> list[dict[str, float]]:
        return [{"ttft_ms": ttft_ms, "itl_ms": 0.0, "wall_ms": wall_ms}] * 2

    cold, shared = summarize(
        jobs, {"prefixcache": results(90, 500), "openvino": results(100, 2000), "vllm": results(120, 1000)}
    )
    assert cold["ratio_to_better_peer"] == pytest.approx(0.9)
    assert cold["met"]
    assert shared["systems"]["prefixcache"]["median"] == pytest.approx(320)
    assert shared["ratio_to_better_peer"] == pytest.approx(2.0)
    assert not shared["met"]
