"""Rows put in order by expert on the device, and cut into tiles of one expert each. Nothing asks the host.

P pairs of a token and one of its experts, X experts, C chunks of pairs. Pairs of one expert keep their order. All
shapes follow from P and X alone, so a captured launch serves whatever tokens choose.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, overlap

CHUNK = 1024  # pairs of a program; a guess
ONE_HOT = 8192  # elements of the matrix of pairs and experts that a program has at once; a guess


@triton.jit
def _experts_of(ids, chunk, part, num_pairs, CHUNK: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """(pairs [ROWS], which of the experts [ROWS, PADDED] each goes to: 1 or 0)."""
    pairs = chunk * CHUNK + part * ROWS + tl.arange(0, ROWS)
    expert = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
    return pairs, (expert[:, None] == tl.arange(0, PADDED)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    ids,  # int32 [P]
    counts,  # int32 [C, PADDED]
    num_pairs,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (C,): how many pairs of each chunk go to each expert."""
    begin(PDL)
    chunk = tl.program_id(0)
    total = tl.zeros([PADDED], tl.int32)
    for part in range(tl.cdiv(tl.minimum(num_pairs - chunk * CHUNK, CHUNK), ROWS)):
        _, one_hot = _experts_of(ids, chunk, part, num_pairs, CHUNK, ROWS, PADDED)
        total += tl.sum(one_hot, 0)
    tl.store(counts + chunk * PADDED + tl.arange(0, PADDED), total)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "most_tiles", "tile_m"])
def place_kernel(
    ids,  # int32 [P]
    counts,  # int32 [C, PADDED], if C > 1
    order,  # int32 [P]: pairs, expert by expert
    tiles,  # int32 [most_tiles, 4]: expert, first place in `order`, number of pairs (0: no tile), 0
    num_pairs,
    num_chunks,
    most_tiles,
    tile_m,  # the most pairs of a tile
    IS_ONE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (C,). IS_ONE: C is 1, and nobody has counted."""
    begin(PDL)
    chunk = tl.program_id(0)
    experts = tl.arange(0, PADDED)
    before = tl.zeros([PADDED], tl.int32)
    total = tl.zeros([PADDED], tl.int32)
    parts = tl.cdiv(tl.minimum(num_pairs - chunk * CHUNK, CHUNK), ROWS)
    if IS_ONE:
        for part in range(parts):
            _, one_hot = _experts_of(ids, chunk, part, num_pairs, CHUNK, ROWS, PADDED)
            total += tl.sum(one_hot, 0)
    else:
        for other in range(num_chunks):
            theirs = tl.load(counts + other * PADDED + experts)
            total += theirs
            before += tl.where(other < chunk, theirs, 0)
    start = tl.cumsum(total, 0) - total
    base = start + before
    for part in range(parts):
        pairs, one_hot = _experts_of(ids, chunk, part, num_pairs, CHUNK, ROWS, PADDED)
        places = base[None, :] + tl.cumsum(one_hot, 0) - one_hot
        tl.store(order + tl.sum(places * one_hot, 1), pairs, mask=pairs < num_pairs)
        base += tl.sum(one_hot, 0)
    tiles_of = (total + tile_m - 1) // tile_m
    end_tile = tl.cumsum(tiles_of, 0)
    first_tile = end_tile - tiles_of
    for part in range(chunk, tl.cdiv(most_tiles, ROWS), num_chunks):
        tile = part * ROWS + tl.arange(0, ROWS)
        mine = ((first_tile[None, :] <= tile[:, None]) & (tile[:, None] < end_tile[None, :])).to(tl.int32)
        done = (tile - tl.sum(mine * first_tile[None, :], 1)) * tile_m
        left = tl.minimum(tl.sum(mine * total[None, :], 1) - done, tile_m)
        is_tile = tl.sum(mine, 1) > 0
        within = tile < most_tiles
        tl.store(tiles + tile * 4, tl.sum(mine * experts[None, :], 1), mask=within)
        tl.store(tiles + tile * 4 + 1, tl.sum(mine * start[None, :], 1) + done, mask=within)
        tl.store(tiles + tile * 4 + 2, tl.where(is_tile, left, 0), mask=within)


def most_tiles(num_pairs: int, num_experts: int, tile_m: int) -> int:
    """How many tiles there can be, however the pairs are spread."""
    spread = min(num_pairs, num_experts)  # one pair each; the others fill whole tiles at best
    return spread + (num_pairs - spread) // tile_m


def sort_triton(ids_Tk: torch.Tensor, num_experts: int, tile_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order int32 [P], tiles int32 [most_tiles, 4]) of the experts int32 [T, k] of each token."""
    num_pairs, device = ids_Tk.numel(), ids_Tk.device
    padded, num_chunks = triton.next_power_of_2(num_experts), triton.cdiv(num_pairs, CHUNK)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((most_tiles(num_pairs, num_experts, tile_m), 4), dtype=torch.int32, device=device)
    sizes = {"CHUNK": CHUNK, "ROWS": max(16, min(CHUNK, ONE_HOT // padded)), "PADDED": padded}
    options = {"num_warps": 8, **overlap(device)}
    counts = order
    if num_chunks > 1:
        counts = torch.empty((num_chunks, padded), dtype=torch.int32, device=device)
        count_kernel[(num_chunks,)](ids_Tk, counts, num_pairs, **sizes, **options)
    place_kernel[(num_chunks,)](
        ids_Tk, counts, order, tiles, num_pairs, num_chunks, len(tiles), tile_m,
        IS_ONE=num_chunks == 1, **sizes, **options,
    )  # fmt: skip
    return order, tiles
