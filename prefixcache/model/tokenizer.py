"""Text to token ids and back, exactly as the model's own tokenizer does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from prefixcache.errors import InvalidRequest, ModelError
from prefixcache.model.digest import tokenizer_digest
from prefixcache.model.encoding_memo import EncodingMemo
from prefixcache.model.text_stream import ByteStream, TextStream, WindowStream, decoder_steps
from prefixcache.request import Namespace

SHARED = Namespace()


class ChatMessage(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


class Tokenizer:
    """The model's tokenizer. Any thread.

    Nothing here changes the tokenizer after construction: transformers' own call switches truncation and padding on
    the shared object, which breaks other threads, so the compiled tokenizer is called directly.

    Attributes:
        vocab_size: How many token ids the model knows; the tokenizer itself may know fewer.
        eos_token_ids: Tokens that end the model's output.
        bos_token_id: The token that starts a text, if the model has one.
        has_chat_template: `encode_chat` can work.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        if not tokenizer.is_fast:
            raise ModelError(f"The tokenizer {type(tokenizer).__name__} is not supported: it has no tokenizer.json.")
        self.vocab_size = vocab_size
        # configs name tokens that the model does not have (such as -1): they can never be sampled, nor be masked
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.has_chat_template = tokenizer.chat_template is not None
        self._chat_tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._memo = EncodingMemo(self._backend)
        self._adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]
        added_tokens = self._backend.get_added_tokens_decoder()
        self._special_token_ids = frozenset(token_id for token_id, token in added_tokens.items() if token.special)
        self._decoder_steps = decoder_steps(self._backend.decoder)

    def encode(self, text: str, namespace: Namespace = SHARED, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text.

        Pieces are remembered for `namespace` alone, so that time tells nobody what others have sent. With
        `add_special_tokens`, whatever the model expects around a text is added once: a text that already
        begins with BOS, such as a chat that the caller rendered, gets no second one.
        """
        if not add_special_tokens:
            return self._memo.encode(text, namespace)
        token_ids: list[int] = self._backend.encode(text).ids
        if token_ids[:2] == [self.bos_token_id] * 2 and self._adds_bos:
            del token_ids[0]
        return token_ids

    def encode_chat(self, messages: Sequence[ChatMessage], namespace: Namespace = SHARED) -> list[int]:
        """Tokenize a conversation, rendered with the model's chat template up to where the answer begins.

        The template writes every special token itself. Equal messages give equal ids, unless the template asks for
        the date.

        Raises:
            InvalidRequest: The model has no chat template, or the template refuses these messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest("messages", "this model has no chat template; send text or token_ids instead")
        if not messages:
            raise InvalidRequest("messages", "must hold at least one message")
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._chat_tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        return self.encode(str(text), namespace, add_special_tokens=False)

    def digest(self) -> bytes:
        """Return 32 bytes that stand for how text becomes ids. Takes a moment: the whole tokenizer is serialised."""
        return tokenizer_digest(self._chat_tokenizer)

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer as the files that others can load it from, by name. Takes a moment."""
        with TemporaryDirectory() as folder:
            self._chat_tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of some tokens; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def text_stream(self, *, skip_special_tokens: bool) -> TextStream:
        """Start to decode one sequence token by token; the pieces join up to what `decode` gives for all of it."""
        skipped = self._special_token_ids if skip_special_tokens else frozenset()
        stream = ByteStream if self._decoder_steps == ["ByteLevel"] else WindowStream
        return stream(self._backend, skipped, self._decoder_steps)
