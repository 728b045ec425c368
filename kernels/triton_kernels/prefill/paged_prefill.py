"""Paged prefill attention: ragged new tokens, causal among themselves, over a prefix read through the block table;
encoders' attention both ways; cross attention, which sees the prefix alone.

N rows, T new tokens in all, H query heads over K KV heads, D head size, S slots a block. The prefix of a row is its
first seq_len - query_len tokens; it may end inside a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.api.spec import BlockSparse, Reach
from tandem.kernels.triton_kernels.common import (
    add_sinks,
    cdiv,
    check_cache,
    check_tokens,
    load_rows,
    masked_scores,
    oldest_seen,
    online_softmax,
    padded_head_size,
    tile_of,
)
from tandem.kernels.triton_kernels.decode.decode_launch import first_sparse_head
from tandem.kernels.triton_kernels.decode.decode_segment import sparse_shift


@triton.jit
def paged_prefill_kernel(
    output,  # [T, H, D] contiguous
    query,  # [T, H, D], strides (query_token, query_head, 1)
    key,  # [T, K, D], strides (key_token, key_head, 1): new tokens
    value,  # [T, K, D], strides (value_token, value_head, 1)
    key_cache,  # [num_blocks, K, S, D], strides (cache_block, cache_head, cache_slot, 1)
    value_cache,  # as key_cache
    block_tables,  # int32 [N, B], strides (table_row, 1)
    query_start_loc,  # int32 [N+1]
    seq_lens,  # int32 [N]
    alibi_slopes,  # fp32 [H]
    sinks,  # fp32 [H]
    k_scale,  # fp32 [1]
    v_scale,  # fp32 [1]
    scale,
    soft_cap,
    window,
    sparse_local,
    sparse_step,
    sparse_first,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    cache_block,
    cache_head,
    cache_slot,
    table_row,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CACHE_TILE: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPARSE_STRIDE: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Grid (ceil(max_query_len / QUERY_TILE), H, N): one tile of queries of one head of one row. Not CAUSAL: queries
    see their row's prefix (HAS_CACHE), and count from its beginning, or all new tokens."""
    head, row = tl.program_id(1), tl.program_id(2)
    kv_head = head // GROUP
    first_token = tl.load(query_start_loc + row).to(tl.int64)
    query_len = (tl.load(query_start_loc + row + 1) - first_token).to(tl.int32)
    first_query = tl.program_id(0) * QUERY_TILE
    if first_query >= query_len:
        return
    num_earlier = tl.load(seq_lens + row) - query_len
    members = first_query + tl.arange(0, QUERY_TILE)
    in_row = members < query_len
    query_tile = load_rows(
        query + first_token * query_token + head * query_head, members, query_token, in_row, HEAD_SIZE, D_PAD
    )
    num_before = num_earlier if CAUSAL else 0
    query_positions = num_before + members
    slopes = tl.zeros([QUERY_TILE], tl.float32)
    if HAS_ALIBI:
        slopes += tl.load(alibi_slopes + head)
    shift = 0
    if SPARSE_STRIDE > 0:
        shift = sparse_shift(kv_head, head, sparse_first, sparse_step)
    lowest = 0
    stop_cache = num_earlier
    stop_new = tl.minimum(first_query + QUERY_TILE, query_len) if CAUSAL else query_len
    if WINDOW:
        lowest = tl.maximum(oldest_seen(num_before + first_query, window, WINDOW), 0)
        if not CAUSAL:
            stop_cache = tl.minimum(stop_cache, first_query + QUERY_TILE - 1 + window)
            stop_new = tl.minimum(stop_new, first_query + QUERY_TILE - 1 + window)
    if HAS_CACHE and not CAUSAL:
        stop_new = 0
    peak = tl.full([QUERY_TILE], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    accumulator = tl.zeros([QUERY_TILE, D_PAD], tl.float32)

    if HAS_CACHE:
        for start in range(lowest // CACHE_TILE * CACHE_TILE, stop_cache, CACHE_TILE):
            block_id = tl.load(block_tables + row.to(tl.int64) * table_row + start // BLOCK_SIZE).to(tl.int64)
            base = block_id * cache_block + kv_head * cache_head
            slots = start % BLOCK_SIZE + tl.arange(0, CACHE_TILE)
            positions = start + tl.arange(0, CACHE_TILE)
            valid = (positions < num_earlier) & (positions >= lowest)
            old_key = load_rows(key_cache + base, slots, cache_slot, valid, HEAD_SIZE, D_PAD)
            old_value = load_rows(value_cache + base, slots, cache_slot, valid, HEAD_SIZE, D_PAD)
            if IS_FP8:
                old_key = old_key.to(tl.float32) * tl.load(k_scale)
                old_value = old_value.to(tl.float32) * tl.load(v_scale)
            old_key, old_value = old_key.to(query_tile.dtype), old_value.to(query_tile.dtype)
            scores = masked_scores(
                query_tile, old_key, query_positions, positions, valid, slopes, scale, soft_cap, window, sparse_local,
                shift, HAS_ALIBI, WINDOW, HAS_SOFT_CAP, SPARSE_STRIDE, SPARSE_BLOCK, CAUSAL,
            )  # fmt: skip
            peak, total, accumulator = online_softmax(scores, old_value, peak, total, accumulator)

    new_keys = key + first_token * key_token + kv_head * key_head
    new_values = value + first_token * value_token + kv_head * value_head
    start_new = tl.maximum(lowest - num_before, 0) // KEY_TILE * KEY_TILE
    for start in range(start_new, stop_new, KEY_TILE):
        tokens = start + tl.arange(0, KEY_TILE)
        valid = tokens < query_len
        new_key = load_rows(new_keys, tokens, key_token, valid, HEAD_SIZE, D_PAD)
        new_value = load_rows(new_values, tokens, value_token, valid, HEAD_SIZE, D_PAD)
        scores = masked_scores(
            query_tile, new_key, query_positions, num_before + tokens, valid, slopes, scale, soft_cap, window,
            sparse_local, shift, HAS_ALIBI, WINDOW, HAS_SOFT_CAP, SPARSE_STRIDE, SPARSE_BLOCK, CAUSAL,
        )  # fmt: skip
        peak, total, accumulator = online_softmax(scores, new_value, peak, total, accumulator)

    columns = tl.arange(0, D_PAD)
    if HAS_SINKS:
        row_sinks = tl.zeros([QUERY_TILE], tl.float32) + tl.load(sinks + head)
        total, accumulator = add_sinks(row_sinks, peak, total, accumulator)
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    offsets = ((first_token + members) * tl.num_programs(1) + head)[:, None] * HEAD_SIZE + columns[None, :]
    mask = in_row[:, None] & (columns < HEAD_SIZE)[None, :]
    tl.store(output + offsets, result.to(output.dtype.element_ty), mask=mask)


def paged_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    reach: Reach = Reach(),
    soft_cap: float | None = None,
    sparse: BlockSparse | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """query [T, H, D], key/value [T, K, D] -> [T, H, D]. Without caches no row has a prefix.

    The cache may already hold the new tokens; they are read from `key` and `value`. Not `causal`: encoders' attention
    without caches, else cross attention over the rows' first seq_len - query_len tokens alone; rows that see no key
    give zeros. Raises ValueError for shapes or strides that don't fit.
    """
    num_heads, head_size = query.shape[1:]
    num_kv_heads, num_rows = key.shape[1], seq_lens.shape[0]
    check_tokens("query", query, num_heads, head_size)
    check_tokens("key", key, num_kv_heads, head_size)
    check_tokens("value", value, num_kv_heads, head_size)
    has_cache = key_cache is not None and value_cache is not None
    if key_cache is not None and value_cache is not None:
        check_cache(key_cache, value_cache, num_kv_heads, head_size)
        cache_strides, block_size = key_cache.stride()[:3], key_cache.shape[2]
    else:
        key_cache, value_cache, cache_strides, block_size = key, value, (0, 0, 0), 64
    if query_start_loc.shape[0] != num_rows + 1 or block_tables.shape[0] < num_rows:
        raise ValueError(f"{num_rows} rows, query_start_loc {tuple(query_start_loc.shape)}")
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if query.shape[0] == 0 or max_query_len == 0:
        return output
    constants = prefill_constants(query.dtype, num_heads // num_kv_heads, head_size, block_size)
    grid = (cdiv(max_query_len, constants["QUERY_TILE"]), num_heads, num_rows)
    paged_prefill_kernel[grid](
        output, query, key, value, key_cache, value_cache, block_tables, query_start_loc, seq_lens,
        query if alibi_slopes is None else alibi_slopes, query if sinks is None else sinks, k_scale, v_scale,
        scale, soft_cap or 0.0, reach.size, sparse.local_blocks if sparse else 0,
        sparse.head_sliding_step if sparse else 0, first_sparse_head(sparse, num_heads, num_kv_heads),
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *cache_strides, block_tables.stride(0),
        **constants, HAS_CACHE=has_cache, IS_FP8=has_cache and key_cache.element_size() == 1,
        HAS_ALIBI=alibi_slopes is not None, WINDOW=reach.kind, HAS_SOFT_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
        SPARSE_STRIDE=sparse.vert_stride if sparse else 0, SPARSE_BLOCK=sparse.block_size if sparse else 0,
        CAUSAL=causal,
    )  # fmt: skip
    return output


def prefill_constants(dtype: torch.dtype, group: int, head_size: int, block_size: int) -> dict[str, int]:
    """Tile sizes and launch options; small tiles where elements are wide, so that shared memory suffices."""
    row_bytes = dtype.itemsize * padded_head_size(head_size)
    query_tile, key_tile = (128, 64) if row_bytes <= 256 else (64, 32)
    if row_bytes > 512:
        query_tile = 32
    return {
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "D_PAD": padded_head_size(head_size),
        "BLOCK_SIZE": block_size,
        "QUERY_TILE": query_tile,
        "KEY_TILE": key_tile,
        "CACHE_TILE": tile_of(block_size, key_tile),
        "num_warps": 8 if query_tile == 128 else 4,
        "num_stages": 2 if row_bytes <= 256 else 1,
    }
