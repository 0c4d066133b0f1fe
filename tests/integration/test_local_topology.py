"""The topology of docker-compose.yml as plain processes: what one replica computed is warm on the other."""

from __future__ import annotations

import json
import random
import urllib.parse
import urllib.request
from pathlib import Path

from deploy.local.topology import Replica, Topology
from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.client import Client
from tests.support.models import VOCAB_SIZE, slow_server_flags
from tests.support.patience import until

PROMPT = random.Random(5).choices(range(3, VOCAB_SIZE), k=1200)


def prometheus_says(url: str, query: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each series that a query finds now."""
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}") as response:
        result = json.load(response)["data"]["result"]
    return [(series["metric"], float(series["value"][1])) for series in result]


def answer(replica: Replica) -> pb.CompleteResponse:
    with Client(replica.address) as client:
        return client.complete(token_ids=PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)


def test_a_request_is_warm_on_the_other_replica_and_both_are_scraped(slow_model_folder: Path, tmp_path: Path) -> None:
    flags = (*slow_server_flags(slow_model_folder), "--disk-size", "64MiB")
    with Topology(tmp_path, *flags, redis_memory="64mb") as topology:
        one, other = topology.replicas
        computed = answer(one)
        saved = 'sum(prefixcache_tier_saved_bytes_total{tier="remote"}) >= 75 * 16384'
        until(lambda: bool(prometheus_says(topology.prometheus_url, saved)))
        restored = answer(other)
        until(lambda: prometheus_says(topology.prometheus_url, 'sum(up{job="prefixcache"})')[0][1] == 2)
    assert computed.usage.cached_tokens == 0
    assert restored.usage.cached_tokens_by_tier.remote >= 1100
    assert restored.samples == computed.samples
