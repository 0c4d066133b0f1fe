"""Two replicas, one Redis and the gateway smg in front; chats through the OpenAI API: who answered, with what cached.

`make gateway` runs it: it needs redis-server, and smg in .venv-smg. Everything listens on free ports of loopback and
ends with the program.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import openai
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console
from rich.table import Table

from prefixcache.errors import NotServing
from prefixcache.local_server import LocalServer

HERE = Path(__file__).parent
SMG = HERE.parent / ".venv-smg" / "bin" / "smg"
CACHE_TOKENS = 16_384
ANSWER_TOKENS = 40
DOCUMENT_CHARACTERS = 2_000
START_LIMIT_S = 60.0
CHATS = (
    ("Ann", ("Name three facts from the text.", "Which one matters most?", "Say it in five words.")),
    ("Bob", ("What is the text about?", "Who would read it?", "What should they do first?")),
    ("Eve", ("Give the text a title.", "Give it a second title.", "Which of the two is shorter?")),
)


@dataclass
class Turn:
    """One question and what its answer cost."""

    chat: str
    question: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float


class Fleet:
    """Two replicas behind a gateway, and a client of it.

    Args:
        servers: The replicas.
        url: Where the gateway's HTTP API is.
    """

    def __init__(self, servers: Sequence[LocalServer], url: str) -> None:
        self._servers = servers
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none is needed")
        self._model = self._client.models.list().data[0].id

    def ask(self, chat: str, messages: list[ChatCompletionMessageParam], question: str) -> Turn:
        """Ask one more question of a chat, and add it and its answer to the messages."""
        messages.append({"role": "user", "content": question})
        before = [_num_answered(server) for server in self._servers]
        started_s = time.monotonic()
        reply = self._client.chat.completions.create(
            model=self._model, messages=messages, max_tokens=ANSWER_TOKENS, temperature=0, frequency_penalty=0.3
        )
        seconds = time.monotonic() - started_s
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        after = [_num_answered(server) for server in self._servers]
        replicas = [name for name, old, new in zip("AB", before, after, strict=True) if new > old]
        assert reply.usage is not None
        details = reply.usage.prompt_tokens_details
        cached_tokens = (details.cached_tokens if details else None) or 0
        return Turn(chat, question, "".join(replicas), reply.usage.prompt_tokens, cached_tokens, seconds)


def main() -> int:
    console = Console()
    if not (SMG.exists() and shutil.which("redis-server")):
        console.print("[red]This needs redis-server, and smg in .venv-smg: run `make gateway`.[/red]")
        return 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefixcache-gateway-")))
        log = stack.enter_context((folder / "log").open("w"))
        try:
            fleet = _start(stack, folder, log, console)
        except NotServing as error:
            console.print(f"[red]{error}[/red]\n{(folder / 'log').read_text()[-2000:]}", highlight=False)
            return 1
        turns = list(_turns(fleet, console))
    console.print(_table(turns))
    return 0


def _start(stack: ExitStack, folder: Path, log: IO[str], console: Console) -> Fleet:
    redis_port, gateway_port, metrics_port = (_free_port() for _ in range(3))
    redis = ["redis-server", "--port", str(redis_port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    stack.enter_context(_process(redis, log))
    console.print("Starting two replicas with the default model, which share one Redis.")
    flags = ("--cache-tokens", str(CACHE_TOKENS), "--redis", f"redis://127.0.0.1:{redis_port}")
    servers = [LocalServer(*flags, log=log) for _ in "AB"]
    for server in servers:
        stack.enter_context(server)
    for name, server in zip("AB", servers, strict=True):
        console.print(f"Replica {name} on {server.address}: {server.description}")
    url = f"http://127.0.0.1:{gateway_port}"
    gateway = [
        *(str(SMG), "launch", "--host", "127.0.0.1", "--port", str(gateway_port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--shutdown-grace-period-secs", "1", "--policy", "cache_aware"),
        *("--worker-urls", *(f"grpc://{server.address}" for server in servers)),
    ]
    stack.enter_context(_process(gateway, log))
    _wait_until_ready(url, len(servers))
    console.print(f"The gateway answers on {url}/v1, to any client of the OpenAI API.")
    return Fleet(servers, url)


def _turns(fleet: Fleet, console: Console) -> Iterator[Turn]:
    """Chats in turns, as if several people were at it."""
    handbook = (HERE / "handbook.md").read_text(encoding="utf-8")
    chats: list[tuple[str, list[ChatCompletionMessageParam], Sequence[str]]] = []
    for index, (name, questions) in enumerate(CHATS):
        document = handbook[index * DOCUMENT_CHARACTERS : (index + 1) * DOCUMENT_CHARACTERS]
        chats.append((name, [{"role": "system", "content": f"You help {name}. The text:\n{document}"}], questions))
    for turn in range(len(CHATS[0][1])):
        for name, messages, questions in chats:
            with console.status(f"{name}, question {turn + 1}"):
                yield fleet.ask(name, messages, questions[turn])


def _table(turns: Sequence[Turn]) -> Table:
    table = Table(title="Who answered, and what was cached")
    table.add_column("chat")
    table.add_column("question", overflow="fold")
    table.add_column("replica", justify="center")
    for name in ("prompt\ntokens", "cached\ntokens", "whole\nanswer"):
        table.add_column(name, justify="right", no_wrap=True)
    for turn in turns:
        row = (turn.chat, turn.question, turn.replica, f"{turn.prompt_tokens:,}", f"{turn.cached_tokens:,}")
        table.add_row(*row, f"{turn.seconds:.1f} s")
    return table


def _wait_until_ready(url: str, num_workers: int) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/readiness", timeout=5) as response:
                state: dict[str, Any] = json.load(response)
                if state.get("healthy_workers") == num_workers:
                    return
        except OSError:  # not listening yet, or 503
            pass
        time.sleep(0.1)
    raise NotServing(f"the gateway did not find its {num_workers} replicas within {START_LIMIT_S:g} s")


def _num_answered(server: LocalServer) -> float:
    with urllib.request.urlopen(server.metrics_url, timeout=5) as response:
        found = re.search(r'^prefixcache_requests_total\{outcome="ok"\} (\S+)$', response.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


@contextmanager
def _process(command: Sequence[str], log: IO[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
