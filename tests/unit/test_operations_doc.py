"""docs/operations.md says what is so: every metric, every setting."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from prefixcache.metrics import Metrics
from tests.support.operations_doc import PATH, documented_metrics, headings


def registered(registry: CollectorRegistry) -> dict[str, str]:
    suffix = {"counter": "_total", "info": "_info"}
    return {
        family.name + suffix.get(family.type, ""): family.type
        for family in registry.collect()
        if family.name.startswith("prefixcache_")
    }


def test_the_table_of_metrics_is_complete():
    assert documented_metrics() == registered(Metrics().registry)


def test_generated_tables_are_fresh():
    result = subprocess.run(
        [sys.executable, PATH.parent / "reference.py", "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "section", ["Metrics", "Alerts", "Sizing", "Upgrade and rollback", "What can fail, and what clients see"]
)
def test_what_people_look_for_is_there(section: str):
    assert section in headings()
