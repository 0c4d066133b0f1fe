"""Where to compute, in which type, and how much memory is free there."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import torch

from prefixcache.errors import ModelError

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CGROUP = Path("/sys/fs/cgroup")


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`; `auto` logs what it took.

    Raises:
        ModelError: CUDA was asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        built = "finds no GPU that it can use" if torch.version.cuda else "is built without CUDA"
        raise ModelError(f"device is cuda, but PyTorch {torch.__version__} {built}; use --device cpu or auto.")
    if name != "auto":
        return torch.device(name)
    device = torch.device("cuda" if has_cuda else "cpu")
    what = torch.cuda.get_device_name(device) if has_cuda else f"{torch.get_num_threads()} threads"
    logger.info("device auto: %s (%s)", device, what)
    return device


def choose_dtype(name: str, device: torch.device, *, has_own_kernels: bool) -> torch.dtype:
    """Return the type for `auto` or a dtype's name; `auto` logs what it took.

    bfloat16 halves memory, but PyTorch on a CPU without instructions for it multiplies several times slower than in
    float32. Our own kernels compute in float32 whatever the weights are kept in.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    else:
        dtype = torch.bfloat16 if has_own_kernels or _cpu_multiplies_bfloat16() else torch.float32
    logger.info("dtype auto: %s", str(dtype).removeprefix("torch."))
    return dtype


def free_memory_bytes(device: torch.device) -> int:
    """Return how much memory this process could still take on a device.

    On the CPU a container's limit (cgroup version 2) counts as well as the machine's memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    limit = _container_free_bytes(CGROUP)
    return free if limit is None else min(free, limit)


def _container_free_bytes(cgroup: Path) -> int | None:
    """Return what is left below a container's limit, counting file cache as free; None where there is no limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))


def _cpu_multiplies_bfloat16() -> bool:
    """Tell whether this CPU has matrix instructions for bfloat16: AVX-512 or AMX on x86, BF16 on Arm."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
