"""Rows put in order by expert on the device, and cut into tiles of one expert each. Nothing asks the host.

P pairs of a token and one of its experts, X experts. Each expert's program finds its own pairs among all, so it waits
for nobody. Pairs of one expert keep their order. All shapes follow from P and X alone, so a captured launch serves
whatever tokens choose.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, overlap

FEW_PAIRS, MANY_PAIRS = 1024, 4096  # that a program looks at at once, if there are no more, or more; guesses
NO_EXPERT: tl.constexpr = tl.constexpr(1 << 30)
TILES: tl.constexpr = tl.constexpr(32)  # written at once


@triton.jit(do_not_specialize=["num_pairs", "tile_m"])
def sort_kernel(
    ids,  # int32 [P]; below 0: an expert that isn't here
    order,  # int32 [P]: pairs of the experts here, expert by expert
    tiles,  # int32 [P // tile_m + X, 4]: expert, first place in `order`, number of pairs (0: no tile), 0
    num_pairs,
    tile_m,  # the most pairs of a tile
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (X,). An expert's tiles begin at (pairs before its own) // tile_m + expert: experts before it need no more,
    since each of them leaves less than one tile unfilled."""
    begin(PDL)
    expert = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    less = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        chosen = tl.load(ids + first + places, mask=first + places < num_pairs, other=NO_EXPERT)
        less += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
        equal += (chosen == expert).to(tl.int32)
    start, count = tl.sum(less, 0), tl.sum(equal, 0)
    base = start
    if count > 0:
        for first in range(0, num_pairs, BLOCK):
            chosen = tl.load(ids + first + places, mask=first + places < num_pairs, other=NO_EXPERT)
            mine = (chosen == expert).to(tl.int32)
            tl.store(order + base + tl.cumsum(mine, 0) - 1, first + places, mask=mine > 0)
            base += tl.sum(mine, 0)
    first_tile = start // tile_m + expert
    end_tile = (start + count) // tile_m + expert + 1
    if expert == tl.num_programs(0) - 1:
        end_tile = num_pairs // tile_m + expert + 1  # those of pairs that aren't here, too
    for part in range(first_tile, end_tile, TILES):
        tile = part + tl.arange(0, TILES)
        done = (tile - first_tile) * tile_m
        within = tile < end_tile
        tl.store(tiles + tile * 4, expert, mask=within)
        tl.store(tiles + tile * 4 + 1, start + done, mask=within)
        tl.store(tiles + tile * 4 + 2, tl.minimum(tl.maximum(count - done, 0), tile_m), mask=within)


def sort_triton(ids_Tk: torch.Tensor, num_experts: int, tile_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order int32 [P], tiles int32 [P // tile_m + X, 4]) of the experts int32 [T, k] of each token."""
    num_pairs, device = ids_Tk.numel(), ids_Tk.device
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((num_pairs // tile_m + num_experts, 4), dtype=torch.int32, device=device)
    block = FEW_PAIRS if num_pairs <= FEW_PAIRS else MANY_PAIRS
    sort_kernel[(num_experts,)](
        ids_Tk, order, tiles, num_pairs, tile_m, BLOCK=block, num_warps=block // 256, **overlap(device)
    )
    return order, tiles
