"""The client commands and the blocking client against a real server."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from prefixcache.cli import main
from prefixcache.client import Client, RequestFailed
from tests.support.patience import until
from tests.support.wire import WireServer, wire_server_thread


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with wire_server_thread(cache_tokens=2048, max_model_len=300) as running:
        yield running


@pytest.fixture
def run(server: WireServer, capsys: pytest.CaptureFixture[str]):
    def run_command(*argv: str) -> tuple[int, str, str]:
        exit_code = main([*argv, "--server", server.target])
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return run_command


def test_generate_streams_text_to_stdout_and_figures_to_stderr(run, server: WireServer):
    options = ("--max-tokens", "8", "--temperature", "0", "--no-cache")
    exit_code, out, err = run("generate", "The quick brown fox", *options)
    with Client(server.target) as client:
        reply = client.complete("The quick brown fox", max_tokens=8, temperature=0.0)
    assert exit_code == 0
    assert out == reply.samples[0].text + "\n"
    assert "TTFT" in err
    assert f"prompt {reply.usage.prompt_tokens} tokens, 0 of them cached" in err


def test_generate_as_json_prints_the_messages(run):
    exit_code, out, err = run("generate", "--json", "The quick", "--max-tokens", "3", "--temperature", "0")
    messages = [json.loads(line) for line in out.splitlines()]
    assert exit_code == 0
    assert err == ""
    assert [("usage" in message) for message in messages] == [False] * (len(messages) - 1) + [True]
    assert sum(len(message["token_ids"]) for message in messages) == int(messages[-1]["usage"]["completion_tokens"])


def test_generate_writes_several_samples_one_after_the_other(run):
    options = ("--max-tokens", "6", "--temperature", "0", "--presence-penalty", "0.5", "--frequency-penalty", "0.5")
    alone = run("generate", "The quick", *options)[1]
    exit_code, out, err = run("generate", "The quick", "--n", "3", *options)
    assert exit_code == 0
    assert out == f"{alone}--- 2 of 3\n{alone}--- 3 of 3\n{alone}"
    assert "answer 18 tokens" in err


def test_generate_as_json_has_logprobs_if_asked(run):
    _, out, _ = run("generate", "--json", "The quick", "--max-tokens", "2", "--logprobs", "2")
    entries = [entry for line in out.splitlines() for entry in json.loads(line)["logprobs"]]
    assert [len(entry["top_token_ids"]) for entry in entries] == [2, 2]


def test_a_refused_request_is_one_line_and_exit_code_2(run):
    exit_code, out, err = run("generate", "x", "--top-p", "7")
    assert (exit_code, out) == (2, "")
    assert err == "prefixcache generate: top_p: must be above 0 and at most 1; got 7.0\n"


def test_chat_keeps_the_history_and_shows_what_was_cached(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\nAnd now?\n/reset\nHello\n/quit\nnever\n"))
    exit_code, _, err = run("chat", "--max-tokens", "5", "--temperature", "0", "--system", "Be brief.")
    figures = [line for line in err.splitlines() if line.startswith("TTFT")]
    assert exit_code == 0
    assert len(figures) == 3
    prompts = [int(line.split("prompt ")[1].split()[0]) for line in figures]
    cached = [int(line.split("tokens, ")[1].split()[0]) for line in figures]
    assert prompts[1] > prompts[0] == prompts[2]
    assert cached[1] >= prompts[0] - 1
    assert cached[2] == prompts[2] - 1


def test_a_conversation_that_outgrew_the_model_goes_on_without_the_last_question(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"Hello\n{'fox ' * 300}\nBye\n"))
    exit_code, _, err = run("chat", "--max-tokens", "5", "--temperature", "0")
    assert exit_code == 0
    assert "the model's length is 300" in err
    assert len([line for line in err.splitlines() if line.startswith("TTFT")]) == 2


def test_tokenize_and_back(run):
    text = "naïve 🦊 fox"
    exit_code, out, err = run("tokenize", text)
    assert exit_code == 0
    assert err == f"{len(out.split())} tokens\n"
    assert run("tokenize", "--decode", *out.split()[1:])[1] == text + "\n"
    assert len(run("tokenize", "--chat", text)[1].split()) > len(out.split())


def test_tokenize_reads_stdin(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve".encode())))
    assert run("tokenize", "-")[1] == run("tokenize", "naïve")[1]


def test_info_shows_model_and_cache(run):
    exit_code, out, _ = run("info")
    assert exit_code == 0
    assert "LlamaForCausalLM" in out
    assert "2,048 tokens in pages of 16" in out


def test_check_config_shows_settings_and_the_memory_plan(model_folder: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--model", str(model_folder), "--cache-tokens", "1000", "--max-model-len", "500", "--dtype", "float32"]
    assert main(["check-config", *arguments]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "max-model-len 500" in lines
    assert "port 50051" in lines
    assert "tokens that fit 1,008 in 63 pages of 16" in lines
    assert "sequences of full length that fit 2.0" in lines
    assert any("4 layers x 2 x 2 K/V heads x 16 head dim x 4 bytes = 1,024 bytes" in line for line in lines)


def test_a_setting_that_does_not_go_with_the_model_is_a_mistake(model_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["check-config", "--model", str(model_folder), "--max-model-len", "4096"]) == 2
    assert "max-model-len is 4096, but the model allows 2048" in capsys.readouterr().err


def test_the_blocking_client_does_what_the_stubs_do(server: WireServer):
    with Client(server.target) as client:
        client.wait_until_serving(5)
        messages = list(client.generate("The quick", max_tokens=4, temperature=0.0))
        assert messages[-1].HasField("usage")
        with pytest.raises(RequestFailed) as caught:
            client.complete("x", temperature=-1.0, request_id="mine")
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.request_id == "mine"
        assert caught.value.retry_after_ms is None


def test_closing_a_blocking_stream_cancels_the_call(server: WireServer):
    with Client(server.target) as client:
        with server.held(num_steps=1):
            stream = client.generate("A quick stream", max_tokens=250, ignore_eos=True)
            next(stream)
            stream.close()
            until(lambda: server.value("requests_total", outcome="cancelled") == 1)
        reply = client.complete("The quick", max_tokens=1)
        assert reply.usage.completion_tokens == 1


def test_waiting_for_a_server_that_never_comes_ends():
    with Client("127.0.0.1:1") as client, pytest.raises(RequestFailed) as caught:
        client.wait_until_serving(0.3)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
