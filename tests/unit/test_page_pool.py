import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.kv.layout import KVLayout, MemoryPlan
from prefixcache.kv.page_pool import FreeRuns, PagePool, page_runs

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype=torch.float32, page_size=4)


def test_pages_come_consecutive_and_follow_the_given_one() -> None:
    free = FreeRuns(20)
    first = free.take(5)
    assert first == [0, 1, 2, 3, 4]
    assert free.take(3, after=4) == [5, 6, 7]
    free.give([1, 2, 3])
    assert free.take(2, after=0) == [1, 2]
    assert free.take(4) == [8, 9, 10, 11], "the longest run is taken first"


def test_a_request_larger_than_any_run_is_pieced_together() -> None:
    free = FreeRuns(10)
    free.take(10)
    free.give([0, 1, 2, 5, 6, 9])
    assert sorted(free.take(6)) == [0, 1, 2, 5, 6, 9]
    assert free.num_free == 0


def test_freeing_twice_is_an_error() -> None:
    free = FreeRuns(8)
    free.take(4)
    free.give([1])
    with pytest.raises(AssertionError, match="freed twice"):
        free.give([1])
    with pytest.raises(AssertionError, match="freed twice"):
        free.give([6])


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 100), st.booleans()), max_size=60))
def test_free_runs_agree_with_a_plain_set(steps: list[tuple[int, int, bool]]) -> None:
    free, model, held = FreeRuns(24), set(range(24)), []
    for count, pick, takes in steps:
        if takes and count <= len(model):
            after = held[pick % len(held)][-1] if held else None
            pages = free.take(count, after)
            assert len(set(pages)) == count
            assert model.issuperset(pages)
            if after is not None and after + 1 in model:
                assert pages[0] == after + 1
            model.difference_update(pages)
            held.append(pages)
        elif held:
            pages = held.pop(pick % len(held))
            free.give(pages)
            model.update(pages)
        assert free.num_free == len(model)
        assert {page for page in range(24) if page in free} == model


def test_a_pool_allocates_copies_and_frees() -> None:
    pool = PagePool(LAYOUT, num_pages=4, device=torch.device("cpu"))
    assert pool.kv.shape == (2, 2, 16, 1, 2)
    pages = pool.try_allocate(3)
    assert pages == [0, 1, 2]
    assert pool.try_allocate(2) is None
    assert pool.num_free == 1
    pool.kv[:, :, 0:4] = 7.0
    pool.copy_page(0, 2)
    assert bool((pool.kv[:, :, 8:12] == 7.0).all())
    assert bool((pool.kv[:, :, 4:8] == 0.0).all())
    pool.free(pages)
    assert pool.num_free == 4


def test_page_runs_keep_token_order() -> None:
    assert page_runs([4, 5, 6, 2, 3, 9]) == [(4, 3), (2, 2), (9, 1)]
    assert page_runs([]) == []


def test_memory_plan_arithmetic() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    assert layout.bytes_per_token == 30 * 2 * 3 * 64 * 2 == 23_040
    plan = MemoryPlan.from_bytes(layout, 1 << 30, max_model_len=8192)
    assert plan.num_pages == (1 << 30) // (23_040 * 16)
    assert plan.num_bytes <= 1 << 30
    assert MemoryPlan.from_tokens(layout, 1000, max_model_len=8192).num_tokens == 1008
