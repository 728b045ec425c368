"""One row's part of decode attention: its query rows, the keys they see, and where the result goes.

N rows, T new tokens, H query heads in groups of G over K KV heads, D head size.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import add_sinks
from tandem.kernels.triton_kernels.decode.decode_tiles import attend_tiles


@triton.jit
def attend_segment(
    row,
    kv_head,
    late,
    seq_len,
    first,  # tiles [first, last)
    last,
    query,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    tile_lists,
    alibi_slopes,
    k_scale,
    scale,
    soft_cap,
    window,
    query_row,
    query_head,
    cache_block,
    cache_head,
    cache_slot,
    table_row,
    list_row,
    sparse_local,
    sparse_step,
    sparse_first,
    GROUP: tl.constexpr,
    NUM_NEW: tl.constexpr,
    M_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    SPARSE_STRIDE: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    LATE: tl.constexpr,
):
    """A part of one KV head of one row: query row m is new token m // GROUP, head m % GROUP."""
    members = tl.arange(0, M_PAD)
    heads = kv_head * GROUP + members % GROUP
    begin = row.to(tl.int64)
    num_new = 1
    if NUM_NEW > 1:
        begin = tl.load(query_starts + row).to(tl.int64)
        num_new = (tl.load(query_starts + row + 1) - begin).to(tl.int32)
    used = members < num_new * GROUP
    tokens = begin + members // GROUP
    offsets = tokens * query_row + heads * query_head
    columns = tl.arange(0, D_PAD)
    query_pointers = query + offsets[:, None] + columns[None, :]
    query_mask = used[:, None] & (columns < HEAD_SIZE)[None, :]
    positions = tl.where(used, seq_len - num_new + members // GROUP, -1)
    slopes = tl.zeros([M_PAD], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + heads, mask=used, other=0.0)
    shifts = tl.zeros([M_PAD], tl.int32)
    tiles = block_tables
    if SPARSE_STRIDE > 0:
        shifts = sparse_shift(kv_head, heads, sparse_first, sparse_step)
        tiles = tile_lists + (row * NUM_KV_HEADS + kv_head).to(tl.int64) * list_row
    return attend_tiles(
        query_pointers, query_mask, late, k_scale, scale, positions, slopes, shifts,
        key_cache + kv_head.to(tl.int64) * cache_head, value_cache + kv_head.to(tl.int64) * cache_head,
        block_tables + row.to(tl.int64) * table_row, tiles, first, last, seq_len, soft_cap, window, cache_block,
        cache_slot, sparse_local, HEAD_SIZE, D_PAD, BLOCK_SIZE, TILE, HAS_ALIBI, WINDOW, HAS_SOFT_CAP,
        SPARSE_STRIDE, SPARSE_BLOCK, KEYS_FIRST, IS_FP8, LATE,
    )  # fmt: skip


@triton.jit
def sparse_shift(kv_head, heads, first, step):
    """The vertical blocks' offset of each query head; a negative step slides over KV heads (spec.BlockSparse)."""
    sliding = tl.where(step >= 0, heads, kv_head)
    return (first + sliding) * tl.where(step >= 0, step, -step) + 1


@triton.jit
def store_output(
    peak, total, accumulator, output, query_starts, v_scale, sinks, row, kv_head,
    GROUP: tl.constexpr, NUM_NEW: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr, IS_FP8: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Normalized, to [T, H, D]. Rows that saw no key give zeros."""
    if HAS_SINKS:
        heads = kv_head * GROUP + tl.arange(0, total.shape[0]) % GROUP
        total, accumulator = add_sinks(tl.load(sinks + heads), peak, total, accumulator)
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    if IS_FP8:
        result *= tl.load(v_scale)
    members = tl.arange(0, total.shape[0])
    columns = tl.arange(0, D_PAD)
    begin = row.to(tl.int64)
    num_new = 1
    if NUM_NEW > 1:
        begin = tl.load(query_starts + row).to(tl.int64)
        num_new = (tl.load(query_starts + row + 1) - begin).to(tl.int32)
    entries = (begin + members // GROUP) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + members % GROUP
    mask = (members < num_new * GROUP)[:, None] & (columns < HEAD_SIZE)[None, :]
    tl.store(output + entries[:, None] * HEAD_SIZE + columns[None, :], result.to(output.dtype.element_ty), mask=mask)
