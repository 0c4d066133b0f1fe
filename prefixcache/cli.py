"""The command line: finds the command's module, lets it parse its arguments and run, and reports its errors."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import grpc

from prefixcache import __version__
from prefixcache.client import RequestFailed
from prefixcache.commands.server_options import explain
from prefixcache.errors import ConfigError, InvalidRequest, PrefixCacheError

# The module of a command is loaded when the command is chosen: `serve` and `bench` need torch, whose import takes
# seconds that a client command should not have to wait for.
COMMANDS = {
    "serve": "run the server in the foreground",
    "check-config": "show the settings in effect and the memory plan, and start nothing",
    "generate": "continue a prompt",
    "chat": "chat with the model",
    "tokenize": "text to token ids, or back",
    "new-key": "make an API key for a tenant",
    "info": "show the model and the cache of a server",
    "bench": "measure the service against references from the same run",
}

EPILOG = """\
Examples:
  prefixcache serve                       serve the default model on 127.0.0.1:50051
  prefixcache chat                        talk to it
  prefixcache COMMAND --help              all about one command
"""


class Command(Protocol):
    """What a module in `prefixcache.commands` has; the first paragraph of its docstring is the command's help."""

    __doc__: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Does it, and returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 for what went wrong, 2 for a mistake in what was asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    command = _load(name) if name in COMMANDS else None
    parser = _parser(name, command)
    args, unknown_arguments = parser.parse_known_args(arguments)
    args.unknown_arguments = unknown_arguments
    assert command is not None, "the parser accepts known commands only"
    if unknown_arguments and not args.reports_unknown_arguments:
        args.parser.error(f"unknown arguments: {' '.join(unknown_arguments)}")
    try:
        return command.run(args)
    except RequestFailed as error:
        return _fail(name, explain(error, args.server), 2 if error.code is grpc.StatusCode.INVALID_ARGUMENT else 1)
    except PrefixCacheError as error:
        return _fail(name, str(error), 2 if isinstance(error, ConfigError | InvalidRequest) else 1)
    except KeyboardInterrupt:
        return 130
    except (
        BrokenPipeError
    ):  # whoever read the output has left, as `head` does; the interpreter's last flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _load(name: str) -> Command:
    return cast("Command", importlib.import_module(f"prefixcache.commands.{name.replace('-', '_')}"))


def _parser(name: str, command: Command | None) -> argparse.ArgumentParser:
    """A parser that knows all commands by name, and the arguments of the one that was chosen."""
    parser = argparse.ArgumentParser(
        prog="prefixcache",
        description="An LLM inference server over gRPC that never computes the same prompt prefix twice.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"prefixcache {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for other, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            other, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        subparser.set_defaults(reports_unknown_arguments=False, parser=subparser)
        if other == name and command is not None:
            description, _, examples = command.__doc__.partition("\n\nExamples:")
            subparser.description = description
            subparser.epilog = f"Examples:{examples}"
            command.add_arguments(subparser)
    return parser


def _fail(name: str, message: str, exit_code: int) -> int:
    print(f"prefixcache {name}: {message}", file=sys.stderr)
    return exit_code
