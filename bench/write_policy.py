"""Compare the write policies by the real cache, tree, mover and Redis, without a model.

A mixed load of 1,200 prompts: of five, two come once, two ask about one of 60 documents, one is a chat's next turn. It
is served by one server that is restarted half-way, and by two servers that take turns at random. These are counts,
not times: what a model would have computed is only counted. Needs redis-server.

Examples:
  python -m bench.write_policy
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue

import torch
from rich.console import Console
from rich.table import Table

from bench.in_process import LoadsEverything, redis_server, redis_url
from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.cache.tiers import WritePolicy
from prefixcache.config import load_settings
from prefixcache.kv.codec import PageCodec
from prefixcache.kv.layout import PAGE_SIZE, KVLayout
from prefixcache.kv.page_pool import PagePool
from prefixcache.metrics import Metrics
from prefixcache.request import Namespace, Tier
from prefixcache.storage import Storage
from prefixcache.tree.eviction import LeastRecentlyUsed
from prefixcache.tree.node import token_key
from prefixcache.tree.radix import RadixTree

NUM_PROMPTS = 1200
ONCE_TOKENS = 400
NUM_DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 60, 800, 50
NUM_CHATS, TURN_TOKENS = 30, 80
# The whole load is some 45,000 pages, of which 17,000 differ.
DEVICE_PAGES = (1_000, 20_000)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float32)
FINGERPRINT = bytes(32)
REPLY_S = 10.0


def main() -> int:
    table = Table(title="tokens computed, of those in prompts, and pages written, of those in prompts")
    for heading in ("servers", "device pages", "policy", "computed", "written"):
        table.add_column(heading, justify="right")
    for name, serve in {"one, restarted": serve_restarted, "two": serve_by_two}.items():
        for num_pages in DEVICE_PAGES:
            for policy in WritePolicy:
                with redis_server() as port:
                    counted, all_lives = serve(partial(Server, port, num_pages, policy))
                computed = sum(s.num_computed for s in counted) / sum(s.num_prompt_tokens for s in counted)
                written = sum(s.num_written for s in all_lives) * PAGE_SIZE
                share = written / sum(s.num_prompt_tokens for s in all_lives)
                table.add_row(name, f"{num_pages:,}", policy.value, f"{computed:.1%}", f"{share:.1%}")
    Console().print(table)
    return 0


class Server:
    """One life of a server's cache; whatever no tier has is taken as computed."""

    def __init__(self, port: int, num_pages: int, policy: WritePolicy) -> None:
        self.num_prompt_tokens = self.num_computed = self.num_written = 0
        self._metrics = Metrics()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        pool = PagePool(LAYOUT, num_pages, torch.device("cpu"))
        settings = load_settings().model_copy(update={"redis": redis_url(port)})
        self._storage = Storage(settings, FINGERPRINT, pool, LAYOUT, self._metrics.tiers, self._inbox.put)
        assert self._storage.mover is not None
        self._mover = self._storage.mover
        self._mover.prefill = LoadsEverything()
        tree = RadixTree(PAGE_SIZE, LeastRecentlyUsed())
        self._cache = PrefixCache(tree, pool, mover=self._mover, fingerprint=FINGERPRINT, write_policy=policy)

    def serve(self, tokens: list[int]) -> None:
        key = token_key(tokens)
        search = self._cache.search(Namespace(), key)
        while search is not None and search.is_pending:
            self._inbox.get(timeout=REPLY_S)()
        lease = self._cache.try_acquire(Namespace(), key, num_tokens=len(tokens), search=search)
        assert lease is not None
        num_there = lease.num_cached_tokens
        while num_there < len(tokens):
            num_there, num_tokens = self._cache.next_chunk(lease, num_there, len(tokens) - num_there)
            if num_tokens == 0:
                self._inbox.get(timeout=REPLY_S)()
            num_there += num_tokens
            self.num_computed += num_tokens
        self.num_prompt_tokens += len(tokens)
        self._cache.commit_prompt(lease, key, final_state=None)
        self._cache.release(lease, key, len(tokens))
        self._settle()

    def close(self) -> None:
        self._settle()
        self._storage.close()
        codec = PageCodec(FINGERPRINT, PAGE_SIZE, LAYOUT.bytes_per_page)
        name, labels = "prefixcache_tier_saved_bytes_total", {"tier": Tier.REMOTE.value}
        num_bytes = self._metrics.registry.get_sample_value(name, labels) or 0.0
        self.num_written = round(num_bytes / (codec.header_bytes + codec.payload_bytes))

    def _settle(self) -> None:
        assert self._mover.flush(REPLY_S)
        try:
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass


def serve_restarted(new_server: Callable[[], Server]) -> tuple[list[Server], list[Server]]:
    """Serve half of the load in each of two lives; return the second alone, whose hits count, and both."""
    prompts = load()
    lives: list[Server] = []
    for _ in range(2):
        server = new_server()
        for _ in range(NUM_PROMPTS // 2):
            server.serve(next(prompts))
        server.close()
        lives.append(server)
    return lives[1:], lives


def serve_by_two(new_server: Callable[[], Server]) -> tuple[list[Server], list[Server]]:
    """Serve the load by two servers at once; return both, twice."""
    servers, chance = [new_server(), new_server()], random.Random(2)
    for prompt, _ in zip(load(), range(NUM_PROMPTS), strict=False):
        chance.choice(servers).serve(prompt)
    for server in servers:
        server.close()
    return servers, servers


def load() -> Iterator[list[int]]:
    """Yield prompts, the same ones each time."""
    chance = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(50_000) for _ in range(count)]

    documents = [tokens(DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    popularity = [1 / rank for rank in range(1, NUM_DOCUMENTS + 1)]
    chats = [tokens(TURN_TOKENS) for _ in range(NUM_CHATS)]
    while True:
        kind = chance.randrange(5)
        if kind < 2:
            yield tokens(ONCE_TOKENS)
        elif kind < 4:
            yield chance.choices(documents, popularity)[0] + tokens(QUESTION_TOKENS)
        else:
            chat = chance.randrange(NUM_CHATS)
            chats[chat] = chats[chat] + tokens(TURN_TOKENS)
            yield chats[chat]


if __name__ == "__main__":
    sys.exit(main())
