"""Checks of single proto fields, each raising InvalidRequest with the field's name."""

from __future__ import annotations

from collections.abc import Collection

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


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Refuses token ids outside the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(field, f"{wrong} is not a token id; they go from 0 to {vocab_size - 1}")


def check_known_fields(message: Message, name: str) -> None:
    """Refuses what this version would have to ignore: an option it does not know, or another kind of content."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(name, f"has field number {unknown[0].field_number}, which this server does not know")
