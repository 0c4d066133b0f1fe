"""PrefixCache: tree and page pool behind one door, the only thing that the scheduler knows about K/V.

The life of a lease:

    try_acquire ──▶ try_extend* ──▶ commit* ──▶ commit_prompt ──▶ try_extend* ──▶ release
    pin the match,   private pages   whole pages   copy of the tail,              publish the rest,
    copy a partial   for new tokens  to the tree   final state                    unpin, free
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefixcache.cache.host_tier import HostTier
from prefixcache.cache.mover import TierMover
from prefixcache.cache.planner import PrefillEstimate, attention_pairs
from prefixcache.cache.tiers import Load, Search, WritePolicy
from prefixcache.kv.page_pool import PagePool
from prefixcache.request import DEFAULT_NAMESPACE, Namespace, Tier
from prefixcache.tree.contents import contents, name_pages
from prefixcache.tree.events import PageEvent, PageJournal
from prefixcache.tree.hashing import DigestChain
from prefixcache.tree.lease import Lease
from prefixcache.tree.node import BYTES_PER_TOKEN, Node, PageDigest
from prefixcache.tree.radix import Evicted, Match, RadixTree


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; the three always add up to the pool (I3)."""

    free: int
    cached: int
    in_use: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is published at one moment, and the number of the last batch of events before it."""

    sequence: int
    events: list[PageEvent]


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush gave up, and what it had to leave because running sequences use it."""

    num_device_pages: int
    num_host_pages: int
    num_pages_in_use: int


class PrefixCache:
    """Finds, hands out, publishes and evicts K/V pages. Engine thread only.

    Keys are token runs as `tree.node.token_key` encodes them. Nothing here runs the model: the caller writes K/V to
    the private pages of its lease, and publishes with `commit` only what is really written (I4).

    Args:
        tree: What is known.
        pool: The memory; its pages are used by nobody else.
        observe_lookup: Told the seconds of each look-up that leads to a lease or its refusal.
        host: Keeps what the device has to give up; None for none.
        mover: Reaches the stores; None where there are none.
        fingerprint: Names the model and the layout of its K/V outside the process.
        journal: Told what is published and what is given up; None where nobody will ever want to know.
        write_policy: What the stores are to write.
    """

    def __init__(
        self,
        tree: RadixTree,
        pool: PagePool,
        observe_lookup: Callable[[float], None] | None = None,
        host: HostTier | None = None,
        mover: TierMover | None = None,
        fingerprint: bytes = b"",
        journal: PageJournal | None = None,
        write_policy: WritePolicy = WritePolicy.ALWAYS,
    ) -> None:
        self._journal = journal or PageJournal(0, lambda sequence, events: None)
        self._write_policy = write_policy
        self._host = host
        self._mover = mover
        self._own_prefill = PrefillEstimate()
        self._fingerprint = fingerprint
        self._observe_lookup = observe_lookup
        self._tree = tree
        self._pool = pool
        self._page_size = pool.page_size
        self._page_bytes = pool.page_size * BYTES_PER_TOKEN
        self._num_private_pages = 0
        self.num_evicted_pages = 0

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def version(self) -> int:
        """Changes whenever an answer of `num_known_tokens` may have changed."""
        return self._tree.version

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    # --- the life of a lease -----------------------------------------------------------------------------------

    def num_known_tokens(self, namespace: Namespace | None, key: bytes) -> int:
        """Tell how many tokens of `key` need no computing now. An estimate: only `try_acquire` decides."""
        if namespace is None:
            return 0
        match = self._tree.match(namespace, key)
        return self._usable_tokens(match, key)

    def search(self, namespace: Namespace | None, key: bytes) -> Search | None:
        """Ask the stores for what the device does not have of `key`; None where there is nothing to wait for."""
        if self._mover is None or namespace is None or namespace.private_id:
            return None
        return self._mover.search(namespace, key, self.num_known_tokens(namespace, key))

    def try_acquire(
        self,
        namespace: Namespace | None,
        key: bytes,
        *,
        num_tokens: int,
        num_spare_tokens: int = 0,
        reuse: bool = True,
        search: Search | None = None,
    ) -> Lease | None:
        """Take the longest known prefix of `key` and pages for `num_tokens` tokens in all, evicting where needed.

        Args:
            namespace: Where to look; None to stay out of the cache altogether.
            key: The sequence's tokens.
            num_tokens: Tokens that the lease must have room for.
            num_spare_tokens: More room, taken only where it is free anyway, so that pages stay consecutive.
            reuse: False to compute everything again, yet publish the result.
            search: What the stores have said; what is worth loading starts to load.

        Returns:
            The lease, with `num_cached_tokens` at most one below the key's length unless `final_state` is set;
            None where memory is short now.
        """
        if namespace is None:
            lease = Lease(namespace=None, node=None)
            return lease if self._try_fill(lease, num_tokens, num_spare_tokens) else None
        match = self._look_up(namespace, key) if reuse else Match()
        usable = self._usable_tokens(match, key)
        lease = self._pin_whole_pages(namespace, match, usable // self._page_size)
        partial = usable % self._page_size
        if not (partial and self._try_fill_and_copy(lease, match, usable, num_tokens, num_spare_tokens)):
            # without the copy its source can be evicted too: in a pool of just the right size that page decides
            if not self._try_fill(lease, num_tokens, num_spare_tokens):
                self._end(lease, 0)
                return None
            usable -= partial
        num_key_tokens = len(key) // BYTES_PER_TOKEN
        lease.num_cached_tokens = usable
        lease.num_offered_pages = lease.num_shared_pages if self._write_policy is WritePolicy.ALWAYS else 0
        lease.final_state = match.final_state if usable == num_key_tokens else None
        lease.cached_tokens = {Tier.DEVICE: min(usable, num_key_tokens - 1)}
        if reuse and lease.final_state is None:
            self._restore(lease, key, search)
        return lease

    def next_chunk(self, lease: Lease, num_computed_tokens: int, num_wanted_tokens: int) -> tuple[int, int]:
        """Decide how a prompt goes on while a load may be bringing its later pages.

        Args:
            lease: The sequence's lease.
            num_computed_tokens: Leading tokens whose K/V is there.
            num_wanted_tokens: How many more are to be computed.

        Returns:
            How many leading tokens have their K/V now, more than before where a load has arrived; and how many to
            compute in this step, 0 to wait for the load.
        """
        load: Load | None = lease.load
        if load is None or self._mover is None:
            return num_computed_tokens, num_wanted_tokens
        size = self._page_size
        if num_computed_tokens >= load.low * size:  # computation and load have met
            lease.load = None
            load.abandon()
            arrived = load.end * size
            if arrived <= num_computed_tokens:
                return num_computed_tokens, num_wanted_tokens
            for tier, count in load.tokens_by_tier(num_computed_tokens, size).items():
                lease.cached_tokens[tier] = lease.cached_tokens.get(tier, 0) + count
            return arrived, max(0, num_wanted_tokens - (arrived - num_computed_tokens))
        useful = self._mover.computable_tokens(load, num_computed_tokens)
        num_tokens = num_wanted_tokens if useful is None else min(num_wanted_tokens, useful)
        if num_tokens == 0:
            return num_computed_tokens, 0
        claimed = load.claim(-(-(num_computed_tokens + num_tokens) // size)) * size
        if claimed <= num_computed_tokens:  # the page that the computed tokens end in has arrived this very moment
            return self.next_chunk(lease, num_computed_tokens, num_wanted_tokens)
        return num_computed_tokens, min(num_tokens, claimed - num_computed_tokens)

    def try_extend(self, lease: Lease, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all, evicting where needed; False where memory is short now."""
        return self._try_fill(lease, num_tokens, 0)

    def commit(self, lease: Lease, key: bytes, num_tokens: int) -> None:
        """Publish the whole pages among the first `num_tokens` tokens of `key`, all of which have their K/V (I4).

        Where another sequence published the same pages first, its pages replace the lease's own, which are freed.
        """
        num_whole = num_tokens // self._page_size
        if lease.node is None or num_whole <= lease.num_shared_pages:
            return
        self._adopt_published(lease, key[: num_whole * self._page_bytes])
        start = lease.num_shared_pages
        if num_whole > start:
            run = key[start * self._page_bytes : num_whole * self._page_bytes]
            digests = self._digests(lease, key, start, num_whole)
            lease.node, freed = self._tree.extend(lease.node, run, lease.page_table[start:num_whole], digests)
            self._pool.free(freed)
            if digests and lease.chain is not None and lease.namespace is not None:
                parent = lease.chain.digests[start - 1] if start else None
                self._journal.stored(lease.namespace, parent, digests, run)
            lease.num_shared_pages = num_whole
            self._num_private_pages -= num_whole - start

    def commit_prompt(self, lease: Lease, key: bytes, final_state: Any) -> None:
        """Publish all of `key`, just computed, with the model's state at its end.

        A last page that is not full goes in as a copy, since the sequence goes on writing to its own; where no page
        can be had for that, the tail and the state are left out.
        """
        num_tokens = len(key) // BYTES_PER_TOKEN
        self.commit(lease, key, num_tokens)
        if lease.node is None:
            return
        self._offer(lease, key)
        tail = key[lease.num_shared_pages * self._page_bytes :]
        match = self._tree.match_below(lease.node, key, lease.num_shared_pages * self._page_size)
        if match.num_tokens < num_tokens:
            pages = self._try_allocate(1)
            if pages is None:
                return
            self._pool.copy_page(lease.page_table[lease.num_shared_pages], pages[0])
            self._pool.free(self._tree.add_partial(lease.node, tail, pages[0]))
        lease.node.final_states[len(lease.node.pages), tail] = final_state

    def release(self, lease: Lease, key: bytes, num_tokens: int) -> None:
        """End the lease: publish the first `num_tokens` tokens of `key`, all computed, and give everything back."""
        self.commit(lease, key, num_tokens)
        self._offer(lease, key)
        tail = key[lease.num_shared_pages * self._page_bytes : num_tokens * BYTES_PER_TOKEN]
        kept = 0
        if lease.node is not None and tail:
            match = self._tree.match_below(
                lease.node, key[: num_tokens * BYTES_PER_TOKEN], lease.num_shared_pages * self._page_size
            )
            if match.num_tokens < num_tokens:
                page = lease.page_table[lease.num_shared_pages]
                self._pool.free(self._tree.add_partial(lease.node, tail, page))
                kept = 1
        self._end(lease, kept)

    def discard(self, lease: Lease) -> None:
        """End the lease without publishing anything more."""
        self._end(lease, 0)

    def drop(self, namespace: Namespace) -> None:
        """Forget all that a namespace holds and no lease uses."""
        self._give_up(self._tree.drop(namespace))

    def flush(self) -> Flushed:
        """Forget all that this process holds and no lease uses, in host memory too.

        What disk and Redis hold stays: it outlives processes, others may use it, and it is verified when it is read.
        """
        num_pages = self._tree.num_pages
        for namespace in self._tree.namespaces():
            self.drop(namespace)
        num_host_pages = 0 if self._host is None else self._host.clear()
        if self._journal.is_recording:
            self._journal.replace(contents(self._tree))
        return Flushed(num_pages - self._tree.num_pages, num_host_pages, self.page_counts().in_use)

    def note_step(self, prefills: list[tuple[int, int]], seconds: float) -> None:
        """Learn how long a step took: of each sequence its new tokens, and all its computed tokens after them."""
        num_tokens = sum(count for count, _ in prefills)
        pairs = sum(attention_pairs(count, computed - count) for count, computed in prefills)
        self._prefill.observe(num_tokens, pairs, seconds)

    def seconds_to_have(self, num_tokens: int, context_len: int) -> float:
        """Estimate from below how long it takes to have `num_tokens` more of a prompt behind `context_len` others.

        0 while too little has been measured, and where host memory may hold them: that is found out at admission only.
        """
        if self._host is not None or not self._prefill.is_sure_of(num_tokens):
            return 0.0
        compute_s = self._prefill.seconds(num_tokens, context_len)
        return compute_s if self._mover is None else min(compute_s, self._mover.load_seconds(num_tokens))

    @property
    def _prefill(self) -> PrefillEstimate:
        return self._own_prefill if self._mover is None else self._mover.prefill

    # --- events ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """List what the default namespace has on the device; from now on all changes of that are published.

        The first call names every page that is there, where no tier has asked for that before.
        """
        if not self._journal.is_recording:
            if not self._names_all_pages:
                name_pages(self._tree, self._fingerprint)
            self._journal.start()
        self._journal.flush()
        return Snapshot(self._journal.sequence, contents(self._tree))

    def publish_events(self) -> None:
        """Publish what has changed since the last call."""
        self._journal.flush()

    # --- inspection --------------------------------------------------------------------------------------------

    def page_counts(self) -> PageCounts:
        pinned = self._tree.num_pinned_pages
        return PageCounts(
            free=self._pool.num_free, cached=self._tree.num_pages - pinned, in_use=pinned + self._num_private_pages
        )

    @property
    def num_bound_pages(self) -> int:
        """Pages that running sequences need. Those that only wait to be written can be given up. Any thread."""
        return self._num_private_pages + self._tree.num_leased_pages

    @property
    def host(self) -> HostTier | None:
        """What host memory holds, for inspection only."""
        return self._host

    def is_balanced(self) -> bool:
        """Whether every page is accounted for (I3). Cheap."""
        return self._pool.num_free + self._tree.num_pages + self._num_private_pages == self._pool.num_pages

    def check(self) -> None:
        """Assert all invariants of tree and pool. Takes time in proportion to the tree."""
        self._tree.check()
        assert self._num_private_pages >= 0
        assert self.is_balanced(), "I3: free + cached + private pages do not add up to the pool"

    # --- tiers -------------------------------------------------------------------------------------------------

    def _restore(self, lease: Lease, key: bytes, search: Search | None) -> None:
        """Fill the lease's first private pages from host memory, then start to load what the stores have."""
        assert lease.namespace is not None
        known = lease.num_cached_tokens
        start, end = known // self._page_size, (len(key) // BYTES_PER_TOKEN - 1) // self._page_size
        if start >= end:
            return
        if search is not None:
            lease.chain = search.chain.branch()  # samples of one prompt share its search, and go on differently
        if self._host is not None and not lease.namespace.private_id:
            digests = self._digests(lease, key, start, end)
            num_pages = self._host.restore(digests, lease.page_table[start:end])
            if num_pages:
                arrived = (start + num_pages) * self._page_size
                lease.cached_tokens[Tier.HOST] = arrived - known
                lease.num_cached_tokens = arrived
        if search is not None and self._mover is not None:
            lease.load = self._mover.start_load(search, lease, key, lease.num_cached_tokens)

    @property
    def _names_all_pages(self) -> bool:
        """Whether a tier below may ask for any page by its name."""
        return self._mover is not None or self._host is not None

    def _digests(self, lease: Lease, key: bytes, start: int, end: int) -> list[PageDigest]:
        """Name pages [start, end) of `key`; nothing where no tier could ask for them."""
        if lease.chain is None:
            if lease.namespace is None or lease.namespace.private_id:
                return []
            is_followed = self._journal.is_recording and lease.namespace == DEFAULT_NAMESPACE
            if not (self._names_all_pages or is_followed):
                return []
            lease.chain = DigestChain(self._fingerprint, lease.namespace, self._page_size)
        lease.chain.extend(key[: end * self._page_bytes])
        return lease.chain.digests[start:end]

    def _offer(self, lease: Lease, key: bytes) -> None:
        """Have the stores write what this lease has published, or used, since it was last asked."""
        if self._mover is None or lease.node is None:
            return
        start, end = lease.num_offered_pages, lease.num_shared_pages
        if self._write_policy is WritePolicy.REUSED:
            end = min(end, sum(lease.cached_tokens.values()) // self._page_size)
        if start >= end or not self._digests(lease, key, start, end):
            return
        assert lease.chain is not None
        node = lease.node
        self._tree.pin(node, for_save=True)
        unpin = partial(self._tree.unpin, node, for_save=True)
        self._mover.save(lease.chain, key, start, lease.page_table[start:end], unpin)
        lease.num_offered_pages = end

    # --- parts -------------------------------------------------------------------------------------------------

    def _look_up(self, namespace: Namespace, key: bytes) -> Match:
        started_s = time.perf_counter()
        match = self._tree.match(namespace, key)
        if self._observe_lookup is not None:
            self._observe_lookup(time.perf_counter() - started_s)
        return match

    def _usable_tokens(self, match: Match, key: bytes) -> int:
        """Without a final state the last token must be run again, or there would be nothing to sample from."""
        if match.final_state is not None:
            return match.num_tokens
        return min(match.num_tokens, len(key) // BYTES_PER_TOKEN - 1)

    def _pin_whole_pages(self, namespace: Namespace, match: Match, num_whole: int) -> Lease:
        """Make a lease on the first `num_whole` pages of the match, cutting a node where they end inside it."""
        node: Node = match.node if match.node is not None else self._tree.root(namespace)
        surplus = self._whole_pages(match) - num_whole
        num_node_pages = match.num_node_pages - surplus  # surplus is 1 where the last token is run again, else 0
        if num_node_pages == 0 and node.parent is not None:
            node = node.parent
        elif num_node_pages < len(node.pages):
            node = self._tree.split(node, num_node_pages)
        self._tree.pin(node)
        pages = self._tree.path_pages(node)
        assert len(pages) == num_whole
        return Lease(namespace, node, page_table=pages, num_shared_pages=num_whole)

    def _whole_pages(self, match: Match) -> int:
        return (match.num_tokens - match.num_partial_tokens) // self._page_size

    def _partial_source(self, lease: Lease, match: Match, usable: int) -> tuple[Node, int]:
        """Name the node and the page in it to copy the last, partly usable page from."""
        if match.source is not None and usable // self._page_size == self._whole_pages(match):
            # cutting may have moved the page: it is the first one below the pinned node, wherever that ended
            source = match.source
            return source, match.source_page if source.parent is not lease.node else 0
        # the match ended on a page boundary and its last token is run again: the page after the pinned node
        assert match.node is not None
        node, index = match.node, match.num_node_pages - 1
        return node, index if node.parent is not lease.node else 0

    def _try_fill_and_copy(
        self, lease: Lease, match: Match, usable: int, num_tokens: int, num_spare_tokens: int
    ) -> bool:
        """Like `_try_fill`, then copy the partly usable page into the lease's first private one."""
        source, index = self._partial_source(lease, match, usable)
        self._tree.pin(source)  # the new pages may be won by evicting: not this one
        is_filled = self._try_fill(lease, num_tokens, num_spare_tokens)
        if is_filled:
            self._pool.copy_page(source.pages[index], lease.page_table[lease.num_shared_pages])
        self._tree.unpin(source)
        return is_filled

    def _try_fill(self, lease: Lease, num_tokens: int, num_spare_tokens: int) -> bool:
        missing = self.pages_for(num_tokens) - len(lease.page_table)
        if missing <= 0:
            return True
        spare = self.pages_for(num_tokens + num_spare_tokens) - len(lease.page_table)
        if spare <= self._pool.num_free:
            missing = spare
        after = lease.page_table[-1] if lease.page_table else None
        pages = self._try_allocate(missing, after)
        if pages is None:
            return False
        lease.page_table += pages
        self._num_private_pages += len(pages)
        return True

    def _try_allocate(self, num_pages: int, after: int | None = None) -> list[int] | None:
        missing = num_pages - self._pool.num_free
        if missing > 0:
            if missing > self._tree.num_pages - self._tree.num_leased_pages:
                return None  # asking for more than there is must not empty the cache on the way
            while missing > self._tree.num_pages - self._tree.num_pinned_pages:
                # what runs comes before what is to be written
                if self._mover is None or not self._mover.give_up_save():
                    return None
            for evicted in self._tree.evict(missing):
                self.num_evicted_pages += len(evicted.pages)
                if self._host is not None and evicted.digests:
                    self._host.put(evicted.pages, evicted.digests)
                self._give_up([evicted])
        return self._pool.try_allocate(num_pages, after)

    def _give_up(self, evicted: list[Evicted]) -> None:
        for each in evicted:
            self._journal.removed(each)
            self._pool.free(each.pages)

    def _adopt_published(self, lease: Lease, key: bytes) -> None:
        """Move the lease onto whole pages of `key` that are in the tree already, below its node."""
        assert lease.node is not None
        match = self._tree.match_below(lease.node, key, lease.num_shared_pages * self._page_size)
        num_whole = self._whole_pages(match)
        num_new = num_whole - lease.num_shared_pages
        if num_new <= 0:
            return
        assert match.node is not None
        node = match.node
        if match.num_node_pages < len(node.pages):
            node = self._tree.split(node, match.num_node_pages)
        self._tree.pin(node)
        self._tree.unpin(lease.node)
        lease.node = node
        own = lease.page_table[lease.num_shared_pages : num_whole]
        lease.page_table[lease.num_shared_pages : num_whole] = self._tree.path_pages(node)[-num_new:]
        lease.num_shared_pages = num_whole
        self._num_private_pages -= num_new
        self._pool.free(own)

    def _end(self, lease: Lease, num_kept_pages: int) -> None:
        """Free the private pages, but for the first `num_kept_pages`, which belong to the tree now."""
        assert not lease.is_released, "a lease was released twice"
        lease.is_released = True
        if lease.load is not None:
            lease.load.abandon()
        private = lease.page_table[lease.num_shared_pages :]
        self._num_private_pages -= len(private)
        self._pool.free(private[num_kept_pages:])
        if lease.node is not None:
            self._tree.unpin(lease.node)
