"""From what the user typed after `--model` to weights, decoder spec and tokenizer."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from prefixcache.errors import ModelError
from prefixcache.model.families import spec_from_config
from prefixcache.model.gguf import converted_folder, find_default_gguf
from prefixcache.model.spec import DecoderSpec
from prefixcache.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
# What transformers raises for configs, tokenizers and weights that are damaged, incomplete or not there.
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    ArithmeticError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, ready to be given to the decoder.

    Attributes:
        name: Short display name.
        state_dict: Weights under transformers' names for the Llama family; no `lm_head.weight` where it is tied.
    """

    name: str
    spec: DecoderSpec
    state_dict: dict[str, torch.Tensor]
    tokenizer: Tokenizer


def load_model(
    model: str | None, dtype: torch.dtype, device: torch.device, cache_dir: Path, progress: Callable[[str], None]
) -> LoadedModel:
    """Load weights, config and tokenizer of a folder, a hub id, a `.gguf` file, or (None) the default model.

    `cache_dir` keeps a converted GGUF file for the next start; `progress` hears in a few words what is being done.

    Raises:
        ModelError: The model cannot be found, read or served; the message says what to do.
    """
    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]
    name, source = locate(model, cache_dir, progress)
    progress(f"Loading {name} in {str(dtype).removeprefix('torch.')} on {device}")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        spec = spec_from_config(config)
        tokenizer = _load_tokenizer(source, config)
        state_dict = _load_weights(source, config, dtype, device)
    except UNREADABLE as error:
        origin = "" if Path(source).is_dir() else " (no such folder here, so taken for an id on the Hugging Face hub)"
        raise ModelError(f"Cannot load the model {source}{origin}: {error}") from error
    return LoadedModel(name, replace(spec, tied_embeddings=LM_HEAD not in state_dict), state_dict, tokenizer)


def locate(model: str | None, cache_dir: Path, progress: Callable[[str], None]) -> tuple[str, str]:
    """Return the display name, and the folder or hub id that transformers can load."""
    path = find_default_gguf() if model is None else Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"There is no file {path}.")
        return path.stem.partition(".Q")[0], str(converted_folder(path, cache_dir, progress))
    if path.is_dir():
        return path.resolve().name, str(path)
    if model is None or not HUB_ID.fullmatch(model):
        raise ModelError(f"{model} is neither a folder, nor a .gguf file, nor an id on the Hugging Face hub.")
    return path.name, model


def _load_tokenizer(source: str, config: PreTrainedConfig) -> Tokenizer:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the compiled tokenizer raises nothing more specific for a tokenizer.json it rejects
        raise ModelError(f"Cannot load the tokenizer of {source}: {error}") from error
    eos_token_ids = {*_ids(config.eos_token_id), *_ids(tokenizer.eos_token_id)}
    try:
        eos_token_ids.update(_ids(GenerationConfig.from_pretrained(source).eos_token_id))
    except OSError:  # the file is optional
        logger.debug("%s has no generation config", source)
    return Tokenizer(tokenizer, vocab_size=config.vocab_size, eos_token_ids=frozenset(eos_token_ids))


def _ids(value: int | list[int] | None) -> list[int]:
    """Spell an id, several ids or none, as configs write them, as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _load_weights(
    source: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Load every weight in `dtype` on `device`, and make sure that none was made up or left out."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        dtype=dtype,
        trust_remote_code=False,
        use_safetensors=True,  # the other format is a pickle
        output_loading_info=True,
    )
    model, loading = loaded
    if loading["missing_keys"]:
        raise ModelError(f"{source} lacks the weights {_first(loading['missing_keys'])}.")
    unknown_in_layers = [key for key in loading["unexpected_keys"] if key.startswith("model.layers.")]
    if unknown_in_layers:
        raise ModelError(f"{source} has weights that its architecture does not use: {_first(unknown_in_layers)}.")
    weights = model.state_dict()
    if weights[LM_HEAD].data_ptr() == weights[EMBEDDING].data_ptr():
        del weights[LM_HEAD]
    return {key: weight.to(device=device, dtype=dtype) for key, weight in weights.items()}


def _first(keys: set[str] | list[str]) -> str:
    """List a few names and count the rest."""
    shown = sorted(keys)[:5]
    return ", ".join(shown) + (f" and {len(keys) - len(shown)} more" if len(keys) > len(shown) else "")
