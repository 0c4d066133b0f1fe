"""Tells whether a file is still the one that was read."""

from __future__ import annotations

import os
from pathlib import Path

Signature = tuple[int, int, int]


def file_signature(path: Path) -> Signature | None:
    """Return what changes with a file, also where it is replaced through a symbolic link; None if it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
