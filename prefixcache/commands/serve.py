"""Run the server in the foreground.

Settings come from the command line, then from the environment (PREFIXCACHE_PORT=…), then from prefixcache.toml.
The first SIGTERM or Ctrl-C lets running requests finish, a second one ends the server at once.

Examples:
  prefixcache serve
  prefixcache serve --model ~/models/Qwen2.5-0.5B-Instruct --cache-memory 4GiB
  prefixcache serve --host 0.0.0.0 --port 50051 --metrics-port 9464 --log-format json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

from prefixcache import app
from prefixcache.commands.display import Progress
from prefixcache.config import add_settings_arguments, load_settings
from prefixcache.log import setup_logging
from prefixcache.metrics import Metrics
from prefixcache.server.health import Readiness
from prefixcache.server.port import reserved_port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings_arguments(parser)
    parser.set_defaults(reports_unknown_arguments=True)


def run(args: argparse.Namespace) -> int:
    settings = load_settings(args, args.unknown_arguments)
    setup_logging(settings.log_level, settings.log_format)
    # Until there is something to drain. Said explicitly, because process 1 of a container would ignore the signal.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    app.check_edge(settings)
    metrics, readiness = Metrics(), Readiness()
    with app.start_http(settings, metrics, readiness) as http:
        with reserved_port(settings.host, settings.port), Progress() as progress:
            served = app.load(settings, progress.say)

        def announce(port: int) -> None:
            print(
                f"prefixcache is ready on {settings.host}:{port}: {served.describe()}, "
                f"metrics on http://{settings.metrics_host}:{http.port}/metrics",
                flush=True,
            )

        return asyncio.run(app.serve(served, settings, metrics, readiness, announce))
