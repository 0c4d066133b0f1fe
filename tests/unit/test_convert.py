"""Every field of a request: its default, its limits, and that a fault names it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.errors import InvalidRequest
from prefixcache.model.tokenizer import ChatMessage
from prefixcache.request import Namespace, SamplingParams
from prefixcache.server import convert
from prefixcache.server.convert import ChatPrompt, ModelLimits, TextPrompt, TokenPrompt

LIMITS = ModelLimits(max_model_len=100, vocab_size=512)
PROMPT = [1, 2, 3]


def request(**fields: Any) -> pb.GenerateRequest:
    prompt = {} if fields.keys() & {"text", "token_ids", "messages"} else {"token_ids": PROMPT}
    return pb.GenerateRequest(**prompt, **fields)


def accept(**fields: Any):
    checked = convert.check(request(**fields), LIMITS)
    return convert.to_engine(checked, "id", PROMPT, LIMITS)


def refuse(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        accept(**fields)
    assert str(caught.value).startswith(f"{caught.value.field}: ")
    return caught.value


def user(content: str = "hello") -> pb.ChatMessage:
    return pb.ChatMessage(role="user", content=content)


def test_a_bare_prompt_gets_the_documented_defaults():
    accepted = accept()
    assert accepted.prompt_token_ids == PROMPT
    assert accepted.num_samples == 1
    assert accepted.use_cache is True
    assert accepted.namespace == Namespace()
    assert accepted.sampling == SamplingParams(max_tokens=97)
    assert accepted.sampling.temperature == 1.0
    assert accepted.sampling.top_p == 1.0


def test_every_field_arrives_in_the_engine():
    accepted = accept(
        max_tokens=20,
        min_tokens=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        seed=2**63 - 1,
        stop=["\n\n", "User:"],
        stop_token_ids=[511, 0, 511],
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=5,
        logit_bias={7: -100.0, 3: 100.0},
        n=16,
        request_id="abc",
        use_cache=False,
        cache_salt="pepper",
        skip_special_tokens=False,
    )
    assert accepted.sampling == SamplingParams(
        max_tokens=20,
        min_tokens=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        seed=2**63 - 1,
        stop=("\n\n", "User:"),
        stop_token_ids=frozenset({0, 511}),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=5,
        logit_bias=((3, 100.0), (7, -100.0)),
        skip_special_tokens=False,
    )
    assert accepted.num_samples == 16
    assert accepted.use_cache is False
    assert accepted.namespace == Namespace(salt="pepper")


def test_zero_is_not_unset():
    sampling = accept(temperature=0.0, min_p=0.0, seed=0, logprobs=0, prompt_logprobs=0, min_tokens=0).sampling
    assert sampling.temperature == 0.0
    assert sampling.seed == 0
    assert sampling.logprobs == 0
    assert sampling.prompt_logprobs == 0


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, -(2**31), 98, 2**31 - 1]),
        ("min_tokens", [-1, 98]),
        ("temperature", [math.nan, math.inf, -math.inf, -0.1, -1e-9, 1e-9, 0.0009]),
        ("top_p", [math.nan, math.inf, 0.0, -0.1, 1.0001, -math.inf]),
        ("top_k", [-1, -(2**31)]),
        ("min_p", [math.nan, math.inf, -0.01, 1.01]),
        ("repetition_penalty", [math.nan, math.inf, 0.0, -1.0, 0.009, 100.1]),
        ("presence_penalty", [math.nan, math.inf, -2.01, 2.01]),
        ("frequency_penalty", [math.nan, -math.inf, -2.01, 2.01]),
        ("seed", [-1, -(2**63)]),
        ("stop", [[""], ["ok", ""], ["x" * 257], ["x"] * 17]),
        ("stop_token_ids", [[-1], [512], [2**31], [2**63 - 1], [1] * 257]),
        ("logprobs", [-1, 65]),
        ("prompt_logprobs", [-1, 65]),
        ("logit_bias", [{-1: 1.0}, {512: 1.0}, {2**31: 1.0}, {1: math.nan}, {1: math.inf}, {1: 100.5}, {1: -100.5}]),
        ("n", [0, -1, 17]),
        ("request_id", ["x" * 129, "line\nbreak", "naïve"]),
        ("cache_salt", ["x" * 257]),
        ("token_ids", [[-1], [512], [1, 2, 2**31], [-(2**63)], [2**63 - 1], [1] * 100, [1] * 5_000_000]),
        ("text", ["", "x" * 6401]),
        ("messages", [[user()] * 1025, [user("x" * 6401)]]),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, values: list[Any]):
    for value in values:
        assert refuse(**{field: value}).field == field


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [1, 97]),
        ("min_tokens", [0, 97]),
        ("temperature", [0.0, 0.001, 2.0, 1e30]),
        ("top_p", [1e-9, 1.0]),
        ("top_k", [0, 1, 511]),
        ("min_p", [0.0, 1.0]),
        ("repetition_penalty", [0.01, 1.0, 100.0]),
        ("presence_penalty", [-2.0, 2.0]),
        ("frequency_penalty", [-2.0, 2.0]),
        ("seed", [0, 2**63 - 1]),
        ("logprobs", [0, 64]),
        ("prompt_logprobs", [0, 64]),
    ],
)
def test_the_edges_of_a_range_are_accepted(field: str, values: list[Any]):
    for value in values:
        assert getattr(accept(**{field: value}).sampling, field) == value


def test_the_longest_lists_are_accepted():
    accepted = accept(
        stop=["x" * 256] * 16,
        stop_token_ids=list(range(256)),
        logit_bias=dict.fromkeys(range(512), 1.0),
        request_id="x" * 128,
        cache_salt="ß" * 256,
    )
    assert len(accepted.sampling.stop) == 16
    assert len(accepted.sampling.logit_bias) == 512


def test_too_many_biases_are_counted_before_their_ids_are_looked_at():
    wide = ModelLimits(max_model_len=100, vocab_size=5000)
    with pytest.raises(InvalidRequest, match=r"logit_bias: has 1025 entries; at most 1024"):
        convert.check(request(logit_bias=dict.fromkeys(range(1025), 1.0)), wide)
    checked = convert.check(request(logit_bias=dict.fromkeys(range(1024), 1.0)), wide)
    assert len(checked.sampling.logit_bias) == 1024


def test_wishes_beyond_the_vocabulary_are_cut_to_it():
    tiny = ModelLimits(max_model_len=100, vocab_size=32)
    sampling = convert.check(request(top_k=40, logprobs=64, prompt_logprobs=33), tiny).sampling
    assert (sampling.top_k, sampling.logprobs, sampling.prompt_logprobs) == (32, 32, 32)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": "a", "token_ids": [1]}, "token_ids"),
        ({"text": "", "token_ids": [1]}, "token_ids"),
        ({"text": "a", "messages": [user()]}, "messages"),
        ({"token_ids": [1], "messages": [user()]}, "messages"),
    ],
)
def test_two_prompts_are_refused(fields: dict[str, Any], named: str):
    error = refuse(**fields)
    assert error.field == named
    assert "exactly one" in error.reason


@pytest.mark.parametrize("fields", [{"token_ids": []}, {"messages": []}])
def test_no_prompt_is_refused(fields: dict[str, Any]):
    assert "exactly one of text, token_ids and messages" in refuse(**fields).reason


@pytest.mark.parametrize("role", ["", "tool", "User", "developer", "system "])
def test_an_unknown_role_is_refused_with_its_place(role: str):
    error = refuse(messages=[user(), pb.ChatMessage(role=role, content="x")])
    assert error.field == "messages[1].role"


def test_each_kind_of_prompt_is_recognised():
    chat = [pb.ChatMessage(role=role, content=role) for role in ("system", "user", "assistant", "user")]
    assert convert.check(request(text=" "), LIMITS).prompt == TextPrompt(" ")
    assert convert.check(request(token_ids=[0, 511]), LIMITS).prompt == TokenPrompt([0, 511])
    assert convert.check(request(messages=chat), LIMITS).prompt == ChatPrompt(
        [ChatMessage(role, role) for role in ("system", "user", "assistant", "user")]
    )


def test_content_of_a_kind_this_server_does_not_know_is_refused():
    image_part = bytes([0x1A, 3]) + b"png"  # field 3 of a ChatMessage, which has none
    message = pb.ChatMessage.FromString(user().SerializeToString() + image_part)
    error = refuse(messages=[user(), message])
    assert error.field == "messages[1]"
    assert "field number 3" in error.reason


def test_an_option_this_server_does_not_know_is_refused():
    unknown = pb.GenerateRequest.FromString(request().SerializeToString() + bytes([0xC0, 0x3E, 1]))  # field 1000
    with pytest.raises(InvalidRequest, match=r"^request: has field number 1000"):
        convert.check(unknown, LIMITS)


def test_prompt_and_max_tokens_over_the_model_length_names_both_numbers():
    assert accept(max_tokens=97).sampling.max_tokens == 97
    error = refuse(max_tokens=98)
    assert error.field == "max_tokens"
    assert "101" in error.reason
    assert "100" in error.reason


@pytest.mark.parametrize(("prompt", "field"), [({"text": "a"}, "text"), ({"messages": [user()]}, "messages")])
def test_a_prompt_that_fills_the_model_is_refused_with_both_numbers(prompt: dict[str, Any], field: str):
    checked = convert.check(request(**prompt), LIMITS)
    assert convert.to_engine(checked, "id", [1] * 99, LIMITS).sampling.max_tokens == 1
    with pytest.raises(InvalidRequest) as caught:
        convert.to_engine(checked, "id", [1] * 100, LIMITS)
    assert caught.value.field == field
    assert "100 tokens, but the model's length is 100" in caught.value.reason


def test_text_with_a_token_that_only_the_tokenizer_knows_is_refused():
    checked = convert.check(request(text="a"), LIMITS)
    assert convert.to_engine(checked, "id", [0, 511], LIMITS).prompt_token_ids == [0, 511]
    with pytest.raises(InvalidRequest, match=r"^text: holds token 512"):
        convert.to_engine(checked, "id", [0, 512, 5], LIMITS)


def test_text_that_has_no_tokens_is_refused():
    with pytest.raises(InvalidRequest, match=r"^text: has no tokens"):
        convert.to_engine(convert.check(request(text="a"), LIMITS), "id", [], LIMITS)


def test_unset_max_tokens_is_256_or_what_is_left():
    roomy = ModelLimits(max_model_len=1000, vocab_size=512)
    checked = convert.check(request(), roomy)
    assert convert.to_engine(checked, "id", PROMPT, roomy).sampling.max_tokens == 256
    assert convert.to_engine(checked, "id", [1] * 900, roomy).sampling.max_tokens == 100


def test_min_tokens_counts_against_the_unset_max_tokens_too():
    assert accept(min_tokens=97).sampling.min_tokens == 97
    assert refuse(min_tokens=5, max_tokens=4).field == "min_tokens"


def test_tokenize_takes_exactly_one_input():
    check = convert.check_tokenize
    assert check(pb.TokenizeRequest(text="a"), LIMITS) == TextPrompt("a", True)
    assert check(pb.TokenizeRequest(text="a", add_special_tokens=False), LIMITS) == TextPrompt("a", False)
    assert check(pb.TokenizeRequest(messages=[user("a")]), LIMITS) == ChatPrompt([ChatMessage("user", "a")])
    for bad, field in [
        (pb.TokenizeRequest(), "text"),
        (pb.TokenizeRequest(text="a", messages=[user()]), "text"),
        (pb.TokenizeRequest(text=""), "text"),
        (pb.TokenizeRequest(text="x" * 6401), "text"),
        (pb.TokenizeRequest(messages=[user()], add_special_tokens=True), "add_special_tokens"),
        (pb.TokenizeRequest(messages=[pb.ChatMessage(role="x")]), "messages[0].role"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            check(bad, LIMITS)
        assert caught.value.field == field


@pytest.mark.parametrize("token_ids", [[-1], [512], [2**31]])
def test_detokenize_refuses_ids_outside_the_vocabulary(token_ids: list[int]):
    with pytest.raises(InvalidRequest, match=r"^token_ids: "):
        convert.check_detokenize(pb.DetokenizeRequest(token_ids=token_ids), LIMITS)


def test_detokenize_takes_a_million_ids_and_no_more():
    assert convert.check_detokenize(pb.DetokenizeRequest(token_ids=[1] * 2**20), LIMITS) == [1] * 2**20
    with pytest.raises(InvalidRequest, match="at most 1048576"):
        convert.check_detokenize(pb.DetokenizeRequest(token_ids=[1] * (2**20 + 1)), LIMITS)
