"""The port is looked at before the model is loaded, and nobody is let in meanwhile."""

from __future__ import annotations

import socket

import pytest

from deploy.local.processes import free_port
from prefixcache.errors import ConfigError
from prefixcache.server.port import reserved_port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_held_port_refuses_clients_and_may_be_listened_on(host: str):
    port = free_port()
    with reserved_port(host, port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with reserved_port(host, port), socket.socket() as server:  # two may load at once
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            socket.create_connection(("127.0.0.1", port)).close()


def test_a_port_on_which_somebody_listens_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            message = f"cannot listen on {host}:{port}: Address already in use"
            with pytest.raises(ConfigError, match=message), reserved_port(host, port):
                pass


def test_a_host_that_is_not_ours_is_refused():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:50051: Cannot assign"), reserved_port("192.0.2.1", 50051):
        pass
    with pytest.raises(ConfigError, match="there is no such host"), reserved_port("no host", 50051):
        pass


def test_any_port_needs_no_reservation():
    with reserved_port("127.0.0.1", 0):
        pass
