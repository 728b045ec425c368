"""Launches paged decode: tile sizes, plans, strides. Names as in paged_decode.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from tandem.kernels.api.errors import UnsupportedOptionError
from tandem.kernels.api.spec import BlockSparse, Reach
from tandem.kernels.prefixes.shared_prefix import SharedPrefixes
from tandem.kernels.triton_kernels.common import (
    INTERPRET,
    check_cache,
    check_tokens,
    multiprocessors,
    next_power_of_2,
    overlap,
    padded_head_size,
)
from tandem.kernels.triton_kernels.decode.decode_plan import DecodePlan
from tandem.kernels.triton_kernels.decode.paged_decode import paged_decode_kernel

MAX_NEW_TOKENS = 8  # of a row; a guess
WARPS_PER_MULTIPROCESSOR = 8  # docs/measurements.md#decode-attention
TILE_BYTES = 4096  # of keys, where a program is one warp; docs/measurements.md#decode-attention
MAX_PRODUCT_ROWS = 128  # query rows that one program multiplies with a tile of keys; a guess
MERGED_ELEMENTS = 4096  # of parts loaded at once when they are merged; a guess
MERGE_SET = 2 if INTERPRET else 16  # parts merged by one program


@dataclass(frozen=True, eq=False)
class SparseTiles:
    """What each KV head's group of each row sees: `lists` int32 [N, K, tiles], `counts` int32 [N, K]."""

    lists: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, eq=False)
class PrefixParts:
    """Parts over the rows' leading tokens, made by the launch before, perhaps at the same time (shared_prefix.py).

    `plan`: of that launch, with the memory of its parts; `prefixes`: who shares what.
    """

    plan: DecodePlan
    prefixes: SharedPrefixes


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
    padded_rows = next_power_of_2(rows)
    # A warp to a program waits for no other at each tile; its tiles are as large as registers and loads ahead allow.
    alone = dtype.itemsize <= 2 and not wide and padded_rows <= 16
    tile = 32 if wide else 64
    if alone:
        tile = max(16, min(tile, TILE_BYTES // (cache_itemsize * d_pad)))
    if sparse_block:
        tile = min(tile, sparse_block & -sparse_block)
        if tile < 16:
            raise UnsupportedOptionError("blocksparse_params", f"block_size {sparse_block} is no multiple of 16")
    return {
        "GROUP": group,
        "NUM_NEW": num_new,
        "M_PAD": max(8 if alone else 16, padded_rows),
        "ROWS": padded_rows,
        "CHUNK": max(2, min(16, MERGED_ELEMENTS // (padded_rows * d_pad))),
        "HEAD_SIZE": head_size,
        "D_PAD": d_pad,
        "BLOCK_SIZE": block_size,
        "MERGE_SET": MERGE_SET,
        "TILE": tile,
        "KEYS_FIRST": alone,
        "num_warps": 1 if alone else 4,
        "num_stages": 1 if wide else 3 if alone else 4,
    }


@cache
def num_programs(device: torch.device, num_warps: int) -> int:
    """Programs of a V2 launch: as many as run at once, by their registers. With more room they would crowd on the
    multiprocessors that the launch before leaves first: 1.3 times slower where half as many more fitted."""
    if INTERPRET:
        return 5
    return WARPS_PER_MULTIPROCESSOR // num_warps * multiprocessors(device)


def plan_decode(
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    constants: dict[str, int],
    *,
    reach: Reach = Reach(),
    sparse: SparseTiles | None = None,
    prefix_lens: torch.Tensor | None = None,
) -> DecodePlan:
    """The plan of a V2 launch over rows of these lengths (int32 [N]); to be filled anew when lengths change."""
    rows, device = constants["GROUP"] * constants["NUM_NEW"], seq_lens.device
    programs = num_programs(device, constants["num_warps"])
    plan = DecodePlan.allocate(len(seq_lens) * num_kv_heads, programs, rows, constants["HEAD_SIZE"], device)
    plan.fill(
        seq_lens, num_kv_heads, constants["TILE"], num_new=constants["NUM_NEW"], reach=reach,
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
    sinks: torch.Tensor | None = None,
    reach: Reach = Reach(),
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
    assert prefix is None or (plan is not None and constants["NUM_NEW"] == 1)
    launch = overlap(query.device)
    # Queries of many rows would be brought to shared memory again for each tile.
    early = launch["PDL"] and bool(constants["KEYS_FIRST"]) and plan is not None and not plan.is_new
    early = early and sparse is None and prefix is None
    given, shared = (prefix.plan, prefix.prefixes) if prefix else (None, None)
    if plan is not None:
        plan.is_new = False
    paged_decode_kernel[(plan.programs if plan else num_rows * num_kv_heads,)](
        output, plan and plan.partial, plan and plan.peaks, plan and plan.totals, plan and plan.plan,
        query, key_cache, value_cache, block_tables, seq_lens, query_starts,
        tiles and tiles.lists, tiles and tiles.counts, given and given.partial, given and given.peaks,
        given and given.totals, given and given.plan, shared and shared.row_lens, shared and shared.row_places,
        alibi_slopes, sinks, k_scale, v_scale, scale, soft_cap or 0.0, reach.size, num_rows * num_kv_heads,
        given.programs if given else 0, query.stride(0), query.stride(1),
        *key_cache.stride()[:3], block_tables.stride(0),
        tiles.lists.stride(1) if tiles else 0, pattern.local_blocks if pattern else 0,
        pattern.head_sliding_step if pattern else 0, first_sparse_head(pattern, num_heads, num_kv_heads),
        NUM_KV_HEADS=num_kv_heads, SPLIT=plan is not None, IS_FP8=key_cache.element_size() == 1,
        HAS_ALIBI=alibi_slopes is not None, WINDOW=reach.kind, HAS_SOFT_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,        HAS_PREFIX=prefix is not None,
        PREFIX_MEMBERS=shared.members if shared else 0, SPARSE_STRIDE=pattern.vert_stride if pattern else 0,
        SPARSE_BLOCK=pattern.block_size if pattern else 0, EARLY=early, **constants, **launch,
    )  # fmt: skip
    return output


def first_sparse_head(pattern: BlockSparse | None, num_heads: int, num_kv_heads: int) -> int:
    """How many heads (KV heads for a negative step) lie on the ranks before this one."""
    if pattern is None:
        return 0
    return pattern.tp_rank * (num_heads if pattern.head_sliding_step >= 0 else num_kv_heads)
