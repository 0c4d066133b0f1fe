"""From the engine to the gateway's protocol: deltas become chunks, and at the end one summary for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from smg_grpc_proto import vllm_engine_pb2 as vllm

from prefixcache.request import Delta, Finish, GenerateRequest, TokenLogprobs


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


class VllmReply:
    """Turns the deltas of one request into messages. Event loop only.

    The protocol wants the number of cached tokens with each sample's summary, and the engine says it with the
    request's last delta, so all summaries come then.
    """

    def __init__(self, request: GenerateRequest, *, is_stream: bool) -> None:
        self._prompt_token_ids = request.prompt_token_ids
        self._stop_token_ids = request.sampling.stop_token_ids
        self._is_stream = is_stream
        self._samples = [_Sample() for _ in range(request.num_samples)]
        self._prompt_logprobs: list[TokenLogprobs | None] = []

    def messages(self, delta: Delta) -> Iterator[vllm.GenerateResponse]:
        """The messages that one more delta makes."""
        sample = self._samples[delta.sample_index]
        sample.token_ids += delta.token_ids
        sample.logprobs += delta.logprobs
        sample.finish = delta.finish
        self._prompt_logprobs += delta.prompt_logprobs
        if self._is_stream and delta.token_ids:
            yield vllm.GenerateResponse(chunk=self._chunk(delta))
        if delta.usage is not None:
            for index, each in enumerate(self._samples):
                yield vllm.GenerateResponse(complete=self._complete(index, each, delta.usage.cached_tokens))

    def _chunk(self, delta: Delta) -> vllm.GenerateStreamChunk:
        sample = self._samples[delta.sample_index]
        chunk = vllm.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(sample.token_ids),
            index=delta.sample_index,
        )
        if delta.logprobs:
            chunk.output_logprobs.CopyFrom(_output_logprobs(delta.logprobs))
        if self._prompt_logprobs and len(sample.token_ids) == len(delta.token_ids) and delta.sample_index == 0:
            chunk.input_logprobs.CopyFrom(self._input_logprobs())
        return chunk

    def _complete(self, index: int, sample: _Sample, num_cached_tokens: int) -> vllm.GenerateComplete:
        assert sample.finish is not None
        complete = vllm.GenerateComplete(
            output_ids=sample.token_ids,
            finish_reason=sample.finish.reason.value,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(sample.token_ids),
            cached_tokens=num_cached_tokens,
            index=index,
        )
        if isinstance(sample.finish.matched, str):
            complete.matched_stop_str = sample.finish.matched
        elif sample.finish.matched in self._stop_token_ids:  # the model's own end is nobody's match
            complete.matched_token_id = sample.finish.matched
        if not self._is_stream:
            if sample.logprobs:
                complete.output_logprobs.CopyFrom(_output_logprobs(sample.logprobs))
            if self._prompt_logprobs:
                complete.input_logprobs.CopyFrom(self._input_logprobs())
        return complete

    def _input_logprobs(self) -> vllm.InputLogProbs:
        message = vllm.InputLogProbs()
        for token_id, entry in zip(self._prompt_token_ids, self._prompt_logprobs, strict=True):
            message.token_ids.append(token_id)
            value = message.token_logprobs.add()
            top = message.top_logprobs.add()
            if entry is not None:  # nothing precedes the first token
                value.value = entry.logprob
                _set_top(top, entry)
        return message


def _output_logprobs(entries: Iterable[TokenLogprobs]) -> vllm.OutputLogProbs:
    message = vllm.OutputLogProbs()
    for entry in entries:
        message.token_ids.append(entry.token_id)
        message.token_logprobs.append(entry.logprob)
        _set_top(message.top_logprobs.add(), entry)
    return message


def _set_top(message: vllm.TopLogProbs, entry: TokenLogprobs) -> None:
    message.token_ids.extend(token_id for token_id, _ in entry.top)
    message.values.extend(logprob for _, logprob in entry.top)
