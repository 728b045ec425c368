"""Attention of a decode batch's rows over the prefixes they share: each prefix is read once a chunk of rows.

The work is spread by a plan (decode_plan.py) whose segments are the KV heads of the chunks. The rows' own tokens are
the work of paged_decode's kernel, which runs beside this one and in the end adds what this one leaves. N rows, C chunks
of M rows, G query heads a KV head: query row m is member m // G, head m % G. (Sharing the prefix's read among rows:
Juravsky et al. 2024, "Hydragen"; here with static grids.)
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tandem.kernels.prefixes.prefix_groups import LARGEST_TILE
from tandem.kernels.prefixes.shared_prefix import SharedPrefixes
from tandem.kernels.triton_kernels.common import begin_late, next_power_of_2, overlap
from tandem.kernels.triton_kernels.decode.decode_launch import PrefixParts, num_programs
from tandem.kernels.triton_kernels.decode.decode_parts import store_part
from tandem.kernels.triton_kernels.decode.decode_plan import DecodePlan, load_segment, load_share
from tandem.kernels.triton_kernels.decode.decode_tiles import attend_tiles, fetch_tiles

FETCHED = 2  # tiles that a program asks for before its launch may begin; docs/measurements.md#decode-attention


@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "chunk_lens", "chunk_rows"],
)
def shared_prefix_kernel(
    partial,  # as in DecodePlan
    peaks,
    totals,
    plan,
    query,  # [N, H, D], strides (query_row, query_head, 1)
    key_cache,  # [num_blocks, K, S, D], strides (cache_block, cache_head, cache_slot, 1)
    value_cache,  # as key_cache
    block_tables,  # int32 [N, B], strides (table_row, 1)
    seq_lens,  # int32 [N]
    chunk_lens,  # int32 [C]
    chunk_rows,  # int32 [C, MEMBERS]
    alibi_slopes,  # fp32 [H]
    k_scale,  # fp32 [1]
    scale,
    soft_cap,
    query_row,
    query_head,
    cache_block,
    cache_head,
    cache_slot,
    table_row,
    MEMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    M_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    FETCHED: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (P,), each over its run of the plan. EARLY: an earlier launch had the same plan, so it and what it was made
    from are complete, and programs fetch their first tiles into L2 while the launch before this one ends."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if EARLY:
        at, end, segment, segment_begin, segment_end, chunk_len = load_share(plan, program)
        leader = tl.load(chunk_rows + segment // NUM_KV_HEADS * MEMBERS, mask=at < end, other=0).to(tl.int64)
        fetch_tiles(
            key_cache, value_cache, block_tables + leader * table_row,
            (segment % NUM_KV_HEADS).to(tl.int64) * cache_head, at - segment_begin,
            tl.minimum(end, segment_end) - segment_begin, cache_block, cache_slot, HEAD_SIZE, BLOCK_SIZE, TILE, FETCHED,
        )  # fmt: skip
    begin_late(PDL)
    if not EARLY:
        at, end, segment, segment_begin, segment_end, chunk_len = load_share(plan, program)
    members = tl.arange(0, M_PAD)
    places = members // GROUP
    columns = tl.arange(0, D_PAD)
    while at < end:
        chunk = segment // NUM_KV_HEADS
        kv_head = segment % NUM_KV_HEADS
        stop = tl.minimum(end, segment_end)
        rows = tl.load(chunk_rows + chunk * MEMBERS + places, mask=places < MEMBERS, other=-1)
        used = rows >= 0
        rows = tl.maximum(rows, 0).to(tl.int64)
        heads = kv_head * GROUP + members % GROUP
        queries = query + (rows * query_row + heads * query_head)[:, None] + columns[None, :]
        mask = used[:, None] & (columns < HEAD_SIZE)[None, :]
        positions = tl.where(used, tl.load(seq_lens + rows) - 1, -1)
        slopes = tl.zeros([M_PAD], tl.float32)
        if HAS_ALIBI:
            slopes = tl.load(alibi_slopes + heads, mask=used, other=0.0)
        leader = tl.load(chunk_rows + chunk * MEMBERS).to(tl.int64)
        head = kv_head.to(tl.int64) * cache_head
        peak, total, accumulator = attend_tiles(
            queries, mask, False, k_scale, scale, positions, slopes, positions, key_cache + head, value_cache + head,
            block_tables + leader * table_row, block_tables, at - segment_begin, stop - segment_begin,
            chunk_len, soft_cap, 0, cache_block, cache_slot, 0, HEAD_SIZE, D_PAD, BLOCK_SIZE,
            TILE, HAS_ALIBI, False, HAS_SOFT_CAP, 0, 0, False, IS_FP8, False,
        )  # fmt: skip
        store_part(
            segment + program, used, peak, total, accumulator, peaks, totals, partial, MEMBERS * GROUP, HEAD_SIZE, D_PAD
        )
        at = stop
        segment += 1
        segment_begin, segment_end = load_segment(plan, programs, segment, at < end)
        chunk_len = tl.load(chunk_lens + segment // NUM_KV_HEADS, mask=at < end, other=0)


def prefix_constants(constants: dict[str, int], members: int) -> dict[str, int]:
    """Tile sizes and launch options beside those of decode_constants for one new token a row."""
    kept = {name: constants[name] for name in ("GROUP", "HEAD_SIZE", "D_PAD", "BLOCK_SIZE")}
    wide = constants["num_stages"] == 1
    return kept | {
        "MEMBERS": members,
        "M_PAD": max(16, next_power_of_2(members * constants["GROUP"])),
        "TILE": 32 if wide else LARGEST_TILE,
        "FETCHED": FETCHED,
        "num_warps": 8 if constants["D_PAD"] > 128 else 4,
        "num_stages": 1 if wide else 3,
    }


def plan_prefixes(prefixes: SharedPrefixes, num_kv_heads: int, constants: dict[str, int]) -> DecodePlan:
    """The plan of `attend_prefixes`, from prefix_constants; to be filled anew when the prefixes change."""
    device = prefixes.chunk_lens.device
    rows, segments = constants["MEMBERS"] * constants["GROUP"], len(prefixes.chunk_lens) * num_kv_heads
    programs = num_programs(device, constants["num_warps"])
    plan = DecodePlan.allocate(segments, programs, rows, constants["HEAD_SIZE"], device)
    plan.fill(prefixes.chunk_lens, num_kv_heads, constants["TILE"], min_tiles=0)
    return plan


def attend_prefixes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    prefixes: SharedPrefixes,
    plan: DecodePlan,
    scale: float,
    constants: dict[str, int],
    *,
    k_scale: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> PrefixParts:
    """query [N, H, D], one new token a row -> what paged_decode needs as `prefix`, right after this.

    `plan` from plan_prefixes, `constants` from prefix_constants; the rest as in paged_decode.
    """
    launch = overlap(query.device)
    early = launch["PDL"] and not plan.is_new and _has_whole_lines(key_cache)
    plan.is_new = False
    shared_prefix_kernel[(plan.programs,)](
        plan.partial, plan.peaks, plan.totals, plan.plan, query, key_cache, value_cache, block_tables, seq_lens,
        prefixes.chunk_lens, prefixes.chunk_rows, alibi_slopes, k_scale, scale, soft_cap or 0.0,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], block_tables.stride(0),
        NUM_KV_HEADS=key_cache.shape[1], IS_FP8=key_cache.element_size() == 1, HAS_ALIBI=alibi_slopes is not None,
        HAS_SOFT_CAP=soft_cap is not None, EARLY=early, **constants, **launch,
    )  # fmt: skip
    return PrefixParts(plan, prefixes)


def _has_whole_lines(cache: torch.Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes, as fetching them ahead wants it."""
    size = cache.element_size()
    return cache.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in cache.stride()[:3])


def could_share(constants: dict[str, Any], itemsize: int) -> bool:
    """Whether a chunk's queries and accumulators fit the registers."""
    return bool(itemsize * constants["D_PAD"] <= 512)
