"""One unambiguous byte string for a set of named values, made to be hashed.

Every name and value carries its type and its length, so no choice of one value can imitate another field or move the
border between two of them, and the same values give the same bytes in every process on every machine:

    type, 1 byte | length in bytes, 8 bytes little-endian | content
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

FieldValue = bool | int | float | str | bytes | tuple["FieldValue", ...]


def framed(what: str, fields: Mapping[str, FieldValue]) -> bytes:
    """Encode `fields`, in their order, as a `what`: equal bytes mean the same `what`, names, types and values."""
    return _frame(what) + b"".join(_frame(name) + _frame(value) for name, value in fields.items())


def _frame(value: FieldValue) -> bytes:
    match value:
        case bytes():
            tag, content = b"y", value
        case str():
            tag, content = b"s", value.encode("utf-8", "surrogatepass")
        case bool():  # before int, of which it is a kind
            tag, content = b"b", bytes([value])
        case int():
            tag, content = b"i", str(value).encode()
        case float():
            tag, content = b"f", struct.pack("<d", value)  # its bits, so that 0.0 is not -0.0
        case tuple():
            tag, content = b"t", b"".join(map(_frame, value))
        case _:
            raise TypeError(f"cannot frame a {type(value).__name__}")
    return tag + struct.pack("<Q", len(content)) + content
