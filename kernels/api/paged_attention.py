"""`PagedAttention`: the paged operations on plain tensors, without a layer around them.

Shapes: N rows, T new tokens, H query heads, K KV heads, D head size, S slots a block. Caches are [num_blocks, K, S, D]
views with contiguous D. Each operation runs on the first backend in selection.TABLE that can serve its arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

from tandem.kernels.api.backend import AttentionBackend, PagedKV, PagedOps, Prefill
from tandem.kernels.api.errors import UnsupportedOptionError
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.selection import rank_backends, run_with_fallback, select_backend
from tandem.kernels.api.spec import AttentionSpec, BlockSparse
from tandem.kernels.backends.partitions import choose_paged_attention_version
from tandem.kernels.blocks.quantization import FP8_DTYPE, Scale, check_cache_dtype

__all__ = ["PagedAttention", "calculate_cache_memory_usage", "choose_paged_attention_version"]

_UNIT = torch.tensor(1.0)


class PagedAttention:
    """Static operations; see the module's docstring. Options that no backend serves raise UnsupportedOptionError."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[num_blocks, K, 2, S, D]: one layer. A node's pool puts the layers of a block together (see kv_layout)."""
        return AttentionBackend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)

    @staticmethod
    def split_kv_cache(kv_cache: torch.Tensor, num_kv_heads: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(key cache, value cache), views [num_blocks, K, S, D], of a layer [num_blocks, K, 2, S, D] or of a flat
        cache [2, num_blocks, K * S * D]. Raises ValueError when sizes don't fit."""
        if kv_cache.dim() == 3 and kv_cache.shape[0] == 2 and kv_cache.shape[2] % (num_kv_heads * head_size) == 0:
            shaped = kv_cache.view(2, kv_cache.shape[1], num_kv_heads, -1, head_size)
            return shaped[0], shaped[1]
        if kv_cache.dim() == 5 and (kv_cache.shape[1:3], kv_cache.shape[4]) == ((num_kv_heads, 2), head_size):
            return kv_cache[:, :, 0], kv_cache[:, :, 1]
        raise ValueError(f"{tuple(kv_cache.shape)} is no KV cache of {num_kv_heads} heads of {head_size}")

    @staticmethod
    def write_to_paged_cache(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: Scale = _UNIT,
        v_scale: Scale = _UNIT,
        *,
        backend: str = "auto",
    ) -> None:
        """Stores key/value [T, K, D] at `slot_mapping` (any shape with T entries, -1: don't store). An fp8 cache holds
        value / scale, saturated; what saturates is counted (quantization.overflow_counts)."""
        check_cache_dtype(kv_cache_dtype, key_cache)
        spec = _spec_of(key, key_cache, key_cache.shape[1], 1.0)
        kv = PagedKV(key_cache, value_cache, k_scale, v_scale)
        key, value = (x.reshape(-1, *key_cache.shape[1::2]) for x in (key, value))

        def write(ops: type[PagedOps]) -> torch.Tensor:
            ops.write(key, value, kv, slot_mapping.reshape(-1))
            return key

        _run(key, spec, backend, key_cache.shape[2], write)

    @staticmethod
    def forward_decode(
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        kv_cache_dtype: str,
        num_kv_heads: int,
        scale: float,
        alibi_slopes: torch.Tensor | None = None,
        k_scale: Scale = _UNIT,
        v_scale: Scale = _UNIT,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
        *,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        backend: str = "auto",
    ) -> torch.Tensor:
        """query [N, H, D], the newest token of each row, already stored; block_tables int32 [N, B]; seq_lens [N]
        -> [N, H, D]. Block-sparse when `blocksparse_vert_stride` > 1 (the pattern: spec.BlockSparse)."""
        check_cache_dtype(kv_cache_dtype, key_cache)
        sparse = None
        if blocksparse_vert_stride > 1:
            sparse = BlockSparse(
                blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
                blocksparse_head_sliding_step, tp_rank,
            )  # fmt: skip
        spec = _spec_of(query, key_cache, num_kv_heads, scale, alibi_slopes, sliding_window, logits_soft_cap, sparse)
        lengths = tuple(seq_lens.tolist())
        if max(lengths, default=0) > max_seq_len:
            raise ValueError(f"max_seq_len {max_seq_len} is below the longest row's {max(lengths)}")
        rows = _rows(block_tables, torch.arange(len(lengths) + 1), seq_lens, lengths, (1,) * len(lengths))
        kv = PagedKV(key_cache, value_cache, k_scale, v_scale)
        return _run(query, spec, backend, key_cache.shape[2], lambda ops: ops.decode(query, kv, rows, spec))

    @staticmethod
    def forward_prefix(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache_dtype: str,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens_tensor: torch.Tensor,
        max_query_len: int,
        alibi_slopes: torch.Tensor | None = None,
        sliding_window: int | None = None,
        k_scale: Scale = _UNIT,
        v_scale: Scale = _UNIT,
        *,
        scale: float | None = None,
        logits_soft_cap: float | None = None,
        backend: str = "auto",
    ) -> torch.Tensor:
        """New tokens attend to their row's cached prefix and causally to each other; their KV is stored.

        query [T, H, D] (or [..., H * D]), key/value [T, K, D]; row i's new tokens are query_start_loc[i] … [i+1] (the
        end T may be left out) and its length with them is seq_lens_tensor[i] -> like query. `scale` defaults to
        1 / sqrt(D).
        """
        check_cache_dtype(kv_cache_dtype, key_cache)
        num_kv_heads, block_size, head_size = key_cache.shape[1:]
        k, v = (x.reshape(-1, num_kv_heads, head_size) for x in (key, value))
        if k.shape[0] == 0:
            return torch.empty_like(query)
        q = query.reshape(k.shape[0], -1, head_size)
        starts, lengths = query_start_loc.tolist(), tuple(seq_lens_tensor.tolist())
        if len(starts) == len(lengths):
            starts.append(q.shape[0])
        new = tuple(end - begin for begin, end in itertools.pairwise(starts))
        _check_rows(new, lengths, max_query_len, q.shape[0])
        spec = _spec_of(
            q, key_cache, num_kv_heads, scale or 1 / math.sqrt(head_size), alibi_slopes, sliding_window, logits_soft_cap
        )
        rows = _rows(block_tables, torch.tensor(starts), seq_lens_tensor, lengths, new)
        slots = _slots(block_tables, new, lengths, block_size)
        kv = PagedKV(key_cache, value_cache, k_scale, v_scale)

        def prefill(ops: type[PagedOps]) -> torch.Tensor:
            ops.write(k, v, kv, slots)
            return ops.prefill(Prefill(q, k, v, kv, rows), spec)

        return _run(q, spec, backend, block_size, prefill).view(query.shape)


def calculate_cache_memory_usage(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype = torch.float16
) -> int:
    """Bytes of one layer's cache."""
    return (
        math.prod(PagedAttention.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)) * dtype.itemsize
    )


def _run(
    tensor: torch.Tensor,
    spec: AttentionSpec,
    backend: str,
    block_size: int,
    call: Callable[[type[PagedOps]], torch.Tensor],
) -> torch.Tensor:
    """Runs `call(ops)` on the first backend with paged operations that serves the arguments, or falls to the next."""
    layer = (tensor.device, tensor.dtype, spec.head_size, spec)
    first, _ = select_backend(*layer, backend, block_size)
    usable, _ = rank_backends(*layer, block_size)
    return run_with_fallback(usable[usable.index(first) :], lambda candidate: call(candidate.get_ops()))


def _spec_of(
    tensor: torch.Tensor,
    key_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sparse: BlockSparse | None = None,
) -> AttentionSpec:
    if key_cache.dim() != 4 or key_cache.shape[1] != num_kv_heads:
        raise UnsupportedOptionError(
            "num_kv_heads",
            f"{num_kv_heads} heads, but the cache is {tuple(key_cache.shape)} [blocks, heads, slots, size]",
        )
    return AttentionSpec(
        num_heads=tensor.shape[1] if tensor.dim() == 3 else num_kv_heads,
        head_size=key_cache.shape[3],
        scale=scale,
        num_kv_heads=num_kv_heads,
        alibi_slopes=alibi_slopes,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        kv_cache_dtype="fp8" if key_cache.dtype == FP8_DTYPE else "auto",
        blocksparse=sparse,
    )


def _rows(
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    lengths: tuple[int, ...],
    new: tuple[int, ...],
) -> RowBatch:
    device = block_tables.device
    return RowBatch(
        query_start_loc=starts.to(device, torch.int32),
        seq_lens=seq_lens.to(device, torch.int32),
        block_tables=block_tables.to(torch.int32),
        query_lens_cpu=new,
        seq_lens_cpu=lengths,
        max_query_len=max(new, default=0),
        max_seq_len=max(lengths, default=0),
    )


def _check_rows(new: tuple[int, ...], lengths: tuple[int, ...], max_query_len: int, num_tokens: int) -> None:
    if len(new) != len(lengths) or sum(new) != num_tokens or any(n > t for n, t in zip(new, lengths, strict=True)):
        raise ValueError(f"query_start_loc gives rows of {new} new tokens, seq_lens are {lengths}, T is {num_tokens}")
    if max(new, default=0) > max_query_len:
        raise ValueError(f"max_query_len {max_query_len} is below the longest row's {max(new)}")


def _slots(block_tables: torch.Tensor, new: tuple[int, ...], lengths: tuple[int, ...], block_size: int) -> torch.Tensor:
    """int64 [T]: where each new token is stored, from the block tables."""
    device = block_tables.device
    rows = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new, dtype=torch.long)).to(device)
    positions = torch.cat([torch.arange(t - n, t) for n, t in zip(new, lengths, strict=True)] or [torch.arange(0)])
    positions = positions.to(device)
    return block_tables[rows, positions // block_size].long() * block_size + positions % block_size
