"""What a failed call looks like to a user of the client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from prefixcache.errors import PrefixCacheError

CLOSED_BY_US = "Channel closed!"  # what gRPC says of calls that were open when their blocking channel was closed


class RequestFailed(PrefixCacheError):
    """A call ended with an error status.

    Attributes:
        code: gRPC's status code; the table of what each one means is in `inference.proto`.
        message: What the server (or gRPC itself) says about it.
        request_id: Names the request in the server's log; None if no server answered.
        retry_after_ms: How long an overloaded server asks to wait before the next try; None if it doesn't.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, request_id: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.request_id = request_id
        self.retry_after_ms = retry_after_ms

    @classmethod
    def from_rpc_error(cls, error: grpc.RpcError) -> RequestFailed:
        """Reads status and trailing metadata of a call's error, of either kind of channel.

        The gRPC core of a server that stops ends calls that nobody has taken yet with CANCELLED, which is what callers
        do, not servers (grpc/grpc#41785). An answer of the service always names the request; where nothing does, it is
        told as what it is.
        """
        trailing: Any = error.trailing_metadata() or ()
        metadata = {key: str(value) for key, value in trailing}
        request_id, pushback = metadata.get("x-request-id"), metadata.get("grpc-retry-pushback-ms")
        code, message = error.code(), error.details() or ""
        if code is grpc.StatusCode.CANCELLED and request_id is None and message != CLOSED_BY_US:
            code, message = grpc.StatusCode.UNAVAILABLE, "the server stopped before it took the call"
        return cls(code, message, request_id, None if pushback is None else int(pushback))


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turns gRPC's errors of either kind of channel into RequestFailed."""
    try:
        yield
    except grpc.RpcError as error:
        raise RequestFailed.from_rpc_error(error) from error
