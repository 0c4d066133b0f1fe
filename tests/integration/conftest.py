"""What several of these tests need."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import tiny_model
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
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama-gqa").save_pretrained(folder)
    byte_level()._chat_tokenizer.save_pretrained(folder)
    return folder
