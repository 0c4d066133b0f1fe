import hashlib
import os
import random
import struct
import subprocess
import sys

import pytest
from xxhash import xxh3_128_digest

from prefixcache.request import DEFAULT_NAMESPACE, Namespace
from prefixcache.tree import hashing
from prefixcache.tree.hashing import DigestChain, little_endian, namespace_digest
from prefixcache.tree.node import PageDigest, token_key

FINGERPRINT = bytes(range(32))
PAGE_SIZE = 4


def digests(
    token_ids: list[int],
    *,
    fingerprint: bytes = FINGERPRINT,
    namespace: Namespace = DEFAULT_NAMESPACE,
    page_size: int = PAGE_SIZE,
) -> list[PageDigest]:
    chain = DigestChain(fingerprint, namespace, page_size)
    chain.extend(token_key(token_ids))
    return chain.digests


def common(a: list[PageDigest], b: list[PageDigest]) -> int:
    """How many leading pages have the same key; keys and proofs must agree on it, and nothing may meet again later."""
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        assert (x.key == y.key) == (x.proof == y.proof) == (position < count)
    return count


def frame(tag: bytes, content: bytes) -> bytes:
    return tag + struct.pack("<Q", len(content)) + content


def test_the_format_is_the_documented_one() -> None:
    """Recomputed by hand, so that a change of what other processes have stored under is noticed."""
    who = hashlib.sha256(
        frame(b"s", b"namespace")
        + frame(b"s", b"tenant")
        + frame(b"s", b"acme")
        + frame(b"s", b"salt")
        + frame(b"s", "é".encode())
        + frame(b"s", b"private_id")
        + frame(b"i", b"0")
    ).digest()
    root = (
        frame(b"s", b"page chain")
        + frame(b"s", b"fingerprint")
        + frame(b"y", FINGERPRINT)
        + frame(b"s", b"namespace")
        + frame(b"y", who)
        + frame(b"s", b"page_size")
        + frame(b"i", b"4")
    )
    first, second = struct.pack("<4I", 1, 2, 3, 4), struct.pack("<4I", 5, 6, 7, 2**31)
    key = xxh3_128_digest(xxh3_128_digest(root) + first)
    namespace = Namespace(tenant="acme", salt="é")
    assert namespace_digest(namespace) == who
    assert digests([1, 2, 3, 4, 5, 6, 7, 2**31, 9], namespace=namespace) == [
        (key, hashlib.sha256(root + first).digest()),
        (xxh3_128_digest(key + second), hashlib.sha256(root + first + second).digest()),
    ]


def test_a_sequence_that_grows_hashes_only_what_is_new() -> None:
    token_ids = [random.Random(0).randrange(50_000) for _ in range(103)]
    chain = DigestChain(FINGERPRINT, Namespace(), PAGE_SIZE)
    for length in (0, 3, 4, 5, 16, 16, 50, 103):
        before = list(chain.digests)
        chain.extend(token_key(token_ids[:length]))
        assert len(chain.digests) == length // PAGE_SIZE, "whole pages only"
        assert chain.digests[: len(before)] == before
    assert chain.digests == digests(token_ids)


def test_the_digests_of_a_page_cover_its_whole_history() -> None:
    generator = random.Random(1)
    token_ids = [generator.randrange(100, 50_000) for _ in range(64)]
    reference = digests(token_ids)
    for _ in range(200):
        j = generator.randrange(63)
        changed = list(token_ids)
        changed[j] += 31  # cancels out in a polynomial
        changed[j + 1] -= 1
        assert common(reference, digests(changed)) == j // PAGE_SIZE
    swapped = token_ids[:4] + token_ids[8:12] + token_ids[4:8] + token_ids[12:]
    assert common(reference, digests(swapped)) == 1
    assert common(reference, digests([7, *token_ids[1:]])) == 0, "the same last pages behind another first one"
    assert common(reference, digests(token_ids[4:])) == 0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Namespace(tenant="a"), Namespace(salt="a")),  # two fields, one value
        (Namespace(tenant="org_1", salt="2345"), Namespace(tenant="org_12345")),  # one joined string
        (Namespace(tenant="a", salt="b"), Namespace(tenant="b", salt="a")),
        (Namespace(tenant="a\0b"), Namespace(tenant="a", salt="b")),
        (Namespace(), Namespace(tenant="\0")),
        (Namespace(tenant="0"), Namespace()),
    ],
)
def test_namespaces_never_meet(a: Namespace, b: Namespace) -> None:
    assert namespace_digest(a) != namespace_digest(b)
    assert common(digests([1, 2, 3, 4], namespace=a), digests([1, 2, 3, 4], namespace=b)) == 0


def test_a_private_namespace_has_no_name_outside() -> None:
    with pytest.raises(ValueError, match="private"):
        DigestChain(FINGERPRINT, Namespace(private_id=1), PAGE_SIZE)


def test_models_and_page_sizes_never_meet() -> None:
    token_ids = list(range(16))
    assert common(digests(token_ids), digests(token_ids, fingerprint=bytes(32))) == 0
    four, eight = digests(token_ids), digests(token_ids, page_size=8)
    assert not {d.key for d in four} & {d.key for d in eight}
    assert not {d.proof for d in four} & {d.proof for d in eight}


def test_proofs_hold_where_keys_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "xxh3_128_digest", lambda _: bytes(16))
    a, b = digests([1, 2, 3, 4]), digests([1, 2, 3, 5])
    assert a[0].key == b[0].key
    assert a[0].proof != b[0].proof


def test_a_machine_of_the_other_byte_order_gives_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = [1, 2, 70_000, 2**31, 5, 6, 7, 8]
    here = digests(token_ids)
    other = {"little": "big", "big": "little"}[sys.byteorder]
    key_there = struct.pack(f"{'>' if other == 'big' else '<'}8I", *token_ids)
    chain = DigestChain(FINGERPRINT, Namespace(), PAGE_SIZE)
    monkeypatch.setattr(hashing.sys, "byteorder", other)
    chain.extend(key_there)
    assert chain.digests == here
    assert little_endian(key_there) == struct.pack("<8I", *token_ids)


SCRIPT = """
from prefixcache.request import Namespace
from prefixcache.tree.hashing import DigestChain
from prefixcache.tree.node import token_key
chain = DigestChain(bytes(range(32)), Namespace(tenant="t", salt="s"), 4)
chain.extend(token_key(range(40)))
for digest in chain.digests:
    print(digest.key.hex(), digest.proof.hex())
"""


def test_every_process_gives_the_same_digests() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    here = digests(list(range(40)), namespace=Namespace(tenant="t", salt="s"))
    assert outputs == ["".join(f"{d.key.hex()} {d.proof.hex()}\n" for d in here)] * 2
