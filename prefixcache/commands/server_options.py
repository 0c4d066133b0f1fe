"""What the client commands have in common: which server to ask, and how to continue a prompt."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import grpc

from prefixcache.client import Client, RequestFailed, Tls
from prefixcache.client.requests import DEFAULT_TARGET, GenerateOptions
from prefixcache.errors import InvalidRequest

# Named here, too, since to import `config` takes as long as all the rest of a client command.
API_KEY_VARIABLE = "PREFIXCACHE_API_KEY"

_TLS_FAILED = "Tls handshake failed"  # in gRPC's own words
_CLOSED = "Socket closed"

_OPTION_NAMES = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "cache_salt",
    "use_cache",
)


def integer(num_bits: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers that fit into a signed proto field of this width."""

    def parse(text: str) -> int:
        value = int(text)
        if not -(2 ** (num_bits - 1)) <= value < 2 ** (num_bits - 1):
            raise argparse.ArgumentTypeError(f"{text} is out of range")
        return value

    parse.__name__ = "whole number"  # argparse names it in its message
    return parse


def text_of(argument: str) -> str:
    """The text that an argument stands for: stdin for `-`, else itself; raises InvalidRequest if it isn't UTF-8."""
    try:
        text = sys.stdin.buffer.read().decode() if argument == "-" else argument
        text.encode()
    except UnicodeError as error:
        raise InvalidRequest("text", "is not valid UTF-8") from error
    return text


def add_server_argument(parser: argparse.ArgumentParser) -> None:
    """Adds what says which server to ask, and how to reach it."""
    group = parser.add_argument_group("server")
    group.add_argument("--server", default=DEFAULT_TARGET, metavar="HOST:PORT", help="default: %(default)s")
    group.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long; default: never")
    group.add_argument("--tls", action="store_true", help="use TLS; implied by the other --tls flags")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="authorities to trust; default: the public ones")
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate to show to the server")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key")
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help=f"file with the API key; default: ${API_KEY_VARIABLE}"
    )


def connect(args: argparse.Namespace) -> Client:
    """The client that the arguments of `add_server_argument` ask for; raises InvalidRequest."""
    try:
        tls = Tls(args.tls_ca, args.tls_cert, args.tls_key)
        api_key = args.api_key_file.read_text().strip() if args.api_key_file else os.environ.get(API_KEY_VARIABLE)
        return Client(args.server, tls=tls if args.tls or tls != Tls() else None, api_key=api_key or None)
    except OSError as error:
        raise InvalidRequest(str(error.filename), str(error.strerror)) from error
    except ValueError as error:
        raise InvalidRequest("--tls-cert", str(error)) from error


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one option for each of the fields of a request that are of use on a command line."""
    group = parser.add_argument_group("sampling (left out: the server's defaults)")
    group.add_argument("--max-tokens", type=integer(32), metavar="N", help="most tokens to generate")
    group.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    group.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens that sum up to P")
    group.add_argument(
        "--top-k", type=integer(32), metavar="K", help="sample among the K likeliest tokens; 0 means all"
    )
    group.add_argument("--min-p", type=float, metavar="P", help="leave out tokens less likely than P times the best")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 discourages repetition")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="above 0 discourages tokens already written")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="the same, for each time they were written")
    group.add_argument("--seed", type=integer(64), metavar="N", help="makes sampling repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given several times")
    group = parser.add_argument_group("cache")
    group.add_argument("--no-cache", dest="use_cache", action="store_false", default=None, help="compute everything")
    group.add_argument("--cache-salt", metavar="TEXT", help="share cached prefixes with the same salt only")


def sampling_options(args: argparse.Namespace) -> GenerateOptions:
    """The options that were given, for the client's methods."""
    given = {name: getattr(args, name) for name in _OPTION_NAMES if getattr(args, name) is not None}
    return cast("GenerateOptions", given)  # argparse has checked the types


def explain(error: RequestFailed, server: str) -> str:
    """One line for people about a failed call, with what to do about it where that is known."""
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{error.message}; put the key into ${API_KEY_VARIABLE}, or name its file with --api-key-file"
    if error.code is grpc.StatusCode.UNAVAILABLE and _TLS_FAILED in error.message:
        return f"no TLS connection to {server}: {error.message.rpartition(_TLS_FAILED)[2].strip()}"
    if error.code is grpc.StatusCode.UNAVAILABLE and error.message.endswith(_CLOSED):
        return f"{server} closed the connection; does it want TLS (--tls-ca), or a certificate (--tls-cert, --tls-key)?"
    if error.code is grpc.StatusCode.UNAVAILABLE and error.request_id is None:
        return f"no server answers at {server}; start one with: prefixcache serve"
    if error.code is grpc.StatusCode.INVALID_ARGUMENT:
        return error.message
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the server did not finish within --timeout"
    if error.retry_after_ms is not None:
        return f"the server is overloaded ({error.message}); try again in {error.retry_after_ms / 1000:g} s"
    return str(error)
