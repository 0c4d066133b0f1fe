"""What one request costs the others, and what is counted of it."""

import random

from tests.support.in_process import InProcess, Stream, greedy
from tests.support.models import VOCAB_SIZE


def test_many_followers_do_not_hide_a_short_prompt_behind_them():
    service, chooser = InProcess(num_pages=2000, chunk=16), random.Random(0)
    document = [chooser.randrange(3, VOCAB_SIZE) for _ in range(1500)]
    num_prefilled = []

    class Watched(Stream):
        def put(self, item):
            num_prefilled.append(service.num_prefilled_tokens)
            super().put(item)

    engine = service._new_engine()
    streams = [Stream(greedy(document, 2, num_samples=16)) for _ in range(5)] + [Watched(greedy([7, 8, 9], 1))]
    for stream in streams:
        engine.submit(stream.request, stream)
    engine.start()
    for stream in streams:
        stream.wait()
    engine.stop(10)
    assert num_prefilled[0] < 100


def test_prefilled_tokens_are_prompt_tokens_also_after_a_preemption() -> None:
    service = InProcess(num_pages=16)
    service.run(*(greedy([3 + n] * 10, 60, use_cache=False) for n in range(4)))
    assert service.num_preemptions == 1
    assert service.num_prefilled_tokens == 5 * 10
