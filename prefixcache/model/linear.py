"""Matrix products with weights that never change."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can repack this weight: float32 everywhere, 16-bit types only where the CPU computes in them.

    The ops are private to PyTorch, so their absence must not matter.
    """
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or not hasattr(ops, "_reorder_linear_weight"):
        return False
    match weight.dtype:
        case torch.float32:
            return bool(torch.backends.mkldnn.is_available())
        case torch.bfloat16:
            return bool(ops._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(ops._is_mkldnn_fp16_supported())
    return False


class Linear:
    """`x @ weight.T + bias` for a fixed weight, in the layout that is quickest on its device. Engine thread only.

    Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._is_packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_rows, in_features]` to `[num_rows, out_features]`."""
        if self._is_packed:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return packed
        return F.linear(x, self._weight, self._bias)
