"""What docs/operations.md says, for tests that hold it to the program."""

from __future__ import annotations

import re
from pathlib import Path

PATH = Path(__file__).parents[2] / "docs" / "operations.md"


def documented_metrics() -> dict[str, str]:
    """Names of the metrics table and their types."""
    return dict(re.findall(r"^\| `(prefixcache_\w+)` \| (\w+) \|", PATH.read_text(), re.MULTILINE))


def documented_queries() -> list[str]:
    """What stands there for people to ask Prometheus."""
    return re.findall(r"`([^`\n]*(?:rate|increase)\(prefixcache_[^`\n]*)`", PATH.read_text())


def headings() -> list[str]:
    return re.findall(r"^#+ (.+)$", PATH.read_text(), re.MULTILINE)
