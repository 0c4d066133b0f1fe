"""What the default namespace's tree holds, said as events: for whoever begins to follow it."""

from __future__ import annotations

from prefixcache.request import DEFAULT_NAMESPACE, Tier
from prefixcache.tree.events import PageEvent, stored_event
from prefixcache.tree.hashing import DigestChain
from prefixcache.tree.node import Node
from prefixcache.tree.radix import RadixTree


def name_pages(tree: RadixTree, fingerprint: bytes) -> None:
    """Give every whole page its digest, in a tree that has done without. Engine thread only.

    Takes some microseconds a page, and happens at most once: from then on pages get theirs as they come.
    """
    chain = DigestChain(fingerprint, DEFAULT_NAMESPACE, tree.page_size)
    waiting = [(child, chain) for child in tree.top_nodes(DEFAULT_NAMESPACE)]
    while waiting:
        node, above = waiting.pop()
        chain = above.branch()
        chain.append(node.key)  # of a partial leaf that is nothing
        node.digests = chain.digests[len(above.digests) :]
        waiting += [(child, chain) for child in _children(node)]


def contents(tree: RadixTree) -> list[PageEvent]:
    """List every named page, those of a prompt's beginning before those behind them. Engine thread only."""
    events: list[PageEvent] = []
    waiting = tree.top_nodes(DEFAULT_NAMESPACE)
    while waiting:
        node = waiting.pop()
        if node.digests:
            assert node.parent is not None
            parent = node.parent.digests[-1] if node.parent.digests else None
            events.append(stored_event(Tier.DEVICE, parent, node.digests, node.key))
        waiting += _children(node)
    return events


def _children(node: Node) -> list[Node]:
    return list(node.children.values()) if node.children else []
