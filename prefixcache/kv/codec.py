"""Page <-> bytes: the header that lets every stored value prove what it is.

    header | payload                                   one value, under one key, written and expiring as one

    offset  size  header field         content
    0       8     magic                b"pfxcache"
    8       2     format version       FORMAT_VERSION
    10      2     header length        offset of the payload
    12      4     number of tokens     n, the page size
    16      8     payload length       in bytes; nothing follows the payload
    24      32    fingerprint          the model and the layout of its K/V, see `kv_fingerprint`
    56      32    namespace            digest of who may share
    88      16    key                  the page's key
    104     32    proof                the page's proof: SHA-256 of its whole history
    136     16    payload checksum     xxh3-128 of the payload
    152     4n    token ids            the page's tokens
    152+4n  8     header checksum      xxh3-64 of all that stands before it

Numbers are unsigned and little-endian. The payload is the page's K/V, `[num_layers, 2, page_size, num_kv_heads,
head_dim]` in the layout's dtype: the memory's own bytes, nothing converted, nothing evaluated.

A reader knows every field beforehand except the checksums, and compares them all (I7). Magic and version keep their
place in every format version.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

MAGIC = b"pfxcache"
FORMAT_VERSION = 2  # 1 could hold pages in the wrong place

_START = struct.Struct("<8sH")
_FIXED = struct.Struct("<8sHHIQ32s32s16s32s16s")
_CHECKSUM_BYTES = 8
_BYTES_PER_TOKEN = 4

Value = bytes | bytearray | memoryview


class PageIdentity(NamedTuple):
    """Which page a value must be: digests as `DigestChain` gives them, `token_ids` as `little_endian` does."""

    namespace_digest: bytes
    key: bytes
    proof: bytes
    token_ids: bytes


class _Header(NamedTuple):
    magic: bytes
    format_version: int
    header_bytes: int
    num_tokens: int
    payload_bytes: int
    fingerprint: bytes
    namespace_digest: bytes
    key: bytes
    proof: bytes
    payload_checksum: bytes


class Mismatch(StrEnum):
    """Why a stored value is not the page that was asked for. A closed set, used as a metrics label."""

    SHORT = "short"  # ends too early
    MAGIC = "magic"  # not written by this program
    VERSION = "version"
    FINGERPRINT = "fingerprint"
    NAMESPACE = "namespace"
    KEY = "key"
    PROOF = "proof"
    TOKENS = "tokens"
    LENGTH = "length"  # a header or payload of another length, or something behind the payload
    CHECKSUM = "checksum"

    @property
    def is_corrupt(self) -> bool:
        """Whether the value is of no use to anyone and should be deleted.

        One of another format version is: its readers may still be running beside this process.
        """
        return self is not Mismatch.VERSION


class PageCodec:
    """Writes and checks the headers of one model's pages. Any thread.

    Attributes:
        header_bytes: Room that a header takes in front of its payload.
        payload_bytes: Length of every payload.
    """

    def __init__(self, fingerprint: bytes, page_size: int, payload_bytes: int) -> None:
        self.header_bytes = _FIXED.size + page_size * _BYTES_PER_TOKEN + _CHECKSUM_BYTES
        self.payload_bytes = payload_bytes
        self._fingerprint = fingerprint
        self._page_size = page_size

    def encode_header(self, identity: PageIdentity, payload: Value) -> bytes:
        """Return the header of `payload`, which is only read to take its checksum."""
        assert len(identity.token_ids) == self._page_size * _BYTES_PER_TOKEN
        assert len(payload) == self.payload_bytes
        fields = _Header(
            MAGIC,
            FORMAT_VERSION,
            self.header_bytes,
            self._page_size,
            self.payload_bytes,
            self._fingerprint,
            identity.namespace_digest,
            identity.key,
            identity.proof,
            payload_checksum=xxh3_128_digest(payload),
        )
        header = _FIXED.pack(*fields) + identity.token_ids
        return header + xxh3_64_digest(header)

    def seal(self, value: memoryview, identity: PageIdentity) -> None:
        """Write the header into the room in front of a payload that is in `value` already."""
        value[: self.header_bytes] = self.encode_header(identity, value[self.header_bytes :])

    def verify(self, value: Value, identity: PageIdentity) -> memoryview | Mismatch:
        """Return the payload, as a view of `value`, if the value is whole and is this page; else what is wrong.

        Never raises, whatever a store hands back.
        """
        try:
            view = memoryview(value).cast("B")
        except TypeError:  # no plain run of bytes
            return Mismatch.SHORT
        header = self._read_header(view)
        if isinstance(header, Mismatch):
            return header
        return self._identity_mismatch(view, header, identity) or self._checked_payload(view, header)

    def _read_header(self, view: memoryview) -> _Header | Mismatch:
        if len(view) < _START.size:
            return Mismatch.SHORT
        magic, version = _START.unpack_from(view)
        if magic != MAGIC:
            return Mismatch.MAGIC
        if version != FORMAT_VERSION:  # before the checksum, which may be elsewhere there
            return Mismatch.VERSION
        if len(view) < self.header_bytes:
            return Mismatch.SHORT
        header = _Header._make(_FIXED.unpack_from(view))
        if header.header_bytes != self.header_bytes:
            return Mismatch.LENGTH
        end = self.header_bytes - _CHECKSUM_BYTES
        return header if xxh3_64_digest(view[:end]) == view[end : self.header_bytes] else Mismatch.CHECKSUM

    def _identity_mismatch(self, view: memoryview, header: _Header, identity: PageIdentity) -> Mismatch | None:
        if header.fingerprint != self._fingerprint:
            return Mismatch.FINGERPRINT
        if header.namespace_digest != identity.namespace_digest:
            return Mismatch.NAMESPACE
        if header.key != identity.key:
            return Mismatch.KEY
        if header.proof != identity.proof:
            return Mismatch.PROOF
        token_ids = view[_FIXED.size : self.header_bytes - _CHECKSUM_BYTES]
        if header.num_tokens != self._page_size or token_ids != identity.token_ids:
            return Mismatch.TOKENS
        return None

    def _checked_payload(self, view: memoryview, header: _Header) -> memoryview | Mismatch:
        payload = view[self.header_bytes :]
        if len(payload) < min(header.payload_bytes, self.payload_bytes):
            return Mismatch.SHORT
        if not len(payload) == header.payload_bytes == self.payload_bytes:
            return Mismatch.LENGTH
        return payload if xxh3_128_digest(payload) == header.payload_checksum else Mismatch.CHECKSUM
