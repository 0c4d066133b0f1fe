"""Generated tokens to text, up to a stop string."""

from __future__ import annotations

from prefixcache.model.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sample's tokens into text that can be sent at once, and looks for its stop strings. Engine thread only.

    Text is held back while it may be the beginning of a stop string or of a character. The joined pieces are the text
    of all tokens, or what stands before the stop string that is complete first (of two that end together, the longer).

    Attributes:
        matched: The stop string that ended the text, once there is one; from then on no more text comes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, stop: tuple[str, ...]) -> None:
        self.matched: str | None = None
        self._stream = tokenizer.text_stream(skip_special_tokens=skip_special_tokens)
        self._stop = stop
        self._held = ""

    def append(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take the next generated token and return the text that can be sent now.

        With `may_stop` False (the sample is shorter than its `min_tokens`) no stop string is looked for in the text
        up to here.
        """
        return self._release(self._stream.push(token_id), may_stop=may_stop)

    def flush(self) -> str:
        """Return the text that is still held back; the sample has ended. May itself complete a stop string."""
        text = self._release(self._stream.finish(), may_stop=True)
        if self.matched is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, new_text: str, *, may_stop: bool) -> str:
        """Add text to what is held back, and give out what no stop string can claim any more."""
        if self.matched is not None:
            return ""
        text = self._held + new_text
        if not may_stop:
            self._held = ""
            return text
        # (end, start, stop string): the smallest is the one that is complete first
        matches = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.matched = min(matches)
            self._held = ""
            return text[:start]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
