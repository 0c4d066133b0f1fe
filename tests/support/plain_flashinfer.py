"""The part of FlashInfer's interface that the back end uses, as plain matrix products on any device.

It computes what FlashInfer documents, in float64, and refuses what FlashInfer refuses or silently gets wrong. With it
in place of the package, planning, row order and merging run on the CPU; the kernels themselves need tests/gpu.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Pages = tuple[torch.Tensor, torch.Tensor]


class _PagedWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD"
        assert not use_cuda_graph
        assert float_workspace_buffer.dtype == torch.uint8
        self.backend = backend
        self.num_plans = 0

    def _keep(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: tuple[int, int, int],
        page_size: int,
        causal: bool,
        dtypes: tuple[torch.dtype, torch.dtype | None],
    ) -> None:
        for indices in (qo_indptr, kv_indptr, kv_indices, last_page_len):
            assert indices.dtype == torch.int32
            assert indices.ndim == 1
        num_groups = len(last_page_len)
        assert num_groups > 0
        assert len(qo_indptr) == len(kv_indptr) == num_groups + 1
        assert qo_indptr[0] == kv_indptr[0] == 0
        assert kv_indptr[-1] == len(kv_indices)
        assert bool((qo_indptr.diff() > 0).all())
        assert bool((kv_indptr.diff() > 0).all())
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        self._qo, self._kv = qo_indptr.tolist(), kv_indptr.tolist()
        self._indices, self._last = kv_indices.tolist(), last_page_len.tolist()
        self._heads, self._page_size, self._causal, self._dtypes = heads, page_size, causal, dtypes
        self.num_plans += 1

    def run(
        self, q: torch.Tensor, paged_kv_cache: Pages, *, out: torch.Tensor | None = None, return_lse: bool = False
    ) -> Any:
        """Attend; the log-sum-exp has base 2, as FlashInfer's."""
        keys, values = paged_kv_cache
        num_heads, num_kv_heads, head_dim = self._heads
        assert q.shape == (self._qo[-1], num_heads, head_dim)
        assert keys.shape == values.shape
        assert keys.shape[1:] == (self._page_size, num_kv_heads, head_dim)
        assert (q.dtype, keys.dtype) == self._dtypes
        output = torch.empty_like(q) if out is None else out
        assert (output.shape, output.dtype, output.is_contiguous()) == (q.shape, q.dtype, True)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        for g, last in enumerate(self._last):
            rows = slice(self._qo[g], self._qo[g + 1])
            pages = self._indices[self._kv[g] : self._kv[g + 1]]
            length = len(pages) * self._page_size - self._page_size + last
            k, v = (x[pages].flatten(0, 1)[:length].double() for x in (keys, values))
            output[rows], lse[rows] = self._attend(q[rows].double(), k, v)
        return (output, lse) if return_lse else output

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pages:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,thd->nht", q, k) / math.sqrt(q.shape[-1])
        if self._causal:
            unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
            scores = scores.masked_fill(unseen.unsqueeze(1), float("-inf"))
        lse = scores.logsumexp(-1)
        return torch.einsum("nht,thd->nhd", scores.softmax(-1), v), lse / math.log(2.0)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    """Groups of any number of queries."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        self._keep(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk),
            page_size,
            causal,
            (q_data_type, kv_data_type),
        )


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    """Groups of one query."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        self._keep(
            torch.arange(len(indptr), dtype=torch.int32),
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim),
            page_size,
            False,
            (q_data_type, kv_data_type),
        )


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> Pages:
    """Merge attention over two sets of tokens."""
    for v, s in ((v_a, s_a), (v_b, s_b)):
        assert v.is_contiguous()
        assert s.is_contiguous()
        assert s.dtype == torch.float32
        assert v.shape[:2] == s.shape
    assert v_a.shape == v_b.shape
    total = torch.logaddexp2(s_a, s_b)
    a, b = (torch.exp2(s - total).unsqueeze(-1).double() for s in (s_a, s_b))
    return (v_a * a + v_b * b).to(v_a.dtype), total
