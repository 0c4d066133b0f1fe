"""Attention on CUDA by FlashInfer: reads pages where they lie, and a prefix that sequences share once for all of them.

Needs the package `flashinfer-python` (extra `cuda`): import this module only where it is installed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, merge_state

from prefixcache.model.attention.base import SequenceSlice
from prefixcache.model.attention.cascade import MIN_RUN_TOKENS, CascadePlan, PagedBatch, plan_cascade

# Reading shared runs apart costs about eight more launches in each layer, some 30 µs; a data-centre GPU reads about
# this much in that time. An estimate, not a measurement.
MIN_SAVED_BYTES = 64 << 20
MIN_WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends


class FlashInferAttention:
    """Attention back end for CUDA with FlashInfer. Engine thread only.

    FlashInfer's wrappers hold the plan and stage it in pinned memory of their own: `plan` makes the plan before it
    useless, and the step before must be done by then.

    Args:
        num_heads: Query heads.
        num_kv_heads: K/V heads; `num_heads` is a multiple of it.
        head_dim: 64, 128 or 256.
        page_size: Tokens in one page.
        dtype: float16 or bfloat16.
        device: A CUDA device.

    Raises:
        RuntimeError: FlashInfer cannot build or run its kernels here.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._page_size = page_size
        self._dtype = dtype
        self._device = device
        bytes_per_token = 2 * num_kv_heads * head_dim * dtype.itemsize  # in one layer
        self._min_saved_tokens = MIN_SAVED_BYTES // bytes_per_token
        # The calls follow one another on one stream, so they can share it; zeros, as FlashInfer asks for.
        workspace = torch.zeros(self._workspace_bytes(), dtype=torch.uint8, device=device)
        # Decodes and shared runs come from one kernel family ("fa2"), because the log-sum-exp of one is merged with
        # the other's, and because it cuts the K/V of few queries into parts that fill the GPU. With tensor cores it
        # takes any number of query heads for each K/V head. Chunks get whatever is quickest on this GPU.
        self._decodes = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
        self._shared = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._chunks = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")
        self._build_kernels()

    # --- plan --------------------------------------------------------------------------------------------------

    def plan(self, sequences: list[SequenceSlice]) -> CascadePlan:
        return self._prepare(plan_cascade(sequences, self._page_size, self._min_saved_tokens))

    def _prepare(self, plan: CascadePlan) -> CascadePlan:
        """Hand the batches to FlashInfer, which plans on the CPU and copies what the kernels need."""
        if (decodes := plan.decodes) is not None:
            self._decodes.plan(
                decodes.kv_indptr,
                decodes.kv_indices,
                decodes.last_page_len,
                self._num_heads,
                self._num_kv_heads,
                self._head_dim,
                self._page_size,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        if plan.shared is not None:
            self._plan_prefill(self._shared, plan.shared, causal=False)
        if plan.chunks is not None:
            self._plan_prefill(self._chunks, plan.chunks, causal=True)
        return replace(plan, shared_rows=plan.shared_rows.to(self._device))

    def _plan_prefill(self, wrapper: BatchPrefillWithPagedKVCacheWrapper, batch: PagedBatch, *, causal: bool) -> None:
        """Plan a batch; where it is causal, a group's last query sees all its tokens."""
        wrapper.plan(
            batch.qo_indptr,
            batch.kv_indptr,
            batch.kv_indices,
            batch.last_page_len,
            self._num_heads,
            self._num_kv_heads,
            self._head_dim,
            self._page_size,
            causal=causal,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    # --- attend ------------------------------------------------------------------------------------------------

    def attend(
        self, plan: CascadePlan, kv: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = kv.view(2, -1, self._page_size, self._num_kv_heads, self._head_dim)
        query = query.contiguous()  # not all of FlashInfer's kernels promise to take a part of the fused q, k, v
        output = torch.empty_like(query)
        n = plan.num_decodes
        if plan.decodes is not None:
            self._attend_decodes(plan, query[:n], (keys, values), output[:n])
        if plan.chunks is not None:
            self._chunks.run(query[n:], (keys, values), out=output[n:])
        return output

    def _attend_decodes(
        self, plan: CascadePlan, query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor
    ) -> None:
        if plan.shared is None:
            self._decodes.run(query, pages, out=output)
            return
        _, lse = self._decodes.run(query, pages, out=output, return_lse=True)
        shared, shared_lse = self._shared.run(query[plan.shared_rows], pages, return_lse=True)
        for part in plan.levels:
            rows = plan.shared_rows[part]
            output[rows], lse[rows] = merge_state(output[rows], lse[rows], shared[part], shared_lse[part])

    # --- set-up ------------------------------------------------------------------------------------------------

    def _workspace_bytes(self) -> int:
        """Bound what FlashInfer keeps in float32 for K/V that it cuts into parts: two blocks of 128 rows on each SM."""
        num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        rows = 2 * num_sms * 128 * (self._num_heads // self._num_kv_heads)
        return max(MIN_WORKSPACE_BYTES, rows * (self._head_dim + 1) * torch.float32.itemsize)

    def _build_kernels(self) -> None:
        """Use every kernel once: FlashInfer compiles them when they are first used, which can take minutes."""
        num_shared = MIN_RUN_TOKENS // self._page_size
        tables = [[*range(num_shared), num_shared + own] for own in range(3)]
        context_len = MIN_RUN_TOKENS
        sequences = [
            SequenceSlice(0, 1, context_len, tables[0]),
            SequenceSlice(1, 1, context_len, tables[1]),
            SequenceSlice(2, 2, context_len, tables[2]),
        ]
        shape = (2, (num_shared + 3) * self._page_size, self._num_kv_heads, self._head_dim)
        kv = torch.zeros(shape, dtype=self._dtype, device=self._device)
        query = torch.zeros((4, self._num_heads, self._head_dim), dtype=self._dtype, device=self._device)
        new = kv[0, :4]
        self.attend(self._prepare(plan_cascade(sequences, self._page_size, 0)), kv, query, new, new)
        torch.cuda.synchronize(self._device)
