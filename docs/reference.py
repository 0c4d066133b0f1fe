"""Write the tables of operations.md that follow from the code: every setting, and what K/V of known models takes.

`python docs/reference.py` writes them, `python docs/reference.py --check` fails if they are not fresh.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch
from pydantic.fields import FieldInfo

from prefixcache.config import Settings
from prefixcache.kv.layout import KVLayout

PAGE = Path(__file__).parent / "operations.md"

# Layers, K/V heads and head dimension, from the models' own config.json.
MODELS = {
    "SmolLM2-135M in float32": KVLayout(30, 3, 64, torch.float32),
    "SmolLM2-135M": KVLayout(30, 3, 64, torch.bfloat16),
    "Qwen2.5-0.5B": KVLayout(24, 2, 64, torch.bfloat16),
    "Qwen2.5-7B": KVLayout(28, 4, 128, torch.bfloat16),
    "Llama-3.1-8B, Mistral-7B-v0.3": KVLayout(32, 8, 128, torch.bfloat16),
    "Qwen3-8B": KVLayout(36, 8, 128, torch.bfloat16),
    "Qwen3-32B": KVLayout(64, 8, 128, torch.bfloat16),
    "Llama-3.3-70B": KVLayout(80, 8, 128, torch.bfloat16),
}


def settings_table() -> list[str]:
    rows = ["| setting | values | what it does |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None or field.default_factory else f" Default: {field.default}."
        rows.append(f"| `{name}` | {_values(field)} | {field.description}{default} |")
    return rows


def _values(field: FieldInfo) -> str:
    for kind in (field.annotation, *get_args(field.annotation)):
        if get_origin(kind) is Literal:
            return ", ".join(f"`{value}`" for value in get_args(kind))
    return ""


def models_table() -> list[str]:
    rows = [
        "| model, in bfloat16 if not said otherwise | bytes a token | tokens in 1 GiB | bytes a page "
        "| break-even per 1,000 tokens/s of prefill |",
        "|---|---|---|---|---|",
    ]
    for name, layout in MODELS.items():
        per_token = layout.bytes_per_token
        sizes = f"{per_token:,} | {2**30 // per_token:,} | {layout.bytes_per_page:,}"
        rows.append(f"| {name} | {sizes} | {per_token / 1000:,.0f} MB/s |")
    return rows


def refreshed(text: str) -> str:
    """Replace what stands between the markers of each table."""
    for name, rows in (("settings", settings_table()), ("models", models_table())):
        before, _, rest = text.partition(f"<!-- {name}: written by docs/reference.py -->\n")
        _, _, after = rest.partition(f"<!-- end of {name} -->")
        marked = (f"<!-- {name}: written by docs/reference.py -->", *rows, f"<!-- end of {name} -->")
        text = before + "\n".join(marked) + after
    return text


def main() -> int:
    text = PAGE.read_text()
    fresh = refreshed(text)
    if "--check" not in sys.argv:
        PAGE.write_text(fresh)
    elif text != fresh:
        print(f"{PAGE} is not fresh: run python docs/reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
