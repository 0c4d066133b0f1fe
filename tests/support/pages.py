"""Pages with random content, their identities and their stored values."""

from __future__ import annotations

import random
from dataclasses import dataclass

from prefixcache.kv.codec import PageCodec, PageIdentity
from prefixcache.request import DEFAULT_NAMESPACE, Namespace
from prefixcache.tree.hashing import DigestChain, little_endian
from prefixcache.tree.node import token_key

PAGE_SIZE = 4
PAYLOAD_BYTES = 320
FINGERPRINT = bytes(range(32))


@dataclass(frozen=True)
class StoredPage:
    identity: PageIdentity
    value: bytes

    def payload(self, codec: PageCodec) -> bytes:
        return self.value[codec.header_bytes :]


def stored_pages(
    count: int, seed: int, *, fingerprint: bytes = FINGERPRINT, namespace: Namespace = DEFAULT_NAMESPACE
) -> list[StoredPage]:
    """The pages of one sequence as a store holds them."""
    generator = random.Random(seed)
    codec = PageCodec(fingerprint, PAGE_SIZE, PAYLOAD_BYTES)
    key = token_key([generator.randrange(50_000) for _ in range(count * PAGE_SIZE)])
    chain = DigestChain(fingerprint, namespace, PAGE_SIZE)
    chain.extend(key)
    pages = []
    for index, digest in enumerate(chain.digests):
        page_key = key[index * PAGE_SIZE * 4 : (index + 1) * PAGE_SIZE * 4]
        identity = PageIdentity(chain.namespace_digest, digest.key, digest.proof, little_endian(page_key))
        payload = generator.randbytes(PAYLOAD_BYTES)
        pages.append(StoredPage(identity, codec.encode_header(identity, payload) + payload))
    return pages
