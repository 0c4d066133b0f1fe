"""Show the settings in effect and the memory plan, and start nothing.

Reads the same sources as `serve` and loads the model as it does, so what it shows is what `serve` would do now.

Examples:
  prefixcache check-config
  prefixcache check-config --model ~/models/Qwen2.5-0.5B-Instruct --cache-memory 50%
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from prefixcache import app
from prefixcache.commands.display import Progress
from prefixcache.config import Settings, add_settings_arguments, load_settings
from prefixcache.log import setup_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings_arguments(parser)
    parser.set_defaults(reports_unknown_arguments=True)


def run(args: argparse.Namespace) -> int:
    settings = load_settings(args, args.unknown_arguments)
    setup_logging(settings.log_level, settings.log_format)
    with Progress() as progress:
        served = app.load(settings, progress.say)
    console = Console(highlight=False)
    console.print(_table("settings", _settings_rows(settings)))
    console.print()
    console.print(_table("memory", _memory_rows(served)))
    return 0


def _settings_rows(settings: Settings) -> dict[str, str]:
    values = settings.model_dump()
    return {name.replace("_", "-"): "default" if value is None else str(value) for name, value in values.items()}


def _memory_rows(served: app.ServedModel) -> dict[str, str]:
    plan, layout = served.plan, served.plan.layout
    dtype = str(layout.dtype).removeprefix("torch.")
    return {
        "model": f"{served.model.name} in {dtype} on {served.device}",
        "K/V per token": (
            f"{layout.num_layers} layers x 2 x {layout.num_kv_heads} K/V heads x {layout.head_dim} head dim "
            f"x {layout.dtype.itemsize} bytes = {layout.bytes_per_token:,} bytes"
        ),
        "cache": f"{plan.num_bytes / 2**20:,.0f} MiB",
        "tokens that fit": f"{plan.num_tokens:,} in {plan.num_pages:,} pages of {layout.page_size}",
        "model length": f"{plan.max_model_len:,} tokens",
        "sequences of full length that fit": f"{plan.num_full_sequences:.1f}",
    }


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table
