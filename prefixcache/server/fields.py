"""Checks of single proto fields, each raising InvalidRequest with the field's name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from prefixcache.errors import InvalidRequest


def flag(message: Message, field: str, default: bool) -> bool:
    """The value of an optional flag."""
    return bool(getattr(message, field)) if message.HasField(field) else default


def number(message: Message, field: str, default: float, low: float, high: float) -> float:
    """The value of an optional real number, from `low` to `high`."""
    value = float(getattr(message, field)) if message.HasField(field) else default
    if not low <= value <= high:  # written so that NaN fails it
        raise InvalidRequest(field, f"must be from {low:g} to {high:g}; got {value}")
    return value


def integer(message: Message, field: str, default: int, low: int, high: int | None = None) -> int:
    """The value of an optional integer, from `low` to `high`."""
    value = optional_integer(message, field, low, high)
    return default if value is None else value


def optional_integer(message: Message, field: str, low: int, high: int | None = None) -> int | None:
    """The value of an optional integer, from `low` to `high`, or None if it is not set."""
    if not message.HasField(field):
        return None
    value = int(getattr(message, field))
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(field, f"must be {bounds}; got {value}")
    return value


def checked_token_ids(field: str, values: Sequence[int], vocab_size: int) -> list[int]:
    """The token ids in a repeated field, all of them within the vocabulary.

    numpy reads protobuf's array in place; eight thousand ids take 0.1 ms this way and ten times that one by one.
    """
    array = np.asarray(values, dtype=np.int64)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise InvalidRequest(field, f"{wrong} is not a token id; they go from 0 to {vocab_size - 1}")
    token_ids: list[int] = array.tolist()
    return token_ids


def check_known_fields(message: Message, name: str) -> None:
    """Refuses what this version would have to ignore: an option it does not know, or another kind of content."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(name, f"has field number {unknown[0].field_number}, which this server does not know")
