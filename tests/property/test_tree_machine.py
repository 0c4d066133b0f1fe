"""Tree and page pool, driven at random through PrefixCache, against a set of token lists.

The pool is real. Every slot is written with a digest of the whole history that leads to it, namespace included, so a
page that is published too early, overwritten, swapped or lent to the wrong prompt shows in its content:

    slot of position i   holds   digest(namespace, tokens[0..i])     as 4 numbers in K and 4 others in V
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixcache.cache.mover import TierMover
from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.kv.layout import KVLayout
from prefixcache.kv.page_pool import PagePool
from prefixcache.request import Namespace
from prefixcache.tree.events import PageEvent, PageJournal
from prefixcache.tree.eviction import LeastRecentlyUsed
from prefixcache.tree.lease import Lease
from prefixcache.tree.node import BYTES_PER_TOKEN, Node, Root, token_key
from prefixcache.tree.radix import RadixTree
from tests.support.follower import Follower

PAGE_SIZE = 4
NUM_PAGES = 10
FIRST_SEQUENCE = 100
NAMESPACES = (Namespace(), Namespace(tenant="a"), Namespace(salt="a"))

Tokens = tuple[int, ...]


def digest(namespace: Namespace | None, history: Tokens) -> torch.Tensor:
    """What a correct slot holds: [K or V, kv_head, head_dim], exact in float32."""
    raw = hashlib.sha256(repr((namespace, history)).encode()).digest()[:16]
    return torch.tensor([int.from_bytes(raw[i : i + 2]) for i in range(0, 16, 2)]).float().view(2, 1, 4)


def common_length(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(eq=False)
class Held:
    """One live sequence: its lease, its tokens, and how many of them have K/V."""

    lease: Lease
    namespace: Namespace | None
    tokens: Tokens
    num_computed: int

    @property
    def private_pages(self) -> list[int]:
        return self.lease.page_table[self.lease.num_shared_pages :]


class Writes:
    """Stands in for the mover: writes that begin when pages are published, and end when the machine says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Callable[[], None]]] = []  # pages from the root on that are kept for it

    def save(self, chain: object, key: bytes, start: int, pages: list[int], unpin: Callable[[], None]) -> None:
        self.waiting.append((start + len(pages), unpin))

    def give_up_save(self) -> bool:
        if self.waiting:
            self.end(len(self.waiting) - 1)
            return True
        return False

    def end(self, index: int) -> None:
        self.waiting.pop(index)[1]()


@settings(max_examples=150, stateful_step_count=40)
class CacheMachine(RuleBasedStateMachine):
    """`known` is the model: for each namespace, the token lists of which every prefix can be reused."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE_SIZE, LeastRecentlyUsed())
        self.pool = PagePool(KVLayout(1, 1, 4, torch.float32, PAGE_SIZE), NUM_PAGES, torch.device("cpu"))
        self.batches: list[tuple[int, list[PageEvent]]] = []
        journal = PageJournal(FIRST_SEQUENCE, lambda sequence, events: self.batches.append((sequence, events)))
        self.writes = Writes()
        self.cache = PrefixCache(self.tree, self.pool, mover=cast("TierMover", self.writes), journal=journal)
        self.followers: list[Follower] = []
        self.held: list[Held] = []
        self.known: dict[Namespace, set[Tokens]] = {namespace: set() for namespace in NAMESPACES}
        self.sure_states: set[tuple[Namespace, Tokens]] = set()  # final states that nothing has evicted
        self.num_evicted_pages = 0

    # --- what the cache should know ------------------------------------------------------------------------------

    def known_length(self, namespace: Namespace | None, tokens: Tokens) -> int:
        if namespace is None:
            return 0
        return max((common_length(tokens, other) for other in self.known[namespace]), default=0)

    def publish(self, namespace: Namespace | None, tokens: Tokens) -> None:
        if namespace is not None and tokens:
            self.known[namespace].add(tokens)

    def forget_what_is_gone(self) -> None:
        """Take over what eviction left, after making sure that it added nothing and broke no prefix (I1)."""
        left: dict[Namespace, set[Tokens]] = {namespace: set() for namespace in NAMESPACES}
        for namespace, path in self.paths():
            tokens = tuple(token for node in path for token in memoryview(node.key).cast("I"))
            assert self.known_length(namespace, tokens) == len(tokens), "the tree knows what nobody published"
            left[namespace].add(tokens)
        self.known = left
        self.sure_states.clear()

    def paths(self) -> list[tuple[Namespace, list[Node]]]:
        """Every node with the path that leads to it, roots left out."""
        found = []
        for node in self.tree.nodes():
            path = [node]
            while path[0].parent is not None:
                path.insert(0, path[0].parent)
            assert isinstance(path[0], Root)
            if len(path) > 1:
                found.append((path[0].namespace, path[1:]))
        return found

    def after_eviction(self, num_absorbed_pages: int = 0) -> None:
        if self.cache.num_evicted_pages > self.num_evicted_pages:
            assert self.pool.num_free <= num_absorbed_pages, "more was evicted than was needed"
            self.num_evicted_pages = self.cache.num_evicted_pages
            self.forget_what_is_gone()

    # --- a sequence's life ---------------------------------------------------------------------------------------

    @initialize(prompts=st.lists(st.lists(st.sampled_from((1, 2)), min_size=1, max_size=12), max_size=3))
    def warm_up(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.acquire(NAMESPACES[0], tuple(prompt), 0, 0, True)
            if self.held:
                self.end(self.held[-1], by_release=True)

    @rule(data=st.data(), namespace=st.sampled_from((*NAMESPACES, NAMESPACES[0], NAMESPACES[0], None)))
    def start(self, data: st.DataObject, namespace: Namespace | None) -> None:
        tail = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=9)))
        head: Tokens = ()
        if namespace is not None and self.known[namespace] and data.draw(st.booleans()):
            head = data.draw(st.sampled_from(sorted(self.known[namespace])))
            head = head[: data.draw(st.integers(0, len(head)))]
        room = data.draw(st.integers(0, 6))
        spare = data.draw(st.integers(0, 6))
        self.acquire(namespace, head + tail, room, spare, data.draw(st.sampled_from((True, True, True, False))))

    @precondition(lambda self: any(self.known.values()))
    @rule(data=st.data(), cut=st.integers(0, 3))
    def start_again(self, data: st.DataObject, cut: int) -> None:
        """A prompt that is known to its end, or was, but for a few tokens."""
        namespace = data.draw(st.sampled_from([n for n in NAMESPACES if self.known[n]]))
        tokens = data.draw(st.sampled_from(sorted(self.known[namespace])))
        self.acquire(namespace, tokens[: max(1, len(tokens) - cut)], 1, 0, True)

    @precondition(lambda self: self.sure_states)
    @rule(data=st.data())
    def start_identical_prompt(self, data: st.DataObject) -> None:
        namespace, tokens = data.draw(st.sampled_from(sorted(self.sure_states)))
        self.acquire(namespace, tokens, 1, 0, True)

    def pick(self, data: st.DataObject) -> Held:
        return self.held[data.draw(st.integers(0, len(self.held) - 1), label="held")]

    def acquire(self, namespace: Namespace | None, tokens: Tokens, room: int, spare: int, reuse: bool) -> None:
        num_tokens = len(tokens) + room
        has_state = reuse and (namespace, tokens) in self.sure_states
        length = self.known_length(namespace, tokens) if reuse else 0
        usable = length if has_state else min(length, len(tokens) - 1)
        whole = usable // PAGE_SIZE * PAGE_SIZE
        before = self.cache.page_counts()
        must_fit = not self.held or self.fits_beside(self.read_pages(namespace, tokens[:whole]), num_tokens, whole)
        must_copy = self.fits_beside(self.read_nodes(namespace, tokens[:usable]), num_tokens, whole)

        lease = self.cache.try_acquire(
            namespace, token_key(tokens), num_tokens=num_tokens, num_spare_tokens=spare, reuse=reuse
        )
        if lease is None:
            assert num_tokens > NUM_PAGES * PAGE_SIZE or not must_fit, f"refused, though it fits: {before}"
            assert self.cache.page_counts() == before
            return
        self.held.append(Held(lease, namespace, tokens, lease.num_cached_tokens))
        assert len(lease.page_table) * PAGE_SIZE >= num_tokens
        if lease.final_state is not None:
            assert reuse
            assert lease.final_state == (namespace, tokens), "the final state of another prompt"
            assert lease.num_cached_tokens == len(tokens)
        elif must_copy or usable == whole:
            assert not has_state, "the final state of an identical prompt was not found"
            assert lease.num_cached_tokens == usable
        else:  # memory is so short that the page to copy from was given up
            assert lease.num_cached_tokens in (usable, whole)
        self.after_eviction()

    def fits_beside(self, read: list[set[int]], num_tokens: int, num_shared_tokens: int) -> bool:
        """Whether the pages that nobody uses, apart from those that the match reads, are enough for the rest."""
        used = {page for held in self.held for page in held.lease.page_table}
        num_private = self.cache.pages_for(num_tokens) - num_shared_tokens // PAGE_SIZE
        return all(num_private <= NUM_PAGES - len(used | pages) for pages in read)

    def read_pages(self, namespace: Namespace | None, tokens: Tokens) -> list[set[int]]:
        """For each path that begins with these known tokens, the pages that hold them."""
        num_pages = self.cache.pages_for(len(tokens))
        return [
            set([page for node in path for page in node.pages][:num_pages]) for path in self.begin(namespace, tokens)
        ]

    def read_nodes(self, namespace: Namespace | None, tokens: Tokens) -> list[set[int]]:
        """The same, with all other pages of the last node, which a lease may have to keep while it copies."""
        return [{page for node in path for page in node.pages} for path in self.begin(namespace, tokens)]

    def begin(self, namespace: Namespace | None, tokens: Tokens) -> list[list[Node]]:
        """The shortest paths that begin with these known tokens; siblings can begin alike."""
        paths: list[list[Node]] = [[]]
        for owner, path in self.paths():
            run = tuple(token for node in path for token in memoryview(node.key).cast("I"))
            is_shortest = len(run) - len(path[-1].key) // BYTES_PER_TOKEN < len(tokens)
            if owner == namespace and is_shortest and common_length(run, tokens) == len(tokens):
                paths.append(path)
        return paths

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        """One chunk of prefill."""
        held = self.pick(data)
        self.write(held, min(held.num_computed + num_tokens, len(held.tokens)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute_and_commit(self, data: st.DataObject) -> None:
        held = self.pick(data)
        self.write(held, len(held.tokens))
        self.cache.commit(held.lease, token_key(held.tokens), held.num_computed)
        self.note_commit(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        held = self.pick(data)
        self.cache.commit(held.lease, token_key(held.tokens), held.num_computed)
        self.note_commit(held)

    def note_commit(self, held: Held) -> None:
        whole = held.num_computed // PAGE_SIZE * PAGE_SIZE
        self.publish(held.namespace, held.tokens[:whole])
        if held.namespace is not None:
            assert held.lease.num_shared_pages >= whole // PAGE_SIZE

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish_prompt(self, data: st.DataObject) -> None:
        held = self.pick(data)
        self.write(held, len(held.tokens))
        self.cache.commit_prompt(held.lease, token_key(held.tokens), (held.namespace, held.tokens))
        self.note_commit(held)
        if held.namespace is None:
            return
        if self.cache.num_known_tokens(held.namespace, token_key(held.tokens)) == len(held.tokens):
            self.publish(held.namespace, held.tokens)
            self.after_eviction(num_absorbed_pages=1)
            self.sure_states.add((held.namespace, held.tokens))
        else:
            counts = self.cache.page_counts()
            assert counts.free == counts.cached == 0, "the end of a prompt was left out though there was room"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(1, 3), min_size=1, max_size=6))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        """The sequence goes on by tokens that it made itself."""
        held = self.pick(data)
        self.write(held, len(held.tokens))
        if self.cache.try_extend(held.lease, len(held.tokens) + len(tokens)):
            self.after_eviction()
            held.tokens += tuple(tokens)
            self.write(held, len(held.tokens) - 1)  # the last token's K/V does not exist yet
        else:
            counts = self.cache.page_counts()
            missing = self.cache.pages_for(len(held.tokens) + len(tokens)) - len(held.lease.page_table)
            assert counts.free + counts.cached < missing

    def write(self, held: Held, until: int) -> None:
        """Compute K/V up to token `until`, which must lie in the sequence's private pages (I5)."""
        for position in range(held.num_computed, until):
            index, offset = divmod(position, PAGE_SIZE)
            assert index >= held.lease.num_shared_pages, "I5: about to write to a shared page"
            slot = held.lease.page_table[index] * PAGE_SIZE + offset
            self.pool.kv[0, :, slot] = digest(held.namespace, held.tokens[: position + 1])
        held.num_computed = max(held.num_computed, until)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.end(self.pick(data), by_release=True)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.end(self.pick(data), by_release=False)

    def end(self, held: Held, by_release: bool) -> None:
        if by_release:
            self.cache.release(held.lease, token_key(held.tokens), held.num_computed)
            self.publish(held.namespace, held.tokens[: held.num_computed])
        else:
            self.cache.discard(held.lease)
        self.held.remove(held)

    @precondition(lambda self: self.writes.waiting)
    @rule(data=st.data())
    def end_a_write(self, data: st.DataObject) -> None:
        self.writes.end(data.draw(st.integers(0, len(self.writes.waiting) - 1), label="write"))

    # --- the rest ------------------------------------------------------------------------------------------------

    @rule(namespace=st.sampled_from(NAMESPACES))
    def drop(self, namespace: Namespace) -> None:
        self.cache.drop(namespace)
        self.forget_what_is_gone()
        longest = self.longest_in_use((namespace,))
        assert all(len(tokens) <= longest * PAGE_SIZE for tokens in self.known[namespace])

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=st.lists(st.integers(1, 3), min_size=1, max_size=14))
    def look_up(self, namespace: Namespace, tokens: list[int]) -> None:
        version = self.cache.version
        length = self.known_length(namespace, tuple(tokens))

        found = self.cache.num_known_tokens(namespace, token_key(tokens))

        assert found in {length, min(length, len(tokens) - 1)}
        assert self.cache.version == version

    @rule()
    def flush(self) -> None:
        flushed = self.cache.flush()
        self.forget_what_is_gone()
        counts = self.cache.page_counts()
        assert (counts.cached, counts.in_use) == (0, flushed.num_pages_in_use)
        longest = self.longest_in_use(NAMESPACES)
        assert all(len(tokens) <= longest * PAGE_SIZE for known in self.known.values() for tokens in known)

    def longest_in_use(self, namespaces: Sequence[Namespace]) -> int:
        leased = [held.lease.num_shared_pages for held in self.held if held.namespace in namespaces]
        return max(leased + [num_pages for num_pages, _ in self.writes.waiting], default=0)

    # --- events --------------------------------------------------------------------------------------------------

    @rule()
    def follow(self) -> None:
        """Somebody begins to listen, perhaps not as the first."""
        snapshot = self.cache.snapshot()
        self.hand_out_events()
        follower = Follower(PAGE_SIZE, snapshot.sequence, snapshot.events)
        self.followers = [*self.followers[-1:], follower]

    def hand_out_events(self) -> None:
        for sequence, events in self.batches:
            for follower in self.followers:
                follower.apply(sequence, events)
        self.batches.clear()

    @invariant()
    def followers_know_what_the_tree_has(self) -> None:
        self.cache.publish_events()
        assert self.followers or not self.batches, "events for nobody"
        self.hand_out_events()
        there = set()
        for namespace, path in self.paths():
            if namespace == NAMESPACES[0]:
                tokens = tuple(token for node in path for token in memoryview(node.key).cast("I"))
                there.update(tokens[:end] for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE))
        for follower in self.followers:
            assert sorted(follower.prefixes.values()) == sorted(there)

    @invariant()
    def invariants_hold(self) -> None:
        self.cache.check()
        tree_pages = self.check_tree()
        private = [page for held in self.held for page in held.private_pages]
        assert len(set(private)) == len(private), "two sequences write to one page"
        assert not tree_pages & set(private), "I5: a published page is still private"
        assert self.pool.num_free + len(tree_pages) + len(private) == NUM_PAGES, "I3"
        for held in self.held:
            table = held.lease.page_table
            assert set(table[: held.lease.num_shared_pages]) <= tree_pages
            self.check_content(held.namespace, held.tokens[: held.num_computed], table, 0)

    def check_tree(self) -> set[int]:
        pages: set[int] = set()
        for namespace, path in self.paths():
            node = path[-1]
            tokens = tuple(token for step in path for token in memoryview(step.key).cast("I"))
            start = len(tokens) - len(node.key) // BYTES_PER_TOKEN
            assert self.known_length(namespace, tokens) == len(tokens), "the tree knows what nobody published"
            self.check_content(namespace, tokens, node.pages, start)
            path_pages = [page for step in path for page in step.pages]
            users = [
                held
                for held in self.held
                if held.namespace == namespace
                and held.lease.page_table[: held.lease.num_shared_pages][: len(path_pages)] == path_pages
            ]
            assert node.pins == len(users), "I2: a node is pinned by its users and nobody else"
            pages |= set(node.pages)
        return pages

    def check_content(self, namespace: Namespace | None, tokens: Tokens, pages: list[int], start: int) -> None:
        for position in range(start, len(tokens)):
            index, offset = divmod(position - start, PAGE_SIZE)
            found = self.pool.kv[0, :, pages[index] * PAGE_SIZE + offset]
            assert torch.equal(found, digest(namespace, tokens[: position + 1])), f"wrong K/V at position {position}"

    def teardown(self) -> None:
        while self.held:
            self.end(self.held[0], by_release=True)
        assert self.cache.num_bound_pages == 0
        while self.writes.give_up_save():
            pass
        counts = self.cache.page_counts()
        assert counts.in_use == 0
        assert counts.free + counts.cached == NUM_PAGES
        for namespace in NAMESPACES:
            self.cache.drop(namespace)
        assert self.pool.num_free == NUM_PAGES, "a page never came back"
        assert not list(self.tree.nodes())


TestCacheMachine = CacheMachine.TestCase
