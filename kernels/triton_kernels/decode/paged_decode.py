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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.triton_kernels.common import begin_late
from tandem.kernels.triton_kernels.decode.decode_parts import finish_segment, store_part
from tandem.kernels.triton_kernels.decode.decode_plan import load_segment, load_share, parts_of
from tandem.kernels.triton_kernels.decode.decode_segment import attend_segment, store_output
from tandem.kernels.triton_kernels.decode.decode_tiles import first_tile_of

AHEAD: tl.constexpr = tl.constexpr(4)  # tiles that are loaded before a program knows its query, at most

UNSPECIALIZED = [
    "window", "table_row", "list_row", "num_segments", "prefix_programs", "sparse_local", "sparse_step", "sparse_first",
]  # fmt: skip


@triton.jit(
    do_not_specialize=UNSPECIALIZED,
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "query_starts", "prefix_lens", "prefix_places"],
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
    prefix_partial,  # HAS_PREFIX: what shared_prefix_kernel makes, one new token a row
    prefix_peaks,
    prefix_totals,
    prefix_plan,  # its plan
    prefix_lens,  # int32 [N]: leading tokens of each row that it reads
    prefix_places,  # int32 [N]
    alibi_slopes,  # fp32 [H]
    sinks,  # fp32 [H]
    k_scale,  # fp32 [1]
    v_scale,  # fp32 [1]
    scale,
    soft_cap,
    window,
    num_segments,
    prefix_programs,
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
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    PREFIX_MEMBERS: tl.constexpr,
    SPARSE_STRIDE: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: SPLIT (P,), each over its run of the plan; else (N * K,), each over one segment. EARLY: an earlier launch
    had the same plan, so it and what it was made from are complete (`begin_late`), and while the launch before this one
    ends programs load their first tiles, unless there are new tokens among them; then only the query is missing."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    at = program * 0
    end = at + 1
    segment, segment_begin, segment_end = program, at, end
    late = program < 0
    if EARLY:
        at, end, segment, segment_begin, segment_end, seq_len = load_share(plan, program)
        first = at - segment_begin + first_tile_of(seq_len, NUM_NEW, window, WINDOW, TILE)
        last = first + tl.minimum(end, segment_end) - at
        # Rows may be tokens of one sequence, each of which sees what the others store: of a row's tokens as many may be
        # new as the launch has.
        num_stored = seq_len - num_segments // NUM_KV_HEADS * NUM_NEW
        late = (at < end) & (tl.minimum(first + AHEAD, last) * TILE <= num_stored)
    if HAS_PREFIX:  # beside the prefixes' launch, which began late: all before it is complete
        if PDL:
            gdc_launch_dependents()
    elif not late:
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
        before = first_tile_of(seq_len, NUM_NEW, window, WINDOW, TILE)
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
        peak, total, accumulator = attend_segment(
            row, kv_head, late, seq_len, first, last, query, key_cache, value_cache, block_tables, query_starts,
            tile_lists, alibi_slopes, k_scale, scale, soft_cap, window, query_row, query_head, cache_block,
            cache_head, cache_slot, table_row, list_row, sparse_local, sparse_step, sparse_first,
            GROUP, NUM_NEW, M_PAD, HEAD_SIZE, D_PAD, BLOCK_SIZE, TILE, IS_FP8, HAS_ALIBI, WINDOW, HAS_SOFT_CAP,
            SPARSE_STRIDE, SPARSE_BLOCK, KEYS_FIRST, NUM_KV_HEADS, EARLY,
        )  # fmt: skip
        whole = True
        if SPLIT:
            first_program, num_parts = parts_of(plan, segment_begin, segment_end)
            whole = num_parts == 1
        if HAS_PREFIX:
            whole = False
        if whole:
            store_output(
                peak, total, accumulator, output, query_starts, v_scale, sinks, row, kv_head,
                GROUP, NUM_NEW, NUM_KV_HEADS, HEAD_SIZE, D_PAD, IS_FP8, HAS_SINKS,
            )  # fmt: skip
        elif SPLIT:
            used = tl.arange(0, M_PAD) < GROUP * NUM_NEW
            store_part(
                segment + program, used, peak, total, accumulator, peaks, totals, partial, GROUP * NUM_NEW, HEAD_SIZE,
                D_PAD,
            )  # fmt: skip
            if not HAS_PREFIX:
                finish_segment(
                    output, partial, peaks, totals, plan, query_starts, v_scale, sinks, None, None, None, None, None,
                    None, segment, first_program, num_parts, num_segments, 0,
                    GROUP, NUM_NEW, ROWS, CHUNK, MERGE_SET, HEAD_SIZE, D_PAD, NUM_KV_HEADS, IS_FP8, HAS_SINKS, 0,
                )  # fmt: skip
        at = stop
        late = program < 0
        segment += 1
        if SPLIT:
            segment_begin, segment_end, seq_len = following_begin, following_end, following_len
    if HAS_PREFIX:
        if PDL:
            gdc_wait()
        at, end, segment, segment_begin, segment_end, seq_len = load_share(plan, program)
        while at < end:
            first_program, num_parts = parts_of(plan, segment_begin, segment_end)
            finish_segment(
                output, partial, peaks, totals, plan, query_starts, v_scale, sinks, prefix_partial, prefix_peaks,
                prefix_totals, prefix_plan, prefix_lens, prefix_places, segment, first_program, num_parts,
                num_segments, prefix_programs, GROUP, NUM_NEW, ROWS, CHUNK, MERGE_SET, HEAD_SIZE, D_PAD, NUM_KV_HEADS,
                IS_FP8, HAS_SINKS, PREFIX_MEMBERS,
            )  # fmt: skip
            at = tl.minimum(end, segment_end)
            segment += 1
            segment_begin, segment_end = load_segment(plan, programs, segment, at < end)
