"""Paged decode attention: one new token a row, keys and values read through the block table.

V1 computes a row in one pass; V2 splits a row's keys into partitions of PARTITION_SIZE tokens and a second kernel
reduces them (flash decoding). N rows, H query heads in groups of G over K KV heads, D head size, S slots a block,
P partitions.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.partitions import PARTITION_SIZE, num_partitions
from tandem.kernels.triton_kernels.common import (
    check_cache,
    check_tokens,
    load_rows,
    masked_scores,
    online_softmax,
    padded_head_size,
    tile_of,
)

REDUCE_CHUNK = 16  # partitions reduced at once


@triton.jit
def paged_decode_kernel(
    output,  # [N, H, D] of the query's dtype; V2: fp32 [N, H, P, D], unnormalized
    peaks,  # V2: fp32 [N, H, P], contiguous: largest score (log2 units)
    totals,  # V2: fp32 [N, H, P], contiguous: sum of exp2(score - peak)
    query,  # [N, H, D], strides (query_row, query_head, 1)
    key_cache,  # [num_blocks, K, S, D], strides (cache_block, cache_head, cache_slot, 1)
    value_cache,  # as key_cache
    block_tables,  # int32 [N, B], strides (table_row, 1)
    seq_lens,  # int32 [N]
    alibi_slopes,  # fp32 [H]
    k_scale,  # fp32 [1]
    v_scale,  # fp32 [1]
    scale,
    soft_cap,
    window,
    partition_size,
    query_row,
    query_head,
    cache_block,
    cache_head,
    cache_slot,
    table_row,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Grid (N, K, P): all query heads of one KV head of one row, over one partition of its keys."""
    row, kv_head, partition = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    first = partition * partition_size
    if SPLIT and first >= seq_len:
        return
    last = tl.minimum(seq_len, first + partition_size)
    if HAS_WINDOW:
        first = tl.maximum(first, tl.maximum(seq_len - window, 0) // TILE * TILE)
    members = tl.arange(0, GROUP_PAD)
    heads = kv_head * GROUP + members
    query_tile = load_rows(query + row.to(tl.int64) * query_row, heads, query_head, members < GROUP, HEAD_SIZE, D_PAD)
    query_positions = tl.full([GROUP_PAD], 0, tl.int32) + seq_len - 1
    slopes = tl.zeros([GROUP_PAD], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + heads, mask=members < GROUP, other=0.0)
    if IS_FP8:
        scale *= tl.load(k_scale)
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    accumulator = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for start in range(first, last, TILE):
        block_id = tl.load(block_tables + row.to(tl.int64) * table_row + start // BLOCK_SIZE).to(tl.int64)
        base = block_id * cache_block + kv_head * cache_head
        slots = start % BLOCK_SIZE + tl.arange(0, TILE)
        positions = start + tl.arange(0, TILE)
        valid = positions < seq_len
        if HAS_WINDOW:
            valid = valid & (positions >= seq_len - window)
        key = load_rows(key_cache + base, slots, cache_slot, valid, HEAD_SIZE, D_PAD).to(query_tile.dtype)
        value = load_rows(value_cache + base, slots, cache_slot, valid, HEAD_SIZE, D_PAD).to(query_tile.dtype)
        scores = masked_scores(
            query_tile, key, query_positions, positions, valid, slopes, scale, soft_cap, window,
            HAS_ALIBI, HAS_WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip
        peak, total, accumulator = online_softmax(scores, value, peak, total, accumulator)
    if IS_FP8:
        accumulator *= tl.load(v_scale)
    columns = tl.arange(0, D_PAD)
    mask = (members < GROUP)[:, None] & (columns < HEAD_SIZE)[None, :]
    flat_heads = row.to(tl.int64) * (tl.num_programs(1) * GROUP) + heads
    if SPLIT:
        entries = flat_heads * tl.num_programs(2) + partition
        tl.store(peaks + entries, peak, mask=members < GROUP)
        tl.store(totals + entries, total, mask=members < GROUP)
        tl.store(output + entries[:, None] * HEAD_SIZE + columns[None, :], accumulator, mask=mask)
    else:
        result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]  # a row of length 0 gives zeros
        offsets = flat_heads[:, None] * HEAD_SIZE + columns[None, :]
        tl.store(output + offsets, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def reduce_partitions_kernel(
    output,  # [N, H, D] contiguous, of the query's dtype
    partial,  # fp32 [N, H, P, D] contiguous
    peaks,  # fp32 [N, H, P] contiguous
    totals,  # fp32 [N, H, P] contiguous
    seq_lens,  # int32 [N]
    num_partitions,
    partition_size,
    HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (N, H): one head of one row; partitions past the row's end were never written and are not read."""
    row, head = tl.program_id(0), tl.program_id(1)
    flat_head = row.to(tl.int64) * tl.num_programs(1) + head
    used = (tl.load(seq_lens + row) + partition_size - 1) // partition_size
    peak = tl.full([1], float("-inf"), tl.float32)
    for start in range(0, used, CHUNK):
        index = start + tl.arange(0, CHUNK)
        chunk = tl.load(peaks + flat_head * num_partitions + index, mask=index < used, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(chunk, 0))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([1], tl.float32)
    accumulator = tl.zeros([D_PAD], tl.float32)
    columns = tl.arange(0, D_PAD)
    for start in range(0, used, CHUNK):
        index = start + tl.arange(0, CHUNK)
        entries = flat_head * num_partitions + index
        weights = tl.exp2(tl.load(peaks + entries, mask=index < used, other=float("-inf")) - base)
        total += tl.sum(weights * tl.load(totals + entries, mask=index < used, other=0.0), 0)
        mask = (index < used)[:, None] & (columns < HEAD_SIZE)[None, :]
        parts = tl.load(partial + entries[:, None] * HEAD_SIZE + columns[None, :], mask=mask, other=0.0)
        accumulator += tl.sum(weights[:, None] * parts, 0)
    result = accumulator / tl.where(total == 0.0, 1.0, total)
    tl.store(output + flat_head * HEAD_SIZE + columns, result.to(output.dtype.element_ty), mask=columns < HEAD_SIZE)


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    *,
    version: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """query [N, H, D] -> [N, H, D]. `version` "V1" or "V2"; scales are fp32 [1], read for fp8 caches only.

    Raises ValueError for shapes or strides that don't fit.
    """
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[1]
    check_tokens("query", query, num_heads, head_size)
    check_cache(key_cache, value_cache, num_kv_heads, head_size)
    if block_tables.shape[0] < num_rows or seq_lens.shape[0] != num_rows or block_tables.stride(1) != 1:
        raise ValueError(f"{num_rows} rows, block_tables {tuple(block_tables.shape)}, seq_lens {tuple(seq_lens.shape)}")
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_rows == 0:
        return output
    split = version == "V2"
    parts = num_partitions(max_seq_len) if split else 1
    shape = (num_rows, num_heads, parts)
    scratch = (
        [query.new_empty(size, dtype=torch.float32) for size in ((*shape, head_size), shape, shape)] if split else []
    )
    target, peaks, totals = scratch if split else (output, output, output)
    paged_decode_kernel[(num_rows, num_kv_heads, parts)](
        target, peaks, totals, query, key_cache, value_cache, block_tables, seq_lens,
        query if alibi_slopes is None else alibi_slopes, k_scale, v_scale,
        scale, soft_cap or 0.0, window or 0, PARTITION_SIZE if split else max(max_seq_len, 1),
        query.stride(0), query.stride(1), *key_cache.stride()[:3], block_tables.stride(0),
        **decode_constants(query.dtype, num_heads // num_kv_heads, head_size, key_cache.shape[2]),
        SPLIT=split, IS_FP8=key_cache.element_size() == 1, HAS_ALIBI=alibi_slopes is not None,
        HAS_WINDOW=window is not None, HAS_SOFT_CAP=soft_cap is not None,
    )  # fmt: skip
    if split:
        reduce_partitions_kernel[(num_rows, num_heads)](
            output, target, peaks, totals, seq_lens, parts, PARTITION_SIZE,
            HEAD_SIZE=head_size, D_PAD=padded_head_size(head_size), CHUNK=REDUCE_CHUNK,
        )  # fmt: skip
    return output


def decode_constants(dtype: torch.dtype, group: int, head_size: int, block_size: int) -> dict[str, int]:
    """Tile sizes and launch options; small tiles where elements are wide, so that shared memory suffices."""
    wide = dtype.itemsize * padded_head_size(head_size) > 256
    return {
        "GROUP": group,
        "GROUP_PAD": max(16, triton.next_power_of_2(group)),
        "HEAD_SIZE": head_size,
        "D_PAD": padded_head_size(head_size),
        "BLOCK_SIZE": block_size,
        "TILE": tile_of(block_size, 32 if wide else 64),
        "num_warps": 4,
        "num_stages": 1 if wide else 2,
    }
