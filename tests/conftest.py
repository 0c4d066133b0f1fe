"""Settings for every test: no network, one core per process, reproducible random cases."""

from __future__ import annotations

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported for the first time
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # tiny products lose time to thread hand-over, and sums keep one order

SLOW = [hypothesis.HealthCheck.too_slow]  # that a machine draws slowly says nothing about what is tested
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=SLOW)
hypothesis.settings.register_profile(
    "explore", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=SLOW
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_finish() -> None:
    """Keep what is there before the first test out of garbage collection, as a server does.

    Walking through it takes half a second, as long as a store is waited for: a read now and then came too late.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a graphics card where there is none, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
