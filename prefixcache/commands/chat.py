r"""Chat with the model in the terminal.

The whole conversation is sent with every turn; what the server knows of it already is not computed again, which the
line after each answer shows. Ctrl-C stops an answer, Ctrl-D or /quit ends the chat, /reset starts a new one.

Examples:
  prefixcache chat
  prefixcache chat --system "Answer in one sentence." --temperature 0
  printf 'Who wrote Faust?\nWhen?\n' | prefixcache chat
"""

from __future__ import annotations

import argparse
import sys

import grpc
from rich.console import Console

from prefixcache.client import Client, RequestFailed
from prefixcache.commands.display import StreamedAnswer
from prefixcache.commands.server_options import (
    add_sampling_arguments,
    add_server_argument,
    connect,
    explain,
    sampling_options,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_sampling_arguments(parser)
    add_server_argument(parser)


def run(args: argparse.Namespace) -> int:
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]
    history = list(opening)
    notes = Console(stderr=True, highlight=False, style="dim")
    with connect(args) as client:
        model = client.model_info(timeout_s=args.timeout).model
        notes.print(f"{model} at {args.server}; /reset, /quit", soft_wrap=True)
        while (question := _read_question()) is not None:
            if question == "/quit":
                break
            if question == "/reset":
                history = list(opening)
            elif question:
                _take_turn(client, history, question, args, notes)
    return 0


def _read_question() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _take_turn(
    client: Client, history: list[dict[str, str]], question: str, args: argparse.Namespace, notes: Console
) -> None:
    """Asks one question; the history grows by it and its answer, unless the server refused it."""
    messages = [*history, {"role": "user", "content": question}]
    answer = StreamedAnswer()
    reply = client.generate(messages=messages, timeout_s=args.timeout, **sampling_options(args))
    try:
        answer.show(reply)
    except KeyboardInterrupt:
        reply.close()
    except RequestFailed as error:
        if error.code is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        notes.print(explain(error, args.server))  # such as a conversation that has outgrown the model
        return
    print()
    notes.print(answer.summary(), soft_wrap=True)
    history[:] = [*messages, {"role": "assistant", "content": answer.text}]
