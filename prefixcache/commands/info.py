"""Show which model a server serves, and how large its cache is.

Examples:
  prefixcache info
  prefixcache info --server 10.0.0.7:50051
"""

from __future__ import annotations

import argparse

from prefixcache.commands.display import print_rows
from prefixcache.commands.server_options import add_server_argument, connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_argument(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as client:
        info = client.model_info(timeout_s=args.timeout)
    cache_mib = info.cache_capacity_tokens * info.kv_bytes_per_token / 2**20
    rows = {
        "model": info.model,
        "architecture": info.architecture,
        "vocabulary": f"{info.vocab_size:,} tokens",
        "model length": f"{info.max_model_len:,} tokens",
        "end tokens": ", ".join(str(token_id) for token_id in info.eos_token_ids) or "none",
        "chat template": "yes" if info.has_chat_template else "no",
        "device": f"{info.device}, {info.dtype}",
        "cache": f"{info.cache_capacity_tokens:,} tokens in pages of {info.page_size} ({cache_mib:,.0f} MiB)",
        "K/V per token": f"{info.kv_bytes_per_token:,} bytes",
        "version": info.version,
    }
    print_rows(rows)
    return 0
