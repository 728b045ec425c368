"""Paged decode attention: one to eight new tokens a row, keys and values read once through the block table.

V1 gives each KV head of each row to one program. V2 cuts all the keys of the batch into equal runs of tiles
(decode_plan.py); whoever finishes the last of a set of neighbouring parts merges the set, and whoever finishes a
segment's last set merges the sets: no program reads many parts alone. What rows make of the prefixes they share is
given (shared_prefix.py), and counts with their first part. N rows, T new tokens, H query heads in groups of G
over K KV heads, D head size, S slots a block, B table columns, P programs. Launched by
decode_launch.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin_late
from tandem.kernels.triton_kernels.decode_plan import HEADER, RECORD, load_segment, load_share, parts_of
from tandem.kernels.triton_kernels.decode_segment import attend_segment, store_output
from tandem.kernels.triton_kernels.decode_tiles import (
    fetch_tiles,
    first_tile_of,
    load_part,
    merge_parts,
    merge_two,
    store_part,
)

UNSPECIALIZED = [
    "window", "table_row", "list_row", "num_segments", "sparse_local", "sparse_step", "sparse_first",
]  # fmt: skip


@triton.jit(
    do_not_specialize=UNSPECIALIZED,
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "query_starts", "prefix_lens"],
)
def paged_decode_kernel(
    output,  # [T, H, D] contiguous, of the query's dtype
    partial,  # SPLIT: as in DecodePlan
    peaks,
    totals,
    plan,
    query,  # [T, H, D], strides (query_row, query_head, 1)
    key_cache,  # [num_blocks, K, S, D], strides (cache_block, cache_head, cache_slot, 1)
    value_cache,  # as key_cache
    block_tables,  # int32 [N, B], strides (table_row, 1)
    seq_lens,  # int32 [N], the new tokens counted
    query_starts,  # int32 [N + 1], NUM_NEW > 1
    tile_lists,  # int32 [N, K, list_row], SPARSE_STRIDE: tiles that a KV head's group sees
    counts,  # int32 [N, K]: how many
    prefix_lens,  # int32 [N], HAS_PREFIX: leading tokens of each row whose part is given, one new token a row
    prefix_peaks,  # fp32 [N, H]
    prefix_totals,  # fp32 [N, H]
    prefix_partial,  # fp32 [N, H, D]
    alibi_slopes,  # fp32 [H]
    k_scale,  # fp32 [1]
    v_scale,  # fp32 [1]
    scale,
    soft_cap,
    window,
    num_segments,
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
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    MERGE_SET: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    SPARSE_STRIDE: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    FETCHED: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: SPLIT (P,), each over its run of the plan; else (N * K,), each over one segment. EARLY: an earlier launch
    had the same plan, so it and what it was made from are complete (`begin_late`), and programs fetch their first
    tiles, but for the newest tokens all of earlier steps, into L2 while the launch before this one ends."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    at = program * 0
    end = at + 1
    segment, segment_begin, segment_end = program, at, end
    if EARLY:
        at, end, segment, segment_begin, segment_end, seq_len = load_share(plan, program)
        first = at - segment_begin + first_tile_of(seq_len, NUM_NEW, window, HAS_WINDOW, TILE)
        if HAS_PREFIX:
            first += tl.load(prefix_lens + segment // NUM_KV_HEADS, cache_modifier=".cg") // TILE
        last = tl.minimum(first + tl.minimum(end, segment_end) - at, (seq_len + TILE - 1) // TILE)
        fetch_tiles(
            key_cache, value_cache, block_tables + (segment // NUM_KV_HEADS).to(tl.int64) * table_row,
            (segment % NUM_KV_HEADS).to(tl.int64) * cache_head, first, last, cache_block, cache_slot,
            HEAD_SIZE, BLOCK_SIZE, TILE, FETCHED,
        )  # fmt: skip
    begin_late(PDL)
    if SPLIT:
        if not EARLY:
            at, end, segment, segment_begin, segment_end, seq_len = load_share(plan, program)
    else:
        seq_len = tl.load(seq_lens + segment // NUM_KV_HEADS)
    while at < end:
        row = segment // NUM_KV_HEADS
        kv_head = segment % NUM_KV_HEADS
        stop = tl.minimum(end, segment_end)
        if SPLIT:  # what follows, loaded ahead
            following_begin, following_end = load_segment(plan, programs, segment + 1, stop < end)
            following_len = tl.load(seq_lens + (segment + 1) // NUM_KV_HEADS, mask=stop < end, other=0)
        before = first_tile_of(seq_len, NUM_NEW, window, HAS_WINDOW, TILE)
        if HAS_PREFIX:
            before = tl.load(prefix_lens + row) // TILE
        if SPARSE_STRIDE > 0:
            before = 0
        if SPLIT:
            first = before + at - segment_begin
            last = before + stop - segment_begin
            if SPARSE_STRIDE > 0:
                last = tl.minimum(last, tl.load(counts + segment))  # an empty row's list is empty
        else:
            first = before
            last = tl.load(counts + segment) if SPARSE_STRIDE > 0 else (seq_len + TILE - 1) // TILE
        if HAS_PREFIX:  # loaded ahead of the tiles: nothing waits for it then
            given = (at == segment_begin) & (before > 0)
            given_peak, given_total, given_accumulator = load_part(
                segment, given, prefix_peaks, prefix_totals, prefix_partial, GROUP, M_PAD, HEAD_SIZE, D_PAD
            )
        peak, total, accumulator = attend_segment(
            row, kv_head, seq_len, first, last, query, key_cache, value_cache, block_tables, query_starts,
            tile_lists, alibi_slopes, k_scale, scale, soft_cap, window, query_row, query_head, cache_block,
            cache_head, cache_slot, table_row, list_row, sparse_local, sparse_step, sparse_first,
            GROUP, NUM_NEW, M_PAD, HEAD_SIZE, D_PAD, BLOCK_SIZE, TILE, IS_FP8, HAS_ALIBI, HAS_WINDOW, HAS_SOFT_CAP,
            SPARSE_STRIDE, SPARSE_BLOCK, KEYS_FIRST, NUM_KV_HEADS,
        )  # fmt: skip
        if HAS_PREFIX:
            peak, total, accumulator = merge_two(peak, total, accumulator, given_peak, given_total, given_accumulator)
        whole = True
        if SPLIT:
            first_program, num_parts = parts_of(plan, segment_begin, segment_end)
            whole = num_parts == 1
        if whole:
            store_output(
                total, accumulator, output, query_starts, v_scale, row, kv_head,
                GROUP, NUM_NEW, NUM_KV_HEADS, HEAD_SIZE, D_PAD, IS_FP8,
            )  # fmt: skip
        elif SPLIT:
            slot_rows: tl.constexpr = GROUP * NUM_NEW
            used = tl.arange(0, M_PAD) < slot_rows
            store_part(
                segment + program, used, peak, total, accumulator, peaks, totals, partial, slot_rows, HEAD_SIZE, D_PAD
            )
            tl.debug_barrier()  # every thread's part is stored before the program says so
            arrivals = (
                plan + HEADER + RECORD * programs + num_segments + 1
            )  # of segments, after the S + 1 first tiles; then of sets
            first_slot = segment + first_program
            set_slot = first_slot + (program - first_program) // MERGE_SET * MERGE_SET
            set_parts = tl.minimum(first_slot + num_parts - set_slot, MERGE_SET)
            if tl.atomic_add(arrivals + num_segments + set_slot, 1, sem="acq_rel", scope="gpu") == set_parts - 1:
                tl.store(arrivals + num_segments + set_slot, 0)  # ready for the next launch
                peak_R, total_R, accumulator_R = merge_parts(
                    set_slot, 1, set_parts, peaks, totals, partial, slot_rows, 0, slot_rows, HEAD_SIZE, D_PAD, ROWS,
                    CHUNK,
                )  # fmt: skip
                complete = num_parts <= MERGE_SET
                if not complete:
                    used_R = tl.arange(0, ROWS) < slot_rows
                    store_part(
                        set_slot, used_R, peak_R, total_R, accumulator_R, peaks, totals, partial, slot_rows, HEAD_SIZE,
                        D_PAD,
                    )  # fmt: skip
                    tl.debug_barrier()
                    sets = tl.cdiv(num_parts, MERGE_SET)
                    if tl.atomic_add(arrivals + segment, 1, sem="acq_rel", scope="gpu") == sets - 1:
                        tl.store(arrivals + segment, 0)
                        peak_R, total_R, accumulator_R = merge_parts(
                            first_slot, MERGE_SET, sets, peaks, totals, partial, slot_rows, 0, slot_rows, HEAD_SIZE,
                            D_PAD, ROWS, CHUNK,
                        )  # fmt: skip
                        complete = True
                if complete:
                    store_output(
                        total_R, accumulator_R, output, query_starts, v_scale, row, kv_head,
                        GROUP, NUM_NEW, NUM_KV_HEADS, HEAD_SIZE, D_PAD, IS_FP8,
                    )  # fmt: skip
        at = stop
        segment += 1
        if SPLIT:
            segment_begin, segment_end, seq_len = following_begin, following_end, following_len
