"""Shared runs: by hand, by what they must mean, and against a search page by page."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.model.attention.grouping import SharedRun, shared_runs


def whole(tables: list[list[int]]) -> list[int]:
    return [len(table) for table in tables]


def test_nested_sharing() -> None:
    tables = [[0, 1, 2, 9], [0, 1, 2, 7, 8], [0, 1, 2, 7, 8, 12], [5, 6]]

    assert shared_runs(tables, whole(tables), min_pages=1) == [
        SharedRun([0, 1, 2], [0, 1, 2]),
        SharedRun([1, 2], [7, 8]),
    ]


def test_two_families_and_a_stranger() -> None:
    tables = [[0, 1], [4, 5, 6], [0, 2], [4, 5, 7], [3]]

    assert shared_runs(tables, whole(tables), min_pages=1) == [SharedRun([0, 2], [0]), SharedRun([1, 3], [4, 5])]


def test_the_same_page_at_another_place_is_not_shared() -> None:
    assert shared_runs([[0, 1], [2, 1]], [2, 2], min_pages=1) == []


def test_pages_that_are_not_whole_are_left_out() -> None:
    tables = [[0, 1, 2], [0, 1, 2]]

    assert shared_runs(tables, [3, 2], min_pages=1) == [SharedRun([0, 1], [0, 1])]
    assert shared_runs(tables, [3, 0], min_pages=1) == []


def test_one_table_may_be_the_beginning_of_another() -> None:
    tables = [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]

    assert shared_runs(tables, whole(tables), min_pages=1) == [
        SharedRun([0, 1, 2], [0, 1]),
        SharedRun([1, 2], [2, 3]),
    ]


def test_a_short_run_ends_the_search_below_it() -> None:
    tables = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 9]]

    assert shared_runs(tables, whole(tables), min_pages=2) == []
    assert shared_runs(tables[:2], [4, 4], min_pages=2) == [SharedRun([0, 1], [0, 1, 2, 3])]


def test_nothing_to_share() -> None:
    assert shared_runs([], [], min_pages=1) == []
    assert shared_runs([[0, 1]], [2], min_pages=1) == []


# Few page ids and tables grown from each other: most draws share something, many are nested.
@st.composite
def tables_and_lengths(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    tables: list[list[int]] = []
    for _ in range(draw(st.integers(0, 7))):
        stem = draw(st.sampled_from(tables)) if tables else []
        keep = draw(st.integers(0, len(stem)))
        tables.append(stem[:keep] + draw(st.lists(st.integers(0, 3), max_size=12)))
    return tables, [draw(st.sampled_from([len(table), len(table) // 2])) for table in tables]


@settings(max_examples=120)
@given(tables_and_lengths())
def test_two_sequences_share_exactly_the_pages_on_which_they_agree(drawn: tuple[list[list[int]], list[int]]) -> None:
    tables, lengths = drawn
    runs = shared_runs(tables, lengths, min_pages=1)

    for a in range(len(tables)):
        for b in range(a):
            agreed = 0
            while agreed < min(lengths[a], lengths[b]) and tables[a][agreed] == tables[b][agreed]:
                agreed += 1
            assert sum(len(run.pages) for run in runs if {a, b} <= set(run.members)) == agreed


@settings(max_examples=120)
@given(tables_and_lengths(), st.integers(1, 5))
def test_runs_are_what_they_say(drawn: tuple[list[list[int]], list[int]], min_pages: int) -> None:
    tables, lengths = drawn
    num_done = [0] * len(tables)

    for run in shared_runs(tables, lengths, min_pages):
        assert len(set(run.members)) == len(run.members) >= 2
        assert len(run.pages) >= min_pages
        for member in run.members:
            end = num_done[member] + len(run.pages)
            assert tables[member][num_done[member] : end] == run.pages
            assert end <= lengths[member]
            num_done[member] = end


@settings(max_examples=120)
@given(tables_and_lengths(), st.integers(1, 5))
def test_equals_a_search_page_by_page(drawn: tuple[list[list[int]], list[int]], min_pages: int) -> None:
    tables, lengths = drawn
    found: list[SharedRun] = []

    def search(members: list[int], depth: int) -> None:
        for page in sorted({tables[m][depth] for m in members if depth < lengths[m]}):
            group = [m for m in members if depth < lengths[m] and tables[m][depth] == page]
            end = depth
            while all(end < lengths[m] for m in group) and len({tables[m][end] for m in group}) == 1:
                end += 1
            if len(group) > 1 and end - depth >= min_pages:
                found.append(SharedRun(group, tables[group[0]][depth:end]))
                search(group, end)

    search(list(range(len(tables))), 0)

    def key(run: SharedRun) -> tuple[list[int], list[int]]:
        return run.members, run.pages

    assert sorted(shared_runs(tables, lengths, min_pages), key=key) == sorted(found, key=key)
