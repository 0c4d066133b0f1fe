"""The command line without a server: help, mistakes, and errors in one line."""

from __future__ import annotations

import io
import subprocess
import sys

import grpc
import pytest

from prefixcache import __version__
from prefixcache.cli import COMMANDS, main
from prefixcache.client import RequestFailed
from prefixcache.commands.server_options import explain

NOWHERE = ["--server", "127.0.0.1:1"]


def run(*argv: str) -> int:
    try:
        return main(argv)
    except SystemExit as error:  # how argparse ends
        return int(error.code or 0)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text or f"    {name}\n" in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]):
    assert run(name, "--help") == 0
    text = capsys.readouterr().out
    assert f"Examples:\n  prefixcache {name}" in text
    assert text.startswith(f"usage: prefixcache {name}")


def test_version(capsys: pytest.CaptureFixture[str]):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"prefixcache {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["generate"], "the following arguments are required: PROMPT"),
        (["generate", "x", "--max-token", "5"], "unknown arguments: --max-token"),
        (["generate", "x", "--max-tokens", "many"], "invalid whole number value: 'many'"),
        (["generate", "x", "--max-tokens", "99999999999"], "99999999999 is out of range"),
        (["generate", "x", "--system", "y"], "--system goes with --chat"),
        (["generate", "x", "--logprobs", "2"], "--logprobs goes with --json"),
        (["generate", "\udcff"], "text: is not valid UTF-8"),
        (["tokenize"], "one of the arguments TEXT --decode is required"),
        (["tokenize", "--decode", "99999999999999999999"], "is out of range"),
        (["serve", "--prot", "1"], "--prot: there is no such flag; did you mean port?"),
        (["serve", "--port", "99999"], "--port: "),
        (["check-config", "--dtype", "int4"], "--dtype: "),
    ],
)
def test_a_mistake_is_one_clear_message_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_mistake_shows_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]):
    assert run("info", "--bad") == 2
    assert capsys.readouterr().err.startswith("usage: prefixcache info [-h]")


def test_stdin_that_is_no_text_is_the_users_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert run("generate", "-", *NOWHERE) == 2
    assert "not valid UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["generate", "x"], ["chat"], ["tokenize", "x"], ["tokenize", "--decode", "1"], ["info"]]
)
def test_without_a_server_it_says_how_to_start_one(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert run(*argv, *NOWHERE) == 1
    captured = capsys.readouterr()
    assert (
        captured.err == f"prefixcache {argv[0]}: no server answers at 127.0.0.1:1; start one with: prefixcache serve\n"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RequestFailed(grpc.StatusCode.UNAVAILABLE, "x"),
            "no server answers at HOST; start one with: prefixcache serve",
        ),
        (RequestFailed(grpc.StatusCode.UNAVAILABLE, "draining", "id"), "UNAVAILABLE: draining"),
        (RequestFailed(grpc.StatusCode.INVALID_ARGUMENT, "top_p: too big", "id"), "top_p: too big"),
        (
            RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", "id", 1500),
            "the server is overloaded (queue full); try again in 1.5 s",
        ),
        (RequestFailed(grpc.StatusCode.INTERNAL, "internal error, id=7", "7"), "INTERNAL: internal error, id=7"),
    ],
)
def test_a_failed_call_is_explained(error: RequestFailed, message: str):
    assert explain(error, "HOST") == message


def test_client_commands_do_not_wait_for_torch():
    code = f"import sys; from prefixcache.cli import main; main({['info', *NOWHERE]}); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "False\n"
