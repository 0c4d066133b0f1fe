r"""Remembers how pieces of text were tokenized, so that a long chat sent again is not tokenized again.

A tokenizer takes its added special tokens out of a text before it splits the rest, so that what lies between two of
them is tokenized by itself:

    <|im_start|> │ user\\nHello, …  │ <|im_end|> │ \\n │ <|im_start|> │ assistant\\n

Each piece is looked up, and only new ones are tokenized. That holds for most tokenizers, not for all: some put a space
before the first piece alone. `EncodingMemo` tries it out first, and where it fails remembers whole texts only.
"""

from __future__ import annotations

import re
from threading import Lock

from cachetools import LRUCache
from tokenizers import Tokenizer as CompiledTokenizer

from prefixcache.request import Namespace

MAX_BYTES = 64 * 2**20
_BYTES_BESIDE_TEXT = 500  # of one entry: objects and tables
_BYTES_PER_ID = 40  # an int and its place in a tuple: ten times an array's, but a list of them takes no time
_PROBES = ("a", " a", "a ", "\n", "  two  words ", "é 你好", "12 345", ".", "\n\n- x\n", "don't", "\u200b", "e\u0301")


class EncodingMemo:
    """The token ids of texts, with no special tokens added. Any thread.

    Args:
        backend: The compiled tokenizer; it must not change any more.
        max_bytes: About how much memory to use; what was not used longest goes first.
    """

    def __init__(self, backend: CompiledTokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._backend = backend
        self._lock = Lock()
        self._known: LRUCache[tuple[Namespace, str], tuple[int, ...]] = LRUCache(max_bytes, getsizeof=_num_bytes)
        self._special_ids = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special and not token.normalized
        }
        longest_first = sorted(self._special_ids, key=len, reverse=True)  # as the tokenizer itself prefers them
        self._separator = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self.splits = self._separator is not None and self._may_split()
        self._known.clear()  # of what was tried

    def encode(self, text: str, namespace: Namespace) -> list[int]:
        """Return what the tokenizer makes of `text`; what is remembered for one namespace is unknown to all others."""
        if not self.splits or self._separator is None:
            return list(self._encode_piece(text, namespace))
        ids: list[int] = []
        for index, piece in enumerate(self._separator.split(text)):
            if index % 2:
                ids.append(self._special_ids[piece])
            elif piece:
                ids.extend(self._encode_piece(piece, namespace))
        return ids

    def _encode_piece(self, piece: str, namespace: Namespace) -> tuple[int, ...]:
        with self._lock:
            known = self._known.get((namespace, piece))
        if known is None:
            known = tuple(self._backend.encode(piece, add_special_tokens=False).ids)
            if _num_bytes(known) + len(piece) <= self._known.maxsize:
                with self._lock:
                    self._known[namespace, piece] = known
        return known

    def _may_split(self) -> bool:
        """Whether pieces tokenized one by one give what the whole gives."""
        tokens = self._backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip or token.single_word for token in tokens):
            return False
        self.splits = True
        specials = list(self._special_ids)
        texts = [
            f"{before}{special}{after}{specials[-1]}{before}"
            for before in ("", *_PROBES)
            for after in ("", *_PROBES)
            for special in specials[:4]
        ]
        return all(
            self.encode(text, Namespace()) == self._backend.encode(text, add_special_tokens=False).ids for text in texts
        )


def _num_bytes(ids: tuple[int, ...]) -> int:
    """About what an entry takes: a token is some four characters of at most four bytes, and its id, an object."""
    return len(ids) * (16 + _BYTES_PER_ID) + _BYTES_BESIDE_TEXT
