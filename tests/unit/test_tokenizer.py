"""Text to ids and back, chat templates, and use from several threads."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from prefixcache.errors import InvalidRequest
from prefixcache.model.tokenizer import ChatMessage, Tokenizer
from tests.support import tokenizers

CHAT = [ChatMessage("system", "Be brief."), ChatMessage("user", "Grüße 🦊\n\n1. x")]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return tokenizers.default_model().tokenizer


@pytest.fixture(scope="module")
def with_bos() -> Tokenizer:
    return tokenizers.byte_level()


def test_bos_comes_once_whatever_the_path(with_bos: Tokenizer) -> None:
    bos = with_bos.bos_token_id
    rendered = "<s>[user] hi\n[assistant] "
    by_path = [
        with_bos.encode("[user] hi\n[assistant] "),  # raw text
        with_bos.encode_chat([ChatMessage("user", "hi")]),
        with_bos.encode(rendered),  # a chat that the caller rendered
        with_bos.encode(rendered, add_special_tokens=False),
    ]
    assert by_path.count(by_path[0]) == 4
    assert by_path[0][0] == bos
    assert by_path[0][1] != bos
    assert bos not in with_bos.encode("hi", add_special_tokens=False)


def test_a_second_bos_in_the_text_is_the_callers_own(with_bos: Tokenizer, smollm2: Tokenizer) -> None:
    assert with_bos.encode("<s><s>a", add_special_tokens=False)[:2] == [with_bos.bos_token_id] * 2
    # SmolLM2's BOS opens every message of its chat format, and nothing is added to a text
    assert smollm2.encode("<|im_start|><|im_start|>") == [1, 1]


def test_the_default_model_splits_text_as_it_was_trained(smollm2: Tokenizer) -> None:
    tokens = [smollm2.decode([token_id], skip_special_tokens=False) for token_id in smollm2.encode("a\n\n12  3")]
    assert tokens == ["a", "\n\n", "1", "2", "  ", "3"]


def test_the_default_models_chat(smollm2: Tokenizer) -> None:
    text = smollm2.decode(smollm2.encode_chat(CHAT), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße 🦊\n\n1. x<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.has_chat_template
    assert smollm2.eos_token_ids == {2}
    assert smollm2.vocab_size == 49152


def test_a_longer_chat_begins_with_the_shorter_one(smollm2: Tokenizer) -> None:
    first = smollm2.encode_chat(CHAT)
    answer = smollm2.encode("Hello!", add_special_tokens=False)
    second = smollm2.encode_chat([*CHAT, ChatMessage("assistant", "Hello!"), ChatMessage("user", "More")])
    assert second[: len(first) + len(answer)] == first + answer


def test_rendering_is_the_same_in_every_process(with_bos: Tokenizer, tmp_path: Path) -> None:
    with_bos._chat_tokenizer.save_pretrained(tmp_path)
    script = (
        "import json, sys; from transformers import PreTrainedTokenizerFast as Fast\n"
        "from prefixcache.model.tokenizer import ChatMessage, Tokenizer\n"
        "tokenizer = Tokenizer(Fast.from_pretrained(sys.argv[1]), 400, frozenset())\n"
        "messages = [ChatMessage(*message) for message in json.loads(sys.argv[2])]\n"
        "print({tuple(tokenizer.encode_chat(messages)) for _ in range(50)})"
    )
    other_process = subprocess.run(
        [sys.executable, "-c", script, tmp_path, json.dumps(CHAT)],
        env={"PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert other_process.stdout.strip() == str({tuple(with_bos.encode_chat(CHAT)) for _ in range(50)})


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, CHAT, "no chat template"),
        (tokenizers.CHAT_TEMPLATE, [], "at least one"),
        (tokenizers.CHAT_TEMPLATE, [ChatMessage("wizard", "hi")], "unknown role wizard"),
        ("{{ messages[7].content }}", CHAT, "refuses"),
        ("{{ messages[0].content + 1 }}", CHAT, "refuses"),
        ("{% if %}", CHAT, "refuses"),
    ],
)
def test_what_the_template_cannot_render_names_the_field(
    template: str | None, messages: list[ChatMessage], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        tokenizers.byte_level(chat_template=template).encode_chat(messages)
    assert caught.value.field == "messages"


def test_unknown_ids_and_broken_bytes_have_a_text(with_bos: Tokenizer) -> None:
    assert with_bos.decode([with_bos.vocab_size - 1], skip_special_tokens=False) == ""
    assert with_bos.decode(with_bos.encode("🦊")[1:-1], skip_special_tokens=True) == "\ufffd"
    assert with_bos.decode(with_bos.encode("a"), skip_special_tokens=False) == "<s>a"


def test_truncation_and_padding_of_a_tokenizer_file_are_switched_off() -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizers.byte_level()._backend)
    plain.backend_tokenizer.enable_truncation(4)
    plain.backend_tokenizer.enable_padding(length=8)
    tokenizer = Tokenizer(plain, 400, frozenset())
    assert len(tokenizer.encode("one two three four five six seven")) > 8
    assert tokenizer.encode("a", add_special_tokens=False) == plain.convert_tokens_to_ids(["a"])


def test_ids_are_those_of_transformers(smollm2: Tokenizer) -> None:
    for text in [*tokenizers.CORPUS, "<|im_end|>", ""]:
        assert smollm2.encode(text) == smollm2._chat_tokenizer(text)["input_ids"]


def test_many_threads_get_the_same_ids(with_bos: Tokenizer) -> None:
    texts = tokenizers.CORPUS * 20
    expected = [(with_bos.encode(text), with_bos.encode_chat([ChatMessage("user", text)])) for text in texts]

    def both(text: str) -> tuple[list[int], list[int]]:
        token_ids = with_bos.encode(text)
        with_bos.decode(token_ids, skip_special_tokens=True)
        return token_ids, with_bos.encode_chat([ChatMessage("user", text)])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(both, texts)) == expected
