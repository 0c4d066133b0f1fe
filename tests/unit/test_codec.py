import array
import struct
from typing import Any

import pytest
from xxhash import xxh3_64_digest, xxh3_128_digest

from prefixcache.kv.codec import FORMAT_VERSION, MAGIC, Mismatch, PageCodec, PageIdentity
from prefixcache.request import Namespace
from tests.support.pages import FINGERPRINT, PAGE_SIZE, PAYLOAD_BYTES, StoredPage, stored_pages

CODEC = PageCodec(FINGERPRINT, PAGE_SIZE, PAYLOAD_BYTES)
PAGE, OTHER = stored_pages(2, seed=0)


def resigned(value: bytes, offset: int, content: bytes) -> bytes:
    """The value with other bytes at `offset` of its header, and a header checksum that is right again."""
    header = bytearray(value[: CODEC.header_bytes])
    header[offset : offset + len(content)] = content
    header[-8:] = xxh3_64_digest(header[:-8])
    return bytes(header) + value[CODEC.header_bytes :]


def test_what_is_written_can_be_read_without_a_copy() -> None:
    memory = bytearray(PAGE.value)
    payload = CODEC.verify(memory, PAGE.identity)
    assert isinstance(payload, memoryview)
    assert payload.obj is memory
    assert payload == PAGE.value[CODEC.header_bytes :]
    for value in (PAGE.value, memoryview(PAGE.value), memoryview(memory)):
        assert CODEC.verify(value, PAGE.identity) == payload


def test_the_header_is_the_documented_one() -> None:
    identity = PAGE.identity
    payload = PAGE.payload(CODEC)
    header = (
        b"pfxcache"
        + struct.pack("<HHIQ", 2, 152 + 4 * PAGE_SIZE + 8, PAGE_SIZE, PAYLOAD_BYTES)
        + FINGERPRINT
        + identity.namespace_digest
        + identity.key
        + identity.proof
        + xxh3_128_digest(payload)
        + identity.token_ids
    )
    assert PAGE.value == header + xxh3_64_digest(header) + payload
    assert PageCodec(FINGERPRINT, 16, PAYLOAD_BYTES).header_bytes == 224


def test_a_header_is_written_in_front_of_its_payload() -> None:
    memory = bytearray(CODEC.header_bytes) + PAGE.payload(CODEC)
    CODEC.seal(memoryview(memory), PAGE.identity)
    assert memory == PAGE.value


@pytest.mark.parametrize(
    ("offset", "content", "reason"),
    [
        (0, b"PFXCACHE", Mismatch.MAGIC),
        (8, struct.pack("<H", FORMAT_VERSION + 1), Mismatch.VERSION),
        (10, struct.pack("<H", 152), Mismatch.LENGTH),
        (12, struct.pack("<I", PAGE_SIZE + 1), Mismatch.TOKENS),
        (16, struct.pack("<Q", PAYLOAD_BYTES + 1), Mismatch.LENGTH),
        (16, struct.pack("<Q", PAYLOAD_BYTES - 1), Mismatch.LENGTH),
        (16, struct.pack("<Q", 2**64 - 1), Mismatch.LENGTH),
        (24, bytes(32), Mismatch.FINGERPRINT),
        (56, bytes(32), Mismatch.NAMESPACE),
        (88, bytes(16), Mismatch.KEY),
        (104, bytes(32), Mismatch.PROOF),
        (136, bytes(16), Mismatch.CHECKSUM),
        (152, bytes(4), Mismatch.TOKENS),
    ],
)
def test_each_field_is_compared(offset: int, content: bytes, reason: Mismatch) -> None:
    assert CODEC.verify(resigned(PAGE.value, offset, content), PAGE.identity) is reason


def test_a_header_with_a_wrong_checksum_is_not_read() -> None:
    value = bytearray(PAGE.value)
    value[90] ^= 1
    assert CODEC.verify(value, PAGE.identity) is Mismatch.CHECKSUM


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", Mismatch.SHORT),
        (MAGIC, Mismatch.SHORT),
        (PAGE.value[: CODEC.header_bytes - 1], Mismatch.SHORT),
        (PAGE.value[: CODEC.header_bytes], Mismatch.SHORT),
        (PAGE.value[:-1], Mismatch.SHORT),
        (PAGE.value + b"\0", Mismatch.LENGTH),
        (PAGE.value[: CODEC.header_bytes] + OTHER.payload(CODEC), Mismatch.CHECKSUM),
        (b"x" * len(PAGE.value), Mismatch.MAGIC),
    ],
)
def test_damaged_values_are_refused(value: bytes, reason: Mismatch) -> None:
    assert CODEC.verify(value, PAGE.identity) is reason


@pytest.mark.parametrize(
    "value",
    [None, 7, "text", [PAGE.value], memoryview(PAGE.value)[::2], array.array("d", [1.0]), {}, memoryview(b"")],
)
def test_other_types_are_refused(value: Any) -> None:
    assert isinstance(CODEC.verify(value, PAGE.identity), Mismatch)


def test_values_of_other_pages_tenants_and_models_are_refused() -> None:
    (tenants,) = stored_pages(1, seed=0, namespace=Namespace(tenant="b"))
    (models,) = stored_pages(1, seed=0, fingerprint=bytes(32))
    assert CODEC.verify(OTHER.value, PAGE.identity) is Mismatch.KEY
    assert CODEC.verify(tenants.value, PAGE.identity) is Mismatch.NAMESPACE
    assert CODEC.verify(models.value, PAGE.identity) is Mismatch.FINGERPRINT


def test_a_key_collision_is_refused_by_proof_and_again_by_tokens() -> None:
    collision = PAGE.identity._replace(proof=OTHER.identity.proof, token_ids=OTHER.identity.token_ids)
    assert CODEC.verify(stored(collision), PAGE.identity) is Mismatch.PROOF
    double = PAGE.identity._replace(token_ids=OTHER.identity.token_ids)
    assert CODEC.verify(stored(double), PAGE.identity) is Mismatch.TOKENS


def stored(identity: PageIdentity) -> bytes:
    payload = bytes(PAYLOAD_BYTES)
    return StoredPage(identity, CODEC.encode_header(identity, payload) + payload).value


def test_codecs_of_other_shapes_refuse_each_others_values() -> None:
    """Same model name, other page size or other K/V heads: nothing is read, nothing is raised."""
    other_page_size = PageCodec(FINGERPRINT, PAGE_SIZE * 2, PAYLOAD_BYTES)
    identity = PAGE.identity._replace(token_ids=PAGE.identity.token_ids * 2)
    assert other_page_size.verify(PAGE.value, identity) is Mismatch.LENGTH
    fewer_heads = PageCodec(FINGERPRINT, PAGE_SIZE, PAYLOAD_BYTES // 2)
    assert fewer_heads.verify(PAGE.value, PAGE.identity) is Mismatch.LENGTH
    more_heads = PageCodec(FINGERPRINT, PAGE_SIZE, PAYLOAD_BYTES * 2)
    assert more_heads.verify(PAGE.value, PAGE.identity) is Mismatch.LENGTH


def test_only_other_versions_are_left_alone() -> None:
    assert [reason for reason in Mismatch if not reason.is_corrupt] == [Mismatch.VERSION]
