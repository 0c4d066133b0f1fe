"""Time of a look-up in a large tree; no model, no server."""

from __future__ import annotations

import random
import time
from array import array

from prefixcache.bench.figures import Figure
from prefixcache.request import Namespace
from prefixcache.tree.eviction import LeastRecentlyUsed
from prefixcache.tree.node import token_key
from prefixcache.tree.radix import RadixTree

PAGE_SIZE = 16
NAMESPACE = Namespace()


def build_tree(num_nodes: int, num_documents: int, document_tokens: int) -> tuple[RadixTree, list[int]]:
    """Grow a tree of questions about a few long documents, as chats and RAG do; return it and a known prompt.

    Every question branches off at some page of its document, so a document's path is cut into many nodes.
    """
    source = random.Random(0)
    tree = RadixTree(PAGE_SIZE, LeastRecentlyUsed())
    documents = [_tokens(source, document_tokens) for _ in range(num_documents)]
    next_page = 0
    while tree.num_nodes < num_nodes:
        shared = source.randrange(1, document_tokens // PAGE_SIZE + 1) * PAGE_SIZE
        prompt = source.choice(documents)[:shared] + _tokens(source, PAGE_SIZE * source.randrange(1, 8))
        next_page = _insert(tree, prompt, next_page)
    prompt = documents[0] + _tokens(source, PAGE_SIZE * 20)
    _insert(tree, prompt, next_page)
    return tree, prompt


def lookup_us(tree: RadixTree, prompt: list[int], repeat: int) -> Figure:
    """Time `match` for a prompt given as an array of token ids."""
    ids = array("I", prompt)
    values = []
    for _ in range(repeat):
        started = time.perf_counter()
        match = tree.match(NAMESPACE, ids.tobytes())
        values.append((time.perf_counter() - started) * 1e6)
        assert match.num_tokens == len(prompt)
    return Figure(values, "us")


def _insert(tree: RadixTree, prompt: list[int], next_page: int) -> int:
    """Publish the pages of `prompt` that are not known yet, numbering them from `next_page`."""
    key = token_key(prompt)
    match = tree.match(NAMESPACE, key)
    known_pages = match.num_tokens // PAGE_SIZE
    node = match.node or tree.root(NAMESPACE)
    if match.num_node_pages < len(node.pages):
        node = tree.split(node, match.num_node_pages)
    tree.pin(node)
    pages = list(range(next_page, next_page + len(prompt) // PAGE_SIZE - known_pages))
    if pages:
        node, _ = tree.extend(node, key[known_pages * PAGE_SIZE * 4 :], pages, [])
    tree.unpin(node)
    return next_page + len(pages)


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(50_000) for _ in range(count)]
