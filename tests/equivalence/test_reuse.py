"""How much is reused, at every edge of a page and a prompt; the answer stays the same (EQ)."""

from __future__ import annotations

import random

import pytest

from prefixcache.model.tokenizer import ChatMessage
from prefixcache.request import Namespace
from tests.support.checks import Known, assert_exact, common_length, oracle
from tests.support.in_process import UNLIMITED, InProcess, Stream, greedy, tokenizer
from tests.support.models import EOS_TOKEN_ID
from tests.support.prompts import Prompts

FAMILY = "llama-gqa"
PAGE = 16


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 100])
def test_the_same_prompt_gives_the_same_reply_every_time(length: int) -> None:
    service, prompt = InProcess(FAMILY), Prompts(length).tokens(length)

    streams = [service.run_one(greedy(prompt, 6)) for _ in range(5)]

    for stream in streams:
        assert_exact(stream, oracle(FAMILY))
    assert [stream.cached_tokens for stream in streams] == [0] + [length - 1] * 4
    assert service.num_prefilled_tokens == length, "an identical prompt needs no forward pass before its first token"


@pytest.mark.parametrize("length", [15, 16, 32, 47, 48])
def test_a_known_prompt_with_a_little_more(length: int) -> None:
    service, prompts = InProcess(FAMILY), Prompts(length)
    prompt = prompts.tokens(length)
    service.run_one(greedy(prompt, 1))
    service.run_one(greedy(prompt, 1))

    longer = service.run_one(greedy([*prompt, *prompts.tokens(16)], 6))

    assert_exact(longer, oracle(FAMILY))
    assert longer.cached_tokens == length
    assert service.num_prefilled_tokens == length + 16


def test_a_shorter_prompt_than_the_one_known() -> None:
    service, prompt = InProcess(FAMILY), Prompts(5).tokens(70)
    service.run_one(greedy(prompt, 3))

    for length in (69, 64, 63, 49, 48, 47, 17, 16, 15, 2, 1):
        stream = service.run_one(greedy(prompt[:length], 3))
        assert_exact(stream, oracle(FAMILY))
        assert stream.cached_tokens == length - 1


def test_hits_equal_misses_for_pairs_of_prefix_and_suffix() -> None:
    service, prompts = InProcess(FAMILY), Prompts(6)
    for _ in range(30):
        prompt = prompts.tokens(prompts.between(1, 100)) + prompts.tokens(prompts.between(1, 20))
        service.forget()
        cold = service.run_one(greedy(prompt, 5))
        again = service.run_one(greedy(prompt, 5))
        service.run(*(greedy(prompts.tokens(20), 2) for _ in range(5)))
        later = service.run_one(greedy(prompt, 5))

        for stream in (cold, again, later):
            assert_exact(stream, oracle(FAMILY))
        assert [cold.cached_tokens, again.cached_tokens, later.cached_tokens] == [0, len(prompt) - 1, len(prompt) - 1]


def test_several_suffixes_of_one_prefix_keep_their_own_first_token() -> None:
    service, prompts = InProcess(FAMILY), Prompts(17)
    prefix = prompts.tokens(40)

    streams = [service.run_one(greedy([*prefix, *prompts.tokens(5)], 4)) for _ in range(3)]

    for stream in streams:
        assert_exact(stream, oracle(FAMILY))
    assert [stream.cached_tokens for stream in streams] == [0, 40, 40]
    assert len({stream.token_ids[0] for stream in streams}) > 1


@pytest.mark.parametrize("chunk", [7, 16, 64, UNLIMITED])
def test_chunk_size_changes_neither_reply_nor_reuse(chunk: int) -> None:
    service, prompts = InProcess(FAMILY, chunk=chunk), Prompts(10)
    prompt = prompts.tokens(100)
    cold = service.run_one(greedy(prompt, 6))
    assert service.num_prefilled_tokens == 100
    warm = service.run_one(greedy(prompt, 6))
    half = service.run_one(greedy(prompt[:50] + prompts.tokens(50), 6))

    for stream in (cold, warm, half):
        assert_exact(stream, oracle(FAMILY))
    # a prompt's own earlier chunks are no hits
    assert [cold.cached_tokens, warm.cached_tokens, half.cached_tokens] == [0, 99, 50]
    assert service.num_prefilled_tokens == 150


@pytest.mark.parametrize(("num_prompt", "num_output"), [(32, 33), (32, 1), (30, 2), (16, 17), (5, 60)])
def test_generated_tokens_are_reused_but_for_the_last(num_prompt: int, num_output: int) -> None:
    service, prompts = InProcess(FAMILY), Prompts(12)
    first = service.run_one(greedy(prompts.tokens(num_prompt), num_output))
    turn = first.request.prompt_token_ids + first.token_ids

    second = service.run_one(greedy(turn + prompts.tokens(10), 5))

    assert_exact(second, oracle(FAMILY))
    assert second.cached_tokens == len(turn) - 1


def test_every_kind_of_end_leaves_exactly_what_was_computed() -> None:
    service, prompts = InProcess(FAMILY), Prompts(13)
    prompt = prompts.tokens(40)
    free = oracle(FAMILY).generate(prompt, 20).token_ids
    text = tokenizer().decode(free, skip_special_tokens=True)
    by_token = service.run_one(greedy(prompt, 20, stop_token_ids=frozenset({free[7]})))
    by_text = service.run_one(greedy(prompt, 20, stop=(text[len(text) // 2 :][:3],)))
    by_length = service.run_one(greedy(prompt, 1))
    by_eos = service.run_one(greedy(prompt, 20, ignore_eos=False, logit_bias=((EOS_TOKEN_ID, 100.0),)))

    assert by_token.token_ids == list(free[: free.index(free[7]) + 1])
    assert len(by_text.token_ids) < 20
    assert by_eos.token_ids == [EOS_TOKEN_ID]
    for stream in (by_token, by_text, by_length, by_eos):
        turn = prompt + stream.token_ids
        extended = service.run_one(greedy(turn + prompts.tokens(5), 4))
        assert_exact(extended, oracle(FAMILY))
        assert len(turn) - 1 <= extended.cached_tokens <= len(turn)  # a longer end may know the last token, too


def test_a_long_conversation_in_small_steps_gathers_no_error() -> None:
    service, prompts = InProcess(FAMILY), Prompts(19)
    history = prompts.tokens(20)
    errors = []
    for turn in range(25):
        stream = service.run_one(greedy(history, 12))
        assert_exact(stream, oracle(FAMILY))
        assert stream.cached_tokens == (0 if turn == 0 else len(history) - 13)
        exact = oracle(FAMILY).logprobs_of(history, stream.token_ids)
        errors.append(max(abs(a - b) for a, b in zip(stream.logprobs, exact, strict=True)))
        history += [*stream.token_ids, *prompts.tokens(12)]

    assert max(errors[-5:]) < 5 * max(errors[:5]) + 1e-5


def test_only_the_same_namespace_shares() -> None:
    service, prompts, known = InProcess(FAMILY), Prompts(20), Known()
    prompt = prompts.tokens(64)
    spaces = [Namespace(), Namespace("org_1", "2345"), Namespace("org_12345", ""), Namespace("", "org_12345")]
    for namespace in spaces:
        first = service.run_one(greedy(prompt, 4, namespace=namespace))
        assert first.cached_tokens == known.num_cached_tokens(first) == 0
        known.add(first)
        assert_exact(first, oracle(FAMILY))
    for namespace in spaces:
        assert service.run_one(greedy(prompt, 4, namespace=namespace)).cached_tokens == 63


def test_similar_prompts_are_not_the_same_prompt() -> None:
    """Differences that cancel out in weak hashes: neighbours changed against each other, pages swapped, equal ends."""
    service, chooser = InProcess(FAMILY), random.Random(21)
    prompt = [token % 400 + 50 for token in Prompts(21).tokens(64)]
    service.run_one(greedy(prompt, 1))
    variants = []
    for _ in range(30):
        at = chooser.randrange(63)
        variants.append([*prompt[:at], prompt[at] + 31, prompt[at + 1] - 1, *prompt[at + 2 :]])
    variants.append(prompt[PAGE : 2 * PAGE] + prompt[:PAGE] + prompt[2 * PAGE :])
    variants.append(prompt[: 2 * PAGE] + prompt[3 * PAGE :] + prompt[2 * PAGE : 3 * PAGE])
    variants.append(Prompts(22).tokens(48) + prompt[48:])
    for variant in variants:
        service.forget()
        service.run_one(greedy(prompt, 1))
        stream = service.run_one(greedy(variant, 3))
        assert_exact(stream, oracle(FAMILY))
        assert stream.cached_tokens == common_length(prompt, variant)


def test_text_that_is_tokenised_anew_matches_as_far_as_its_tokens_do() -> None:
    service, known = InProcess(FAMILY), Known()
    texts = ["Hello\n\nworld ~2 Hanzi 你好, and so on: ", "\n", " ~", "\n\n\n", "naïve café 🦊 "]
    prompt_text = texts[0]
    for more in texts[1:]:
        stream = service.run_one(greedy(tokenizer().encode(prompt_text), 8))
        assert_exact(stream, oracle(FAMILY))
        assert stream.cached_tokens == known.num_cached_tokens(stream)
        known.add(stream)
        prompt_text += tokenizer().decode(stream.token_ids, skip_special_tokens=True) + more

    assert stream.cached_tokens > 0


def test_a_chat_finds_what_its_rendered_turns_have_in_common() -> None:
    service, known = InProcess(FAMILY), Known()
    messages = [ChatMessage("system", "Be brief and kind, whatever is asked.")]
    for text in ("Who are you?", "And where do you live?", "Thank you!"):
        messages.append(ChatMessage("user", text))
        stream = service.run_one(greedy(tokenizer().encode_chat(messages), 8))
        assert_exact(stream, oracle(FAMILY))
        assert stream.cached_tokens == known.num_cached_tokens(stream)
        known.add(stream)
        messages.append(ChatMessage("assistant", tokenizer().decode(stream.token_ids, skip_special_tokens=True)))

    assert stream.cached_tokens > 40


def test_samples_share_their_prompt() -> None:
    service, prompt = InProcess(FAMILY), Prompts(24).tokens(50)
    request = greedy(prompt, 6, num_samples=4)

    stream: Stream = service.run_one(request)

    assert stream.cached_tokens == 0
    assert service.num_prefilled_tokens <= 50 + 3
    expected = oracle(FAMILY).generate(prompt, 6)
    for reply in stream.replies:
        assert tuple(reply.token_ids) == expected.token_ids


def test_a_final_state_is_found_whatever_was_answered_before() -> None:
    service, prompt = InProcess(FAMILY), Prompts(25).tokens(21)
    for first_token in (400, 100, 300):
        service.run_one(greedy(prompt, 14, logit_bias=((first_token, 100.0),)))
    assert service.num_prefilled_tokens == 21

    for _ in range(2):
        assert_exact(service.run_one(greedy(prompt, 3)), oracle(FAMILY))
    assert service.num_prefilled_tokens == 21, "an identical prompt was run again"
