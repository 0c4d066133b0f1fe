"""What goes into the engine and what comes out of it: plain immutable values, no torch, no gRPC."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Namespace(NamedTuple):
    """Who may share cached K/V with whom. Two requests share only if every field is equal.

    Fields stay apart (they are never joined into one string), so no choice of salt can imitate another tenant.
    """

    tenant: str = ""
    salt: str = ""
    private_id: int = 0  # non-zero: one request's own namespace, dropped when that request ends


class Tier(StrEnum):
    """Where cached K/V was found, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation stops. Values are checked where they enter (`server/convert.py`).

    Penalties follow the field's convention: `repetition_penalty` looks at prompt and output,
    `presence_penalty` and `frequency_penalty` at the output only.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 means all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: no logprobs; n: the chosen token's and the n most likely ones'
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    skip_special_tokens: bool = True


DEFAULT_NAMESPACE = Namespace()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One checked request: prompt token ids and how to continue them.

    `deadline_s` is on the clock of `time.monotonic`; None for a client that waits for ever.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    num_samples: int = 1
    namespace: Namespace = DEFAULT_NAMESPACE
    use_cache: bool = True
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token under the unmodified model, and of its most likely rivals (best first)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why one sample ended. `matched` is the stop string or the stop token id that ended it, if one did."""

    reason: FinishReason
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. Cached tokens are prompt tokens whose K/V earlier requests had computed."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cached_tokens_by_tier: dict[Tier, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one request's time went, in milliseconds, measured in the engine."""

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one sample of a request.

    `usage` and `timings` are set on exactly one delta of a request, its last (I8).
    `prompt_logprobs` arrives in pieces, in prompt order, on the first deltas of sample 0;
    its very first element is None, since nothing precedes the first token.
    """

    sample_index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    timings: Timings | None = None
