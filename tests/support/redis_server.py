"""Real Redis servers for tests: one alone, one with TLS, a cluster, a set under Sentinel; killed and restarted."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from deploy.local.processes import free_port

INSTALL = "apt-get update && apt-get install -y redis-server openssl"
START_LIMIT_S = 30.0


class RedisServer:
    """One `redis-server` process on loopback, with nothing saved to disk unless the arguments say so."""

    binary = "redis-server"

    def __init__(
        self, folder: Path, *arguments: str, port: int | None = None, sentinel_config: Path | None = None
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        common = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder))
        kind = (str(sentinel_config), "--sentinel") if sentinel_config else ("--save", "")
        self._arguments = (*kind, *common, *arguments)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it and returns once it answers."""
        binary = _require(self.binary)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([binary, *self._arguments], stdout=log, stderr=log)
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        pytest.fail(f"redis-server did not start:\n{(self.folder / 'log').read_text()}")

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kills it and starts it again on the same port, empty."""
        self.kill()
        self.start()

    def cli(self, *arguments: str) -> str:
        """Returns what `redis-cli` prints for one command; errors are part of it."""
        command = [_require("redis-cli"), "-h", "127.0.0.1", "-p", str(self.port), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()


class ValkeyServer(RedisServer):
    """One `valkey-server` process; few machines have it."""

    binary = "valkey-server"


@contextmanager
def redis_server(folder: Path, *arguments: str, sentinel_config: Path | None = None) -> Iterator[RedisServer]:
    """Runs one server, or with `sentinel_config` a Sentinel, for as long as the block lasts."""
    server = RedisServer(folder, *arguments, sentinel_config=sentinel_config)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def tls_redis_server(folder: Path, password: str) -> Iterator[tuple[RedisServer, Certificates]]:
    """Runs a server that listens with TLS only, asks for a client's certificate, and has a password."""
    certificates = Certificates(folder / "tls")
    port = free_port()
    server = RedisServer(
        folder,
        *("--port", "0", "--tls-port", str(port), "--requirepass", password),
        *("--tls-cert-file", certificates.server_cert, "--tls-key-file", certificates.server_key),
        *("--tls-ca-cert-file", certificates.ca, "--tls-auth-clients", "yes"),
        port=port,
    )
    server.start()
    try:
        yield server, certificates
    finally:
        server.kill()


@contextmanager
def redis_cluster(folder: Path, num_nodes: int = 3) -> Iterator[list[RedisServer]]:
    """Runs a cluster of masters that share the slots, each with a third of them if there are three."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000")
    with ExitStack() as nodes:
        servers = [nodes.enter_context(redis_server(folder / f"node-{index}", *options)) for index in range(num_nodes)]
        places = [f"127.0.0.1:{server.port}" for server in servers]
        servers[0].cli("--cluster", "create", *places, "--cluster-yes")
        _until(lambda: all("cluster_state:ok" in server.cli("cluster", "info") for server in servers), "the cluster")
        yield servers


@contextmanager
def redis_sentinel(
    folder: Path, service: str = "pages", down_after_ms: int = 60_000
) -> Iterator[tuple[RedisServer, RedisServer, RedisServer]]:
    """Runs a master, a replica and one Sentinel that may promote alone; yields (master, replica, sentinel).

    A Sentinel of little patience promotes the replica also where the machine was held up for a moment.
    """
    with ExitStack() as servers:
        master = servers.enter_context(redis_server(folder / "master", "--repl-diskless-sync-delay", "0"))
        replica = servers.enter_context(redis_server(folder / "replica", "--replicaof", "127.0.0.1", str(master.port)))
        _until(lambda: "master_link_status:up" in replica.cli("info", "replication"), "the replica")
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {service} 127.0.0.1 {master.port} 1\n"
            f"sentinel down-after-milliseconds {service} {down_after_ms}\n"
            f"sentinel failover-timeout {service} 2000\n"
        )
        sentinel = servers.enter_context(redis_server(folder / "sentinel", sentinel_config=config))
        _until(lambda: "slaves=1" in sentinel.cli("info", "sentinel"), "Sentinel")
        yield master, replica, sentinel


class Certificates:
    """An authority and certificates for 127.0.0.1, made by openssl: one for the server, one for clients."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca = str(folder / "ca.crt")
        self.server_cert, self.server_key = str(folder / "server.crt"), str(folder / "server.key")
        self.client_cert, self.client_key = str(folder / "client.crt"), str(folder / "client.key")
        new_key = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
        self._openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test authority")
        for name in ("server", "client"):
            self._openssl("req", *new_key[:3], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
            self._openssl(
                *("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", "-days", "2", "-extfile", "extensions"),
                *("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
            )

    @property
    def query(self) -> str:
        """The options of a URL for a client that has a certificate."""
        return f"ssl_ca_certs={self.ca}&ssl_certfile={self.client_cert}&ssl_keyfile={self.client_key}"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run([_require("openssl"), *arguments], cwd=self._folder, check=True, capture_output=True)


def _require(binary: str) -> str:
    path = shutil.which(binary)
    if path is None:
        pytest.fail(f"these tests need {binary}: {INSTALL}")
    return path


def _until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not is_true():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come up")
        time.sleep(0.05)
