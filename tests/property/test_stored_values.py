"""Whatever happens to a stored value, it is read as what was written or not at all."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.kv.codec import Mismatch, PageCodec
from prefixcache.request import Namespace
from prefixcache.tree.hashing import DigestChain, namespace_digest
from prefixcache.tree.node import token_key
from tests.support.pages import FINGERPRINT, PAGE_SIZE, PAYLOAD_BYTES, stored_pages

NUM_MUTANTS = 10_000
CODEC = PageCodec(FINGERPRINT, PAGE_SIZE, PAYLOAD_BYTES)
PAGES = stored_pages(8, seed=0)
STRANGERS = [
    *stored_pages(8, seed=1),
    *stored_pages(8, seed=0, namespace=Namespace(tenant="b")),
    *stored_pages(8, seed=0, namespace=Namespace(salt="b")),
    *stored_pages(8, seed=0, fingerprint=bytes(32)),
]


def flip_bits(value: bytes, generator: random.Random) -> bytes:
    damaged = bytearray(value)
    for _ in range(generator.choice([1, 1, 1, 2, 8, 100])):
        bit = generator.randrange(len(value) * 8)
        damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def flip_header_bit(value: bytes, generator: random.Random) -> bytes:
    bit = generator.randrange(CODEC.header_bytes * 8)
    return value[: bit // 8] + bytes([value[bit // 8] ^ 1 << bit % 8]) + value[bit // 8 + 1 :]


def truncate(value: bytes, generator: random.Random) -> bytes:
    return value[: generator.randrange(len(value))]


def cut_off_the_start(value: bytes, generator: random.Random) -> bytes:
    return value[generator.randrange(1, len(value)) :]


def extend(value: bytes, generator: random.Random) -> bytes:
    return value + generator.randbytes(generator.choice([1, 2, 8, 1000]))


def insert(value: bytes, generator: random.Random) -> bytes:
    position = generator.randrange(len(value))
    return value[:position] + generator.randbytes(generator.randrange(1, 9)) + value[position:]


def overwrite(value: bytes, generator: random.Random) -> bytes:
    """A torn write: zeros, noise or a piece of another page from some point on."""
    start = generator.randrange(len(value))
    length = generator.randrange(1, len(value) - start + 1)
    stranger = generator.choice(PAGES + STRANGERS).value
    piece = generator.choice([bytes(length), generator.randbytes(length), stranger[start : start + length]])
    return value[:start] + piece + value[start + length :]


def swap_whole(value: bytes, generator: random.Random) -> bytes:
    return generator.choice(PAGES + STRANGERS).value


def swap_payload(value: bytes, generator: random.Random) -> bytes:
    return value[: CODEC.header_bytes] + generator.choice(PAGES + STRANGERS).payload(CODEC)


def repeat(value: bytes, generator: random.Random) -> bytes:
    return value * 2


def noise(value: bytes, generator: random.Random) -> bytes:
    return generator.randbytes(generator.choice([0, 1, 10, len(value), len(value) * 2]))


def other_type(value: bytes, generator: random.Random) -> Any:
    return generator.choice([None, 0, 1.5, "", value.hex(), [value], {"value": value}, memoryview(value)[::-1], ()])


MUTATIONS: list[Callable[[bytes, random.Random], Any]] = [
    flip_bits,
    flip_header_bit,
    truncate,
    cut_off_the_start,
    extend,
    insert,
    overwrite,
    swap_whole,
    swap_payload,
    repeat,
    noise,
    other_type,
]


def test_no_mutated_value_is_accepted_and_none_raises() -> None:
    generator = random.Random(0)
    seen: set[Mismatch] = set()
    num_mutants = 0
    while num_mutants < NUM_MUTANTS:
        page = generator.choice(PAGES)
        mutant = generator.choice(MUTATIONS)(page.value, generator)
        if mutant == page.value:  # by chance nothing has changed
            continue
        num_mutants += 1
        result = CODEC.verify(mutant, page.identity)
        assert isinstance(result, Mismatch)
        seen.add(result)
    # A proof or tokens that differ under an equal key need a forged header: see tests/unit/test_codec.py.
    assert seen == set(Mismatch) - {Mismatch.PROOF, Mismatch.TOKENS}
    for page in PAGES:
        assert CODEC.verify(page.value, page.identity) == page.payload(CODEC)


class Bomb:
    """Unpickling this would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "made"))
    page = PAGES[0]
    for value in (bomb, bomb.ljust(len(page.value), b"\0"), page.value[: CODEC.header_bytes] + bomb):
        assert isinstance(CODEC.verify(value, page.identity), Mismatch)
    padded = bomb.ljust(PAYLOAD_BYTES, b"\0")
    payload = CODEC.verify(CODEC.encode_header(page.identity, padded) + padded, page.identity)
    assert payload == padded, "to the codec it is a payload like any other"
    assert not (tmp_path / "made").exists()


@given(st.binary(max_size=2 * len(PAGES[0].value)))
def test_arbitrary_bytes_are_refused(value: bytes) -> None:
    assert isinstance(CODEC.verify(value, PAGES[0].identity), Mismatch)


texts = st.text(max_size=4) | st.sampled_from(["", "a", "ab", "b", "\0", "\ud800"])
namespaces = st.builds(Namespace, tenant=texts, salt=texts, private_id=st.just(0))


@given(namespaces, namespaces)
def test_namespace_digests_are_equal_for_equal_namespaces_only(a: Namespace, b: Namespace) -> None:
    assert (namespace_digest(a) == namespace_digest(b)) == (a == b)


tokens = st.lists(st.integers(0, 2), max_size=16)


@given(tokens, tokens, st.lists(st.integers(0, 16), max_size=4))
def test_digests_agree_exactly_as_far_as_the_pages_do(a: list[int], b: list[int], steps: list[int]) -> None:
    at_once, step_by_step = (DigestChain(FINGERPRINT, Namespace(), page_size=2) for _ in range(2))
    at_once.extend(token_key(a))
    for length in sorted(steps):
        step_by_step.extend(token_key(b[:length]))
    step_by_step.extend(token_key(b))
    assert len(at_once.digests) == len(a) // 2
    for index, (x, y) in enumerate(zip(at_once.digests, step_by_step.digests, strict=False)):
        same_history = a[: 2 * index + 2] == b[: 2 * index + 2]
        assert (x.key == y.key) == (x.proof == y.proof) == same_history
