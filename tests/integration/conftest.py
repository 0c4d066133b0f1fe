"""What several of these tests need."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.support.models import slow_model, tiny_model
from tests.support.tokenizers import byte_level


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Undoes what commands that set up logging do to the process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(tiny_model("llama-gqa"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def slow_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests of what is loaded: with the tiny model computing may be the quicker way."""
    return _saved(slow_model(), tmp_path_factory.mktemp("model") / "slow")


def _saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_level()._chat_tokenizer.save_pretrained(folder)
    return folder
