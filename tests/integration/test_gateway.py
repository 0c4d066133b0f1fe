"""The real gateway smg and the real openai client in front of two servers that share one Redis."""

from __future__ import annotations

import copy
import random
import re
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from deploy.local.processes import free_port
from prefixcache.client import Client
from prefixcache.local_server import LocalServer
from tests.support.gateway import Gateway, gateway, until
from tests.support.models import tiny_model
from tests.support.redis_server import RedisServer, redis_server
from tests.support.tokenizers import byte_level

PAGE = 16
MODEL = "plain"
# what is sampled may end at any token; where a test counts tokens or takes its time, it must not
FULL_LENGTH: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
WORDS = [
    "river",
    "stone",
    "cloud",
    "amber",
    "maple",
    "quiet",
    "north",
    "garden",
    "copper",
    "willow",
    "harbor",
    "lantern",
    "meadow",
    "silver",
    "thunder",
    "velvet",
]


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that writes plain ASCII, so that whatever it writes shows in a text."""
    model, tokenizer = copy.deepcopy(tiny_model("llama-gqa")), byte_level()
    for token_id in range(model.config.vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=True)
        if not (text.isascii() and text.isprintable() and text):
            model.lm_head.weight.data[token_id] = torch.zeros(model.config.hidden_size)
    folder = tmp_path_factory.mktemp("model") / MODEL
    model.save_pretrained(folder)
    tokenizer._chat_tokenizer.save_pretrained(folder)
    return folder


class Replica:
    """A server process, which can be killed and started again on its port."""

    def __init__(self, model: Path, redis: RedisServer, log: Path) -> None:
        self.port = free_port()
        self._flags = ("--model", str(model), "--cache-tokens", "16384", "--threads", "1", "--redis", redis.url)
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self.server = LocalServer(*self._flags, "--port", str(self.port), log=log)

    def wait(self) -> None:
        self.server.wait_until_ready()

    def kill(self) -> None:
        self.server.process.kill()
        self.server.process.wait()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def value(self, name: str, **labels: str) -> float:
        """A metric's present value, 0 where there is none."""
        shown = ",".join(f'{key}="{label}"' for key, label in sorted(labels.items()))
        with urllib.request.urlopen(self.server.metrics_url, timeout=5) as response:
            text = response.read().decode()
        series = f"prefixcache_{name}{{{shown}}}" if shown else f"prefixcache_{name}"
        found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    @property
    def num_answered(self) -> float:
        return self.value("requests_total", outcome="ok")


@dataclass
class Fleet:
    """What runs for the tests of this file."""

    redis: RedisServer
    one: Replica
    other: Replica
    gateway: Gateway
    client: openai.OpenAI

    @property
    def replicas(self) -> tuple[Replica, Replica]:
        return self.one, self.other

    def total(self, name: str, **labels: str) -> float:
        return sum(replica.value(name, **labels) for replica in self.replicas)


@pytest.fixture(scope="module")
def fleet(plain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with redis_server(folder / "redis") as redis:
        replicas = [Replica(plain_model, redis, folder / "servers.log") for _ in range(2)]
        try:
            for replica in replicas:
                replica.wait()
            with gateway(folder, [replica.address for replica in replicas]) as running:
                yield Fleet(redis, *replicas, running, connect(running))
        finally:
            for replica in replicas:
                replica.server.stop()


def connect(running: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=30)


def text(seed: int, num_words: int = 60) -> str:
    """Words that no other seed begins with; 60 are some hundred tokens."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def tokens(replica: Replica, prompt: str) -> list[int]:
    """The prompt as the gateway sends it for a completion: without the token that begins a text."""
    with Client(replica.address) as client:
        return client.tokenize(prompt, add_special_tokens=False)


def put_into(replica: Replica, prompts: Sequence[str]) -> int:
    """Computes prompts behind the gateway's back; returns how many pages they have."""
    num_pages = 0
    with Client(replica.address) as client:
        for prompt in prompts:
            token_ids = client.tokenize(prompt, add_special_tokens=False)
            client.complete(token_ids=token_ids, max_tokens=1)
            num_pages += len(token_ids) // PAGE
    return num_pages


def share_of_continuations(fleet: Fleet, replica: Replica, prompts: Sequence[str], client: openai.OpenAI) -> float:
    """Sends continuations of prompts through a gateway; returns which share of them one replica answered."""
    before = replica.num_answered
    with Client(replica.address) as own:
        lengths = [len(own.tokenize(prompt, add_special_tokens=False)) for prompt in prompts]
    for prompt, num_tokens in zip(prompts, lengths, strict=True):
        reply = client.completions.create(model=MODEL, prompt=prompt + " and then", max_tokens=1)
        assert reply.usage.prompt_tokens_details.cached_tokens >= num_tokens // PAGE * PAGE
    return (replica.num_answered - before) / len(prompts)


def wait_for_events(running: Gateway, replica: Replica, num_pages: float) -> None:
    until(lambda: running.num_indexed(replica.address) >= num_pages, "the gateway knows the pages", log=running.log)


# --- what clients get ----------------------------------------------------------------------------------------------


def test_a_completion_is_the_engines_own_and_its_usage_says_what_was_cached(fleet: Fleet):
    prompt = text(1)
    token_ids = tokens(fleet.one, prompt)
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0.0}
    cold = fleet.client.completions.create(**asked)
    warm = fleet.client.completions.create(**asked)
    streamed = list(fleet.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    with Client(fleet.one.address) as client:
        own = client.complete(token_ids=token_ids, max_tokens=20, temperature=0.0)

    for reply, num_cached in ((cold, 0), (warm, len(token_ids) - 1)):
        assert reply.choices[0].text == own.samples[0].text
        assert reply.choices[0].finish_reason == "length"
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(token_ids), 20)
        assert reply.usage.prompt_tokens_details.cached_tokens == num_cached
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == own.samples[0].text
    usage = streamed[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(token_ids), 20)
    assert usage.prompt_tokens_details.cached_tokens == len(token_ids) - 1


def test_a_chat_goes_on_from_its_own_history(fleet: Fleet):
    messages: list[Any] = [{"role": "user", "content": text(2)}]
    num_before = 0
    for turn in range(3):
        with Client(fleet.one.address) as client:
            num_tokens = len(client.tokenize(messages=messages))
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0.0}
        stream = list(
            fleet.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        answer = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        usage = stream[-1].usage
        again = fleet.client.chat.completions.create(**asked)
        assert again.choices[0].message.content == answer
        assert usage.prompt_tokens == again.usage.prompt_tokens == num_tokens
        assert again.usage.prompt_tokens_details.cached_tokens == num_tokens - 1
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached >= num_before if turn else cached < PAGE
        num_before = num_tokens
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"and {WORDS[turn]}?"}]


def test_a_stop_string_ends_the_text_and_the_work(fleet: Fleet):
    asked: dict[str, Any] = {"model": MODEL, "prompt": text(3), "temperature": 0.0, "max_tokens": 60}
    whole = fleet.client.completions.create(**asked).choices[0].text
    stop = whole[10:13]
    for is_stream in (False, True):
        generated = fleet.total("generated_tokens_total")
        if is_stream:
            chunks = list(fleet.client.completions.create(**asked, stop=[stop], stream=True))
            written = "".join(chunk.choices[0].text for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            choice = fleet.client.completions.create(**asked, stop=[stop]).choices[0]
            written, reason = choice.text, choice.finish_reason
        assert (written, reason) == (whole[: whole.index(stop)], "stop")
        assert 0 < fleet.total("generated_tokens_total") - generated < 30


def test_logprobs_are_the_engines(fleet: Fleet):
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 5, "temperature": 0.0}
    reply = fleet.client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    with Client(fleet.one.address) as client:
        own = client.complete(messages=messages, max_tokens=5, temperature=0.0, logprobs=3).samples[0]
    entries = reply.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx([each.logprob for each in own.logprobs], abs=1e-4)
    for entry, each in zip(entries, own.logprobs, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(list(each.top_logprobs), abs=1e-4)


def test_samples_and_seeds(fleet: Fleet):
    asked: dict[str, Any] = {"model": MODEL, "prompt": text(4), "max_tokens": 10, **FULL_LENGTH}
    reply = fleet.client.completions.create(**asked, n=3, seed=7)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.text for choice in reply.choices}) == 3
    assert reply.usage.prompt_tokens == len(tokens(fleet.one, text(4)))
    assert reply.usage.completion_tokens == 30
    assert reply.usage.prompt_tokens_details.cached_tokens < PAGE  # other prompts begin with the same word
    seeded = [fleet.client.completions.create(**asked, seed=seed).choices[0].text for seed in (7, 7, 8)]
    assert seeded[0] == seeded[1] == reply.choices[0].text
    assert seeded[1] != seeded[2]


ERRORS: list[tuple[int, str, dict[str, Any]]] = [
    (404, "", {"model": "another"}),
    (400, "prompt", {"prompt": ""}),
    (400, "", {"prompt": text(5, 600)}),
    (400, "", {"max_tokens": 0}),
    (400, "top_p", {"top_p": 1.5}),
    (400, "n", {"n": 17}),
    (400, "constrained", {"extra_body": {"regex": "a+"}}),
]


@pytest.mark.parametrize(("status", "named", "fields"), ERRORS)
def test_errors_are_the_clients_and_say_why(fleet: Fleet, status: int, named: str, fields: dict[str, Any]):
    with pytest.raises(openai.APIStatusError) as caught:
        fleet.client.completions.create(**{"model": MODEL, "prompt": "hello", "max_tokens": 2} | fields)
    assert caught.value.status_code == status, caught.value.message
    assert named in caught.value.message


def test_more_output_than_the_context_holds_is_cut(fleet: Fleet):
    prompt = text(6, 370)
    num_left = 2048 - len(tokens(fleet.one, prompt))
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, **FULL_LENGTH}
    for limit in ({}, {"max_tokens": 100_000}):
        reply = fleet.client.completions.create(**asked, **limit)
        assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (num_left, "length")


@pytest.mark.parametrize("is_after_first_token", [False, True])
def test_work_stops_when_the_client_leaves(fleet: Fleet, is_after_first_token: bool):
    cancelled, generated = fleet.total("requests_total", outcome="cancelled"), fleet.total("generated_tokens_total")
    asked: dict[str, Any] = {"model": MODEL, "prompt": text(7), "max_tokens": 1700, "n": 8, **FULL_LENGTH}
    if is_after_first_token:
        stream = fleet.client.completions.create(**asked, stream=True)
        next(iter(stream))
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            fleet.client.with_options(timeout=1.0).completions.create(**asked)
    until(lambda: fleet.total("requests_total", outcome="cancelled") == cancelled + 1, "the call has ended")
    until(lambda: fleet.total("running_sequences") == 0, "the engine has stopped")
    at_end = fleet.total("generated_tokens_total")
    time.sleep(0.1)
    assert fleet.total("generated_tokens_total") == at_end < generated + 8 * 1700


# --- where requests go ---------------------------------------------------------------------------------------------


def test_continuations_go_to_the_replica_that_has_the_prompt(fleet: Fleet):
    for first_seed, replica in ((1000, fleet.other), (2000, fleet.one)):
        prompts = [text(first_seed + index) for index in range(20)]
        known = fleet.gateway.num_indexed(replica.address)
        num_pages = put_into(replica, prompts)
        wait_for_events(fleet.gateway, replica, known + num_pages)
        assert share_of_continuations(fleet, replica, prompts, fleet.client) >= 0.95


def test_a_flush_is_a_new_beginning(fleet: Fleet):
    assert fleet.gateway.num_indexed(fleet.one.address) > 0
    until(lambda: fleet.gateway.post("/flush_cache")[0] == 200, "all replicas are flushed")
    for replica in fleet.replicas:
        until(lambda replica=replica: fleet.gateway.num_indexed(replica.address) == 0, "the gateway knows of the flush")
        until(lambda replica=replica: replica.value("pages", tier="device", state="cached") == 0, "nothing is left")
    prompts = [text(3000 + index) for index in range(10)]
    wait_for_events(fleet.gateway, fleet.other, put_into(fleet.other, prompts))
    assert share_of_continuations(fleet, fleet.other, prompts, fleet.client) >= 0.95


def test_a_gateway_that_joins_late_learns_what_is_there(fleet: Fleet, tmp_path: Path):
    prompts = [text(4000 + index) for index in range(10)]
    put_into(fleet.other, prompts)
    started_s = time.monotonic()
    with gateway(tmp_path, [replica.address for replica in fleet.replicas]) as late:
        wait_for_events(late, fleet.other, 1)
        assert share_of_continuations(fleet, fleet.other, prompts, connect(late)) >= 0.95
        assert time.monotonic() - started_s < 15


def test_a_gateway_that_did_not_listen_for_a_while_catches_up(fleet: Fleet):
    fleet.gateway.process.send_signal(signal.SIGSTOP)
    try:
        prompts = [text(5000 + index) for index in range(40)]
        put_into(fleet.one, prompts)
    finally:
        fleet.gateway.process.send_signal(signal.SIGCONT)
    resumed_s = time.monotonic()
    # others each time: at first the gateway may still be reading
    tries = [prompts[start : start + 10] for start in (30, 20, 10, 0)]
    assert any(share_of_continuations(fleet, fleet.one, each, fleet.client) >= 0.95 for each in tries)
    assert time.monotonic() - resumed_s < 5


def test_a_replica_may_die_and_comes_back_warm(fleet: Fleet):
    prompts = [text(6000 + index) for index in range(20)]
    put_into(fleet.one, prompts)
    waiting = {"direction": "save", "tier": "remote"}  # a page is in use until it is copied, but written later
    until(lambda: fleet.one.value("tier_pages_in_flight", **waiting) == 0, "what is computed is in Redis")
    fleet.one.kill()

    def ask(index: int) -> int:
        asked = {"prompt": f"{text(6100 + index % 50)} {index}", "max_tokens": 4, **FULL_LENGTH}
        return fleet.client.completions.create(model=MODEL, **asked).usage.completion_tokens

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(200))) == [4] * 200

    fleet.one.start()
    fleet.one.wait()
    back_s = time.monotonic()
    num_from_redis = num_pages = 0
    with Client(fleet.one.address) as client:
        for prompt in prompts:
            token_ids = client.tokenize(prompt, add_special_tokens=False)
            usage = client.complete(token_ids=token_ids, max_tokens=1).usage
            num_from_redis += usage.cached_tokens_by_tier.remote > 0
            num_pages += len(token_ids) // PAGE
    # so small a model often computes quicker than Redis answers; but all of it is there
    missed = {
        reason: fleet.one.value("tier_missed_pages_total", tier="remote", reason=reason)
        for reason in ("slower", "abandoned", "absent")
    }
    assert num_from_redis + missed["slower"] + missed["abandoned"] > 0
    assert missed["absent"] == 0
    # the gateway comes with the cursor of the life before, is refused, and takes a snapshot; it tries every 5 s at most
    until(lambda: fleet.gateway.num_indexed(fleet.one.address) == num_pages, "it knows what is there now", 5.5)
    assert share_of_continuations(fleet, fleet.one, prompts, fleet.client) >= 0.95
    assert time.monotonic() - back_s < 8
