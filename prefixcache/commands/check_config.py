"""Show the settings in effect and the memory plan, and serve nothing.

Reads the same sources as `serve` and loads the model as it does, so what it shows is what `serve` would do now.

Examples:
  prefixcache check-config
  prefixcache check-config --model ~/models/Qwen2.5-0.5B-Instruct --cache-memory 50%
"""

from __future__ import annotations

import argparse

from prefixcache import app
from prefixcache.commands.display import Progress, print_rows
from prefixcache.config import Settings, add_settings_arguments, load_settings
from prefixcache.log import setup_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings_arguments(parser)
    parser.set_defaults(reports_unknown_arguments=True)


def run(args: argparse.Namespace) -> int:
    settings = load_settings(args, args.unknown_arguments)
    setup_logging(settings.log_level, settings.log_format)
    app.check_edge(settings)
    with Progress() as progress:
        served = app.load(settings, progress.say)
    print("settings")
    print_rows(_settings_rows(settings))
    print("\nmemory")
    print_rows(_memory_rows(served))
    return 0


def _settings_rows(settings: Settings) -> dict[str, str]:
    values = settings.model_dump()
    return {name.replace("_", "-"): "default" if value is None else str(value) for name, value in values.items()}


def _memory_rows(served: app.ServedModel) -> dict[str, str]:
    plan, layout = served.plan, served.plan.layout
    return {
        "model": f"{served.name} in {served.dtype_name} on {served.device}",
        "K/V per token": (
            f"{layout.num_layers} layers x 2 x {layout.num_kv_heads} K/V heads x {layout.head_dim} head dim "
            f"x {layout.dtype.itemsize} bytes = {layout.bytes_per_token:,} bytes"
        ),
        "cache": f"{plan.num_bytes / 2**20:,.0f} MiB",
        "tokens that fit": f"{plan.num_tokens:,} in {plan.num_pages:,} pages of {layout.page_size}",
        "model length": f"{plan.max_model_len:,} tokens",
        "sequences of full length that fit": f"{plan.num_full_sequences:.1f}",
    }
