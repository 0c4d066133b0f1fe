"""The file of API keys: what is taken, what is refused, and what happens when it changes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from prefixcache.cli import main
from prefixcache.errors import ConfigError, Unauthenticated
from prefixcache.server import api_keys
from prefixcache.server.api_keys import ApiKeys, key_digest, new_key, read_keys

ALICE, BOB = new_key(), new_key()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "RELOAD_S", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "keys", f"# ours\n\n{key_digest(ALICE)}  alice # since May\n{key_digest(BOB)}\tbob\n")


def write(path: Path, text: str) -> Path:
    """Replaces a file as editors and secret mounts do, so that it is another file each time."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)
    return path


def bearer(key: str) -> list[tuple[str, str | bytes]]:
    return [("x-request-id", "1"), ("authorization", f"Bearer {key}")]


def test_a_key_says_which_tenant_calls(path: Path):
    keys = ApiKeys(path)
    assert keys.tenant_of(bearer(ALICE)) == "alice"
    assert keys.tenant_of([("authorization", f"bearer  {BOB} ")]) == "bob"


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        bearer(""),
        bearer(ALICE[:-1]),
        bearer(key_digest(ALICE)),
        [("authorization", ALICE)],
        [("authorization", f"Basic {ALICE}")],
        [("authorization", f"Bearer {ALICE}".encode())],
        bearer(ALICE) + bearer(BOB),
    ],
)
def test_all_else_is_refused_without_repeating_it(path: Path, metadata: list[tuple[str, str | bytes]]):
    with pytest.raises(Unauthenticated) as caught:
        ApiKeys(path).tenant_of(metadata)
    assert ALICE[:-1] not in str(caught.value)


def test_a_changed_file_counts_from_then_on(path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    keys = ApiKeys(path)
    write(path, f"{key_digest(BOB)} carol\n")
    assert keys.tenant_of(bearer(BOB)) == "carol"
    with pytest.raises(Unauthenticated, match="not known"):
        keys.tenant_of(bearer(ALICE))
    assert [record.getMessage() for record in caplog.records] == ["API keys read again: 1 of 1 tenants"]


@pytest.mark.parametrize("content", ["", "nonsense", f"{key_digest(ALICE)} no/such name", None])
def test_a_wrong_file_later_keeps_the_earlier_keys_and_is_reported_once(
    path: Path, content: str | None, caplog: pytest.LogCaptureFixture
):
    keys = ApiKeys(path)
    if content is None:
        path.unlink()
    else:
        write(path, content)
    for _ in range(3):
        assert keys.tenant_of(bearer(ALICE)) == "alice"
    (record,) = caplog.records
    assert record.getMessage().startswith("the earlier API keys stay in use: ")
    write(path, f"{key_digest(BOB)} carol\n")
    assert keys.tenant_of(bearer(BOB)) == "carol"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("# nothing\n", "there is no key in it; make one with: prefixcache new-key TENANT"),
        (f"{ALICE} alice\n", "line 1 is not a SHA-256"),  # the key itself, put there by mistake
        (f"\n{key_digest(ALICE)}\n", "line 2 is not a SHA-256"),
        (f"{key_digest(ALICE).upper()} alice\n", "line 1 is not a SHA-256"),
        (f"{key_digest(ALICE)} alice\n{key_digest(ALICE)} bob\n", "line 2 gives a key to a second tenant"),
    ],
)
def test_a_wrong_file_is_refused_at_start_without_showing_its_lines(path: Path, content: str, problem: str):
    write(path, content)
    with pytest.raises(ConfigError) as caught:
        ApiKeys(path)
    assert f"{path}: {problem}" in str(caught.value)
    assert ALICE not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="keys: No such file"):
        read_keys(tmp_path / "keys")
    (tmp_path / "keys").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="keys: is not UTF-8"):
        read_keys(tmp_path / "keys")


def test_the_command_makes_a_line_that_knows_its_key(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["new-key", "dave"]) == 0
    captured = capsys.readouterr()
    key = captured.err.strip()
    assert key not in captured.out
    write(path, captured.out)
    assert ApiKeys(path).tenant_of(bearer(key)) == "dave"
    assert main(["new-key", "dave"]) == 0
    assert capsys.readouterr().err.strip() != key
    assert main(["new-key", "no/such name"]) == 2
