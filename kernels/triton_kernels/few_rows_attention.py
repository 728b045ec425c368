"""Attention of a decode step of few rows, from the QKV product to the output projection in one launch: head norms,
rotation, the new token's way into the cache, attention over the paged cache, and merging.

With few rows a step waits for one thing after the other, so everything that does not hang on the product before is done
while that still runs: a program has the keys and values of its newest tile in registers when queries arrive, and takes
the new token's from there, too. Each KV head of each row is cut into equal runs of tiles by its own length; who is
last to finish merges the runs in their order.

R rows of one new token, H query heads in groups of G over K KV heads, D head size, C = (H + 2K) * D, S slots a block,
B table columns, P positions, N runs a KV head at most.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.triton_kernels.common import LOG2_E, dot, online_softmax
from tandem.kernels.triton_kernels.decode_segment import store_output
from tandem.kernels.triton_kernels.decode_tiles import merge_parts, store_part


@triton.jit
def normed_and_rotated(
    values, partners, weight, cos, signed_sin, eps,
    HEAD_SIZE: tl.constexpr, HAS_NORM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """[heads, D] of the QKV product; `partners` are the same with the halves of each head exchanged."""
    columns = tl.arange(0, HEAD_SIZE)
    values, partners = values.to(tl.float32), partners.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(values * values, 1) / HEAD_SIZE + eps)[:, None]
        values *= scale * tl.load(weight + columns).to(tl.float32)[None, :]
        partners *= scale * tl.load(weight + (columns + HEAD_SIZE // 2) % HEAD_SIZE).to(tl.float32)[None, :]
    return (values * cos[None, :] + partners * signed_sin[None, :]).to(dtype)


@triton.jit
def attend_tile(query, key, value, visible, scale, peak, total, accumulator):
    """`scale` includes log2(e)."""
    scores = tl.where(visible[None, :], dot(query, tl.trans(key)) * scale, float("-inf"))
    return online_softmax(scores, value, peak, total, accumulator)


@triton.jit(
    do_not_specialize=["most_runs", "table_row"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "slot_mapping"],
)
def few_rows_attention_kernel(
    output,  # [R, H, D] contiguous
    partial,  # fp32 [R * K * N, G, D]
    peaks,  # fp32 [R * K * N, G]
    totals,  # fp32 [R * K * N, G]
    arrivals,  # int32 [R * K], zero between launches
    qkv,  # [R, C], strides (qkv_row, 1): query heads, key heads, value heads
    cos_sin,  # fp32 [P, D] contiguous: cos of the D / 2 angles, then sin
    q_weight,  # [D], HAS_NORM
    k_weight,  # [D], HAS_NORM
    key_cache,  # [num_blocks, K, S, D], strides (cache_block, cache_head, cache_slot, 1)
    value_cache,  # as key_cache
    block_tables,  # int32 [R, B], strides (table_row, 1)
    seq_lens,  # int32 [R], the new token counted; 0: padding
    slot_mapping,  # int64 [R]; -1: not stored
    scale,
    eps,
    most_runs,
    qkv_row,
    cache_block,
    cache_head,
    cache_slot,
    table_row,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N, R * K). What is read before the wait was complete before the pass began: lengths, tables and older tokens.
    (A pass begins with torch's embedding, which lets nothing start before it has ended.)"""
    if PDL:
        gdc_launch_dependents()
    run, segment = tl.program_id(0), tl.program_id(1)
    row, kv_head = segment // NUM_KV_HEADS, segment % NUM_KV_HEADS
    seq_len = tl.load(seq_lens + row, cache_modifier=".cg")
    tiles = tl.maximum(tl.cdiv(seq_len, TILE), 1)
    share = tl.cdiv(tiles, most_runs)
    runs = tl.cdiv(tiles, share)
    if run >= runs:
        return
    newest = tl.minimum((run + 1) * share, tiles) - 1
    slots, columns = tl.arange(0, TILE), tl.arange(0, HEAD_SIZE)
    partner_columns = (columns + HEAD_SIZE // 2) % HEAD_SIZE
    inside = kv_head.to(tl.int64) * cache_head + slots[:, None] * cache_slot + columns[None, :]
    table = block_tables + row.to(tl.int64) * table_row
    block = tl.load(table + newest * TILE // BLOCK_SIZE, mask=seq_len > 0, other=0, cache_modifier=".cg")
    place = block.to(tl.int64) * cache_block + newest * TILE % BLOCK_SIZE * cache_slot + inside
    positions = newest * TILE + slots
    is_old = (positions < seq_len - 1)[:, None]
    newest_keys = tl.load(key_cache + place, mask=is_old, other=0.0, cache_modifier=".cg")
    newest_values = tl.load(value_cache + place, mask=is_old, other=0.0, cache_modifier=".cg")
    angles = cos_sin + tl.maximum(seq_len - 1, 0).to(tl.int64) * HEAD_SIZE + columns % (HEAD_SIZE // 2)
    cos = tl.load(angles)
    signed_sin = tl.load(angles + HEAD_SIZE // 2) * tl.where(columns < HEAD_SIZE // 2, -1.0, 1.0)
    slot = tl.load(slot_mapping + row, cache_modifier=".cg")
    if PDL:
        gdc_wait()

    dtype: tl.constexpr = qkv.dtype.element_ty
    of_row = qkv + row.to(tl.int64) * qkv_row
    members = tl.arange(0, M_PAD)
    used = members < GROUP
    heads = of_row + (kv_head * GROUP + members[:, None]) * HEAD_SIZE
    query = tl.load(heads + columns[None, :], mask=used[:, None], other=0.0)
    query_partners = tl.load(heads + partner_columns[None, :], mask=used[:, None], other=0.0)
    of_head = of_row + (NUM_KV_HEADS * GROUP + kv_head) * HEAD_SIZE
    key = tl.load(of_head + columns[None, :])
    key_partners = tl.load(of_head + partner_columns[None, :])
    value = tl.load(of_head + NUM_KV_HEADS * HEAD_SIZE + columns[None, :])
    query = normed_and_rotated(query, query_partners, q_weight, cos, signed_sin, eps, HEAD_SIZE, HAS_NORM, dtype)
    key = normed_and_rotated(key, key_partners, k_weight, cos, signed_sin, eps, HEAD_SIZE, HAS_NORM, dtype)
    if (newest == tiles - 1) & (slot >= 0):
        into = (slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * cache_slot + kv_head.to(tl.int64) * cache_head
        tl.store(key_cache + into + columns[None, :], key)
        tl.store(value_cache + into + columns[None, :], value)

    scale *= LOG2_E
    peak = tl.full([M_PAD], float("-inf"), tl.float32)
    total = tl.zeros([M_PAD], tl.float32)
    accumulator = tl.zeros([M_PAD, HEAD_SIZE], tl.float32)
    is_new = (positions == seq_len - 1)[:, None]
    newest_keys, newest_values = tl.where(is_new, key, newest_keys), tl.where(is_new, value, newest_values)
    peak, total, accumulator = attend_tile(
        query, newest_keys, newest_values, positions < seq_len, scale, peak, total, accumulator
    )
    # One tile ahead by hand: a load of addresses inside the loop would be pipelined itself, at the cost of the keys.
    next_block = tl.load(table + run * share * TILE // BLOCK_SIZE, mask=seq_len > 0, other=0)
    for tile in range(run * share, newest):
        place = next_block.to(tl.int64) * cache_block + tile * TILE % BLOCK_SIZE * cache_slot + inside
        next_block = tl.load(table + (tile + 1) * TILE // BLOCK_SIZE)
        keys = tl.load(key_cache + place)
        values = tl.load(value_cache + place)
        peak, total, accumulator = attend_tile(query, keys, values, slots < TILE, scale, peak, total, accumulator)

    if runs == 1:
        store_output(
            total, accumulator, output, seq_lens, cos_sin, row, kv_head,
            GROUP, 1, NUM_KV_HEADS, HEAD_SIZE, HEAD_SIZE, False,
        )  # fmt: skip
    else:
        first_slot = segment * most_runs
        store_part(
            first_slot + run, used, peak, total, accumulator, peaks, totals, partial, GROUP, HEAD_SIZE, HEAD_SIZE
        )
        tl.debug_barrier()  # every thread's part is stored before the program says so
        if tl.atomic_add(arrivals + segment, 1, sem="acq_rel", scope="gpu") == runs - 1:
            tl.store(arrivals + segment, 0)  # ready for the next launch
            _, total_R, accumulator_R = merge_parts(
                first_slot, 1, runs, peaks, totals, partial, GROUP, 0, GROUP, HEAD_SIZE, HEAD_SIZE, ROWS, CHUNK
            )
            store_output(
                total_R, accumulator_R, output, seq_lens, cos_sin, row, kv_head,
                GROUP, 1, NUM_KV_HEADS, HEAD_SIZE, HEAD_SIZE, False,
            )  # fmt: skip
