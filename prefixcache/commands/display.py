"""How the commands show progress and answers to people: answers on stdout, everything else on stderr."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from rich.console import Console
from rich.table import Table

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb

WIDE = 1000  # columns, where there is no terminal whose width would be the limit

_log = logging.getLogger(__name__)


def spinner(text: str) -> AbstractContextManager[object]:
    """Shows that something is being waited for, if there is a terminal to show it on."""
    console = Console(stderr=True)
    return console.status(text) if console.is_terminal else nullcontext()


def print_rows(rows: Mapping[str, str]) -> None:
    """Prints names and values in two columns; long values are left whole, so that other programs can read them."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


class Progress:
    """Shows what is being done: behind a spinner on a terminal, else as lines of the log."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._status = console.status("starting") if console.is_terminal else None

    def say(self, text: str) -> None:
        """Shows what is being done from now on."""
        if self._status is None:
            _log.info("%s", text)
        else:
            self._status.update(text)

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


class StreamedAnswer:
    """Shows one answer as it comes, and keeps what was shown, also of an answer that was interrupted.

    Attributes:
        text: The answer so far; of several samples the first.
        further_samples: The texts of the others so far.
    """

    def __init__(self, num_samples: int = 1) -> None:
        self.text = ""
        self.further_samples = [""] * (num_samples - 1)
        self._usage: pb.Usage | None = None
        self._started_at = time.monotonic()
        self._ttft_s = 0.0

    def show(self, messages: Iterator[pb.GenerateResponse]) -> None:
        """Writes the first sample's text to stdout as it comes, behind a spinner until something is there."""
        with spinner("thinking"):
            first = next(messages)
        self._ttft_s = time.monotonic() - self._started_at
        self._write(first)
        for message in messages:
            self._write(message)

    def summary(self) -> str:
        """One line about what the answer took, measured at this end."""
        if self._usage is None:
            return "interrupted"
        num_tokens = self._usage.completion_tokens
        decode_s = time.monotonic() - self._started_at - self._ttft_s
        rate = f", {(num_tokens - 1) / decode_s:.1f} tokens/s" if num_tokens > 1 else ""
        return (
            f"TTFT {self._ttft_s * 1000:.0f} ms | prompt {self._usage.prompt_tokens} tokens, "
            f"{self._usage.cached_tokens} of them cached | answer {num_tokens} tokens{rate}"
        )

    def _write(self, message: pb.GenerateResponse) -> None:
        if message.sample_index:
            self.further_samples[message.sample_index - 1] += message.text
        else:
            self.text += message.text
            sys.stdout.write(message.text)
            sys.stdout.flush()
        if message.HasField("usage"):
            self._usage = message.usage
