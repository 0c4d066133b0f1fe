"""The soak's own test: a few seconds of it, with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.soak import growth_of


def test_a_short_soak_holds_every_promise(model_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.soak", "--model", str(model_folder), "--results", str(tmp_path)]
    command += ["--duration", "8", "--clients", "4", "--document-tokens", "200", "--cache-tokens", "2048"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("soak-2*.json")
    result = json.loads(path.read_text())
    assert all(check["holds"] for check in result["checks"])
    assert sum(result["requests"].values()) >= 20
    assert [event for _, event in result["events"]][-1] == "Redis back, empty"


@pytest.mark.parametrize("num_samples", [1, 2, 7, 300])
def test_growth_is_told_however_few_the_samples(num_samples: int) -> None:
    assert 0 <= growth_of(range(1000, 1000 + num_samples)) < num_samples
