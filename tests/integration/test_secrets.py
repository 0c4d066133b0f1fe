"""What must not be seen is nowhere to be seen: not in logs, errors, metrics, replies, nor in check-config."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from prefixcache.cli import main
from prefixcache.client import Client, RequestFailed
from prefixcache.local_server import LocalServer
from prefixcache.server.api_keys import key_digest, new_key
from tests.support.redis_server import redis_server

PASSWORD, WRONG_PASSWORD = "correct-horse-battery", "staple-battery-horse"
KEY, STRANGE_KEY = new_key(), new_key()
PROMPT, SALT = "my grandmother's maiden name is Quux", "pepper-and-more-pepper"
SECRETS = (PASSWORD, WRONG_PASSWORD, KEY, STRANGE_KEY, PROMPT, "Quux", SALT)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{key_digest(KEY)} acme\n")
    return path


def test_nothing_that_a_server_says_has_a_secret_in_it(
    keys: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    log_path = tmp_path / "log"
    with redis_server(tmp_path / "redis", "--requirepass", PASSWORD) as redis, log_path.open("w") as log:
        monkeypatch.setenv("PREFIXCACHE_REDIS", f"redis://:{WRONG_PASSWORD}@127.0.0.1:{redis.port}/0")
        flags = ("--model", str(model_folder), "--cache-tokens", "512", "--threads", "1", "--log-level", "debug")
        server = LocalServer(*flags, "--api-keys", str(keys), log=log, on_line=said.append)
        with (
            server,
            Client(server.address, api_key=KEY) as client,
            Client(server.address, api_key=STRANGE_KEY) as other,
        ):
            client.complete(PROMPT, cache_salt=SALT, max_tokens=2)
            for refused in (other, client):
                with pytest.raises(RequestFailed) as caught:
                    refused.complete(PROMPT, cache_salt=SALT, max_tokens=10_000)
                said.append(str(caught.value))
            with urllib.request.urlopen(server.metrics_url) as response:
                said.append(response.read().decode())
            said += [str(client.model_info()), server.description]
    said.append(log_path.read_text())
    everything = "\n".join(said)
    assert "tenant=acme" in everything
    assert "outcome=unauthenticated" in everything
    assert 'prefixcache_store_errors_total{kind="auth",tier="remote"}' in everything
    assert [secret for secret in SECRETS if secret in everything] == []


def test_check_config_shows_no_secret(
    keys: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PREFIXCACHE_REDIS", f"redis://user:{PASSWORD}@127.0.0.1:1/0")
    monkeypatch.setenv("PREFIXCACHE_API_KEY", KEY)
    assert main(["check-config", "--model", str(model_folder), "--cache-tokens", "512", "--api-keys", str(keys)]) == 0
    shown = "".join(capsys.readouterr())
    assert f"api-keys {keys}" in " ".join(shown.split())
    assert [secret for secret in SECRETS if secret in shown] == []


def test_errors_about_stores_and_keys_show_no_secret(
    keys: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    flags = ["--model", str(model_folder), "--cache-tokens", "512", "--port", "0", "--metrics-port", "0"]
    for url in (f"redis://:{PASSWORD}@host:notaport/0", f"rediss://u:{PASSWORD}@h?ssl_x=1", f"http://:{PASSWORD}@h"):
        monkeypatch.setenv("PREFIXCACHE_REDIS", url)
        assert main(["serve", *flags]) == 2
    monkeypatch.delenv("PREFIXCACHE_REDIS")
    keys.write_text(KEY)
    assert main(["serve", *flags, "--api-keys", str(keys)]) == 2
    shown = "".join(capsys.readouterr())
    assert str(keys) in shown
    assert [secret for secret in SECRETS if secret in shown] == []
