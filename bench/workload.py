"""The workload that every system is measured on: token ids of real English text, fresh in every run.

    cold       a prompt that was never sent, at each length
    again      the same prompt once more
    extended   a known prefix with new tokens behind it, other ones each time
    shared     clients that come together, share a known prefix, and differ behind it

Every prompt starts with tokens drawn at random, so that nothing is warm by accident.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

LENGTHS = (512, 2048, 7500)
OUTPUT_TOKENS = 24
PREFIX_TOKENS, NEW_TOKENS = 2048, 64
NUM_CLIENTS, SHARED_OUTPUT_TOKENS = 16, 32
RANDOM_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts that are sent together.

    Attributes:
        kind: `warm-up`, or what the answers are measured as: `cold-512`, `again-512`, `extended`, `shared`, ...
    """

    kind: str
    prompts: list[list[int]]
    max_tokens: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def corpus() -> str:
    """Some 500 KB of English that every Python brings along: its own manual."""
    return "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def build_jobs(corpus_ids: list[int], lengths: Sequence[int], repeat: int, seed: int) -> list[Job]:
    """Put the workload together.

    Args:
        corpus_ids: The corpus as the model's token ids.
        lengths: Prompt lengths for `cold` and `again`.
        repeat: How often each thing is measured.
        seed: Another one makes other prompts.
    """
    numbers = random.Random(seed)

    def prompt(length: int) -> list[int]:
        start = numbers.randrange(len(corpus_ids) - length)
        fresh = [numbers.choice(corpus_ids) for _ in range(RANDOM_TOKENS)]
        return fresh + corpus_ids[start : start + length - RANDOM_TOKENS]

    jobs = [Job("warm-up", [prompt(length)], 4) for length in (64, 300, 64)]
    for length in lengths:
        for _ in range(repeat):
            text = prompt(length)
            jobs += [Job(f"cold-{length}", [text], 1), Job(f"again-{length}", [text], OUTPUT_TOKENS)]
    prefix = prompt(PREFIX_TOKENS)
    jobs.append(Job("warm-up", [prefix], 1))
    jobs += [Job("extended", [prefix + prompt(NEW_TOKENS)], 1) for _ in range(repeat)]
    for _ in range(repeat):
        prompts = [prefix + prompt(NEW_TOKENS) for _ in range(NUM_CLIENTS)]
        jobs.append(Job("shared", prompts, SHARED_OUTPUT_TOKENS))
    return jobs
