"""The main job on real input: one server, one long document, and what is saved because prefixes are known.

Starts a server with the default model on free ports, asks it questions about `handbook.md`, holds a short chat,
sends a prompt twice and eight at once, measures the same requests with `use_cache=False`, prints one table and the
answers, and stops the server. Nothing here knows more than the public client does.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prefixcache.client import Client, RequestFailed
from prefixcache.errors import NotServing
from prefixcache.local_server import LocalServer

Messages = list[dict[str, str]]

HANDBOOK = Path(__file__).with_name("handbook.md").read_text(encoding="utf-8")
QUESTIONS = (
    "On which port does the server listen for gRPC?",
    "How many parameters does the default model have?",
    "How long is the grace period?",
)
PERSONA = (
    "You are the assistant of a small public library in a town by the sea. Visitors of every age write to you. "
    "Be friendly, be brief, and answer in one short sentence. Use simple words, since some of them are still "
    "learning the language. If you are asked for a list, give exactly as many items as were asked for. Do not repeat "
    "the question. Do not speak about yourself unless you are asked to. If you do not know something, say so, and "
    "send the visitor to the desk on the ground floor, which is open from nine to five on weekdays and until noon on "
    "Saturdays. Books may be kept for four weeks, films for one. Never promise that a book is on the shelf; it may "
    "have been lent a minute ago. Never give medical or legal advice. Be kind to children, and do not ask them for "
    "their names. When somebody says thank you, answer with a smile."
)
CHAT = (
    "Name three fruits, please.",
    "Which of them is the sweetest?",
    "Write one sentence about it.",
)
TOPICS = ("prefill", "decode", "TTFT", "a prefix", "gRPC", "a token", "a prompt", "an agent")
SHARED_CHARACTERS = 2_000  # of the handbook, in front of each of the eight

LOG_PREFIX = re.compile(r"\S+Z [A-Z]+ \S+ ")  # time, level and logger of a log line
CACHE_TOKENS = 16_384  # the document twice (once cached, once without the cache) and the rest
ANSWER_TOKENS = 24
# Reading 6,000 tokens without the cache takes a small CPU half a minute. Of the comparisons that take so long, those
# that would end later than this are left out, and the table says so.
BUDGET_S = 140.0


@dataclass(frozen=True, slots=True)
class Run:
    """What came back for one request, and how long its first token took as the client saw it."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str


@dataclass(slots=True)
class Row:
    """One line of the table: a request with the cache, and later the same one without."""

    what: str
    requests: list[Messages]
    runs: list[Run]
    uncached: list[Run] | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(run.prompt_tokens for run in self.runs)

    @property
    def cached_tokens(self) -> int:
        return sum(run.cached_tokens for run in self.runs)


class Demo:
    """Runs the parts one after the other and gathers the rows.

    Args:
        client: Connected to a server whose cache is empty.
        console: Where progress goes.
    """

    def __init__(self, client: Client, console: Console) -> None:
        self._client = client
        self._console = console
        self._started_s = time.monotonic()
        self._prefill_tokens_per_s = 0.0
        self._document_rows: list[Row] = []
        self.rows: list[Row] = []

    def questions(self) -> None:
        """Several questions about one document, the last of them twice."""
        names = ("Handbook, question 1", "Handbook, question 2", "Handbook, question 3", "Question 3 again")
        for name, question in zip(names, (*QUESTIONS, QUESTIONS[-1]), strict=True):
            self._document_rows.append(self._ask(name, [[_system(HANDBOOK), _user(question)]]))
        first = self._document_rows[0]
        self._prefill_tokens_per_s = first.prompt_tokens / first.runs[0].ttft_s

    def chat(self) -> None:
        """Three turns, each of which sends all that was said before."""
        history: Messages = [_system(PERSONA)]
        for turn, text in enumerate(CHAT, start=1):
            history.append(_user(text))
            row = self._ask(f"Chat, turn {turn}", [list(history)])
            history.append({"role": "assistant", "content": row.runs[0].text})

    def eight_at_once(self) -> None:
        """Eight requests in the same moment, with a text in front that the server has not seen as a prompt yet."""
        text = "From a handbook: " + HANDBOOK[:SHARED_CHARACTERS]
        self._ask("Eight at once (median)", [[_user(f"{text}\n\nExplain {t}.")] for t in TOPICS])

    def compare(self) -> None:
        """The same requests with `use_cache=False`, one token each.

        The questions about the document all cost the same, and much: one of them is always measured, the others for
        as long as the time allows.
        """
        new, second, *others = self._document_rows
        for row in (*(row for row in self.rows if row not in self._document_rows), second):
            self._ask_without_cache(row)
        for row in (*reversed(others), new):
            if self._elapsed_s + row.prompt_tokens / self._prefill_tokens_per_s < BUDGET_S:
                self._ask_without_cache(row)

    def _ask_without_cache(self, row: Row) -> None:
        with self._progress(f"{row.what}, without the cache"):
            row.uncached = self._run(row.requests, max_tokens=1, use_cache=False)

    def _ask(self, what: str, requests: list[Messages]) -> Row:
        with self._progress(what):
            row = Row(what, requests, self._run(requests, max_tokens=ANSWER_TOKENS, use_cache=True))
        self.rows.append(row)
        return row

    def _run(self, requests: Sequence[Messages], *, max_tokens: int, use_cache: bool) -> list[Run]:
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda messages: self._run_one(messages, max_tokens, use_cache), requests))

    def _run_one(self, messages: Messages, max_tokens: int, use_cache: bool) -> Run:
        started_s = time.monotonic()
        ttft_s, text = 0.0, ""
        for delta in self._client.generate(
            messages=messages, max_tokens=max_tokens, temperature=0.0, frequency_penalty=0.3, use_cache=use_cache
        ):
            ttft_s = ttft_s or time.monotonic() - started_s
            text += delta.text
        return Run(ttft_s, delta.usage.prompt_tokens, delta.usage.cached_tokens, text.strip())

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    @contextmanager
    def _progress(self, what: str) -> Iterator[None]:
        with self._console.status(what):
            yield
        self._console.print(f"[dim]{self._elapsed_s:6.1f} s[/dim]  {what}")


def table(rows: Sequence[Row]) -> Table:
    """What was asked, how much of it was known, and what that did to the time to first token."""
    result = Table(title="Time to first token (TTFT), with the cache and without")
    result.caption = "The last token of a prompt never counts as cached."
    if any(row.uncached is None for row in rows):
        result.caption += (
            f" Not run: would have taken the demo beyond {BUDGET_S:.0f} s, and costs as much as its neighbours."
        )
    result.add_column("request", overflow="fold")
    for name in ("prompt\ntokens", "cached\ntokens", "TTFT\ncached", "TTFT\nno cache", "ratio"):
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ttft_s = median(run.ttft_s for run in row.runs)
        no_cache, ratio = "not run", ""
        if row.uncached is not None:
            uncached_s = median(run.ttft_s for run in row.uncached)
            no_cache, ratio = _milliseconds(uncached_s), f"{uncached_s / ttft_s:,.1f} x"
        result.add_row(
            row.what, f"{row.prompt_tokens:,}", f"{row.cached_tokens:,}", _milliseconds(ttft_s), no_cache, ratio
        )
    return result


def print_answers(console: Console, rows: Sequence[Row]) -> None:
    """The answers, each under what was asked."""
    console.print("\n[bold]Answers[/bold] (cut short; a model of 135 million parameters is modest in what it knows)")
    for row in rows:
        for request, run in zip(row.requests, row.runs, strict=True):
            question = request[-1]["content"].rpartition("\n")[2]
            console.print(f"\n[bold]> {escape(question)}[/bold]\n{escape(run.text)}", highlight=False)


@contextmanager
def server_log(console: Console) -> Iterator[IO[str]]:
    """A file for the server's log, whose latest line is shown beside a spinner until the block ends.

    Raises:
        NotServing: As the block did; the end of the log is printed first.
    """
    reader_fd, writer_fd = os.pipe()
    latest: deque[str] = deque(maxlen=20)
    with os.fdopen(writer_fd, "w") as writer, console.status("Starting the server") as status:

        def follow() -> None:
            with os.fdopen(reader_fd) as reader:
                for line in reader:
                    latest.append(line.rstrip())
                    status.update(f"Starting the server: {escape(LOG_PREFIX.sub('', latest[-1])[:50])}")

        threading.Thread(target=follow, daemon=True).start()  # goes on after the block, or the server would block
        try:
            yield writer
        except NotServing:
            console.print("\n".join(latest), highlight=False, markup=False)
            raise


def main() -> int:
    console = Console()
    console.print("Starting a server; the very first start converts the default model.")
    try:
        with server_log(console) as log:
            server = LocalServer("--cache-tokens", str(CACHE_TOKENS), log=log)
            server.wait_until_ready()
    except NotServing as error:
        console.print(f"[red]{error}[/red]")
        return 1
    console.print(server.description)
    try:
        with Client(server.address) as client:
            demo = Demo(client, console)
            demo.questions()
            demo.chat()
            demo.eight_at_once()
            demo.compare()
    except RequestFailed as error:
        console.print(f"[red]{error}[/red]")
        return 1
    finally:
        exit_code = server.stop()
    console.print()
    console.print(table(demo.rows))
    print_answers(console, demo.rows)
    console.print(f"\nThe server has stopped, exit code {exit_code}.")
    return exit_code


def _system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
