"""Server processes that find what others have computed: on one Redis, and on disk after a crash (B2)."""

from __future__ import annotations

import random
import re
import time
import urllib.request
from pathlib import Path

import pytest

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.client import Client
from prefixcache.local_server import LocalServer
from tests.support.models import VOCAB_SIZE, slow_server_flags
from tests.support.redis_server import redis_server

PAGE = 16
PROMPT = random.Random(1).choices(range(3, VOCAB_SIZE), k=1500)
NUM_PAGES = len(PROMPT) // PAGE


def server(model_folder: Path, hash_seed: int, *flags: str) -> LocalServer:
    """A server process of its own, whose hashes differ from the others'; it starts while others do."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONHASHSEED", str(hash_seed))
        return LocalServer(*slow_server_flags(model_folder), *flags)


def answer(running: LocalServer) -> pb.CompleteResponse:
    with Client(running.address) as client:
        return client.complete(token_ids=PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)


def wait_until_saved(running: LocalServer, tier: str) -> None:
    """Returns once every whole page of the prompt has been written to a tier."""
    page_bytes, deadline_s = 16384, time.monotonic() + 20
    pattern = re.compile(rf'^prefixcache_tier_saved_bytes_total{{tier="{tier}"}} (\S+)', re.MULTILINE)
    while True:
        with urllib.request.urlopen(running.metrics_url) as response:
            saved = pattern.search(response.read().decode())
        if saved and float(saved[1]) >= NUM_PAGES * page_bytes:
            return
        assert time.monotonic() < deadline_s, "the pages are not written"
        time.sleep(0.02)


def test_another_server_and_a_successor_find_what_one_has_computed(slow_model_folder: Path, tmp_path: Path) -> None:
    """On Redis while it runs, and on disk after it was killed."""
    disk = ("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")
    with redis_server(tmp_path) as redis:
        starting = (
            server(slow_model_folder, 1, "--redis", redis.url, *disk),
            server(slow_model_folder, 2, "--redis", redis.url),
        )
        with starting[0] as one, starting[1] as other:
            computed = answer(one)
            for tier in ("remote", "disk"):
                wait_until_saved(one, tier)
            from_redis = answer(other)
            one.process.kill()
            one.process.wait()
            with server(slow_model_folder, 3, *disk) as successor:
                from_disk = answer(successor)

    assert computed.usage.cached_tokens == 0
    assert from_redis.usage.cached_tokens_by_tier.remote >= 0.95 * NUM_PAGES * PAGE
    assert from_disk.usage.cached_tokens_by_tier.disk >= 0.95 * NUM_PAGES * PAGE
    assert from_redis.samples == from_disk.samples == computed.samples
