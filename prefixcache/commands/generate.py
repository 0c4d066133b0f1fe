"""Continue a prompt and stream what the model writes.

The text goes to stdout and one line about tokens and time to stderr, so the output can be piped.

Examples:
  prefixcache generate "The three laws of robotics are" --max-tokens 60
  prefixcache generate --chat "What is a radix tree?"
  cat report.txt question.txt | prefixcache generate --chat - --temperature 0
  prefixcache generate --json "Once upon" --seed 7 | jq .token_ids
"""

from __future__ import annotations

import argparse
import sys

from google.protobuf.json_format import MessageToJson

from prefixcache.client import Client
from prefixcache.commands.display import StreamedAnswer
from prefixcache.commands.server_options import add_sampling_arguments, add_server_argument, sampling_options, text_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="ask it as a user's message, in the model's chat format")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    parser.add_argument("--json", action="store_true", help="print each message of the reply as one line of JSON")
    add_sampling_arguments(parser)
    add_server_argument(parser)


def run(args: argparse.Namespace) -> int:
    if args.system is not None and not args.chat:
        print("prefixcache generate: --system goes with --chat", file=sys.stderr)
        return 2
    prompt = text_of(args.prompt)
    messages = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})

    with Client(args.server) as client:
        reply = client.generate(
            None if args.chat else prompt,
            messages=messages if args.chat else None,
            timeout_s=args.timeout,
            **sampling_options(args),
        )
        if args.json:
            for message in reply:
                print(MessageToJson(message, preserving_proto_field_name=True, indent=None), flush=True)
            return 0
        answer = StreamedAnswer()
        answer.show(reply)
    print()
    print(answer.summary(), file=sys.stderr)
    return 0
