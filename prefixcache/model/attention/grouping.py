"""Find what decoding sequences share, so that shared K/V is read once for all of them.

    pages of A  │ 0 1 2 3 4 5 │ 9 │          run 0-5: queries of A, B, C together
    pages of B  │ 0 1 2 3 4 5 │ 7 8 │   ──▶  run 7-8: B and C together
    pages of C  │ 0 1 2 3 4 5 │ 7 8 │ 12     page 9: A alone; page 12: C alone

Because pages are shared in the tree only whole, comparing page ids is enough; nested sharing falls out by recursion.
Pure Python.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Pages that stand at the same place in the page tables of all `members`."""

    members: list[int]
    pages: list[int]


def shared_runs(page_tables: list[list[int]], num_whole_pages: list[int], min_pages: int) -> list[SharedRun]:
    """Split the page tables' whole pages into runs, each with all the sequences that share it.

    Args:
        page_tables: One for each sequence.
        num_whole_pages: How many leading pages of each may be shared (those that are full).
        min_pages: A shared run shorter than this is left to each sequence alone.

    Returns:
        Runs with two members or more, each member's in token order. What lies behind a sequence's last run is its own.
    """
    runs: list[SharedRun] = []
    _collect(page_tables, num_whole_pages, list(range(len(page_tables))), 0, min_pages, runs)
    return runs


def _collect(
    page_tables: list[list[int]],
    num_whole_pages: list[int],
    members: list[int],
    depth: int,
    min_pages: int,
    runs: list[SharedRun],
) -> None:
    """Add the runs that start at page index `depth`, where all `members` agree on what came before."""
    by_page: dict[int, list[int]] = {}
    for member in members:
        if depth < num_whole_pages[member]:
            by_page.setdefault(page_tables[member][depth], []).append(member)
    for group in by_page.values():
        if len(group) < 2:
            continue
        first = page_tables[group[0]]
        end = min(num_whole_pages[member] for member in group)
        for member in group[1:]:
            end = _agreement(first, page_tables[member], depth, end)
        if end - depth >= min_pages:
            runs.append(SharedRun(group, first[depth:end]))
            _collect(page_tables, num_whole_pages, group, end, min_pages, runs)


def _agreement(a: list[int], b: list[int], start: int, end: int) -> int:
    """Find the first index in [start, end) at which `a` and `b` differ, else `end`."""
    if a[start:end] == b[start:end]:
        return end
    low, high = start, end
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
