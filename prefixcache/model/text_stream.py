"""Decoding a growing sequence, at a cost per token that does not grow with it.

A token's text is not always known when the token is: a character may be spread over several tokens, and some decoders
treat the first token of a text, or a run of byte tokens, in their own way.

    tokens   "Hel" "lo" " " <F0> <9F> <A6> <8A> "!"
    pieces   "Hel" "lo" " "  ""   ""   ""  "🦊" "!"
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Protocol

import tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4


class TextStream(Protocol):
    """Text of one sequence, piece by piece. Used by one thread at a time."""

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is now certain."""
        ...

    def finish(self) -> str:
        """Return the rest. No token may follow."""
        ...


def decoder_steps(decoder: tokenizers.decoders.Decoder | None) -> list[str]:
    """Name the steps of a tokenizer's decoder, such as `["ByteLevel"]` or `["Replace", "ByteFallback", "Fuse"]`."""
    if decoder is None:
        return []
    description = json.loads(decoder.__getstate__())
    return [step["type"] for step in description.get("decoders", [description])]


class ByteStream:
    """For byte-level BPE: each token stands for bytes, and the text is those bytes as UTF-8."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skipped: frozenset[int], steps: list[str]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token is written as it reads, not in the alphabet that stands for bytes
            return token.encode()


class WindowStream:
    """For every other decoder: decodes only the newest tokens, behind those of the piece before.

    The tokens of the piece before (the context) keep what the decoder does to the start of a text away from the new
    ones. A run of byte tokens waits until it ends: until then its decoder may still change all of it.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skipped: frozenset[int], steps: list[str]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._has_byte_tokens = "ByteFallback" in steps
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        if self._has_byte_tokens and BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_CHARACTER_BYTES:
            return ""
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._pending_text())

    def _pending_text(self) -> str:
        text: str = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        return text[len(self._context_text) :]

    def _take(self, text: str) -> str:
        """Make the pending tokens the new context."""
        if text:
            self._context, self._pending = self._pending, []
            self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=False)
        elif self._context:  # tokens without any text would only make the window longer
            self._pending.clear()
        return text
