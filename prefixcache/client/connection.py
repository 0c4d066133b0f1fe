"""How a client reaches its server: plainly or with TLS, and with which API key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True)
class Tls:
    """Asks for TLS. All are PEM files, read when the client is made; OSError is raised for those that cannot be.

    Attributes:
        ca: Authorities that the server's certificate may come from; None for the public ones that gRPC knows.
        cert: The client's own certificate, for servers that want one.
        key: Its key.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client certificate and its key go together")

    def credentials(self) -> grpc.ChannelCredentials:
        ca, cert, key = (None if path is None else Path(path).read_bytes() for path in (self.ca, self.cert, self.key))
        return grpc.ssl_channel_credentials(ca, key, cert)


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of each call that says who calls."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)
