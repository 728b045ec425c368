"""Paged decode attention: one to eight new tokens a row, keys and values read once through the block table.

V1 gives each KV head of each row to one program. V2 cuts all the keys of the batch into equal runs of tiles
(decode_plan.py); the program that finishes a row's last part merges its parts. N rows, T new tokens, H query heads in
groups of G over K KV heads, D head size, S slots a block, B table columns, P programs.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tandem.kernels.errors import UnsupportedOptionError
from tandem.kernels.spec import BlockSparse
from tandem.kernels.triton_kernels.common import (
    INTERPRET,
    begin,
    check_cache,
    check_tokens,
    load_rows,
    overlap,
    padded_head_size,
)
from tandem.kernels.triton_kernels.decode_plan import DecodePlan, load_segment, load_share, parts_of
from tandem.kernels.triton_kernels.decode_tiles import (
    attend_tiles,
    first_tile_of,
    merge_parts,
    prepare_query,
    store_part,
)

MAX_NEW_TOKENS = 8  # of a row
PROGRAMS_PER_MULTIPROCESSOR = 2
MAX_PRODUCT_ROWS = 128  # query rows that one program multiplies with a tile of keys
MERGED_ELEMENTS = 4096  # of parts loaded at once when they are merged


@triton.jit
def attend_segment(
    row,
    kv_head,
    first,  # tiles [first, last)
    last,
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    SPARSE_STRIDE: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
):
    """A part of one KV head of one row: query row m is new token m // GROUP, head m % GROUP."""
    seq_len = tl.load(seq_lens + row)
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
    query_tile = load_rows(query, offsets, 1, used, HEAD_SIZE, D_PAD)
    positions = tl.where(used, seq_len - num_new + members // GROUP, -1)
    slopes = tl.zeros([M_PAD], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + heads, mask=used, other=0.0)
    if IS_FP8:
        scale *= tl.load(k_scale)
    query_tile, row_scale = prepare_query(query_tile, scale, IS_FP8)
    shifts = tl.zeros([M_PAD], tl.int32)
    tiles = block_tables
    if SPARSE_STRIDE > 0:
        shifts = sparse_shift(kv_head, heads, sparse_first, sparse_step)
        tiles = tile_lists + (row * NUM_KV_HEADS + kv_head).to(tl.int64) * list_row
    return attend_tiles(
        query_tile, row_scale, positions, slopes, shifts, key_cache + kv_head.to(tl.int64) * cache_head,
        value_cache + kv_head.to(tl.int64) * cache_head, block_tables + row.to(tl.int64) * table_row, tiles,
        first, last, seq_len, soft_cap, window, cache_block, cache_slot, sparse_local,
        HEAD_SIZE, D_PAD, BLOCK_SIZE, TILE, HAS_ALIBI, HAS_WINDOW, HAS_SOFT_CAP, SPARSE_STRIDE, SPARSE_BLOCK,
    )  # fmt: skip


@triton.jit
def sparse_shift(kv_head, heads, first, step):
    """The vertical blocks' offset of each query head; a negative step slides over KV heads (spec.BlockSparse)."""
    sliding = tl.where(step >= 0, heads, kv_head)
    return (first + sliding) * tl.where(step >= 0, step, -step) + 1


@triton.jit
def store_output(
    total, accumulator, output, query_starts, v_scale, row, kv_head,
    GROUP: tl.constexpr, NUM_NEW: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Normalized, to [T, H, D]. Rows that saw no key give zeros."""
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


UNSPECIALIZED = [
    "window", "table_row", "list_row", "num_segments", "sparse_local", "sparse_step", "sparse_first", "prefix_programs",
    "prefix_rows",
]  # fmt: skip


@triton.jit(
    do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=["block_tables", "seq_lens", "query_starts"]
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
    prefix_lens,  # int32 [N], HAS_PREFIX: tokens whose parts lie in prefix_partial, …
    prefix_places,  # int32 [N]: chunk * members + index of the row in its chunk
    prefix_partial,
    prefix_peaks,
    prefix_totals,
    prefix_plan,
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
    prefix_programs,
    prefix_rows,  # query rows of a chunk
    GROUP: tl.constexpr,
    NUM_NEW: tl.constexpr,
    M_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
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
    PDL: tl.constexpr,
):
    """Grid: SPLIT (P,), each over its run of the plan; else (N * K,), each over one segment."""
    begin(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    at = program * 0
    end = at + 1
    segment = program
    if SPLIT:
        at, end, segment = load_share(plan, program)
    while at < end:
        row = segment // NUM_KV_HEADS
        kv_head = segment % NUM_KV_HEADS
        seq_len = tl.load(seq_lens + row)
        before = first_tile_of(seq_len, NUM_NEW, window, HAS_WINDOW, TILE)
        if HAS_PREFIX:
            before = tl.load(prefix_lens + row) // TILE
        if SPARSE_STRIDE > 0:
            before = 0
        if SPLIT:
            segment_begin, segment_end = load_segment(plan, programs, segment)
            stop = tl.minimum(end, segment_end)
            first = before + at - segment_begin
            last = before + stop - segment_begin
            if SPARSE_STRIDE > 0:
                last = tl.minimum(last, tl.load(counts + segment))  # an empty row's list is empty
        else:
            stop = end
            first = before
            last = tl.load(counts + segment) if SPARSE_STRIDE > 0 else (seq_len + TILE - 1) // TILE
        peak, total, accumulator = attend_segment(
            row, kv_head, first, last, query, key_cache, value_cache, block_tables, seq_lens, query_starts,
            tile_lists, alibi_slopes, k_scale, scale, soft_cap, window, query_row, query_head, cache_block,
            cache_head, cache_slot, table_row, list_row, sparse_local, sparse_step, sparse_first,
            GROUP, NUM_NEW, M_PAD, HEAD_SIZE, D_PAD, BLOCK_SIZE, TILE, IS_FP8, HAS_ALIBI, HAS_WINDOW, HAS_SOFT_CAP,
            SPARSE_STRIDE, SPARSE_BLOCK, NUM_KV_HEADS,
        )  # fmt: skip
        whole = True
        if SPLIT:
            first_program, num_parts = parts_of(plan, segment_begin, segment_end)
            whole = num_parts == 1
            if HAS_PREFIX:
                whole = whole & (before == 0)
        if whole:
            store_output(
                total, accumulator, output, query_starts, v_scale, row, kv_head,
                GROUP, NUM_NEW, NUM_KV_HEADS, HEAD_SIZE, D_PAD, IS_FP8,
            )  # fmt: skip
        elif SPLIT:
            slot_rows: tl.constexpr = GROUP * NUM_NEW
            store_part(segment + program, peak, total, accumulator, peaks, totals, partial, slot_rows, HEAD_SIZE, D_PAD)
            tl.debug_barrier()  # every thread's part is stored before the program says so
            arrivals = plan + 3 + programs + num_segments + segment  # after the S + 1 first tiles
            arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
            if arrived == num_parts - 1:
                tl.store(arrivals, 0)  # ready for the next launch
                peak_R = tl.full([ROWS], float("-inf"), tl.float32)
                total_R = tl.zeros([ROWS], tl.float32)
                accumulator_R = tl.zeros([ROWS, D_PAD], tl.float32)
                peak_R, total_R, accumulator_R = merge_parts(
                    peak_R, total_R, accumulator_R, segment + first_program, num_parts, peaks, totals, partial,
                    slot_rows, 0, slot_rows, HEAD_SIZE, D_PAD, ROWS, CHUNK,
                )  # fmt: skip
                if HAS_PREFIX:  # noqa: SIM102 - one is known when compiling
                    if before > 0:
                        place = tl.load(prefix_places + row)
                        members = prefix_rows // GROUP
                        prefix = place // members * NUM_KV_HEADS + kv_head
                        prefix_begin, prefix_end = load_segment(prefix_plan, prefix_programs, prefix)
                        prefix_first, prefix_parts = parts_of(prefix_plan, prefix_begin, prefix_end)
                        peak_R, total_R, accumulator_R = merge_parts(
                            peak_R, total_R, accumulator_R, prefix + prefix_first, prefix_parts, prefix_peaks,
                            prefix_totals, prefix_partial, prefix_rows, place % members * GROUP, slot_rows,
                            HEAD_SIZE, D_PAD, ROWS, CHUNK,
                        )  # fmt: skip
                store_output(
                    total_R, accumulator_R, output, query_starts, v_scale, row, kv_head,
                    GROUP, NUM_NEW, NUM_KV_HEADS, HEAD_SIZE, D_PAD, IS_FP8,
                )  # fmt: skip
        at = stop
        segment += 1


@dataclass(frozen=True, eq=False)
class SparseTiles:
    """What each KV head's group of each row sees: `lists` int32 [N, K, tiles], `counts` int32 [N, K]."""

    lists: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, eq=False)
class PrefixParts:
    """Parts of the rows' leading tokens, computed by another launch (shared_prefix.py) over `plan`.

    `lens` int32 [N]: how many tokens, whole blocks, less than the row's length; `places` int32 [N]: chunk * members +
    the row's index in its chunk.
    """

    lens: torch.Tensor
    places: torch.Tensor
    plan: DecodePlan
    slot_rows: int


@cache
def decode_constants(
    dtype: torch.dtype,
    cache_itemsize: int,
    group: int,
    num_new: int,
    head_size: int,
    block_size: int,
    sparse_block: int,
) -> dict[str, int]:
    """Tile sizes and launch options; small tiles where elements are wide, so that shared memory suffices."""
    d_pad = padded_head_size(head_size)
    wide = dtype.itemsize * d_pad > 256
    rows = group * num_new
    if rows > MAX_PRODUCT_ROWS:
        raise UnsupportedOptionError("num_heads", f"{num_new} new tokens of {group} query heads a KV head: {rows} rows")
    tile = 32 if wide else 64
    if sparse_block:
        tile = min(tile, sparse_block & -sparse_block)
        if tile < 16:
            raise UnsupportedOptionError("blocksparse_params", f"block_size {sparse_block} is no multiple of 16")
    padded_rows = triton.next_power_of_2(rows)
    return {
        "GROUP": group,
        "NUM_NEW": num_new,
        "M_PAD": max(16, padded_rows),
        "ROWS": padded_rows,
        "CHUNK": max(2, min(16, MERGED_ELEMENTS // (padded_rows * d_pad))),
        "HEAD_SIZE": head_size,
        "D_PAD": d_pad,
        "BLOCK_SIZE": block_size,
        "TILE": tile,
        "num_warps": 4,
        "num_stages": 1 if wide else 3,
    }


@cache
def num_programs(device: torch.device) -> int:
    """Programs of a V2 launch: as many as run at once."""
    if INTERPRET:
        return 5
    return PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def plan_decode(
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    constants: dict[str, int],
    *,
    window: int | None = None,
    sparse: SparseTiles | None = None,
    prefix_lens: torch.Tensor | None = None,
) -> DecodePlan:
    """The plan of a V2 launch over rows of these lengths (int32 [N]); to be filled anew when lengths change."""
    rows, device = constants["GROUP"] * constants["NUM_NEW"], seq_lens.device
    plan = DecodePlan.allocate(len(seq_lens) * num_kv_heads, num_programs(device), rows, constants["HEAD_SIZE"], device)
    plan.fill(
        seq_lens, num_kv_heads, constants["TILE"], num_new=constants["NUM_NEW"], window=window,
        prefix_lens=prefix_lens, counts=None if sparse is None else sparse.counts,
    )  # fmt: skip
    return plan


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    constants: dict[str, int],
    *,
    plan: DecodePlan | None,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    query_starts: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sparse: tuple[BlockSparse, SparseTiles] | None = None,
    prefix: PrefixParts | None = None,
) -> torch.Tensor:
    """query [T, H, D] -> [T, H, D]: V2 over `plan` (made by plan_decode for the same lengths and options), V1 if None.

    `constants` from decode_constants. Row i's new tokens are `query_starts[i]` … (int32 [N + 1]; None: one a row), the
    last of its `seq_lens[i]` tokens, their KV stored. Scales are fp32 [1], read for fp8 caches only. Raises ValueError
    for shapes or strides that don't fit.
    """
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[1]
    num_rows = seq_lens.shape[0]
    check_tokens("query", query, num_heads, head_size)
    check_cache(key_cache, value_cache, num_kv_heads, head_size)
    if (
        block_tables.shape[0] < num_rows
        or block_tables.stride(1) != 1
        or (query_starts is None and num_tokens != num_rows)
    ):
        raise ValueError(
            f"{num_tokens} tokens, block_tables {tuple(block_tables.shape)}, seq_lens {tuple(seq_lens.shape)}"
        )
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_rows == 0 or num_tokens == 0:
        return output
    pattern, tiles = sparse or (None, None)
    prefix_plan = prefix.plan if prefix else None
    paged_decode_kernel[(plan.programs if plan else num_rows * num_kv_heads,)](
        output, plan and plan.partial, plan and plan.peaks, plan and plan.totals, plan and plan.plan,
        query, key_cache, value_cache, block_tables, seq_lens, query_starts,
        tiles and tiles.lists, tiles and tiles.counts, prefix and prefix.lens, prefix and prefix.places,
        prefix_plan and prefix_plan.partial, prefix_plan and prefix_plan.peaks, prefix_plan and prefix_plan.totals,
        prefix_plan and prefix_plan.plan, alibi_slopes, k_scale, v_scale, scale, soft_cap or 0.0, window or 0,
        num_rows * num_kv_heads, query.stride(0), query.stride(1), *key_cache.stride()[:3], block_tables.stride(0),
        tiles.lists.stride(1) if tiles else 0, pattern.local_blocks if pattern else 0,
        pattern.head_sliding_step if pattern else 0, first_sparse_head(pattern, num_heads, num_kv_heads),
        prefix_plan.programs if prefix_plan else 0, prefix.slot_rows if prefix else 0,
        NUM_KV_HEADS=num_kv_heads, SPLIT=plan is not None, IS_FP8=key_cache.element_size() == 1,
        HAS_ALIBI=alibi_slopes is not None, HAS_WINDOW=window is not None, HAS_SOFT_CAP=soft_cap is not None,
        HAS_PREFIX=prefix is not None, SPARSE_STRIDE=pattern.vert_stride if pattern else 0,
        SPARSE_BLOCK=pattern.block_size if pattern else 0, **constants, **overlap(query.device),
    )  # fmt: skip
    return output


def first_sparse_head(pattern: BlockSparse | None, num_heads: int, num_kv_heads: int) -> int:
    """How many heads (KV heads for a negative step) lie on the ranks before this one."""
    if pattern is None:
        return 0
    return pattern.tp_rank * (num_heads if pattern.head_sliding_step >= 0 else num_kv_heads)
