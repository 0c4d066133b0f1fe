"""The one table that turns an error into a gRPC status."""

from __future__ import annotations

from dataclasses import dataclass

from grpc import StatusCode

from prefixcache.errors import (
    Aborted,
    CursorExpired,
    DeadlinePassed,
    EngineFailed,
    EventsLost,
    InvalidRequest,
    NotServing,
    Overloaded,
    PrefixCacheError,
    Unauthenticated,
    Unsupported,
)
from prefixcache.metrics import Outcome

PUSHBACK_KEY = "grpc-retry-pushback-ms"  # gRPC clients with a retry policy wait this long (gRFC A6)

_TABLE: tuple[tuple[type[PrefixCacheError], StatusCode, Outcome], ...] = (
    (InvalidRequest, StatusCode.INVALID_ARGUMENT, Outcome.INVALID),
    (Unauthenticated, StatusCode.UNAUTHENTICATED, Outcome.UNAUTHENTICATED),
    (DeadlinePassed, StatusCode.DEADLINE_EXCEEDED, Outcome.DEADLINE),
    (Overloaded, StatusCode.RESOURCE_EXHAUSTED, Outcome.OVERLOADED),
    (NotServing, StatusCode.UNAVAILABLE, Outcome.NOT_SERVING),
    (EngineFailed, StatusCode.INTERNAL, Outcome.FAILED),
    (Aborted, StatusCode.CANCELLED, Outcome.CANCELLED),
    (Unsupported, StatusCode.UNIMPLEMENTED, Outcome.INVALID),
    (CursorExpired, StatusCode.OUT_OF_RANGE, Outcome.INVALID),
    (EventsLost, StatusCode.DATA_LOSS, Outcome.FAILED),
)


@dataclass(frozen=True, slots=True)
class Status:
    """How one call ends on the wire, and how it is counted."""

    code: StatusCode
    outcome: Outcome
    message: str
    metadata: tuple[tuple[str, str], ...] = ()


OK = Status(StatusCode.OK, Outcome.OK, "")
CANCELLED = Status(StatusCode.CANCELLED, Outcome.CANCELLED, "cancelled by the client")
DEADLINE_EXCEEDED = Status(StatusCode.DEADLINE_EXCEEDED, Outcome.DEADLINE, "deadline exceeded")


def status_of(error: Exception, request_id: str) -> Status:
    """The status for an error; one that nobody foresaw tells the client where to look in the log, and no more."""
    for kind, code, outcome in _TABLE:
        if isinstance(error, kind):
            retry_after_ms = error.retry_after_ms if isinstance(error, Overloaded) else None
            metadata = () if retry_after_ms is None else ((PUSHBACK_KEY, str(retry_after_ms)),)
            return Status(code, outcome, str(error), metadata)
    return Status(StatusCode.INTERNAL, Outcome.FAILED, f"internal error, id={request_id}")
