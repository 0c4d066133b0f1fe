"""What a process leaves behind when it is told to end, and when it is killed."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixcache.client import Client
from prefixcache.local_server import LocalServer
from tests.support.models import VOCAB_SIZE, slow_server_flags

NUM_TOKENS = 320
TURNED_LIMIT_S = 0.2
PROMPTS = [random.Random(seed).choices(range(3, VOCAB_SIZE), k=NUM_TOKENS) for seed in range(3)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def server(model_folder: Path, disk: Path) -> LocalServer:
    return LocalServer(*slow_server_flags(model_folder, 4096), "--disk", str(disk), "--disk-size", "64MiB")


def drained_while_three_streams_run(running: LocalServer) -> tuple[list[list[int]], float]:
    """Sends SIGTERM in mid-stream; returns the streams' tokens, and how long health took to turn."""
    with Client(running.address) as client, grpc.insecure_channel(running.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        streams = [client.generate(token_ids=prompt, max_tokens=100, **GREEDY) for prompt in PROMPTS]
        started = [next(stream) for stream in streams]
        running.process.send_signal(signal.SIGTERM)
        signalled_at = time.monotonic()
        assert next(watch).status == NOT_SERVING
        turned_s = time.monotonic() - signalled_at
        answers = [
            [token_id for message in (first, *stream) for token_id in message.token_ids]
            for first, stream in zip(started, streams, strict=True)
        ]
    assert running.process.wait(20) == 0
    return answers, turned_s


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def test_a_drained_server_has_written_everything_and_a_killed_one_leaves_nothing_to_clean(
    slow_model_folder: Path, tmp_path: Path
):
    for attempt in range(3):  # a pause of the machine is not the server's
        disk = tmp_path / f"disk-{attempt}"
        with server(slow_model_folder, disk) as first:
            answers, turned_s = drained_while_three_streams_run(first)
        if turned_s < TURNED_LIMIT_S:
            break
    assert turned_s < TURNED_LIMIT_S
    assert [len(answer) for answer in answers] == [100] * 3
    left_by_a_drain = files(disk)

    for prompt, answer in zip(PROMPTS[1:], answers[1:], strict=True):  # the second of these follows a kill
        with server(slow_model_folder, disk) as killed, Client(killed.address) as client:
            more = client.complete(token_ids=prompt + answer, max_tokens=1, **GREEDY)
            # the whole pages of the prompt and of the answer, whose last token was never computed
            assert more.usage.cached_tokens_by_tier.disk == (NUM_TOKENS + 99) // 16 * 16
            stream = client.generate(token_ids=PROMPTS[0][::-1], max_tokens=1000, **GREEDY)
            next(stream)
            killed.process.kill()
            killed.process.wait()
        assert files(disk) == left_by_a_drain
