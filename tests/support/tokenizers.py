"""Small real tokenizers of the kinds that the supported models use, and the default model's own."""

from __future__ import annotations

import json
from functools import cache

import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as CompiledTokenizer
from transformers import PreTrainedTokenizerFast

from prefixcache.config import Settings
from prefixcache.model.loader import LoadedModel, load_model
from prefixcache.model.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12345 and 67890!",
    "  leading spaces, trailing spaces  \n\n\ttabs\tand newlines\n",
    "Grüße aus Köln, café, naïve, Ελληνικά, русский текст, 你好世界, こんにちは, 한국어",
    "emoji: 🦊 🎉 👩‍👩‍👧 ✅ and symbols ≤ ≥ → ∑",
    "def prefill(tokens): return [token for token in tokens if token]",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + message.role) }}"
    "{% endif %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
FIRST_BYTE_TOKEN_ID = len(SPECIAL_TOKENS)  # of `sentencepiece`: 256 byte tokens follow the special ones


@cache
def default_model() -> LoadedModel:
    """The default model in float32, converted into the user's own cache folder the first time."""
    return load_model(None, torch.float32, torch.device("cpu"), Settings().cache_dir, print)


def byte_level(*, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Byte-level BPE that adds BOS, as Llama 3 has it."""
    backend = CompiledTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _finish(backend, chat_template)


def sentencepiece(*, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """BPE over pieces with ▁ for the space and byte tokens for unknown characters, as Llama 2 and Mistral have it."""
    trained = CompiledTokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), behavior="merged_with_next")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL_TOKENS + byte_tokens, limit_alphabet=60)
    trained.train_from_iterator(CORPUS, trainer)
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    backend = CompiledTokenizer(
        models.BPE(trained.get_vocab(), merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(backend, chat_template)


def metaspace(*, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Unigram with a Metaspace decoder, which drops the space before the first word of a text."""
    backend = CompiledTokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL_TOKENS, unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    return _finish(backend, chat_template)


def _finish(backend: CompiledTokenizer, chat_template: str | None) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )
    # some ids more than the tokenizer knows, as models with a padded vocabulary have
    return Tokenizer(tokenizer, backend.get_vocab_size() + 5, frozenset({backend.token_to_id("</s>")}))
