"""Prompts that nobody asked for, run before the first request so that the planner knows what computing costs."""

from __future__ import annotations

import time

from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.engine.runner import Runner
from prefixcache.engine.scheduler import Work
from prefixcache.engine.sequence import Sequence

# A first run pays for what is set up once, so it does not count; the others are as long as steps are.
LENGTHS = (16, 16, 64, 512)


def warm_up(runner: Runner, cache: PrefixCache, max_num_batched_tokens: int) -> None:
    """Run a few lengths and tell the cache how long each took; nothing of them is kept."""
    for index, length in enumerate(LENGTHS):
        num_tokens = min(length, max_num_batched_tokens, cache.num_pages * cache.page_size)
        sequence = Sequence(0, None, [0] * num_tokens, max_tokens=1)
        sequence.lease = cache.try_acquire(None, sequence.prompt_key, num_tokens=num_tokens)
        assert sequence.lease is not None, "warming up comes before the first request"
        started_s = time.monotonic()
        hidden = runner.forward([Work(sequence, num_tokens)], [1])
        runner.logits(runner.final_states(hidden, [0])).argmax().item()  # the device is done as well
        if index:
            cache.note_step([(num_tokens, num_tokens)], time.monotonic() - started_s)
        cache.discard(sequence.lease)
