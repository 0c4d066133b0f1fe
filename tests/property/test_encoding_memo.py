"""What is remembered of a text's tokens is what the tokenizer gives, for every tokenizer that splits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from prefixcache.model.encoding_memo import EncodingMemo
from prefixcache.model.tokenizer import Tokenizer
from prefixcache.request import Namespace
from tests.support import tokenizers

ALICE, BOB = Namespace("alice"), Namespace("bob")
KINDS = {
    "default model": lambda: tokenizers.default_model().tokenizer,
    "byte level": tokenizers.byte_level,
    "sentencepiece": tokenizers.sentencepiece,
}
PIECES = st.one_of(
    st.sampled_from(
        ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|im_", "▁", " ", "\n", "\r\n", "é", "e\u0301"]
    ),
    st.text(max_size=12),
    st.text(st.characters(codec="utf-8"), max_size=12).map(lambda text: text * 64),
    st.sampled_from(tokenizers.CORPUS).map(lambda text: text * 3),
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


@settings(deadline=None, max_examples=300)
@given(pieces=st.lists(PIECES, max_size=8))
def test_the_memo_gives_what_the_tokenizer_gives(tokenizer: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = tokenizer._backend.encode(text, add_special_tokens=False).ids
    for _ in range(2):  # the second time from memory
        assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_the_default_models_tokenizer_splits() -> None:
    assert tokenizers.default_model().tokenizer._memo.splits


def test_a_tokenizer_whose_special_tokens_take_spaces_with_them_does_not_split() -> None:
    backend = tokenizers.byte_level()._backend
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    memo = EncodingMemo(backend)
    assert not memo.splits
    text = "left <mask> right" * 20
    assert memo.encode(text, ALICE) == memo.encode(text, ALICE) == backend.encode(text, add_special_tokens=False).ids


def test_what_one_namespace_sent_is_not_remembered_for_another() -> None:
    memo = EncodingMemo(tokenizers.byte_level()._backend)
    text = "a secret that is worth guessing " * 10
    memo.encode(text, ALICE)
    size_of_one = memo._known.currsize
    memo.encode(text, ALICE)
    assert memo._known.currsize == size_of_one
    memo.encode(text, BOB)
    assert memo._known.currsize == 2 * size_of_one


def test_memory_is_bounded() -> None:
    backend = tokenizers.byte_level()._backend
    memo = EncodingMemo(backend, max_bytes=250_000)
    for index in range(200):
        memo.encode(f"{index} " * 500, ALICE)
    assert 0 < memo._known.currsize <= 250_000
    text = "longer than all there is " * 10_000
    assert memo.encode(text, ALICE) == backend.encode(text, add_special_tokens=False).ids
