"""The model of a fleet: cases computed by hand, and that nothing is lost or made up."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet_model import Fleet, at_load, read_trace, replay, work_s
from bench.replica_model import Clock, Job, Replica, Request, ServiceTimes
from bench.routing_model import LONG_QUEUE, ByEvents, PrefixHash, RoundRobin, Route
from bench.store_model import StoreModel

BLOCK = 10  # tokens
# A prompt's token takes 10 ms and a decode step 100 ms, whoever is in it; one loads 80 bytes/s.
TIMES = ServiceTimes(
    prefill_token_s=0.01,
    prefill_pair_s=0.0,
    decode_step_s=0.1,
    decode_request_s=0.0,
    decode_context_s=0.0,
    restore_latency_s=0.0,
    restore_bytes_per_s=80.0,
    kv_bytes_per_token=1,
    chunk_tokens=10,
)


def request(arrival_s: float, ids: Sequence[int], num_output_tokens: int = 1) -> Request:
    return Request(arrival_s, len(ids) * BLOCK, num_output_tokens, array("I", ids).tobytes())


def run(requests: list[Request], times: ServiceTimes = TIMES, cache_blocks: int = 100) -> dict[float, Job]:
    """What became of each request on one replica, by arrival."""
    clock, ended = Clock(), []
    replica = Replica(clock, times, cache_blocks, BLOCK, None, ended.append)
    for one in requests:
        clock.at(one.arrival_s, lambda one=one: replica.submit(one))
    clock.run()
    return {job.request.arrival_s: job for job in ended}


# --- by hand -------------------------------------------------------------------------------------------------------


def test_a_request_alone_takes_its_prefill_and_its_steps():
    job = run([request(0, [1, 2], num_output_tokens=3)])[0]
    assert job.ttft_s == pytest.approx(0.2)
    assert job.total_s == pytest.approx(0.4)


def test_what_is_known_is_not_computed_again():
    jobs = run([request(0, [1, 2]), request(1, [1, 2, 3]), request(2, [1, 2, 3])])
    assert [job.num_cached_tokens for job in jobs.values()] == [0, 20, 29]
    assert jobs[1].ttft_s == pytest.approx(0.1)
    assert jobs[2].ttft_s == pytest.approx(0.01)


def test_prefill_and_decode_share_the_steps_and_the_shortest_goes_first():
    """The short one until 0.1; then steps of 0.1 + 0.1, one of which ends it at 0.3; then one step of 0.1."""
    long, short = request(0, [1, 2]), request(1e-9, [3], num_output_tokens=2)
    jobs = run([long, short])
    assert jobs[1e-9].ttft_s == pytest.approx(0.1)
    assert jobs[1e-9].total_s == pytest.approx(0.3)
    assert jobs[0].ttft_s == pytest.approx(0.4)


def test_a_long_prompt_is_not_overtaken_for_ever():
    """Short ones come as fast as they are served; the long one waits for eight chunks and then goes on."""
    jobs = run([request(0, range(100, 105)), *(request(0.01 + 0.1 * n, [n]) for n in range(40))])
    assert 0.5 < jobs[0].ttft_s < 2.0


def test_a_full_cache_gives_up_the_least_recently_used():
    jobs = run(
        [request(0, [1]), request(1, [2]), request(2, [1]), request(3, [3]), request(4, [1]), request(5, [2])],
        cache_blocks=2,
    )
    assert [job.num_cached_tokens for job in jobs.values()] == [0, 0, 9, 0, 9, 0]


def test_transfers_share_the_stores_bandwidth():
    """160 bytes from 0 on: 80 in the first second, 50 beside another in the second one, the last 30 at 80 again."""
    clock, ended = Clock(), {}
    store = StoreModel(clock, 100, 0.0, 80.0, 100.0)
    clock.at(0, lambda: store.read(160, lambda: ended.setdefault("first", clock.now_s)))
    clock.at(1, lambda: store.read(50, lambda: ended.setdefault("second", clock.now_s)))
    clock.run()
    assert ended == pytest.approx({"first": 2.375, "second": 2.0})
    assert store.read_bytes == 210


def test_a_second_replica_loads_what_the_first_has_stored():
    """Ten tokens at 80 bytes a second and one that is computed anyway, where computing all would take 0.2 s."""
    fleet = Fleet(num_replicas=2, device_tokens=1000, store_tokens=1000, block_tokens=BLOCK, store_bytes_per_s=1000.0)
    outcome = replay([request(0, [1, 2]), request(10, [1, 3])], TIMES, fleet, RoundRobin())
    assert outcome.store_hit_rate == 0, "0.125 s to load what takes 0.1 s to compute"
    quick = replace(TIMES, restore_bytes_per_s=1000.0)
    outcome = replay([request(0, [1, 2]), request(10, [1, 3])], quick, fleet, RoundRobin())
    assert outcome.store_hit_rate == 10 / 40
    assert outcome.ttft_s == pytest.approx([0.2, 0.11])
    assert outcome.store_read_bytes_per_s * outcome.duration_s == pytest.approx(10)
    assert outcome.store_write_bytes_per_s * outcome.duration_s == pytest.approx(30)


# --- routing -------------------------------------------------------------------------------------------------------


def fleet_of(num_replicas: int) -> list[Replica]:
    clock = Clock()
    return [Replica(clock, TIMES, 100, BLOCK, None, lambda job: None) for _ in range(num_replicas)]


def test_events_send_a_continuation_to_where_its_beginning_is():
    clock = Clock()
    replicas = [Replica(clock, TIMES, 100, BLOCK, None, lambda job: None) for _ in range(3)]
    replicas[1].submit(request(0, [1, 2]))
    clock.run()
    route = ByEvents()
    assert route(request(1, [1, 2, 3]), replicas) is replicas[1]
    replicas[1].submit(request(1, [9]))
    assert route(request(1, [1, 7, 8]), replicas) is replicas[0], "a third of the prompt is no reason"


def test_a_hash_sends_what_begins_alike_to_one_place_and_spreads_the_rest():
    replicas, route = fleet_of(8), PrefixHash()
    chosen = {id(route(request(0, [0, document, turn]), replicas)) for document in range(50) for turn in range(3)}
    assert len(chosen) == 8
    assert route(request(0, [0, 5, 1]), replicas) is route(request(0, [0, 5, 2]), replicas)


@pytest.mark.parametrize("route", [RoundRobin(), PrefixHash(), ByEvents()], ids=lambda route: type(route).__name__)
def test_a_long_queue_is_passed_over(route: Route):
    replicas = fleet_of(2)
    for number in range(LONG_QUEUE):
        replicas[0].submit(request(0, [number]))
    assert all(route(request(0, [number, number]), replicas) is replicas[1] for number in range(20))


# --- nothing is lost -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store_tokens", [0, 400])
@pytest.mark.parametrize("route_class", [RoundRobin, PrefixHash, ByEvents])
def test_every_request_ends_once_and_every_token_is_counted_once(route_class: type, store_tokens: int):
    source = random.Random(3)
    quick = replace(TIMES, restore_latency_s=0.01, restore_bytes_per_s=5000.0)
    requests = [
        request(source.uniform(0, 60), [0, *source.choices(range(1, 6), k=source.randint(1, 9))], source.randint(1, 20))
        for _ in range(400)
    ]
    requests = [replace(one, blocks=chained(one.blocks)) for one in requests]
    fleet = Fleet(3, device_tokens=300, store_tokens=store_tokens, block_tokens=BLOCK, store_bytes_per_s=8000.0)
    outcome = replay(requests, quick, fleet, route_class())
    assert outcome.num_requests == len(outcome.ttft_s) == len(requests)
    assert min(outcome.ttft_s) > 0
    assert 0 < outcome.device_hit_rate + outcome.store_hit_rate < 1
    assert (outcome.store_hit_rate > 0) == (store_tokens > 0)
    if store_tokens:
        loaded = outcome.store_read_bytes_per_s * outcome.duration_s
        assert loaded >= outcome.store_hit_rate * sum(one.num_tokens for one in requests)


def chained(blocks: bytes) -> bytes:
    """Ids that each stand for everything before them too, as the trace's do."""
    ids, history = [], 0
    for block in array("I", blocks):
        history = (history * 7 + block + 1) % 2**31
        ids.append(history)
    return array("I", ids).tobytes()


def test_a_trace_is_read_and_brought_to_a_load(tmp_path: Path):
    lines = [{"timestamp": 3000 * n, "input_length": 100, "output_length": 0, "hash_ids": [0, n]} for n in range(5)]
    lines.append({"timestamp": 9000, "input_length": 101, "output_length": 5, "hash_ids": [0, 9]})
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    requests = read_trace(tmp_path / "trace.jsonl", max_prompt_tokens=100)
    assert [one.num_tokens for one in requests] == [100] * 5
    assert all(3 * n <= one.arrival_s < 3 * n + 3 for n, one in enumerate(requests))
    faster = at_load(requests, TIMES, num_replicas=2, load=0.5)
    span_s = faster[-1].arrival_s - faster[0].arrival_s
    assert work_s(requests, TIMES) == pytest.approx(0.5 * 2 * span_s)
