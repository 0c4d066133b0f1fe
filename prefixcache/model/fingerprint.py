"""The fingerprint of everything besides tokens and namespace that decides what a page's bytes are."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import fields

from prefixcache.framing import FieldValue, framed
from prefixcache.kv.layout import KVLayout
from prefixcache.model.spec import DecoderSpec


def kv_fingerprint(
    spec: DecoderSpec, layout: KVLayout, weights_digest: bytes, tokenizer_digest: bytes, format_version: int
) -> bytes:
    """Return 32 bytes that two processes share only if each may read the K/V that the other has stored.

    Every field of `spec` and `layout` counts, also one that is added later. So does the byte order, since payloads are
    the memory's own bytes: machines of different byte order use one store side by side without sharing.
    """
    values: dict[str, FieldValue] = {
        "format_version": format_version,
        "byte_order": sys.byteorder,
        "weights": weights_digest,
        "tokenizer": tokenizer_digest,
    }
    values |= {f"spec.{field.name}": getattr(spec, field.name) for field in fields(spec)}
    values |= {f"layout.{field.name}": getattr(layout, field.name) for field in fields(layout)}
    values["layout.dtype"] = str(layout.dtype)
    return hashlib.sha256(framed("kv", values)).digest()
