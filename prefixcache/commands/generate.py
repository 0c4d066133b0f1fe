"""Continue a prompt and stream what the model writes.

The text goes to stdout and one line about tokens and time to stderr, so the output can be piped.

Examples:
  prefixcache generate "The three laws of robotics are" --max-tokens 60
  prefixcache generate --chat "What is a radix tree?"
  cat report.txt question.txt | prefixcache generate --chat - --temperature 0
  prefixcache generate "A name for a cat:" --n 3 --max-tokens 5
  prefixcache generate --json "Once upon" --seed 7 --logprobs 2 | jq .logprobs
"""

from __future__ import annotations

import argparse
import sys

from google.protobuf.json_format import MessageToJson

from prefixcache.commands.display import StreamedAnswer
from prefixcache.commands.server_options import (
    add_sampling_arguments,
    add_server_argument,
    connect,
    integer,
    sampling_options,
    text_of,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="ask it as a user's message, in the model's chat format")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    parser.add_argument("--json", action="store_true", help="print each message of the reply as one line of JSON")
    parser.add_argument("--n", type=integer(32), default=1, metavar="N", help="write N answers; default: 1")
    parser.add_argument(
        "--logprobs", type=integer(32), metavar="N", help="with --json: log-probabilities, and the N likeliest tokens'"
    )
    add_sampling_arguments(parser)
    add_server_argument(parser)


def run(args: argparse.Namespace) -> int:
    if args.system is not None and not args.chat:
        print("prefixcache generate: --system goes with --chat", file=sys.stderr)
        return 2
    if args.logprobs is not None and not args.json:
        print("prefixcache generate: --logprobs goes with --json", file=sys.stderr)
        return 2
    prompt = text_of(args.prompt)
    messages = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})

    options = sampling_options(args)
    options["n"] = args.n
    if args.logprobs is not None:
        options["logprobs"] = args.logprobs
    with connect(args) as client:
        reply = client.generate(
            None if args.chat else prompt,
            messages=messages if args.chat else None,
            timeout_s=args.timeout,
            **options,
        )
        if args.json:
            for message in reply:
                print(MessageToJson(message, preserving_proto_field_name=True, indent=None), flush=True)
            return 0
        answer = StreamedAnswer(args.n)
        answer.show(reply)
    print()
    for number, text in enumerate(answer.further_samples, 2):
        print(f"--- {number} of {args.n}\n{text}")
    print(answer.summary(), file=sys.stderr)
    return 0
