"""TLS on the gRPC port: who is believed, who is let in, and what happens when certificates change."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from prefixcache.cli import main
from prefixcache.client import AsyncClient, Client, RequestFailed, Tls
from prefixcache.config import Settings
from prefixcache.errors import ConfigError
from prefixcache.server.api_keys import key_digest, new_key
from prefixcache.server.tls import ServerCertificates
from tests.support.redis_server import Certificates
from tests.support.wire import WireServer, wire_server, wire_server_thread


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of another authority."""
    return Certificates(tmp_path_factory.mktemp("theirs"))


def served(certificates: Certificates, folder: Path) -> dict[str, Path]:
    """Settings for a server with copies of these certificates, made or replaced in a folder."""
    files = {"tls_cert": folder / "server.crt", "tls_key": folder / "server.key"}
    shutil.copy(certificates.server_cert, files["tls_cert"])
    shutil.copy(certificates.server_key, files["tls_key"])
    return files


def with_certificate(authority: Certificates, client: Certificates) -> Tls:
    return Tls(Path(authority.ca), Path(client.client_cert), Path(client.client_key))


async def is_answered(server: WireServer, tls: Tls | None) -> bool:
    async with AsyncClient(server.target, tls=tls) as client:
        try:
            return (await client.model_info(timeout_s=5.0)).model == "tiny"
        except RequestFailed as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


async def test_only_tls_is_answered_and_only_our_authority_is_believed(
    ours: Certificates, theirs: Certificates, tmp_path: Path
):
    async with wire_server(**served(ours, tmp_path)) as server:
        assert await is_answered(server, Tls(Path(ours.ca)))
        assert not await is_answered(server, Tls(Path(theirs.ca)))
        assert not await is_answered(server, Tls())
        assert not await is_answered(server, None)
        async with AsyncClient(server.target, tls=Tls(Path(ours.ca))) as client:
            messages = [message async for message in client.generate(token_ids=[5, 6], max_tokens=3)]
            assert messages[-1].HasField("usage")
            await client.wait_until_serving(5.0)


async def test_clients_need_a_certificate_of_the_authority_that_is_named(
    ours: Certificates, theirs: Certificates, tmp_path: Path
):
    async with wire_server(**served(ours, tmp_path), tls_client_ca=ours.ca) as server:
        assert await is_answered(server, with_certificate(ours, ours))
        assert not await is_answered(server, with_certificate(ours, theirs))
        assert not await is_answered(server, Tls(Path(ours.ca)))


async def test_a_certificate_that_changes_is_taken_up_and_a_wrong_one_is_not(
    ours: Certificates, theirs: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "prefixcache.server.tls")
    settings = await asyncio.to_thread(served, ours, tmp_path)
    async with wire_server(**settings) as server, AsyncClient(server.target, tls=Tls(Path(ours.ca))) as open_client:
        await open_client.model_info()
        shutil.copy(theirs.server_key, settings["tls_key"])  # does not go with the certificate yet
        assert await is_answered(server, Tls(Path(ours.ca)))
        assert await is_answered(server, Tls(Path(ours.ca)))
        shutil.copy(theirs.server_cert, settings["tls_cert"])
        assert await is_answered(server, Tls(Path(theirs.ca)))
        assert not await is_answered(server, Tls(Path(ours.ca)))
        assert (await open_client.model_info()).model == "tiny"
    messages = [record.getMessage() for record in caplog.records if record.name == "prefixcache.server.tls"]
    assert messages == [
        "the earlier TLS certificate stays in use: "
        f"tls-cert {settings['tls_cert']} with tls-key {settings['tls_key']}: key values mismatch",
        "TLS certificate read again",
    ]


def test_files_that_cannot_be_used_are_refused_at_start(ours: Certificates, theirs: Certificates, tmp_path: Path):
    cert, key = Path(ours.server_cert), Path(ours.server_key)
    locked, empty, absent = tmp_path / "locked.key", tmp_path / "empty", tmp_path / "absent"
    empty.touch()
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    for files, problem in [
        ((cert, Path(theirs.server_key)), "key values mismatch"),
        ((absent, key), "No such file or directory"),
        ((cert, empty), "tls-cert .* with tls-key .*empty: "),
        ((cert, locked), "tls-cert .* with tls-key .*locked.key: "),
        ((cert, key, empty), "tls-client-ca .*empty: "),
        ((cert, key, absent), "tls-client-ca .*absent: No such file"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            ServerCertificates(*files)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tls_cert": "x"}, "tls_cert and tls_key go together"),
        ({"tls_key": "x"}, "tls_cert and tls_key go together"),
        ({"tls_client_ca": "x"}, "tls_client_ca is set, but tls_cert and tls_key"),
    ],
)
def test_settings_of_tls_go_together(settings: dict[str, str], problem: str):
    with pytest.raises(ValueError, match=problem):
        Settings(**settings)


# --- the client commands, against a server that wants everything: TLS, a client certificate, a key --------------------

KEY = new_key()


@pytest.fixture(scope="module")
def strict_server(ours: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WireServer]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(f"{key_digest(KEY)} acme\n")
    with wire_server_thread(
        **served(ours, folder), tls_client_ca=ours.ca, api_keys=folder / "keys", max_model_len=300
    ) as running:
        yield running


@pytest.fixture
def flags(strict_server: WireServer, ours: Certificates) -> list[str]:
    certificate = ["--tls-cert", ours.client_cert, "--tls-key", ours.client_key]
    return ["--server", strict_server.target, "--tls-ca", ours.ca, *certificate]


def test_the_key_comes_from_the_environment_or_a_file(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert main(["info", *flags, "--api-key-file", str(tmp_path / "key")]) == 0
    monkeypatch.setenv("PREFIXCACHE_API_KEY", KEY)
    assert main(["generate", "Hi", "--max-tokens", "2", *flags]) == 0
    assert main(["tokenize", "Hi", *flags]) == 0
    assert KEY not in "".join(capsys.readouterr())


def test_what_is_missing_is_explained(
    flags: list[str], ours: Certificates, theirs: Certificates, capsys: pytest.CaptureFixture[str]
):
    def failure(*arguments: str, exit_code: int = 1) -> str:
        assert main(["info", *arguments]) == exit_code
        return capsys.readouterr().err

    message = failure(*flags)
    assert "wants one API key" in message
    assert "$PREFIXCACHE_API_KEY" in message
    assert "closed the connection; does it want TLS" in failure(*flags[:2])
    assert "closed the connection; does it want TLS" in failure(*flags[:4])
    assert "CERTIFICATE_VERIFY_FAILED" in failure(*flags[:2], "--tls-ca", theirs.ca)
    assert "CERTIFICATE_VERIFY_FAILED" in failure(*flags[:2], "--tls")
    assert "No such file" in failure(*flags[:2], "--tls-ca", "absent", exit_code=2)
    assert "go together" in failure(*flags[:2], "--tls-cert", ours.client_cert, exit_code=2)


def test_the_blocking_client_takes_both(strict_server: WireServer, ours: Certificates):
    with Client(strict_server.target, tls=with_certificate(ours, ours), api_key=KEY) as client:
        assert client.complete(token_ids=[5], max_tokens=1).usage.completion_tokens == 1
        assert client.model_info().model == "tiny"
