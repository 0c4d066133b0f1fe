"""Which attention back end is chosen, and what is said about it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from prefixcache.model.attention import choose
from prefixcache.model.attention.choose import choose_backend, flashinfer_obstacle, varlen_obstacle
from prefixcache.model.attention.cpu import CPUAttention
from prefixcache.model.attention.sdpa import SDPAAttention
from prefixcache.model.attention.varlen import VarlenAttention
from prefixcache.model.families import spec_from_config
from prefixcache.model.spec import DecoderSpec
from tests.support.models import tiny_model

HOPPER, AMPERE, TURING, VOLTA = (9, 0), (8, 0), (7, 5), (7, 0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Says what is installed, whatever this machine has."""
    state = SimpleNamespace(flashinfer=True, flash_attention=True, capability=HOPPER)
    monkeypatch.setattr(choose, "find_spec", lambda _: state if state.flashinfer else None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: state.flash_attention)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: state.capability)
    return state


def test_the_cpu_has_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    assert isinstance(choose_backend(torch.device("cpu"), spec(), 16, torch.float32), CPUAttention)
    assert [record.getMessage() for record in caplog.records] == [
        "attention: PyTorch's flash kernel for the CPU, on pages in place"
    ]


def test_without_flashinfer_the_log_says_how_to_get_it(
    installed: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    installed.flashinfer = False
    caplog.set_level(logging.INFO)

    backend = choose_backend(torch.device("cuda"), spec(head_dim=64), 16, torch.bfloat16)

    assert isinstance(backend, VarlenAttention)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("attention: FlashAttention on gathered K/V")
    assert "pip install 'prefixcache[cuda]'" in message


def test_flashinfer_that_does_not_work_is_not_the_end(
    installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: object) -> None:
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(choose, "_build_flashinfer", no_compiler)
    caplog.set_level(logging.INFO)

    backend = choose_backend(torch.device("cuda"), spec(head_dim=64), 16, torch.bfloat16)

    assert isinstance(backend, VarlenAttention)
    warning, message = caplog.records
    assert warning.levelno == logging.WARNING
    assert "Could not find nvcc" in warning.getMessage()
    assert message.getMessage().endswith("not FlashInfer: it failed")


def test_float32_on_cuda(installed: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    assert isinstance(choose_backend(torch.device("cuda"), spec(head_dim=64), 16, torch.float32), SDPAAttention)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message == (
        "attention: SDPA, one sequence at a time; not FlashInfer: it has no float32; "
        "not FlashAttention: it has no float32"
    )


@pytest.mark.parametrize(
    ("head_dim", "dtype", "capability", "flashinfer", "flash_attention"),
    [
        (64, torch.bfloat16, HOPPER, True, True),
        (128, torch.float16, AMPERE, True, True),
        (256, torch.bfloat16, AMPERE, True, True),
        (96, torch.bfloat16, HOPPER, False, True),
        (20, torch.bfloat16, HOPPER, False, False),
        (512, torch.bfloat16, HOPPER, False, False),
        (64, torch.float16, TURING, True, False),
        (64, torch.bfloat16, TURING, False, False),
        (64, torch.float16, VOLTA, False, False),
        (64, torch.float32, HOPPER, False, False),
    ],
)
def test_what_each_can_do(
    installed: SimpleNamespace,
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    flashinfer: bool,
    flash_attention: bool,
) -> None:
    assert (flashinfer_obstacle(head_dim, dtype, capability) is None) is flashinfer
    assert (varlen_obstacle(head_dim, dtype, capability) is None) is flash_attention


def test_obstacles_name_what_is_missing(installed: SimpleNamespace) -> None:
    installed.flashinfer = installed.flash_attention = False

    assert flashinfer_obstacle(64, torch.bfloat16, HOPPER) == "it is not installed (pip install 'prefixcache[cuda]')"
    assert varlen_obstacle(64, torch.bfloat16, HOPPER) == "this PyTorch is built without it"
    assert varlen_obstacle(20, torch.bfloat16, HOPPER) == "it has no kernels for heads of 20"
    assert flashinfer_obstacle(64, torch.bfloat16, TURING) == "it needs compute capability 8.0 for this type, not 7.5"


def spec(head_dim: int = 16) -> DecoderSpec:
    config = tiny_model("llama-gqa").config
    values = {**config.to_dict(), "head_dim": head_dim}
    return spec_from_config(type(config)(**values))
