"""Requests and channel settings that the blocking and the asyncio client share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb

DEFAULT_TARGET = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

Message = pb.ChatMessage | Mapping[str, str]

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A server that vanished is noticed within 30 s, also during a long silent prefill; servers accept 10 s and slower.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that is being started is found soon after it listens. The "min" to these is left alone: it is how long
    # setting up a connection may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # whether to try again is the caller's decision
    ("grpc.enable_http_proxy", 0),  # an HTTP proxy of the environment is not meant for this
]


class GenerateOptions(TypedDict, total=False):
    """How to continue a prompt; `inference.proto` says what each means, its limits, and what it is when left out."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    logit_bias: Mapping[int, float]
    n: int
    request_id: str
    use_cache: bool
    cache_salt: str
    skip_special_tokens: bool


def generate_request(
    text: str | None, messages: Sequence[Message] | None, token_ids: Sequence[int] | None, options: GenerateOptions
) -> pb.GenerateRequest:
    """The message for Generate and Complete; what is None or left out stays unset."""
    return pb.GenerateRequest(
        text=text, token_ids=token_ids, messages=None if messages is None else chat_messages(messages), **options
    )


def tokenize_request(
    text: str | None, messages: Sequence[Message] | None, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    """The message for Tokenize; what is None stays unset."""
    return pb.TokenizeRequest(
        text=text,
        messages=None if messages is None else chat_messages(messages),
        add_special_tokens=add_special_tokens,
    )


def chat_messages(messages: Sequence[Message]) -> list[pb.ChatMessage]:
    """Chat messages as proto messages, from such or from mappings with `role` and `content`."""
    return [message if isinstance(message, pb.ChatMessage) else pb.ChatMessage(**message) for message in messages]
