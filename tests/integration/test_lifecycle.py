"""Start, drain, stall and failure, as clients and supervisors see them."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.processes import free_port
from prefixcache import app
from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.app import serve, start_http
from prefixcache.cli import main
from prefixcache.client import AsyncClient, Client, RequestFailed
from prefixcache.config import Settings
from prefixcache.engine.runner import Runner
from prefixcache.errors import ConfigError, ModelError
from prefixcache.local_server import LocalServer
from prefixcache.metrics import Metrics
from prefixcache.server.health import Readiness
from tests.support.models import VOCAB_SIZE
from tests.support.wire import WireServer, eventually, served_model, wire_server

PROMPT = [(7 * index + 3) % VOCAB_SIZE for index in range(40)]
LONG: dict[str, Any] = {"token_ids": PROMPT, "temperature": 0.0, "ignore_eos": True}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(server: WireServer) -> int:
    async with grpc.aio.insecure_channel(server.target) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return response.status


async def wait_for_health(server: WireServer, status: int) -> None:
    async with asyncio.timeout(10):
        while await health_of(server) != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(RequestFailed) as caught:
        await call
    return caught.value.code


# --- drain ---------------------------------------------------------------------------------------------------------


async def test_a_drain_turns_away_what_is_new_and_finishes_what_runs():
    async with wire_server() as server, AsyncClient(server.target) as client:
        alone = await client.complete(max_tokens=200, **LONG)
        streams = [client.generate(max_tokens=200, cache_salt=str(index), **LONG) for index in range(3)]
        with server.slowed(0.02):  # none has ended when the last one has begun
            started = [await anext(stream) for stream in streams]
        with server.held():
            server.stopping.set()
            await wait_for_health(server, NOT_SERVING)
            assert server.readiness.problem == "the server is shutting down"
            assert await code_of(client.complete(max_tokens=1, **LONG)) is grpc.StatusCode.UNAVAILABLE
        for first, stream in zip(started, streams, strict=True):
            messages = [first, *[message async for message in stream]]
            token_ids = [token_id for message in messages for token_id in message.token_ids]
            assert token_ids == list(alone.samples[0].token_ids)
    assert server.server.engine.num_open == 0


async def test_streams_longer_than_the_grace_period_end_as_unavailable():
    async with wire_server(grace_s=0.2) as server, AsyncClient(server.target) as client:
        stream = client.generate(max_tokens=1900, **LONG)
        with server.held(num_steps=1):
            await anext(stream)
            server.stopping.set()
            started_at = time.monotonic()
            with pytest.raises(RequestFailed) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - started_at > 0.15
    assert server.value("requests_total", outcome="not_serving") == 1


async def test_a_call_that_comes_with_the_news_of_a_drain_is_turned_away_by_the_service(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(app, "TURN_AWAY_S", 2.0)  # long enough for this test, however slow it is
    async with wire_server() as server, AsyncClient(server.target) as client:
        await client.complete(max_tokens=1, **LONG)
        watch = await _watch(server)
        server.stopping.set()
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(RequestFailed, match="UNAVAILABLE: the server is shutting down") as caught:
            await client.complete(max_tokens=1, **LONG)
        assert caught.value.request_id is not None


async def test_calls_that_a_stopping_server_has_not_taken_fail_as_unavailable():
    async with wire_server() as server, AsyncClient(server.target) as client:
        with Client(server.target) as blocking:
            await asyncio.to_thread(blocking.wait_until_serving, 5.0)
            await client.wait_until_serving(5.0)
            calls = [asyncio.create_task(client.complete(max_tokens=1, **LONG)) for _ in range(4)]
            calls += [asyncio.create_task(asyncio.to_thread(blocking.complete, max_tokens=1, **LONG)) for _ in range(4)]
            await asyncio.sleep(0)  # they are on their way
            time.sleep(0.5)  # noqa: ASYNC251  # they have arrived, and this loop, which would take them, is busy
            await server.server._grpc.stop(1.0)
            answers = await asyncio.gather(*calls, return_exceptions=True)
    failures = [answer for answer in answers if not isinstance(answer, pb.CompleteResponse)]  # one or two were taken
    assert len(failures) >= 4
    assert {getattr(failure, "code", failure) for failure in failures} == {grpc.StatusCode.UNAVAILABLE}


# --- an engine that does not come round ----------------------------------------------------------------------------


async def test_a_stuck_engine_is_seen_and_nobody_waits_for_it():
    async with wire_server(stall_timeout_s=0.5) as server, AsyncClient(server.target) as client:
        assert await health_of(server) == SERVING
        assert server.readiness.problem is None
        with server.held():
            open_call = asyncio.create_task(client.complete(max_tokens=5, **LONG))
            await wait_for_health(server, NOT_SERVING)
            await eventually(lambda: (server.readiness.problem or "").startswith("the engine has been stuck for"))
            assert await code_of(open_call) is grpc.StatusCode.UNAVAILABLE
            assert await code_of(client.complete(max_tokens=5, timeout_s=10, **LONG)) is grpc.StatusCode.UNAVAILABLE

        await wait_for_health(server, SERVING)
        await eventually(lambda: server.readiness.problem is None)
        assert (await client.complete(max_tokens=5, **LONG)).usage.completion_tokens == 5
        await eventually(lambda: server.value("pages", tier="device", state="in_use") == 0)


async def test_an_idle_engine_is_not_stuck():
    async with wire_server(stall_timeout_s=1.5) as server:
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert await health_of(server) == SERVING


# --- an engine that fails ------------------------------------------------------------------------------------------


async def test_a_failed_engine_ends_every_stream_and_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async with wire_server() as server, AsyncClient(server.target) as client:
        streams = [client.generate(max_tokens=1500, cache_salt=str(index), **LONG) for index in range(3)]
        for stream in streams:
            await anext(stream)
        assert (watch := await _watch(server)) is not None

        def fail(*_: object) -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(server.server.engine._runner, "forward", fail)
        for stream in streams:
            with pytest.raises(RequestFailed) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code is grpc.StatusCode.INTERNAL
            assert "secret" not in caught.value.message
        assert (await watch.read()).status == NOT_SERVING
        assert await code_of(client.complete(max_tokens=1, **LONG)) in (
            grpc.StatusCode.INTERNAL,
            grpc.StatusCode.UNAVAILABLE,
        )
    assert server.server.engine.failure is not None
    assert server.readiness.problem == "the engine failed: RuntimeError"
    assert server.value("requests_total", outcome="failed") >= 3
    assert "secret detail" in caplog.text


async def _watch(server: WireServer) -> Any:
    channel = grpc.aio.insecure_channel(server.target)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    return watch


async def test_the_exit_code_after_a_failure_is_1(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(Runner, "forward", fail)
    settings = Settings(port=0, cache_tokens=512)
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(served_model(settings), settings, Metrics(), Readiness(), port.set_result))
    async with AsyncClient(f"127.0.0.1:{await port}") as client:
        assert await code_of(client.complete(max_tokens=1, **LONG)) is grpc.StatusCode.INTERNAL
    assert await serving == 1
    assert "out of order" in caplog.text
    gc.unfreeze()  # the server's objects, and what tests/conftest.py froze
    gc.collect()
    gc.freeze()


# --- the process ---------------------------------------------------------------------------------------------------


@pytest.fixture
def process(model_folder: Path) -> Iterator[LocalServer]:
    with LocalServer("--model", str(model_folder), "--cache-tokens", "4096", "--threads", "1") as server:
        yield server


def test_sigterm_lets_a_stream_finish_and_exits_with_0(process: LocalServer):
    with Client(process.address) as client:
        stream = client.generate(max_tokens=300, **LONG)
        first = next(stream)
        process.process.send_signal(signal.SIGTERM)
        rest = list(stream)
    assert sum(len(message.token_ids) for message in [first, *rest]) == 300
    assert rest[-1].HasField("usage")
    assert process.process.wait(10) == 0


def test_a_second_signal_ends_it_at_once(process: LocalServer):
    with Client(process.address) as client, grpc.insecure_channel(process.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        stream = client.generate(max_tokens=2000, n=16, **LONG)
        next(stream)
        process.process.send_signal(signal.SIGINT)
        assert next(watch).status == NOT_SERVING
        assert process.process.poll() is None
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(10) == 128 + signal.SIGTERM
        with pytest.raises(RequestFailed):
            list(stream)


def test_probes_are_answered_while_the_model_is_loading(monkeypatch: pytest.MonkeyPatch):
    port, answers = free_port(), dict[str, tuple[int, str]]()

    def load(settings: Settings, progress: object) -> None:
        answers.update({path: probe(port, path) for path in ("/healthz", "/readyz", "/metrics")})
        raise ModelError("this is as far as the test goes")

    monkeypatch.setattr(app, "load", load)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["serve", "--port", "0", "--metrics-port", str(port)]) != 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert answers["/healthz"] == (200, "alive\n")
    assert answers["/readyz"] == (503, "not ready: the model is being loaded\n")
    assert "\nprefixcache_ready 0.0\n" in answers["/metrics"][1]


def probe(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_taken_port_is_a_clear_error_before_anything_is_loaded(model_folder: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "prefixcache", "serve", "--model", str(model_folder)]
        command += ["--cache-tokens", "512", "--port", str(port), "--metrics-port", "0"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr == f"prefixcache serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_taken_metrics_port_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot serve metrics on 127.0.0.1:{port}: Address already in use"):
            start_http(Settings(metrics_port=port), Metrics(), Readiness())
