"""The radix tree: which token prefixes are known, and which pages hold their K/V.

One tree for each namespace, all under one eviction policy. See `node.py` for the picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prefixcache.request import Namespace
from prefixcache.tree.eviction import EvictionPolicy
from prefixcache.tree.node import BYTES_PER_TOKEN, Node, PageDigest, Root, common_prefix_bytes


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a key is known. Valid until the tree changes.

        root ═══▶ A ═══▶ B [ p0 p1 p2│p3 … ]
                         ▲    ▲ num_node_pages = 2 whole pages of B match
                         node      └ partial page p2: its first `num_partial_tokens` tokens match too

    Attributes:
        num_tokens: Matching tokens in all.
        node: Deepest node of which whole pages match; None where the namespace is unknown.
        num_node_pages: Whole pages of `node` that match.
        source: Node that owns the partly matching page; None where the match ends on a page boundary.
        source_page: That page's index in `source.pages`.
        num_partial_tokens: How many of its tokens match.
        final_state: Final state of the prompt that ends exactly here, if the whole key matched and one is kept.
    """

    num_tokens: int = 0
    node: Node | None = None
    num_node_pages: int = 0
    source: Node | None = None
    source_page: int = 0
    num_partial_tokens: int = 0
    final_state: Any = None


@dataclass(frozen=True, slots=True)
class Evicted:
    """Pages that left the tree, whose they were, and what names them elsewhere (nothing for a partial page)."""

    namespace: Namespace
    pages: list[int]
    digests: list[PageDigest]


class RadixTree:
    """Token prefixes of all namespaces, with their pages. Engine thread only.

    The tree names pages, it does not own memory: every page that leaves the tree is handed back to the caller.

    Args:
        page_size: Tokens in one page.
        policy: Decides which unpinned leaf is evicted first.

    Attributes:
        num_pinned_pages: Pages that cannot be evicted now.
        num_leased_pages: Those of them that could not be, were every save given up.
    """

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_nodes = 0
        self.num_pinned_pages = 0
        self.num_leased_pages = 0
        self.version = 0  # changes with every change of what can be matched
        self._page_bytes = page_size * BYTES_PER_TOKEN
        self._policy = policy
        self._roots: dict[Namespace, Root] = {}
        self._tick = 0

    # --- look-up -----------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, key: bytes) -> Match:
        """Find the longest known prefix of `key`, to the token. Changes nothing."""
        root = self._roots.get(namespace)
        return Match() if root is None else self._match_below(root, key, 0)

    def match_below(self, node: Node, key: bytes, num_tokens: int) -> Match:
        """Like `match`, for a key whose first `num_tokens` tokens are known to end at `node`."""
        return self._match_below(node, key, num_tokens * BYTES_PER_TOKEN)

    def _match_below(self, node: Node, key: bytes, offset: int) -> Match:
        page_bytes, num_bytes = self._page_bytes, len(key)
        while (children := node.children) is not None and offset < num_bytes:
            child = children.get(key[offset : offset + page_bytes])
            if child is None:  # no child agrees on a whole page; one may agree on a part of it
                child, common = node.nearest_child(key, offset, page_bytes)
                if child is None:
                    break
                return self._match_inside(node, child, offset, common, key)
            edge_bytes = len(child.key)
            if edge_bytes != page_bytes and (edge_bytes < page_bytes or not key.startswith(child.key, offset)):
                return self._match_inside(node, child, offset, common_prefix_bytes(child.key, key, offset), key)
            node, offset = child, offset + edge_bytes
        state = node.final_states.get((len(node.pages), b"")) if offset == len(key) else None
        return Match(offset // BYTES_PER_TOKEN, node, len(node.pages), final_state=state)

    def _match_inside(self, node: Node, child: Node, offset: int, common: int, key: bytes) -> Match:
        """The match ends within `child`'s edge, `common` bytes below the end of `node`."""
        whole_pages, rest = divmod(common, self._page_bytes)
        num_node_pages = len(node.pages)
        if whole_pages:
            node, num_node_pages = child, whole_pages
        is_whole = offset + common == len(key)
        state = node.final_states.get((num_node_pages, key[len(key) - rest :])) if is_whole else None
        return Match(
            num_tokens=(offset + common) // BYTES_PER_TOKEN,
            node=node,
            num_node_pages=num_node_pages,
            source=child if rest else None,
            source_page=whole_pages,
            num_partial_tokens=rest // BYTES_PER_TOKEN,
            final_state=state,
        )

    # --- pins --------------------------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> Root:
        """Return the namespace's root, making one where there is none."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        return root

    def pin(self, node: Node, *, for_save: bool = False) -> None:
        """Keep `node` and the path above it from eviction, and count this as a use of them (I2)."""
        self._tick += 1
        step: Node | None = node
        while step is not None:
            if not step.is_pinned:
                self._policy.discard(step)
                self.num_pinned_pages += len(step.pages)
            if for_save:
                step.saves += 1
            else:
                self.num_leased_pages += len(step.pages) if step.pins == 0 else 0
                step.pins += 1
            step.last_used = self._tick
            step = step.parent

    def unpin(self, node: Node, *, for_save: bool = False) -> None:
        """Undo one `pin` of the same kind. Counts as a use: what was just finished with is the youngest."""
        self._tick += 1
        step: Node | None = node
        while step is not None:
            if for_save:
                step.saves -= 1
            else:
                step.pins -= 1
                self.num_leased_pages -= len(step.pages) if step.pins == 0 else 0
            assert min(step.pins, step.saves) >= 0, "a node was unpinned more often than pinned"
            step.last_used = self._tick
            if not step.is_pinned:
                self.num_pinned_pages -= len(step.pages)
                self._settle(step)
            step = step.parent

    def _settle(self, node: Node) -> None:
        """Put a node where it belongs after its pins or children changed: policy, nowhere, or gone (empty root)."""
        if node.is_evictable:
            self._policy.add(node)
        elif isinstance(node, Root) and not node.children and not node.is_pinned:
            self._roots.pop(node.namespace, None)

    # --- growth ------------------------------------------------------------------------------------------------

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` after its first `num_pages` pages and return the new upper part.

        `node` itself stays the lower part, so a lease on it still holds the whole path; the upper part takes over
        its pins (every path through the lower part runs through the upper one).
        """
        assert 0 < num_pages < len(node.pages)
        assert node.parent is not None
        cut = num_pages * self._page_bytes
        parent, states = node.parent, node.final_states
        upper = Node(
            parent=parent,
            key=node.key[:cut],
            pages=node.pages[:num_pages],
            pins=node.pins,
            saves=node.saves,
            last_used=node.last_used,
            final_states={place: state for place, state in states.items() if place[0] <= num_pages},
            digests=node.digests[:num_pages],
        )
        parent.add_child(upper, self._page_bytes)  # same first page: takes the place of `node`
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[num_pages:]
        node.digests = node.digests[num_pages:]
        node.final_states = {(p - num_pages, tail): state for (p, tail), state in states.items() if p > num_pages}
        upper.add_child(node, self._page_bytes)
        self.num_nodes += 1
        return upper

    def extend(self, node: Node, key: bytes, pages: list[int], digests: list[PageDigest]) -> tuple[Node, list[int]]:
        """Publish whole `pages`, holding the tokens `key` and named by `digests`, below the pinned `node`.

        No child of `node` may match a whole page of `key` yet; the caller has looked.
        `node` itself grows where the caller's pin is the only one and nothing hangs below, so that a prompt that is
        computed in chunks, or a chat that goes on, makes one long node and not a chain.

        Returns:
            The node that now ends with `key`, pinned in place of `node`; and pages that are no longer needed.
        """
        freed = self._absorb(node, key)
        self.version += 1
        self.num_pages += len(pages)
        self.num_pinned_pages += len(pages)
        self.num_leased_pages += len(pages)
        if node.parent is not None and not node.children and node.pins + node.saves == 1:
            node.key += key
            node.pages += pages
            node.digests += digests
            return node, freed
        child = Node(node, key, pages, pins=1, last_used=node.last_used, digests=digests)
        node.add_child(child, self._page_bytes)
        self.num_nodes += 1
        return child, freed

    def add_partial(self, node: Node, key: bytes, page: int) -> list[int]:
        """Publish a page that holds only the few tokens `key` as a leaf below `node`, free to be copied from.

        No child of `node` may begin with `key` yet; the caller has looked.

        Returns:
            Pages that are no longer needed.
        """
        assert 0 < len(key) < self._page_bytes
        freed = self._absorb(node, key)
        self.version += 1
        leaf = Node(node, key, [page], last_used=node.last_used)
        node.add_child(leaf, self._page_bytes)
        self.num_nodes += 1
        self.num_pages += 1
        self._policy.discard(node)
        self._policy.add(leaf)
        return freed

    def _absorb(self, node: Node, key: bytes) -> list[int]:
        """Remove the partial leaf below `node` that `key` continues, if there is one, and return its page.

        There is at most one, and it is then the nearest child: no leaf is ever kept beside a sibling it begins.
        Leases never pin a partial leaf (they copy it), so it can always go.
        """
        leaf, common = node.nearest_child(key, 0, self._page_bytes)
        if leaf is None or common < len(leaf.key) or common == self._page_bytes:
            return []
        self._unlink(leaf)
        return leaf.pages

    # --- shrinking ---------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> list[Evicted]:
        """Give up at least `num_pages` pages if there are that many unpinned ones, tails before heads (I6).

        Returns:
            What was given up, in that order; fewer pages than asked for where everything else is in use.
        """
        evicted: list[Evicted] = []
        num_evicted = 0
        while num_evicted < num_pages and (node := self._policy.victim()) is not None:
            missing = num_pages - num_evicted
            if missing < len(node.pages):
                evicted.append(self._cut_tail(node, missing))
            else:
                evicted.append(Evicted(_root(node).namespace, node.pages, node.digests))
                self._remove(node)
            num_evicted += len(evicted[-1].pages)
        return evicted

    def drop(self, namespace: Namespace) -> list[Evicted]:
        """Forget every unpinned node of a namespace and return what that was."""
        evicted: list[Evicted] = []
        root = self._roots.get(namespace)
        if root is not None:
            for node in reversed(list(_walk(root))):  # children before parents
                if node.is_evictable:
                    evicted.append(Evicted(namespace, node.pages, node.digests))
                    self._remove(node)
        return evicted

    def _cut_tail(self, node: Node, num_pages: int) -> Evicted:
        self.version += 1
        keep = len(node.pages) - num_pages
        evicted = Evicted(_root(node).namespace, node.pages[keep:], node.digests[keep:])
        node.pages, node.digests = node.pages[:keep], node.digests[:keep]
        node.key = node.key[: keep * self._page_bytes]
        last = (keep, b"")
        node.final_states = {place: state for place, state in node.final_states.items() if place <= last}
        self.num_pages -= num_pages
        return evicted

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        self._unlink(node)
        end = len(parent.pages)  # final states of prompts that end inside the node's first page go with it
        for size in range(BYTES_PER_TOKEN, min(len(node.key) + 1, self._page_bytes), BYTES_PER_TOKEN):
            parent.final_states.pop((end, node.key[:size]), None)
        self._settle(parent)

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        assert not node.is_pinned
        self.version += 1
        self._policy.discard(node)
        node.parent.remove_child(node, self._page_bytes)
        self.num_nodes -= 1
        self.num_pages -= len(node.pages)

    # --- inspection --------------------------------------------------------------------------------------------

    def path_pages(self, node: Node) -> list[int]:
        """List the page ids from the root down to the end of `node`."""
        runs: list[list[int]] = []
        step: Node | None = node
        while step is not None:
            runs.append(step.pages)
            step = step.parent
        return [page for run in reversed(runs) for page in run]

    def namespaces(self) -> list[Namespace]:
        """List those that hold anything."""
        return list(self._roots)

    def top_nodes(self, namespace: Namespace) -> list[Node]:
        """List the nodes with which a namespace's prompts begin."""
        root = self._roots.get(namespace)
        return list(root.children.values()) if root is not None and root.children else []

    def nodes(self) -> Iterator[Node]:
        """Walk every node of every namespace, parents before children, roots included."""
        for root in self._roots.values():
            yield from _walk(root)

    def check(self) -> None:
        """Assert the tree's own invariants (I2, I6 and the counters). Takes time in proportion to the tree."""
        pages: list[int] = []
        num_nodes = pinned = leased = 0
        for node in self.nodes():
            children = list(node.children.values()) if node.children else []
            assert node.pins >= sum(child.pins for child in children), "I2: a child has more pins than its parent"
            assert node.saves >= sum(child.saves for child in children), "I2: a child has more saves than its parent"
            assert all(child.parent is node for child in children)
            assert all(child.last_used <= node.last_used for child in children), "a parent looks older than its child"
            if node.parent is not None:
                num_nodes += 1
                pages += node.pages
                pinned += len(node.pages) if node.is_pinned else 0
                leased += len(node.pages) if node.pins else 0
                self._check_run(node, children)
            self._check_final_states(node)
        assert len(pages) == len(set(pages)) == self.num_pages, "a page is in the tree twice, or not counted"
        assert num_nodes == self.num_nodes
        assert (pinned, leased) == (self.num_pinned_pages, self.num_leased_pages)

    def _check_run(self, node: Node, children: list[Node]) -> None:
        whole, rest = divmod(len(node.key), self._page_bytes)
        assert node.key, "an empty edge"
        if rest:
            assert whole == 0, "a partial page at the end of a full node"
            assert not children, "a partial leaf with children"
            assert not node.is_pinned, "a pinned partial leaf"
        assert len(node.pages) == whole + bool(rest)
        assert len(node.digests) in {0, whole}

    def _check_final_states(self, node: Node) -> None:
        for num_pages, tail in node.final_states:
            assert num_pages <= len(node.pages)
            assert len(tail) < self._page_bytes
            own = node.key[num_pages * self._page_bytes :]
            _, common = node.nearest_child(tail, 0, self._page_bytes)
            assert own.startswith(tail) or common == len(tail), "a final state without its K/V"


def _root(node: Node) -> Root:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node


def _walk(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        if node.children:
            stack.extend(node.children.values())
