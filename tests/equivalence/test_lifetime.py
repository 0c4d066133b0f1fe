"""What a request leaves behind, however it ends: its K/V for later ones, and nothing else."""

from __future__ import annotations

import gc
import itertools
import random
import time

import psutil

from prefixcache.engine.engine import Engine
from prefixcache.errors import InvalidRequest
from tests.support.checks import assert_exact, oracle
from tests.support.held import held
from tests.support.in_process import TIMEOUT_S, InProcess, Stream, greedy, submit
from tests.support.models import VOCAB_SIZE
from tests.support.prompts import Prompts

FAMILY = "llama-gqa"


def cancel(engine: Engine, stream: Stream) -> None:
    assert stream.handle is not None
    engine.abort(stream.handle)


def test_work_of_a_cancelled_request_is_kept_as_far_as_it_went() -> None:
    service, prompts = InProcess(FAMILY, num_pages=256, chunk=32), Prompts(21)
    for round_ in range(12):
        prompt = prompts.tokens(512)
        before = service.num_prefilled_tokens
        with service.running() as engine:
            cancelled = submit(engine, greedy(prompt, 8))
            time.sleep(0.002 * round_)
            cancel(engine, cancelled)
        num_computed = service.num_prefilled_tokens - before

        stream = service.run_one(greedy(prompt, 4))

        assert_exact(stream, oracle(FAMILY))
        if not cancelled.has_ended:
            assert num_computed - 1 <= stream.cached_tokens <= num_computed
        assert stream.cached_tokens <= 511


def test_cancelled_while_waiting_decoding_and_after_the_end() -> None:
    service, prompts = InProcess(FAMILY, num_pages=16), Prompts(22)
    with service.running() as engine:
        with held(service._runner, num_steps=4) as is_held:
            decoding = submit(engine, greedy(prompts.tokens(20), 200))
            waiting = submit(engine, greedy(prompts.tokens(200), 20))
            assert is_held.wait(TIMEOUT_S)
            cancel(engine, waiting)
            cancel(engine, decoding)
            cancel(engine, decoding)
        finished = submit(engine, greedy(prompts.tokens(20), 4)).wait()
        cancel(engine, finished)
        assert_exact(submit(engine, greedy(prompts.tokens(20), 4)).wait(), oracle(FAMILY))

    assert decoding.num_deltas >= 3
    assert not decoding.has_ended
    assert not waiting.has_ended


def test_two_thousand_mixed_requests_leave_nothing_behind() -> None:
    """Done, stopped, cancelled and refused ones, eight at a time, in a cache that holds a fraction of them."""
    # Small steps have few shapes: the matrix library keeps something for each shape that it meets, up to a limit
    # that 2,000 requests of all sizes would not reach, and that is not the growth looked for here.
    service, chooser = InProcess(FAMILY, num_pages=64, chunk=16, max_num_seqs=8), random.Random(1)
    tokens = list(range(3, VOCAB_SIZE))
    kinds = itertools.cycle(("done", "stopped", "cancelled", "shared", "sampled", "uncached", "refused", "samples"))
    shared = chooser.choices(tokens, k=40)
    process = psutil.Process()
    rss_bytes = []

    def start(engine: Engine, kind: str) -> Stream | None:
        prompt = chooser.choices(tokens, k=chooser.randint(1, 40))
        num_tokens = chooser.randint(1, 4)
        if kind == "refused":
            try:
                submit(engine, greedy(chooser.choices(tokens, k=40), 64 * 16))
            except InvalidRequest:
                return None
            raise AssertionError("more than the cache holds was accepted")
        if kind == "stopped":
            return submit(engine, greedy(prompt, 6, stop_token_ids=frozenset(range(0, VOCAB_SIZE, 2))))
        if kind == "shared":
            return submit(engine, greedy(shared[: chooser.randint(1, 40)] + prompt[:5], num_tokens))
        if kind == "sampled":
            return submit(engine, greedy(prompt, num_tokens, temperature=1.0, stop=("a", "ee")))
        if kind == "uncached":
            return submit(engine, greedy(prompt, num_tokens, use_cache=False))
        if kind == "samples":
            samples = {"num_samples": 2, "temperature": 1.0, "use_cache": chooser.random() < 0.5}
            return submit(engine, greedy(prompt, num_tokens, **samples))
        stream = submit(engine, greedy(prompt, 20 if kind == "cancelled" else num_tokens))
        if kind == "cancelled":
            cancel(engine, stream)
            return None
        return stream

    with service.running() as engine:
        for number in range(0, 2000, 8):
            streams = [start(engine, next(kinds)) for _ in range(8)]
            for stream in streams:
                if stream is not None:
                    assert stream.wait().error is None
            if number % 200 == 0:
                gc.collect()
                rss_bytes.append(process.memory_info().rss)
        assert engine.num_open == 0
        prompt = chooser.choices(tokens, k=30)
        assert_exact(submit(engine, greedy(prompt, 4)).wait(), oracle(FAMILY))

    assert service.cache.num_evicted_pages > 1000
    assert service.metrics.queue_depth._value.get() == 0
    assert rss_bytes[-1] - rss_bytes[2] < 0.05 * rss_bytes[2], f"memory grows: {rss_bytes}"
