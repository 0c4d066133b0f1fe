"""Deltas as messages."""

from __future__ import annotations

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.request import Delta, Finish, FinishReason, Tier, Timings, TokenLogprobs, Usage
from prefixcache.server.reply import CompleteReply, stream_messages

PROMPT = [41, 42, 43]
USAGE = Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=4, cached_tokens_by_tier={Tier.DEVICE: 2})
TIMINGS = Timings(queue_ms=1.5, prefill_ms=2.5, ttft_ms=4.0, total_ms=8.0)


def entry(token_id: int, num_top: int = 0) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, tuple((token_id + rank, -0.5 - rank) for rank in range(num_top)))


def test_a_plain_delta_is_one_message_without_finish_or_usage():
    (message,) = stream_messages(Delta(2, (7, 8), "hi"), PROMPT)
    assert message == pb.GenerateResponse(sample_index=2, token_ids=[7, 8], text="hi")
    assert message.WhichOneof("matched") is None
    assert not message.HasField("usage")
    assert not message.HasField("timings")


def test_the_last_delta_carries_everything():
    delta = Delta(0, (7,), "x", (entry(7, 2),), (), Finish(FinishReason.STOP, "END"), USAGE, TIMINGS)
    (message,) = stream_messages(delta, PROMPT)
    assert message.finish_reason == pb.FINISH_REASON_STOP
    assert message.stop_string == "END"
    assert message.usage == pb.Usage(
        prompt_tokens=3,
        cached_tokens=2,
        completion_tokens=4,
        cached_tokens_by_tier=pb.CachedTokensByTier(device=2),
    )
    assert message.timings == pb.Timings(queue_ms=1.5, prefill_ms=2.5, ttft_ms=4.0, total_ms=8.0)
    assert message.logprobs == [
        pb.TokenLogprobs(token_id=7, logprob=-0.5, top_token_ids=[7, 8], top_logprobs=[-0.5, -1.5])
    ]


def test_a_stop_token_with_id_0_is_told_from_no_match():
    (matched,) = stream_messages(Delta(0, finish=Finish(FinishReason.STOP, 0)), PROMPT)
    (unmatched,) = stream_messages(Delta(0, finish=Finish(FinishReason.LENGTH)), PROMPT)
    assert matched.WhichOneof("matched") == "stop_token_id"
    assert unmatched.WhichOneof("matched") is None
    assert unmatched.finish_reason == pb.FINISH_REASON_LENGTH


def test_the_first_prompt_token_has_no_logprob():
    (message,) = stream_messages(Delta(0, prompt_logprobs=(None, entry(42))), PROMPT)
    first, second = message.prompt_logprobs
    assert first.token_id == 41
    assert not first.HasField("logprob")
    assert second.token_id == 42
    assert second.HasField("logprob")


def test_long_prompt_logprobs_are_cut_into_pieces_that_any_client_takes():
    entries = (None, *(entry(2**31 - 100, 64) for _ in range(7999)))
    delta = Delta(0, (7,), "x", prompt_logprobs=entries, usage=USAGE, timings=TIMINGS)
    messages = list(stream_messages(delta, PROMPT))
    assert sum(message.ByteSize() for message in messages) > 4 * 1024 * 1024
    assert max(message.ByteSize() for message in messages) <= 256 * 1024
    assert sum(len(message.prompt_logprobs) for message in messages) == 8000
    assert [list(message.token_ids) for message in messages[:-1]] == [[]] * (len(messages) - 1)
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]


def test_a_complete_reply_gathers_samples_apart():
    reply = CompleteReply(2, PROMPT)
    reply.add(Delta(0, (1,), "a", (entry(1),), prompt_logprobs=(None,)))
    reply.add(Delta(1, (5,), "", (entry(5),)))
    reply.add(Delta(0, (2,), "b", (entry(2),), prompt_logprobs=(entry(42), entry(43))))
    reply.add(Delta(0, finish=Finish(FinishReason.STOP, 2)))
    reply.add(Delta(1, (6,), "é", (entry(6),), finish=Finish(FinishReason.LENGTH), usage=USAGE, timings=TIMINGS))
    first, second = reply.message.samples
    assert (list(first.token_ids), first.text, first.finish_reason) == ([1, 2], "ab", pb.FINISH_REASON_STOP)
    assert first.stop_token_id == 2
    assert (list(second.token_ids), second.text, second.finish_reason) == ([5, 6], "é", pb.FINISH_REASON_LENGTH)
    assert [logprob.token_id for logprob in second.logprobs] == [5, 6]
    assert [logprob.token_id for logprob in reply.message.prompt_logprobs] == [41, 42, 43]
    assert reply.message.usage.completion_tokens == 4
    assert reply.message.timings.total_ms == 8.0
