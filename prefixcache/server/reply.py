"""From the engine to the wire: deltas become messages, and no message grows beyond what any client can take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.request import Delta, Finish, FinishReason, Timings, TokenLogprobs, Usage

# A default client refuses messages above 4 MiB. Much smaller pieces also keep the event loop free between them.
MAX_PIECE_BYTES = 256 * 1024

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def stream_messages(delta: Delta, prompt_token_ids: list[int]) -> Iterator[pb.GenerateResponse]:
    """The messages of one delta: one, unless its prompt logprobs have to be cut into pieces before it."""
    *pieces, last_piece = _pieces(delta.prompt_logprobs)
    for piece in pieces:
        message = pb.GenerateResponse(sample_index=delta.sample_index)
        message.prompt_logprobs.extend(_logprobs(piece, prompt_token_ids))
        yield message

    message = pb.GenerateResponse(sample_index=delta.sample_index, token_ids=delta.token_ids, text=delta.text)
    if last_piece:
        message.prompt_logprobs.extend(_logprobs(last_piece, prompt_token_ids))
    if delta.logprobs:
        message.logprobs.extend(_logprobs(delta.logprobs, prompt_token_ids))
    if delta.finish is not None:
        _set_finish(message, delta.finish)
    if delta.usage is not None:
        message.usage.CopyFrom(_usage(delta.usage))
    if delta.timings is not None:
        message.timings.CopyFrom(_timings(delta.timings))
    yield message


class CompleteReply:
    """Gathers the deltas of one request into the one message of a Complete call."""

    def __init__(self, num_samples: int, prompt_token_ids: list[int]) -> None:
        self.message = pb.CompleteResponse(samples=[pb.Sample() for _ in range(num_samples)])
        self._texts: list[list[str]] = [[] for _ in range(num_samples)]
        self._prompt_token_ids = prompt_token_ids

    def add(self, delta: Delta) -> None:
        """Adds one delta; after the last one `message` is whole."""
        sample = self.message.samples[delta.sample_index]
        sample.token_ids.extend(delta.token_ids)
        sample.logprobs.extend(_logprobs(delta.logprobs, self._prompt_token_ids))
        self.message.prompt_logprobs.extend(_logprobs(delta.prompt_logprobs, self._prompt_token_ids))
        self._texts[delta.sample_index].append(delta.text)
        if delta.finish is not None:
            sample.text = "".join(self._texts[delta.sample_index])
            _set_finish(sample, delta.finish)
        if delta.usage is not None:
            self.message.usage.CopyFrom(_usage(delta.usage))
        if delta.timings is not None:
            self.message.timings.CopyFrom(_timings(delta.timings))


def _pieces(logprobs: tuple[TokenLogprobs | None, ...]) -> list[tuple[TokenLogprobs | None, ...]]:
    """Consecutive slices, each below MAX_PIECE_BYTES on the wire; one empty slice if there is nothing."""
    num_top = max((len(entry.top) for entry in logprobs if entry is not None), default=0)
    # An id takes at most 5 bytes as a varint and a logprob 4; tags, lengths and the token itself stay below 32.
    num_each = MAX_PIECE_BYTES // (32 + 9 * num_top)
    return [logprobs[start : start + num_each] for start in range(0, max(len(logprobs), 1), num_each)]


def _logprobs(entries: Iterable[TokenLogprobs | None], prompt_token_ids: list[int]) -> Iterator[pb.TokenLogprobs]:
    for entry in entries:
        if entry is None:  # the first token of the prompt
            yield pb.TokenLogprobs(token_id=prompt_token_ids[0])
        else:
            yield pb.TokenLogprobs(
                token_id=entry.token_id,
                logprob=entry.logprob,
                top_token_ids=[token_id for token_id, _ in entry.top],
                top_logprobs=[logprob for _, logprob in entry.top],
            )


def _set_finish(message: pb.GenerateResponse | pb.Sample, finish: Finish) -> None:
    message.finish_reason = _FINISH_REASONS[finish.reason]
    if isinstance(finish.matched, str):
        message.stop_string = finish.matched
    elif finish.matched is not None:
        message.stop_token_id = finish.matched


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        cached_tokens_by_tier=pb.CachedTokensByTier(
            **{tier.value: num_tokens for tier, num_tokens in usage.cached_tokens_by_tier.items()}
        ),
        completion_tokens=usage.completion_tokens,
    )


def _timings(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queue_ms=timings.queue_ms,
        prefill_ms=timings.prefill_ms,
        ttft_ms=timings.ttft_ms,
        total_ms=timings.total_ms,
    )
