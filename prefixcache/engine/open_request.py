"""OpenRequest: what the engine keeps of a request from its arrival to its last delta."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from prefixcache.engine.detokenizer import Detokenizer
from prefixcache.engine.sampler import SamplerState
from prefixcache.engine.sequence import Sequence
from prefixcache.errors import PrefixCacheError
from prefixcache.request import Delta, Finish, FinishReason, GenerateRequest, Timings, Usage


class DeltaSink(Protocol):
    """Where a request's deltas go; told by the engine's `publish`, never by the engine thread itself."""

    def put(self, item: Delta | PrefixCacheError) -> None:
        """Take one delta, or the error that ends the request. Event loop only."""


@dataclass(slots=True, eq=False)
class Sample:
    """One of a request's samples: its sequence, and how its tokens are chosen and turned into text."""

    index: int
    sequence: Sequence
    sampler: SamplerState
    detokenizer: Detokenizer
    last_token_s: float = 0.0

    def accept(
        self, token_id: int, request: GenerateRequest, eos_token_ids: frozenset[int]
    ) -> tuple[str, Finish | None]:
        """Append a sampled token; return the text that can be sent now, and why the sample ends if it does.

        The token that ends a sample is part of its token ids but not of its text.
        """
        params = request.sampling
        self.sequence.token_ids.append(token_id)
        num_output = self.sequence.num_output_tokens
        if token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos):
            return self._end(self.detokenizer.flush(), Finish(FinishReason.STOP, token_id))
        text = self.detokenizer.append(token_id, may_stop=num_output >= params.min_tokens)
        if self.detokenizer.matched is not None:
            return text, Finish(FinishReason.STOP, self.detokenizer.matched)
        if num_output >= params.max_tokens:
            return self._end(text + self.detokenizer.flush(), Finish(FinishReason.LENGTH))
        return text, None

    def _end(self, text: str, finish: Finish) -> tuple[str, Finish]:
        """What the detokenizer held back may itself complete a stop string: then that is the reason."""
        matched = self.detokenizer.matched
        return text, finish if matched is None else Finish(FinishReason.STOP, matched)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One accepted request. Engine thread only, but for the identity that `submit` returns.

    Attributes:
        serial: Its own number, never one that a client chose (request ids may clash).
        admitted_s: When its first sample began to run; None before.
        first_token_s: When its first token was chosen; None before.
        num_prompt_logprobs: Prompt positions reported so far.
    """

    serial: int
    request: GenerateRequest
    sink: DeltaSink
    arrived_s: float
    samples: list[Sample] = field(default_factory=list)
    num_unfinished: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    num_prompt_logprobs: int = 0
    is_failed: bool = False

    def usage(self) -> Usage:
        """Sum up tokens. All samples share one prompt, so its cached tokens are those that the first one found."""
        cached = self.samples[0].sequence.cached_tokens or {}
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=sum(cached.values()),
            completion_tokens=sum(sample.sequence.num_output_tokens for sample in self.samples),
            cached_tokens_by_tier=dict(cached),
        )

    def timings(self, now_s: float) -> Timings:
        admitted_s = self.arrived_s if self.admitted_s is None else self.admitted_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return Timings(
            queue_ms=(admitted_s - self.arrived_s) * 1e3,
            prefill_ms=(first_token_s - admitted_s) * 1e3,
            ttft_ms=(first_token_s - self.arrived_s) * 1e3,
            total_ms=(now_s - self.arrived_s) * 1e3,
        )


def ending_ids(request: GenerateRequest, eos_token_ids: Iterable[int]) -> list[int]:
    """List the tokens that end a sample of this request."""
    stops = set(request.sampling.stop_token_ids)
    return sorted(stops if request.sampling.ignore_eos else stops | set(eos_token_ids))
