"""Measured values with their spread, and what they were measured on."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from prefixcache import __version__


@dataclass(frozen=True, slots=True)
class Figure:
    """Repeated measurements of one thing, all in one unit."""

    values: list[float]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, Any]:
        return {
            "median": round(self.median, 4),
            "min": round(min(self.values), 4),
            "max": round(max(self.values), 4),
            "runs": len(self.values),
            "unit": self.unit,
        }


def timed_ms(work: Callable[[], object], repeat: int) -> Figure:
    """Time `work` `repeat` times, after one run that does not count."""
    work()
    values = []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        values.append((time.perf_counter() - started) * 1e3)
    return Figure(values, "ms")


def machine() -> dict[str, Any]:
    """Describe what the figures were measured on."""
    return {
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prefixcache": __version__,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str | None:
    """Name the commit of the working tree that this file lies in, if it lies in one."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() or None
