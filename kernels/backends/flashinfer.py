"""FlashInfer's paged prefill, when installed. Plans once a step and option set, then runs each layer.

Its plans are made on the host from lengths that a captured graph would freeze, so decode rows go to our kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from tandem.kernels.api.backend import AttentionBackend, AttentionImpl, PagedImpl, PagedKV, PagedOps, Prefill, refuse
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.prompt_only import PromptOnlyOps, common_refusal, general_ops

try:
    import flashinfer

    _import_error = None
except Exception as error:  # a broken build raises more than ImportError
    flashinfer = None
    _import_error = f"flashinfer can't be imported: {error}"

WORKSPACE_BYTES = 128 << 20  # FlashInfer's own recommendation
_workspaces: dict[torch.device, torch.Tensor] = {}


class FlashInferOps(PagedOps):
    """Prefill by FlashInfer's plans, decode rows by the general backend."""

    write = staticmethod(PromptOnlyOps.write)

    @staticmethod
    def decode(query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
        return general_ops(query, kv, spec).decode(query, kv, rows, spec)

    @staticmethod
    def prefill(new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        if new.kv is None:
            return general_ops(new.q, None, spec).prefill(new, spec)
        return _planned(new.q, new.kv, new.rows, spec).run(new.q, (new.kv.key_cache, new.kv.value_cache))


class FlashInferImpl(PagedImpl):
    """A layer's attention by FlashInfer."""

    ops = FlashInferOps


class FlashInferBackend(AttentionBackend):
    """FlashInfer for heads of 64, 128 and 256 on CUDA devices, without ALiBi."""

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return FlashInferImpl

    @staticmethod
    def get_ops() -> type[PagedOps]:
        return FlashInferOps

    @staticmethod
    def unavailable_reason() -> str | None:
        return _import_error or (None if torch.cuda.is_available() else "FlashInfer needs a CUDA device")

    @staticmethod
    def unsupported_reason(
        device: torch.device, dtype: torch.dtype, head_size: int, options: AttentionSpec
    ) -> str | None:
        return common_refusal(device, dtype, head_size, options) or refuse(
            (head_size not in (64, 128, 256), f"head_size {head_size}: FlashInfer has 64, 128 and 256"),
            (options.alibi_slopes is not None, "alibi_slopes"),
        )


def _planned(query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> Any:
    """A wrapper planned for these rows and this layer's options, shared by the layers that agree on them."""
    key = ("flashinfer", spec.num_heads, spec.num_kv_heads, spec.sliding_window, spec.logits_soft_cap, spec.scale)
    if key not in rows.scratch:
        device = query.device
        if device not in _workspaces:
            _workspaces[device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspaces[device], "HND")
        query_starts, block_starts, block_ids, last_slots = _block_lists(rows, kv.block_size)
        wrapper.plan(
            query_starts,
            block_starts,
            block_ids,
            last_slots,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            kv.block_size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            logits_soft_cap=spec.logits_soft_cap,
            q_data_type=query.dtype,
            kv_data_type=kv.key_cache.dtype,
        )
        rows.scratch[key] = wrapper
    return rows.scratch[key]


def _block_lists(rows: RowBatch, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(starts of queries and of blocks int32 [N+1], block ids int32 [sum], valid slots of each last block int32 [N]).

    All but the ids stay on the host, where the plan reads them.
    """
    counts = [-(-length // block_size) for length in rows.seq_lens_cpu]
    query_starts, block_starts = (
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in (rows.query_lens_cpu, counts)
    )
    ids = torch.cat([table[:count] for table, count in zip(rows.block_tables, counts, strict=True)])
    last = [(length - 1) % block_size + 1 if length else 0 for length in rows.seq_lens_cpu]
    return query_starts, block_starts, ids, torch.tensor(last, dtype=torch.int32)
