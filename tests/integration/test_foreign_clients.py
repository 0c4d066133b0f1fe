"""Clients that no one here wrote: grpcurl (grpc-go, through reflection) and Node's grpc-js (from the .proto files)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixcache.client import Client
from tests.support.wire import WireServer, wire_server_thread

NODE_FOLDER = Path(__file__).parents[2] / "examples" / "node"
SERVICES = {"prefixcache.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
REQUEST: dict[str, Any] = {
    "text": "The quick brown fox jumps over the lazy dog. Grüße aus Köln, 你好世界!",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 1,
}
BAD_REQUEST = {"text": "once", "temperature": -1}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with wire_server_thread() as running:
        yield running


@pytest.fixture(scope="module")
def answer(server: WireServer) -> Any:
    """What our own client gets for REQUEST."""
    with Client(server.target) as client:
        return client.complete(**REQUEST)


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


def assert_streamed(messages: list[dict[str, Any]], answer: Any) -> None:
    """The messages, with the .proto file's own field names, add up to what our own client got."""
    assert len(messages) > 5, "it did not stream"
    sample, usage = answer.samples[0], messages[-1]["usage"]
    assert "".join(message.get("text", "") for message in messages) == sample.text
    # JSON has 64-bit numbers as text
    assert [int(token) for message in messages for token in message.get("token_ids", ())] == list(sample.token_ids)
    assert sum(len(message.get("logprobs", ())) for message in messages) == REQUEST["max_tokens"]
    assert messages[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert int(usage["prompt_tokens"]) == answer.usage.prompt_tokens
    assert int(usage["cached_tokens"]) == answer.usage.prompt_tokens - 1


# --- grpcurl -------------------------------------------------------------------------------------------------------


@pytest.fixture
def grpcurl(server: WireServer) -> Run:
    """Runs grpcurl; `flags` stand before the address, `arguments` after it."""
    own = Path(sys.executable).parent / "grpcurl"
    binary = str(own) if own.exists() else shutil.which("grpcurl")
    if binary is None:
        pytest.skip("needs grpcurl: its Python package is for Linux on x86-64 only; elsewhere put it on the PATH")
    return lambda *arguments, flags=(): run([binary, "-plaintext", *flags, server.target, *arguments])


def json_values(text: str) -> list[Any]:
    """The JSON values that stand one after the other in a text."""
    values, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values


def test_grpcurl_lists_and_describes_services(grpcurl: Run):
    assert set(grpcurl("list").stdout.split()) >= SERVICES
    described = grpcurl("describe", "prefixcache.v1.Inference").stdout
    assert "rpc Generate ( .prefixcache.v1.GenerateRequest ) returns ( stream .prefixcache.v1.GenerateResponse );" in (
        described
    )


def test_grpcurl_checks_health(grpcurl: Run):
    result = grpcurl("grpc.health.v1.Health/Check", flags=("-d", '{"service": "prefixcache.v1.Inference"}'))
    assert json.loads(result.stdout) == {"status": "SERVING"}


def test_grpcurl_streams_an_answer(grpcurl: Run, answer: Any):
    result = grpcurl("prefixcache.v1.Inference/Generate", flags=("-d", json.dumps(REQUEST)))
    assert result.returncode == 0, result.stderr
    assert_streamed(json_values(result.stdout), answer)


def test_grpcurl_shows_which_field_is_wrong(grpcurl: Run):
    result = grpcurl("prefixcache.v1.Inference/Generate", flags=("-d", json.dumps(BAD_REQUEST)))
    assert result.returncode != 0
    assert "Code: InvalidArgument" in result.stderr
    assert "Message: temperature" in result.stderr


# --- Node ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def node(server: WireServer) -> Run:
    """Runs the example for Node users."""
    binary = shutil.which("node")
    if binary is None or not (NODE_FOLDER / "node_modules").is_dir():
        pytest.skip("needs Node.js 18 or newer and `npm ci` in examples/node, which `make test` runs where npm is")
    return lambda *arguments: run(
        [binary, str(NODE_FOLDER / "client.js"), *arguments], PREFIXCACHE_ADDRESS=server.target
    )


def test_node_lists_services(node: Run):
    result = node("services")
    assert set(result.stdout.split()) >= SERVICES, result.stderr


def test_node_checks_health(node: Run):
    assert node("health").stdout == "SERVING\n"


def test_node_streams_an_answer(node: Run, answer: Any):
    result = node("generate", json.dumps(REQUEST))
    assert result.returncode == 0, result.stderr
    assert_streamed([json.loads(line) for line in result.stdout.splitlines()], answer)


def test_node_chats(node: Run, server: WireServer):
    result = node("chat", "Grüße!")
    assert result.returncode == 0, result.stderr
    with Client(server.target) as client:
        answer = client.complete(messages=[{"role": "user", "content": "Grüße!"}], temperature=0)
    assert result.stdout.startswith(answer.samples[0].text)
    assert result.stdout.endswith("prompt tokens were cached\n")


def test_node_shows_which_field_is_wrong(node: Run):
    result = node("generate", json.dumps(BAD_REQUEST))
    assert result.returncode == 1
    assert result.stderr.startswith("INVALID_ARGUMENT: temperature")
