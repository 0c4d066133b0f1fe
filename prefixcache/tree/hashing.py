"""The names that a sequence's whole pages have outside the process.

    root   = tagged and length-framed (model fingerprint, namespace, page size)
    key    0 = xxh3-128(root)          key    n = xxh3-128(key n-1 + tokens of page n)
    proof  0 = SHA-256(root)           proof  n = SHA-256(root + tokens of pages 1 … n)

Both cover everything that shaped a page's K/V: the model, who may share, and every token up to the page's end. The
key is short and quick, and a store is asked for it. The proof stands in the stored value and is compared on load: two
histories that happen to have one key, or are made to have it, never have one proof.

Both depend on content alone. Tokens are hashed as little-endian 32-bit numbers whatever the machine's own byte order,
and nothing depends on the process, its start or PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from copy import copy

from xxhash import xxh3_128_digest

from prefixcache.framing import framed
from prefixcache.request import Namespace
from prefixcache.tree.node import BYTES_PER_TOKEN, PageDigest


class DigestChain:
    """The digests of one sequence's whole pages, hashed once each as the sequence grows. One thread at a time.

    Attributes:
        namespace_digest: What stored values carry of the namespace.
        digests: One for each whole page so far, in order.

    Raises:
        ValueError: The namespace is one request's own: it means nothing to another process.
    """

    def __init__(self, fingerprint: bytes, namespace: Namespace, page_size: int) -> None:
        self.namespace_digest = namespace_digest(namespace)
        self.digests: list[PageDigest] = []
        root = framed(
            "page chain",
            {"fingerprint": fingerprint, "namespace": self.namespace_digest, "page_size": page_size},
        )
        self._page_bytes = page_size * BYTES_PER_TOKEN
        self._key = xxh3_128_digest(root)
        # One running hash: a proof costs one block of SHA-256 more than the page's own.
        self._history = hashlib.sha256(root)

    def extend(self, key: bytes) -> None:
        """Hash the further whole pages of `key`, which must begin with the tokens that were hashed before.

        Args:
            key: All tokens of the sequence so far, as `token_key` encodes them; a started last page is left for later.
        """
        self.append(key[len(self.digests) * self._page_bytes :])

    def append(self, run: bytes) -> None:
        """Hash the whole pages of `run`, which come next; a started last page is left out."""
        page_bytes = self._page_bytes
        fresh = little_endian(run[: len(run) - len(run) % page_bytes])
        parent, history, digests = self._key, self._history, self.digests
        for offset in range(0, len(fresh), page_bytes):
            page = fresh[offset : offset + page_bytes]
            parent = xxh3_128_digest(parent + page)
            history.update(page)
            # PageDigest(…) would take as long as the hashing
            digests.append(tuple.__new__(PageDigest, (parent, history.digest())))
        self._key = parent

    def branch(self) -> DigestChain:
        """Return a chain of its own that goes on from here."""
        branch = copy(self)
        branch.digests = list(self.digests)
        branch._history = self._history.copy()
        return branch


def namespace_digest(namespace: Namespace) -> bytes:
    """Return 32 bytes that stand for who may share, every field tagged and length-framed.

    Raises:
        ValueError: The namespace is one request's own: its number means something else in another process.
    """
    if namespace.private_id:
        raise ValueError("a private namespace has no name outside its process")
    return hashlib.sha256(framed("namespace", namespace._asdict())).digest()


def little_endian(key: bytes) -> bytes:
    """Return a token key as it is hashed and stored: 32-bit numbers, lowest byte first on every machine."""
    if sys.byteorder == "little":
        return key
    token_ids = array("I", key)
    token_ids.byteswap()
    return token_ids.tobytes()
