"""A node's children: the nearest one is found with an order and without."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.tree.node import MAX_UNORDERED, Children, Node, common_prefix_bytes, token_key

# few tokens, so that pages share beginnings of every length
PAGES = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(token_key)


def node(page: bytes) -> Node:
    return Node(parent=None, key=page, pages=[0])


@given(steps=st.lists(st.tuples(st.booleans(), PAGES), max_size=60), wanted=st.lists(PAGES, min_size=1, max_size=5))
def test_the_nearest_child_agrees_on_as_much_as_any(steps: list[tuple[bool, bytes]], wanted: list[bytes]):
    """While children come and go, across the number from which an order is kept."""
    children = Children()
    for is_new, page in steps:
        if is_new:
            children.add(page, node(page))
        elif page in children:
            children.remove(page)
        for sought in wanted:
            child, common = children.nearest(sought)
            assert common == max((common_prefix_bytes(other, sought, 0) for other in children), default=0)
            if common:
                assert child is not None
                assert common_prefix_bytes(child.key, sought, 0) == common
            else:
                assert child is None


def test_a_child_takes_the_place_of_the_one_that_begins_alike():
    children = Children()
    pages = [token_key([number, 7]) for number in range(MAX_UNORDERED + 5)]
    for page in pages:
        children.add(page, node(page))
    successor = node(pages[3])

    children.add(pages[3], successor)

    assert children.nearest(pages[3]) == (successor, len(pages[3]))
    children.remove(pages[3])
    assert children.nearest(token_key([3])) == (None, 0)
    assert len(children) == len(pages) - 1
