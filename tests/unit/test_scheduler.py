"""The scheduler on a real cache of tiny pages; the model is played by `compute`, which only moves counters."""

import pytest
import torch

from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.engine.scheduler import MAX_OVERTAKEN, Scheduler, StepPlan
from prefixcache.engine.sequence import Sequence, SequenceState
from prefixcache.kv.layout import KVLayout
from prefixcache.kv.page_pool import PagePool
from prefixcache.request import Namespace
from prefixcache.tree.eviction import LeastRecentlyUsed
from prefixcache.tree.radix import RadixTree

PAGE_SIZE = 4
NAMESPACE = Namespace()


class Rig:
    """A scheduler, its cache, and steps that compute nothing but keep all books."""

    def __init__(self, num_pages: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 16) -> None:
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, page_size=PAGE_SIZE)
        self.cache = PrefixCache(
            RadixTree(PAGE_SIZE, LeastRecentlyUsed()), PagePool(layout, num_pages, torch.device("cpu"))
        )
        self.scheduler = Scheduler(self.cache, max_num_seqs, max_num_batched_tokens)
        self.num_arrived = 0

    def add(
        self, tokens: list[int], max_tokens: int = 8, namespace: Namespace | None = NAMESPACE, tenant: str = ""
    ) -> Sequence:
        sequence = Sequence(self.num_arrived, namespace, list(tokens), max_tokens, tenant)
        self.num_arrived += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for work in plan.work:
            sequence = work.sequence
            sequence.num_computed_tokens += work.num_tokens
            if sequence.num_uncomputed_tokens == 0:
                if sequence.num_output_tokens == 0:
                    self.cache.commit_prompt(sequence.lease, sequence.prompt_key, "state")
                sequence.token_ids.append(1000 + sequence.arrival)
                if sequence.num_output_tokens >= sequence.max_tokens:
                    self.scheduler.finish(sequence)
            else:
                self.cache.commit(sequence.lease, sequence.key(), sequence.num_computed_tokens)
        self.cache.check()
        return plan

    def run(self, max_steps: int = 500) -> int:
        for count in range(max_steps):
            if not self.scheduler.has_work:
                return count
            self.step()
        pytest.fail("sequences were left over")


def tokens_of(plan: StepPlan) -> dict[int, int]:
    return {work.sequence.arrival: work.num_tokens for work in plan.work}


def test_a_long_prompt_is_computed_in_chunks_and_decodes_come_first() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.add([1, 2, 3], max_tokens=8)
    assert tokens_of(rig.step()) == {0: 3}
    rig.add(list(range(100, 140)))
    assert tokens_of(rig.step()) == {0: 1, 1: 15}
    assert tokens_of(rig.step()) == {0: 1, 1: 15}
    assert tokens_of(rig.step()) == {0: 1, 1: 10}
    assert tokens_of(rig.step()) == {0: 1, 1: 1}


def test_an_equal_prompt_needs_no_forward_pass() -> None:
    rig = Rig()
    rig.add([1, 2, 3, 4, 5, 6], max_tokens=1)
    rig.step()
    repeated = rig.add([1, 2, 3, 4, 5, 6], max_tokens=2)
    assert tokens_of(rig.step()) == {1: 0}
    assert repeated.num_cached_tokens == 5  # never the whole prompt
    assert tokens_of(rig.step()) == {1: 1}


def test_generated_tokens_but_the_last_are_known_afterwards() -> None:
    rig = Rig()
    first = rig.add([1, 2, 3, 4, 5, 6], max_tokens=5)
    rig.run()
    follow_up = rig.add([*first.token_ids, 7, 8])
    rig.step()
    assert follow_up.num_cached_tokens == 6 + 5 - 1


def test_a_shared_new_prefix_is_computed_once() -> None:
    rig = Rig(max_num_batched_tokens=16)
    prefix = list(range(100, 132))
    for last in range(6):
        rig.add([*prefix, last, last])
    computed = 0
    while rig.scheduler.has_work:
        computed += sum(w.num_tokens for w in rig.step().work if w.sequence.num_output_tokens <= 1)
    assert computed <= len(prefix) + 6 * (2 + PAGE_SIZE)


def test_a_follower_takes_over_when_its_leader_is_cancelled() -> None:
    rig = Rig(max_num_batched_tokens=8)
    prefix = list(range(100, 140))
    leader = rig.add([*prefix, 1])
    follower = rig.add([*prefix, 2])
    assert tokens_of(rig.step()) == {0: 8}
    assert tokens_of(rig.step()) == {0: 8}
    rig.scheduler.finish(leader)
    plan = rig.step()
    assert tokens_of(plan) == {1: 8}
    assert follower.num_cached_tokens == 16  # what the leader had finished is not computed again
    rig.run()


def test_namespaces_do_not_wait_for_each_other() -> None:
    rig = Rig(max_num_batched_tokens=32)
    prompt = list(range(100, 112))
    rig.add(prompt, namespace=Namespace(salt="a"))
    rig.add(prompt, namespace=Namespace(salt="b"))
    rig.add(prompt, namespace=None)
    assert tokens_of(rig.step()) == {0: 12, 1: 12, 2: 8}
    rig.run()


def test_short_rests_overtake_but_not_for_ever() -> None:
    rig = Rig(num_pages=256, max_num_seqs=8, max_num_batched_tokens=8)
    long = rig.add(list(range(1000, 1200)), max_tokens=1)
    for count in range(MAX_OVERTAKEN):
        assert long.num_computed_tokens == 0, f"served in step {count}"
        rig.add([count * 10 + i for i in range(8)], max_tokens=1)
        rig.step()
    # passed over often enough: served although shorter ones keep coming
    rig.add(list(range(500, 508)), max_tokens=1)
    rig.step()
    assert long.num_computed_tokens == 8
    rig.run()


def test_tenants_come_by_turns_however_many_one_of_them_sends() -> None:
    rig = Rig(num_pages=1024, max_num_seqs=1)
    many = [rig.add([100 * n + i for i in range(4)], max_tokens=1, tenant="many") for n in range(200)]
    rig.step()
    few = [rig.add(list(range(5000 * n, 5000 * n + 12)), max_tokens=1, tenant="few") for n in (1, 2, 3)]
    for _ in range(6):
        rig.step()
    assert all(sequence.state is SequenceState.FINISHED for sequence in few)
    assert sum(sequence.state is SequenceState.FINISHED for sequence in many) == 4
    rig.run()


def test_tenants_share_the_tokens_of_a_step_by_turns() -> None:
    rig = Rig(num_pages=256, max_num_batched_tokens=8)
    rig.add(list(range(1000, 1024)), max_tokens=1, tenant="a")
    assert tokens_of(rig.step()) == {0: 8}
    rig.add(list(range(2000, 2040)), max_tokens=1, tenant="b")
    assert [tokens_of(rig.step()) for _ in range(4)] == [{1: 8}, {0: 8}, {1: 8}, {0: 8}]
    rig.run()


def test_what_comes_before_a_new_sequence() -> None:
    rig = Rig(max_num_seqs=2, max_num_batched_tokens=8)
    rig.add([1, 2, 3], max_tokens=8)
    running = rig.add(list(range(100, 120)))
    assert tokens_of(rig.step()) == {0: 3, 1: 5}
    short, long = rig.add([7, 8]), rig.add(list(range(200, 240)))
    rig.add([9], tenant="other")
    new = Sequence(99, NAMESPACE, list(range(300, 320)), 8)
    assert rig.scheduler.ahead_of(new) == [(running, 5, False), (short, 0, True)]
    longer = Sequence(99, NAMESPACE, list(range(300, 350)), 8)
    assert rig.scheduler.ahead_of(longer) == [(running, 5, False), (short, 0, True), (long, 0, True)]


def test_what_others_compute_anyway_is_no_work_of_ones_own() -> None:
    rig = Rig(max_num_seqs=1, max_num_batched_tokens=8)
    rig.add(list(range(100, 140)))
    rig.step()
    rig.add([*range(200, 220), 1])

    def coming(tokens: list[int], namespace: Namespace = NAMESPACE) -> int:
        return rig.scheduler.num_coming_tokens(Sequence(99, namespace, tokens, 8))

    assert coming([*range(100, 130), 7, 7]) == 30  # runs
    assert coming([*range(200, 220), 2]) == 20  # waits
    assert coming(list(range(200, 220))) == 19  # the last one is run in any case
    assert coming(list(range(100, 106))) == 5
    assert coming(list(range(300, 320))) == 0
    assert coming([*range(100, 130), 7, 7], Namespace(salt="other")) == 0


def test_the_youngest_is_preempted_and_all_end() -> None:
    rig = Rig(num_pages=10, max_num_seqs=4, max_num_batched_tokens=64)
    sequences = [rig.add([100 * n + i for i in range(8)], max_tokens=20) for n in range(4)]
    num_preempted = 0
    for _ in range(500):
        if not rig.scheduler.has_work:
            break
        num_preempted += rig.step().num_preempted
    assert num_preempted > 0
    assert all(s.state is SequenceState.FINISHED and s.num_output_tokens == 20 for s in sequences)
    assert all(s.num_cached_tokens == 0 for s in sequences), "tokens of a preempted run counted as cached"
    assert rig.cache.page_counts().in_use == 0


def test_a_prompt_that_waits_for_pages_is_not_starved_by_small_ones() -> None:
    rig = Rig(num_pages=12, max_num_seqs=8, max_num_batched_tokens=64)
    rig.add([1, 2, 3, 4], max_tokens=20)
    rig.step()
    large = rig.add(list(range(1000, 1040)), max_tokens=4)  # 11 pages: only when the first is done
    steps = 0
    while large.state is not SequenceState.FINISHED:
        rig.add([2000 + 10 * steps + i for i in range(4)], max_tokens=4)
        rig.step()
        steps += 1
        assert steps < 80, "the large prompt starves"


def test_a_prompt_that_just_fits_is_admitted_beside_what_is_cached() -> None:
    rig = Rig(num_pages=4)
    rig.add([1, 2, 3, 4, 5, 6], max_tokens=1)
    rig.run()
    # matches six tokens, one and a half pages; needs all four pages itself, so the half page cannot be copied
    sequence = rig.add([1, 2, 3, 4, 5, 6, *range(50, 58)], max_tokens=2)
    rig.run()
    assert sequence.num_output_tokens == 2
    assert sequence.num_cached_tokens == 4


def test_cancel_in_every_state_gives_everything_back() -> None:
    rig = Rig(max_num_batched_tokens=8)
    running = rig.add(list(range(20)))
    rig.step()
    waiting = rig.add(list(range(20)))
    rig.scheduler.finish(waiting)
    rig.scheduler.finish(running)
    rig.cache.check()
    assert not rig.scheduler.has_work
    assert rig.cache.page_counts().in_use == 0
    assert rig.cache.num_known_tokens(NAMESPACE, running.prompt_key) == 8  # what was computed stays useful
