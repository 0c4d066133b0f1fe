"""Matrix products with weights that never change."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Weights packed for oneDNN beat `F.linear` on the CPU for anything between a few rows and a few thousand, in every
# dtype (docs/performance.md). The ops are private to PyTorch, so their absence must not matter.
_CAN_PACK = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and torch.backends.mkldnn.is_available()


class Linear:
    """`x @ weight.T + bias` for a fixed weight, in the layout that is quickest on its device. Engine thread only.

    Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._is_packed = _CAN_PACK and weight.device.type == "cpu"
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_rows, in_features]` to `[num_rows, out_features]`."""
        if self._is_packed:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return packed
        return F.linear(x, self._weight, self._bias)
