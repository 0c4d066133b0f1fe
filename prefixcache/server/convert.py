"""From the wire to the engine: checks every field of a request, then says it in the engine's terms.

A prompt may be text, so the work comes in two parts, and nothing is tokenized for a request that has another fault:

    proto ── check ──▶ CheckedRequest ── (token ids of its prompt) ── to_engine ──▶ GenerateRequest

Every fault raises InvalidRequest with the name of the proto field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.errors import InvalidRequest
from prefixcache.model.tokenizer import ChatMessage
from prefixcache.request import GenerateRequest, Namespace, SamplingParams
from prefixcache.server.fields import check_known_fields, checked_token_ids, flag, integer, number, optional_integer

DEFAULT_MAX_TOKENS = 256
ROLES = frozenset({"system", "user", "assistant"})

MAX_SAMPLES = 16
MAX_LOGPROBS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_REQUEST_ID_CHARS = 128
MAX_SALT_CHARS = 256
MAX_MESSAGES = 1024
MAX_DETOKENIZE_TOKENS = 1 << 20
MAX_CHARS_PER_TOKEN = 64  # longer text cannot fit into the model, so it is refused without being tokenized

# Nearer to 0 than this, dividing logits by the temperature or a penalty could overflow float32.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.001, 1e30
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_PENALTY = 2.0


class ModelLimits(NamedTuple):
    """What the model that is served can take."""

    max_model_len: int
    vocab_size: int

    @property
    def max_chars(self) -> int:
        """Longest text, in characters, that is worth tokenizing."""
        return self.max_model_len * MAX_CHARS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as plain text."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as chat messages."""

    messages: list[ChatMessage]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids, all within the vocabulary."""

    token_ids: list[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt
PROMPT_FIELDS: dict[type[Prompt], str] = {TextPrompt: "text", ChatPrompt: "messages", TokenPrompt: "token_ids"}


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request without faults, as far as that can be said before its prompt has been counted in tokens.

    Attributes:
        max_tokens: As the client gave it; `sampling.max_tokens` is settled by `to_engine`.
    """

    prompt: Prompt
    max_tokens: int | None
    sampling: SamplingParams
    num_samples: int
    namespace: Namespace
    use_cache: bool


def check(request: pb.GenerateRequest, limits: ModelLimits, tenant: str = "") -> CheckedRequest:
    """Checks every field of a Generate or Complete request of an authenticated tenant.

    Raises:
        InvalidRequest: The first fault found; it names the field.
    """
    check_known_fields(request, "request")
    _check_request_id(request.request_id)
    if len(request.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequest("cache_salt", f"has {len(request.cache_salt)} characters; at most {MAX_SALT_CHARS}")
    return CheckedRequest(
        prompt=_generate_prompt(request, limits),
        max_tokens=optional_integer(request, "max_tokens", 1),
        sampling=_sampling(request, limits),
        num_samples=integer(request, "n", 1, 1, MAX_SAMPLES),
        namespace=Namespace(tenant=tenant, salt=request.cache_salt),
        use_cache=flag(request, "use_cache", True),
    )


def to_engine(
    checked: CheckedRequest,
    request_id: str,
    prompt_token_ids: list[int],
    limits: ModelLimits,
    deadline_s: float | None = None,
) -> GenerateRequest:
    """Settles what depends on the length of the prompt, and hands on the request in the engine's terms.

    Raises:
        InvalidRequest: The prompt is empty, or it does not fit into the model together with what is asked for.
    """
    prompt_field = PROMPT_FIELDS[type(checked.prompt)]
    num_prompt_tokens = len(prompt_token_ids)
    if num_prompt_tokens == 0:
        raise InvalidRequest(prompt_field, "has no tokens; a prompt needs at least one")
    check_prompt_length(prompt_field, num_prompt_tokens, limits)
    if not isinstance(checked.prompt, TokenPrompt) and (largest := max(prompt_token_ids)) >= limits.vocab_size:
        # a tokenizer may know more tokens than the model
        raise InvalidRequest(prompt_field, f"holds token {largest}, for which this model has no embedding")

    num_left = limits.max_model_len - num_prompt_tokens
    max_tokens = min(DEFAULT_MAX_TOKENS, num_left) if checked.max_tokens is None else checked.max_tokens
    if max_tokens > num_left:
        raise InvalidRequest(
            "max_tokens",
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} make {num_prompt_tokens + max_tokens}, "
            f"but the model's length is {limits.max_model_len}",
        )
    if checked.sampling.min_tokens > max_tokens:
        raise InvalidRequest("min_tokens", f"{checked.sampling.min_tokens} is more than max_tokens {max_tokens}")
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=replace(checked.sampling, max_tokens=max_tokens),
        num_samples=checked.num_samples,
        namespace=checked.namespace,
        use_cache=checked.use_cache,
        deadline_s=deadline_s,
    )


def check_tokenize(request: pb.TokenizeRequest, limits: ModelLimits) -> TextPrompt | ChatPrompt:
    """Checks a Tokenize request; raises InvalidRequest."""
    check_known_fields(request, "request")
    if request.HasField("text") == bool(request.messages):
        raise InvalidRequest("text", "give exactly one of text and messages")
    if request.messages:
        if request.HasField("add_special_tokens"):
            raise InvalidRequest("add_special_tokens", "goes with text only; a chat template adds its own")
        return _chat_prompt(request.messages, limits)
    return _text_prompt(request.text, limits, flag(request, "add_special_tokens", True))


def check_detokenize(request: pb.DetokenizeRequest, limits: ModelLimits) -> list[int]:
    """Checks a Detokenize request and returns its token ids; raises InvalidRequest."""
    if len(request.token_ids) > MAX_DETOKENIZE_TOKENS:
        raise InvalidRequest("token_ids", f"has {len(request.token_ids)} entries; at most {MAX_DETOKENIZE_TOKENS}")
    return checked_token_ids("token_ids", request.token_ids, limits.vocab_size)


def check_prompt_length(field: str, num_prompt_tokens: int, limits: ModelLimits) -> None:
    """Raises InvalidRequest, with both numbers, for a prompt that leaves no room for a single new token."""
    if num_prompt_tokens >= limits.max_model_len:
        raise InvalidRequest(
            field,
            f"the prompt has {num_prompt_tokens} tokens, but the model's length is {limits.max_model_len}, "
            "of which at least one is for the answer",
        )


def is_request_id(request_id: str) -> bool:
    """Whether a client's request id may be used: short, and fit for a log line and a metadata value."""
    return 0 < len(request_id) <= MAX_REQUEST_ID_CHARS and request_id.isascii() and request_id.isprintable()


def _check_request_id(request_id: str) -> None:
    if request_id and not is_request_id(request_id):
        raise InvalidRequest("request_id", f"must be printable ASCII of at most {MAX_REQUEST_ID_CHARS} characters")


def _generate_prompt(request: pb.GenerateRequest, limits: ModelLimits) -> Prompt:
    given = [("text", request.HasField("text")), ("token_ids", request.token_ids), ("messages", request.messages)]
    names = [name for name, is_given in given if is_given]
    if len(names) > 1:
        raise InvalidRequest(names[1], f"cannot be combined with {names[0]}; give exactly one prompt")
    if not names:
        raise InvalidRequest(
            "text", "no prompt: give exactly one of text, token_ids and messages, and not an empty one"
        )
    if request.messages:
        return _chat_prompt(request.messages, limits)
    if request.HasField("text"):
        return _text_prompt(request.text, limits)

    # The length comes first: it is known at once, even of millions of ids.
    check_prompt_length("token_ids", len(request.token_ids), limits)
    return TokenPrompt(checked_token_ids("token_ids", request.token_ids, limits.vocab_size))


def _text_prompt(text: str, limits: ModelLimits, add_special_tokens: bool = True) -> TextPrompt:
    if not text:
        raise InvalidRequest("text", "is empty")
    _check_chars("text", len(text), limits)
    return TextPrompt(text, add_special_tokens)


def _chat_prompt(messages: Sequence[pb.ChatMessage], limits: ModelLimits) -> ChatPrompt:
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"has {len(messages)} entries; at most {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        check_known_fields(message, f"messages[{index}]")
        if message.role not in ROLES:
            raise InvalidRequest(f"messages[{index}].role", "must be one of system, user, assistant")
    _check_chars("messages", sum(len(message.content) for message in messages), limits)
    return ChatPrompt([ChatMessage(message.role, message.content) for message in messages])


def _check_chars(field: str, num_chars: int, limits: ModelLimits) -> None:
    if num_chars > limits.max_chars:
        raise InvalidRequest(
            field,
            f"has {num_chars} characters, but a model length of {limits.max_model_len} tokens "
            f"holds at most {limits.max_chars}",
        )


def _sampling(request: pb.GenerateRequest, limits: ModelLimits) -> SamplingParams:
    return SamplingParams(
        max_tokens=DEFAULT_MAX_TOKENS,
        min_tokens=integer(request, "min_tokens", 0, 0),
        temperature=_temperature(request),
        top_p=_top_p(request),
        top_k=min(integer(request, "top_k", 0, 0), limits.vocab_size),
        min_p=number(request, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=number(request, "repetition_penalty", 1.0, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        presence_penalty=number(request, "presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=number(request, "frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        seed=optional_integer(request, "seed", 0),
        stop=_stop(request.stop),
        stop_token_ids=_stop_token_ids(request.stop_token_ids, limits.vocab_size),
        ignore_eos=flag(request, "ignore_eos", False),
        logprobs=_num_logprobs(request, "logprobs", limits.vocab_size),
        prompt_logprobs=_num_logprobs(request, "prompt_logprobs", limits.vocab_size),
        logit_bias=_logit_bias(request, limits.vocab_size),
        skip_special_tokens=flag(request, "skip_special_tokens", True),
    )


def _temperature(request: pb.GenerateRequest) -> float:
    value = request.temperature if request.HasField("temperature") else 1.0
    if value != 0.0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:  # written so that NaN fails it
        raise InvalidRequest(
            "temperature", f"must be 0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}; got {value}"
        )
    return value


def _top_p(request: pb.GenerateRequest) -> float:
    value = request.top_p if request.HasField("top_p") else 1.0
    if not 0.0 < value <= 1.0:
        raise InvalidRequest("top_p", f"must be above 0 and at most 1; got {value}")
    return value


def _stop(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"has {len(stop)} entries; at most {MAX_STOP_STRINGS}")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest("stop", f"an entry has {len(text)} characters; each must have 1 to {MAX_STOP_CHARS}")
    return tuple(stop)


def _stop_token_ids(stop_token_ids: Sequence[int], vocab_size: int) -> frozenset[int]:
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"has {len(stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS}")
    return frozenset(checked_token_ids("stop_token_ids", stop_token_ids, vocab_size))


def _num_logprobs(request: pb.GenerateRequest, field: str, vocab_size: int) -> int | None:
    value = optional_integer(request, field, 0, MAX_LOGPROBS)
    return None if value is None else min(value, vocab_size)


def _logit_bias(request: pb.GenerateRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = dict(request.logit_bias)
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequest("logit_bias", f"has {len(biases)} entries; at most {MAX_LOGIT_BIASES}")
    checked_token_ids("logit_bias", list(biases), vocab_size)
    for token_id, bias in biases.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "logit_bias", f"{bias} for token {token_id}; must be from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            )
    return tuple(sorted(biases.items()))
