"""Low-rank adapters (LoRA, arXiv 2106.09685) of many kinds in one batch: out += x A^T B^T, each row by its own adapter.

T rows, K inputs, N outputs, R rank (padded to a power of two, 16 or more), P parts: projections merged into one matrix
(q, k, v; gate, up), each with an A of its own. On GPUs two kernels of kernels/triton_kernels/products/adapters.py, else
the eager twin below, which is also what tests compare with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.kernels.products.fused_ops import is_fused

LEAST_RANK = 16  # tl.dot's smallest inner dimension
FEW_TILE_ROWS, MANY_TILE_ROWS = 16, 64  # rows of a tile: of decode steps, of prompts; 64 is a guess


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which rows of a step take which adapter. `tiles` int32 [tiles, 3], contiguous, on the device: first row, number
    of rows (at most `tile_rows`), slot counted from 1; slot 0: these rows take none. Rows in no tile take none."""

    tiles: torch.Tensor
    tile_rows: int


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """The adapters of one merged projection in their slots: a [slots, P * R, K], b [slots, N, R] (times the adapter's
    scaling), ranks int32 [slots, P], at most R; 0: that part has no adapter. What lies beyond a rank is never read.
    `part_sizes`: outputs of each part, N in all."""

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    part_sizes: tuple[int, ...]


def padded_rank(rank: int) -> int:
    """R of a stack whose adapters have at most `rank`."""
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def add_adapters(
    out_TN: torch.Tensor, x_TK: torch.Tensor, stack: AdapterStack, rows: AdapterRows, group: int = 0
) -> None:
    """out += x A^T B^T in place for the rows of `rows`. `group` > 0: the outputs of the two parts take turns, `group`
    of each (kernels/products/matmul.py, group_gate_up)."""
    if is_fused(x_TK):
        from tandem.kernels.triton_kernels.products.adapters import add_adapters_triton

        add_adapters_triton(
            out_TN, x_TK, stack.a, stack.b, stack.ranks, stack.part_sizes, rows.tiles, rows.tile_rows, group
        )
    else:
        add_adapters_eager(out_TN, x_TK, stack, rows, group)


def add_adapters_eager(
    out_TN: torch.Tensor, x_TK: torch.Tensor, stack: AdapterStack, rows: AdapterRows, group: int = 0
) -> None:
    """The same, tile by tile in PyTorch."""
    padded, ranks = stack.a.shape[1] // len(stack.part_sizes), stack.ranks.tolist()
    for first, count, slot in rows.tiles.tolist():
        begin = 0
        for part, size in enumerate(stack.part_sizes):
            rank = ranks[slot - 1][part] if slot else 0
            if rank:
                a_RK = stack.a[slot - 1, part * padded : part * padded + rank]
                b_NR = stack.b[slot - 1, begin : begin + size, :rank]
                low = torch.nn.functional.linear(x_TK[first : first + count], a_RK)
                _columns(out_TN[first : first + count], part, begin, size, group).add_(
                    (low @ b_NR.t()).view(count, *_turns(size, group))
                )
            begin += size


def _columns(out: torch.Tensor, part: int, begin: int, size: int, group: int) -> torch.Tensor:
    """The outputs of one part, [rows, size] or, where parts take turns, [rows, size / group, group]."""
    if not group:
        return out[:, begin : begin + size]
    return out.view(len(out), size // group, 2, group)[:, :, part]


def _turns(size: int, group: int) -> tuple[int, ...]:
    return (size // group, group) if group else (size,)
