"""Finds out whether the port can be had before minutes go into loading a model."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefixcache.errors import ConfigError

# An address that this machine lacks, such as ::1 for localhost where IPv6 is off, is passed over, as gRPC does.
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[None]:
    """Hold a port without listening on it, so that clients are refused until the server is there.

    Fails where another server listens. Of two that are still loading both may hold it; then the second to listen
    fails. Port 0, any free one, needs no reservation.

    Raises:
        ConfigError: The port is taken, the user may not have it, or the host is not this machine's.
    """
    with ExitStack() as stack:
        if port:
            _hold(stack, host, port)
        yield


def _hold(stack: ExitStack, host: str, port: int) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: there is no such host") from error
    absent = []
    for family, kind, protocol, _, address in found:
        try:
            held = stack.enter_context(socket.socket(family, kind, protocol))
            # As gRPC itself: connections of an earlier server that are still closing down do not count.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
            absent.append(error)
    if len(absent) == len(found):
        raise ConfigError(f"cannot listen on {host}:{port}: {absent[0].strerror}") from absent[0]
