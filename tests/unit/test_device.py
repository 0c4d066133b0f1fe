"""Choice of device and dtype, and the memory that is free."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import pytest
import torch

from prefixcache.errors import ModelError
from prefixcache.model.device import _container_free_bytes, choose_device, choose_dtype, free_memory_bytes

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_an_error_and_auto_says_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match=r"device is cuda, but PyTorch .*--device cpu or auto"):
        choose_device("cuda")
    with caplog.at_level(logging.INFO):
        assert choose_device("auto") == CPU
    assert "device auto: cpu" in caplog.text


def test_the_cpu_can_be_asked_for() -> None:
    assert choose_device("cpu") == CPU


@pytest.mark.gpu
def test_auto_takes_cuda() -> None:
    device = choose_device("auto")
    assert device.type == choose_device("cuda").type == "cuda"
    assert choose_dtype("auto", device, has_own_kernels=False) in (torch.bfloat16, torch.float16)
    assert 0 < free_memory_bytes(device) <= torch.cuda.get_device_properties(device).total_memory


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_named_dtype_is_taken(name: str) -> None:
    assert choose_dtype(name, CPU, has_own_kernels=True) is getattr(torch, name)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_f": True}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True, "avx512_bf16": False}, torch.bfloat16),
        ({"bf16": True, "neon": True}, torch.bfloat16),
    ],
)
def test_auto_dtype_on_the_cpu_follows_its_instructions(
    capabilities: dict[str, bool],
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    with caplog.at_level(logging.INFO):
        assert choose_dtype("auto", CPU, has_own_kernels=False) is expected
    assert f"dtype auto: {str(expected).removeprefix('torch.')}" in caplog.text


def test_auto_dtype_is_bfloat16_on_our_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert choose_dtype("auto", CPU, has_own_kernels=True) is torch.bfloat16


def test_free_memory_of_this_machine() -> None:
    assert 0 < free_memory_bytes(CPU) <= psutil.virtual_memory().total


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert _container_free_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 250\n")
    assert _container_free_bytes(tmp_path) == 550
    (tmp_path / "memory.current").write_text("1500\n")
    assert _container_free_bytes(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_free_bytes(tmp_path) is None
