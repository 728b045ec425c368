"""Decode attention over latents: all heads of a row read the same rows of the cache, whose first part is values, too.

N rows of one new token, H query heads in G groups of GROUP, L latent size, P size of the rotated part, S slots a block,
B table columns. A segment of the plan (decode_plan.py) is one group of heads of one row; its parts are merged by a
second launch, some columns of a head to a program: what bounds it is how often one waits for memory, not bytes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from tandem.kernels.products.matmul_plans import SHARED_BYTES
from tandem.kernels.triton_kernels.common import (
    INTERPRET,
    LOG2_E,
    begin,
    cdiv,
    check_cache,
    dot,
    multiprocessors,
    overlap,
    padded_head_size,
)
from tandem.kernels.triton_kernels.decode.decode_parts import merge_parts, store_part
from tandem.kernels.triton_kernels.decode.decode_plan import DecodePlan, load_segment, load_share, parts_of
from tandem.kernels.triton_kernels.decode.decode_tiles import load_block

MOST_HEADS = 64  # of a program, whose sums of latents are half of a multiprocessor's registers then
PARTS_AT_ONCE = 32  # merged by a program of MERGED_COLUMNS; a guess: docs/measurements.md#latent-attention
MERGED_COLUMNS = 128  # a guess, too


@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
def latent_decode_kernel(
    partial,  # as in DecodePlan
    peaks,
    totals,
    plan,
    query,  # [N, H, L + P], strides (query_row, query_head, 1)
    cache,  # [num_blocks, 1, S, L + P], strides (cache_block, _, cache_slot, 1)
    block_tables,  # int32 [N, B], strides (table_row, 1)
    seq_lens,  # int32 [N]
    scale,
    query_row,
    query_head,
    cache_block,
    cache_slot,
    table_row,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    M_PAD: tl.constexpr,
    LATENT: tl.constexpr,
    L_PAD: tl.constexpr,
    ROTATED: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,  # positions before are hidden from all
    PDL: tl.constexpr,
):
    """Grid (programs of the plan,)."""
    begin(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    at, end, segment, segment_begin, segment_end, seq_len = load_share(plan, program)
    members = tl.arange(0, M_PAD)
    while at < end:
        stop = tl.minimum(end, segment_end)
        row = (segment // GROUPS).to(tl.int64)
        heads = segment % GROUPS * GROUP + members
        peak, total, accumulator = attend_latents(
            query + row * query_row + heads * query_head, members < GROUP, cache, block_tables + row * table_row,
            at - segment_begin, stop - segment_begin, seq_len, scale * LOG2_E, cache_block, cache_slot,
            LATENT, L_PAD, ROTATED, P_PAD, BLOCK_SIZE, TILE, FIRST,
        )  # fmt: skip
        store_part(
            segment + program, members < GROUP, peak, total, accumulator, peaks, totals, partial, GROUP, LATENT, L_PAD
        )
        at = stop
        segment += 1
        segment_begin, segment_end = load_segment(plan, programs, segment, at < end)
        seq_len = tl.load(seq_lens + segment // GROUPS, mask=at < end, other=0)


@triton.jit
def attend_latents(
    query_pointers,  # [M]
    used,  # bool [M]
    cache,
    table,  # the row's block table
    first,  # tiles [first, last)
    last,
    seq_len,
    scale,  # to base 2
    cache_block,
    cache_slot,
    LATENT: tl.constexpr,
    L_PAD: tl.constexpr,
    ROTATED: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
):
    """-> a part (decode_parts.py), of [M, L_PAD]. Each tile is read once. Latents before `FIRST` and past `seq_len` are
    never loaded."""
    M: tl.constexpr = query_pointers.shape[0]
    columns, others = tl.arange(0, L_PAD), tl.arange(0, P_PAD)
    query = tl.load(
        query_pointers[:, None] + columns[None, :], mask=used[:, None] & (columns < LATENT)[None, :], other=0.0
    )
    rotated_query = tl.load(
        query_pointers[:, None] + LATENT + others[None, :], mask=used[:, None] & (others < ROTATED)[None, :], other=0.0
    )
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    accumulator = tl.zeros([M, L_PAD], tl.float32)
    slots = tl.arange(0, TILE)
    next_block = load_block(table, first, seq_len, BLOCK_SIZE, TILE)  # one ahead by hand, as in decode_tiles.py
    for tile in range(first, last):
        block = next_block
        next_block = load_block(table, tile + 1, seq_len, BLOCK_SIZE, TILE)
        start = tile * TILE
        stored = start + slots < seq_len
        if FIRST > 0:
            stored = stored & (start + slots >= FIRST)
        if BLOCK_SIZE % TILE == 0:  # a tile lies in one block
            rows = block.to(tl.int64) * cache_block + (start % BLOCK_SIZE + slots) * cache_slot
        else:
            blocks = tl.load(table + (start + slots) // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
            rows = blocks * cache_block + ((start + slots) % BLOCK_SIZE) * cache_slot
        mask, rotated_mask = stored[:, None], stored[:, None]
        if LATENT != L_PAD:
            mask = mask & (columns < LATENT)[None, :]
        if ROTATED != P_PAD:
            rotated_mask = rotated_mask & (others < ROTATED)[None, :]
        latent = tl.load(cache + rows[:, None] + columns[None, :], mask=mask, other=0.0)
        rotated = tl.load(cache + rows[:, None] + LATENT + others[None, :], mask=rotated_mask, other=0.0)
        scores = dot(query, tl.trans(latent)) + dot(rotated_query, tl.trans(rotated))
        scores = tl.where(stored[None, :], scores * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # rows that saw nothing yet: no inf - inf
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None] + dot(weights.to(latent.dtype), latent)
        peak = new_peak
    return peak, total, accumulator


@triton.jit(do_not_specialize=["programs"])
def merge_latents_kernel(
    output,  # [N, H, L] contiguous
    partial,
    peaks,
    totals,
    plan,
    programs,  # of the plan
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a program; they divide LATENT, or hold it
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N, H, ceil(L / COLUMNS)). Heads of empty rows get zeros."""
    begin(PDL)
    row, head, first_column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * COLUMNS
    segment = row * GROUPS + head // GROUP
    segment_begin, segment_end = load_segment(plan, programs, segment, True)
    first, num_parts = parts_of(plan, segment_begin, segment_end)
    _, total, accumulator = merge_parts(
        segment + first, 1, num_parts, peaks, totals, partial + first_column, GROUP, head % GROUP, 1,
        LATENT, COLUMNS, 1, CHUNK,
    )  # fmt: skip
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    columns = first_column + tl.arange(0, COLUMNS)[None, :]
    entry = (row.to(tl.int64) * (GROUPS * GROUP) + head) * LATENT
    tl.store(output + entry + columns, result.to(output.dtype.element_ty), mask=columns < LATENT)


@cache
def latent_constants(
    dtype: torch.dtype,
    num_heads: int,
    latent_size: int,
    rotated_size: int,
    block_size: int,
    shared_bytes: int = SHARED_BYTES,
) -> dict[str, int]:
    """Tile sizes and launch options: docs/measurements.md#latent-attention. No more tiles are loaded ahead than shared
    memory holds."""
    most = MOST_HEADS if dtype.itemsize == 2 else 16
    group = next(size for size in range(min(num_heads, most), 0, -1) if num_heads % size == 0)
    padded = 16 if group <= 16 else MOST_HEADS
    wide = dtype.itemsize > 2
    latent, rotated = padded_head_size(latent_size), padded_head_size(rotated_size)
    row_bytes = (latent + rotated) * dtype.itemsize
    tile, stages = (16, 1) if wide else (64, 3 if padded == 16 else 2)
    while stages > 1 and _rows_held(tile, stages, padded) * row_bytes > shared_bytes:
        tile, stages = (tile // 2, stages) if stages == 2 and tile > 16 else (tile, stages - 1)
    return {
        "GROUPS": num_heads // group,
        "GROUP": group,
        "M_PAD": padded,
        "LATENT": latent_size,
        "L_PAD": latent,
        "ROTATED": rotated_size,
        "P_PAD": rotated,
        "BLOCK_SIZE": block_size,
        "TILE": tile,
        "num_warps": 4 if wide and padded == 16 else 8,
        "num_stages": stages,
    }


def _rows_held(tile: int, stages: int, padded: int) -> int:
    """Rows in shared memory: queries, tiles on their way, and what compilers add; products of 64 rows read tiles from
    there, so that the one at work counts, too."""
    return padded + tile * (stages if padded == MOST_HEADS else stages - 1) + 2


def merge_columns(constants: dict[str, int]) -> int:
    """Columns of a program that merges."""
    return MERGED_COLUMNS if constants["LATENT"] % MERGED_COLUMNS == 0 else constants["L_PAD"]


@cache
def num_latent_programs(device: torch.device, num_warps: int) -> int:
    """Programs that run at once, by their registers and shared memory: docs/measurements.md#latent-attention."""
    if INTERPRET:
        return 5
    return 8 // num_warps * multiprocessors(device)


def plan_latents(seq_lens: torch.Tensor, constants: dict[str, int], programs: int = 0) -> DecodePlan:
    """The plan of a launch over rows of these lengths (int32 [N]); to be filled anew when lengths change. `programs`:
    of the launch, 0: as many as suit the device."""
    programs = programs or num_latent_programs(seq_lens.device, constants["num_warps"])
    segments = len(seq_lens) * constants["GROUPS"]
    plan = DecodePlan.allocate(segments, programs, constants["GROUP"], constants["LATENT"], seq_lens.device)
    plan.fill(seq_lens, constants["GROUPS"], constants["TILE"])
    return plan


def latent_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    constants: dict[str, int],
    plan: DecodePlan,
    first: int = 0,
) -> torch.Tensor:
    """query [N, H, L + P] over cache [num_blocks, 1, S, L + P] -> [N, H, L]. `constants` from latent_constants, `plan`
    of plan_latents for the same lengths; nobody sees positions before `first`. Raises ValueError for shapes or strides
    that don't fit."""
    num_rows, num_heads, width = query.shape
    check_cache(cache, cache, 1, width)
    if query.stride(2) != 1 or len(seq_lens) != num_rows or block_tables.stride(1) != 1:
        raise ValueError(f"query {tuple(query.shape)}, seq_lens {tuple(seq_lens.shape)}, tables with strides")
    output = query.new_empty(num_rows, num_heads, constants["LATENT"])
    if num_rows == 0:
        return output
    launch = overlap(query.device)
    plan.is_new = False
    latent_decode_kernel[(plan.programs,)](
        plan.partial, plan.peaks, plan.totals, plan.plan, query, cache, block_tables, seq_lens, scale,
        *query.stride()[:2], cache.stride(0), cache.stride(2), block_tables.stride(0), **constants, FIRST=first,
        **launch,
    )  # fmt: skip
    columns = merge_columns(constants)
    merge_latents_kernel[(num_rows, num_heads, cdiv(constants["LATENT"], columns))](
        output, plan.partial, plan.peaks, plan.totals, plan.plan, plan.programs, GROUPS=constants["GROUPS"],
        GROUP=constants["GROUP"], LATENT=constants["LATENT"], COLUMNS=columns,
        CHUNK=PARTS_AT_ONCE * MERGED_COLUMNS // max(columns, MERGED_COLUMNS), num_warps=4, **launch,
    )  # fmt: skip
    return output
