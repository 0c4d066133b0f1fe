"""The streamed text is exactly the text of all tokens, cut before the stop string that is complete first."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.engine.detokenizer import Detokenizer
from prefixcache.model.tokenizer import Tokenizer
from tests.support import tokenizers

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "smollm2": lambda: tokenizers.default_model().tokenizer,
    "byte-level": cache(tokenizers.byte_level),
    "sentencepiece": cache(tokenizers.sentencepiece),
    "metaspace": cache(tokenizers.metaspace),
}
TEXTS = ["Hello, world!", "🦊👩‍👩‍👧🎉", "你好世界 こんにちは", "  two  spaces ", "Ελληνικά\n\n12 34", "a\tb", ""]

every_kind = pytest.mark.parametrize("kind", KINDS)


def pieces(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    streamed = [detokenizer.append(token_id) for token_id in token_ids]
    return [*streamed, detokenizer.flush()]


def byte_tokens(text: bytes) -> list[int]:
    return [tokenizers.FIRST_BYTE_TOKEN_ID + byte for byte in text]


def stop_reference(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Where a reader who takes the text one character at a time would stop, preferring the longer stop string."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate
    return text, None


@every_kind
@pytest.mark.parametrize("text", TEXTS)
def test_real_text_comes_back(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    streamed = pieces(Detokenizer(tokenizer, skip_special_tokens=True, stop=()), token_ids)
    assert "".join(streamed) == tokenizer.decode(token_ids, skip_special_tokens=True)
    if kind in ("smollm2", "byte-level"):
        assert "".join(streamed) == text
        assert not any("\ufffd" in piece for piece in streamed)


@every_kind
@given(data=st.data())
def test_joined_pieces_are_the_text_of_all_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    any_token = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 300)
    token_ids = data.draw(st.lists(any_token, max_size=40))
    skip = data.draw(st.booleans())
    streamed = pieces(Detokenizer(tokenizer, skip, stop=()), token_ids)
    assert "".join(streamed) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@every_kind
@given(data=st.data())
def test_stops_before_the_stop_string_that_is_complete_first(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    source = data.draw(st.text("ab c.é🦊", max_size=30))
    token_ids = tokenizer.encode(source, add_special_tokens=False)
    stop = tuple(data.draw(st.lists(st.text("ab c.é🦊", min_size=1, max_size=4), max_size=4)))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, stop=stop)
    streamed = pieces(detokenizer, token_ids)
    expected, matched = stop_reference(tokenizer.decode(token_ids, skip_special_tokens=True), stop)
    assert ("".join(streamed), detokenizer.matched) == (expected, matched)


def test_a_character_is_never_cut() -> None:
    tokenizer = KINDS["byte-level"]()
    token_ids = tokenizer.encode("🦊", add_special_tokens=False)
    assert len(token_ids) > 1
    assert pieces(Detokenizer(tokenizer, True, ()), token_ids) == [""] * (len(token_ids) - 1) + ["🦊", ""]


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    tokenizer = KINDS["byte-level"]()
    token_ids = tokenizer.encode("ok🦊", add_special_tokens=False)[:-1]
    assert "".join(pieces(Detokenizer(tokenizer, True, ()), token_ids)) == "ok\ufffd"


def test_byte_tokens_wait_until_their_run_ends() -> None:
    tokenizer = KINDS["sentencepiece"]()
    fox = byte_tokens("🦊".encode())
    word = tokenizer.encode("a", add_special_tokens=False)[-1]
    valid = pieces(Detokenizer(tokenizer, True, ()), [word, *fox, word])
    assert valid[:5] == [tokenizer.decode([word], skip_special_tokens=True), "", "", "", ""]
    assert valid[5].startswith("🦊")
    assert "".join(pieces(Detokenizer(tokenizer, True, ()), [*fox, *byte_tokens(b"\xff")])) == "\ufffd" * 5


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    tokenizer = KINDS["byte-level"]()
    detokenizer = Detokenizer(tokenizer, True, ("STOP",))
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("xST", "y"))
    assert "".join(detokenizer.append(token_id) for token_id in first) == "x"
    assert "".join(detokenizer.append(token_id) for token_id in second) == "STy"
    assert detokenizer.matched is None


def test_nothing_comes_after_a_match() -> None:
    tokenizer = KINDS["byte-level"]()
    detokenizer = Detokenizer(tokenizer, True, ("b",))
    streamed = pieces(detokenizer, tokenizer.encode("abcb", add_special_tokens=False))
    assert "".join(streamed) == "a"
    assert detokenizer.matched == "b"


def test_no_stop_string_is_looked_for_before_min_tokens() -> None:
    tokenizer = KINDS["byte-level"]()
    detokenizer = Detokenizer(tokenizer, True, ("ab",))
    early = tokenizer.encode("ab a", add_special_tokens=False)
    streamed = "".join(detokenizer.append(token_id, may_stop=False) for token_id in early)
    assert streamed == "ab a"
    late = tokenizer.encode("b ab", add_special_tokens=False)
    streamed += "".join(detokenizer.append(token_id) for token_id in late) + detokenizer.flush()
    assert (streamed, detokenizer.matched) == ("ab ab ", "ab")


def test_the_end_of_the_text_can_complete_a_stop_string() -> None:
    tokenizer = KINDS["sentencepiece"]()
    detokenizer = Detokenizer(tokenizer, True, ("🦊",))
    assert "".join(pieces(detokenizer, byte_tokens("🦊".encode()))) == ""
    assert detokenizer.matched == "🦊"


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "metaspace"])
@pytest.mark.parametrize("stream", ["words", "one byte", "special"])
def test_the_thousandth_token_costs_no_more_than_the_first(kind: str, stream: str) -> None:
    tokenizer = KINDS[kind]()
    if stream == "words":
        token_ids = [random.Random(0).randrange(3, tokenizer.vocab_size) for _ in range(20_000)]
    elif stream == "one byte":  # never a complete character
        byte_token = tokenizer.encode("🦊", add_special_tokens=False)[-1]
        token_ids = [byte_token] * 20_000
    else:
        token_ids = [*tokenizer.encode("a", add_special_tokens=False), *[min(tokenizer.eos_token_ids)] * 20_000]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, stop=("never",))
    started = time.process_time()
    for token_id in token_ids:
        detokenizer.append(token_id)
    assert time.process_time() - started < 5  # seconds; decoding everything again each time takes minutes
