"""Show the token ids of a text, or the text of token ids.

Examples:
  prefixcache tokenize "Hello, world"
  prefixcache tokenize --chat "Hello"       with the tokens of the model's chat format around it
  prefixcache tokenize --decode 1 2 3
"""

from __future__ import annotations

import argparse
import sys

from prefixcache.commands.server_options import add_server_argument, connect, integer, text_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("text", metavar="TEXT", nargs="?", help="the text; - reads it from stdin")
    source.add_argument(
        "--decode", metavar="ID", nargs="+", type=integer(64), help="token ids to turn into text instead"
    )
    parser.add_argument("--chat", action="store_true", help="take TEXT as a user's message, in the model's chat format")
    add_server_argument(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as client:
        if args.decode:
            print(client.detokenize(args.decode, timeout_s=args.timeout))
            return 0
        text = text_of(args.text)
        if args.chat:
            token_ids = client.tokenize(messages=[{"role": "user", "content": text}], timeout_s=args.timeout)
        else:
            token_ids = client.tokenize(text, timeout_s=args.timeout)
    print(*token_ids)
    print(f"{len(token_ids)} tokens", file=sys.stderr)
    return 0
