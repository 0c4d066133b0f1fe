"""Random prompts of every relation to what was sent before."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.support.models import VOCAB_SIZE


class Prompts:
    """A seeded source of prompts; remembers the conversations so far, to come back to them.

    Args:
        seed: The same seed gives the same prompts, as long as the same replies are told.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._conversations: list[list[int]] = []

    def tokens(self, length: int) -> list[int]:
        """New random tokens."""
        return self._random.choices(range(3, VOCAB_SIZE), k=length)

    def between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def next(self, max_length: int = 120) -> list[int]:
        """A prompt that is new, repeated, extended, or shares a part with an earlier conversation."""
        kind = self._random.choice(("new", "repeated", "extended", "overlapping", "overlapping"))
        prompt = self._of_kind(kind if self._conversations else "new")[:max_length]
        self._conversations.append(prompt)
        return prompt

    def tell(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
        """Remember a reply, so that a later prompt can go on from it."""
        self._conversations.append([*prompt, *reply])

    def _of_kind(self, kind: str) -> list[int]:
        if kind == "new":
            return self.tokens(self.between(1, 100))
        earlier = self._random.choice(self._conversations)
        if kind == "repeated":
            return list(earlier)
        if kind == "extended":
            return earlier + self.tokens(self.between(1, 20))
        return earlier[: self.between(1, len(earlier))] + self.tokens(self.between(1, 20))
