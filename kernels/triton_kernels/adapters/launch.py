"""Launches the products with adapters of low rank, out += x A^T B^T, where rows take different A and B. Letters as in
adapter_rows.py."""

from __future__ import annotations

from typing import Any

import torch

from tandem.kernels.products.adapter_rows import TILE_ROWS, AdapterRows, AdapterStack
from tandem.kernels.products.fused_ops import silu_mul
from tandem.kernels.triton_kernels.adapters.rows import (
    expand_rows_kernel,
    expand_silu_rows_kernel,
    shrink_rows_kernel,
)
from tandem.kernels.triton_kernels.adapters.tiles import expand_tiles_kernel, shrink_tiles_kernel
from tandem.kernels.triton_kernels.common import cdiv, next_power_of_2, overlap

# Of decode rows: places of a program, splits times lanes at most, words of B at once, inputs at once and of a split at
# least, warps of shrink; of what ends in silu places of a program, words of B of either part at once, warps;
# docs/measurements.md#adapters.
PLACES, SPLIT_LANES, WORDS_OF_B, BLOCK_K, LEAST_INPUTS = 2, 128, 4096, 512, 512
SHRINK_WARPS = 4
SILU_TILE, SILU_WORDS, SILU_WARPS = 8, 2048, 4
CHUNK = 16  # lanes of a program at most, of one part; a guess
# Of prompts, guesses too.
TILE_K, TILE_LANES, TILE_SPLITS, WORDS_OF_TILE = 64, 64, 4, 4096
NEVER = 1 << 30
LEAST_INNER = 16  # of tl.dot


def num_splits(lanes: int, num_inputs: int) -> int:
    """The number of parts in which the inputs of decode rows are cut."""
    return max(1, min(SPLIT_LANES // lanes, cdiv(num_inputs, LEAST_INPUTS)))


def shrink_triton(x_TK: torch.Tensor, stack: AdapterStack, rows: AdapterRows, *, beside: bool = False) -> torch.Tensor:
    """These launch one kernel each; see kernels/products/adapters.py for what the arguments mean."""
    (num_rows, size), lanes, a, ranks = x_TK.shape, stack.a.shape[1], stack.a, stack.ranks
    splits = TILE_SPLITS if rows.tiles is not None else num_splits(lanes, size)
    low = torch.empty((splits, num_rows, lanes), dtype=torch.float32, device=x_TK.device)
    strides = x_TK.stride(0), a.stride(0), ranks.stride(0), num_rows
    common = {"SIZE": size, "LANES": lanes, "RANK": stack.rank, "SPLITS": splits, **overlap(x_TK.device)}
    if rows.tiles is None:
        chunk = min(CHUNK, stack.rank)
        shrink_rows_kernel[(cdiv(num_rows, PLACES), lanes // chunk, splits)](
            x_TK, a, ranks, rows.order, rows.slots, low, *strides,
            PLACES=PLACES, CHUNK=chunk, BLOCK_K=BLOCK_K, BESIDE=beside, num_warps=SHRINK_WARPS, num_stages=1, **common,
        )  # fmt: skip
    elif len(rows.tiles):
        chunk = max(LEAST_INNER, min(TILE_LANES, next_power_of_2(lanes)))
        shrink_tiles_kernel[(len(rows.tiles), cdiv(lanes, chunk), splits)](
            x_TK, a, ranks, rows.order, rows.tiles, low, *strides,
            CHUNK=chunk, BLOCK_M=TILE_ROWS, BLOCK_K=TILE_K, num_warps=4, **common,
        )  # fmt: skip
    return low


def expand_triton(
    out_TN: torch.Tensor, low: torch.Tensor, stack: AdapterStack, rows: AdapterRows, group: int = 0
) -> None:
    """`group` > 0, for prompts: outputs of the two parts take turns."""
    b, ranks, sizes, tiles = stack.b, stack.ranks, stack.part_sizes, rows.tiles
    block = (
        _outputs_at_once(WORDS_OF_B // PLACES, stack.rank)
        if tiles is None
        else _outputs_at_once(WORDS_OF_TILE, stack.rank)
    )
    blocks = [cdiv(size, block) for size in sizes]
    starts = [sum(sizes[:index]) for index in (1, 2)]
    firsts = [sum(blocks[:index]) if index < len(sizes) else NEVER for index in (1, 2)]
    strides = b.stride(0), ranks.stride(0), out_TN.stride(0), len(out_TN)
    common = {
        "START_1": starts[0], "START_2": starts[1], "SIZE": sum(sizes), "FIRST_1": firsts[0], "FIRST_2": firsts[1],
        "LANES": low.shape[2], "RANK": stack.rank, "SPLITS": low.shape[0], "BLOCK_N": block,
        "num_warps": 4, **overlap(low.device),
    }  # fmt: skip
    if tiles is None:
        expand_rows_kernel[(cdiv(len(out_TN), PLACES), sum(blocks))](
            low, b, ranks, rows.order, rows.slots, out_TN, *strides,
            SPLITS_PAD=next_power_of_2(low.shape[0]), PLACES=PLACES, num_stages=1, **common,
        )  # fmt: skip
    elif len(tiles):
        expand_tiles_kernel[(len(tiles), sum(blocks))](
            low, b, ranks, rows.order, tiles, out_TN, *strides,
            GROUP=group, INNER=max(LEAST_INNER, stack.rank), BLOCK_M=TILE_ROWS, **common,
        )  # fmt: skip


def expand_silu_mul_triton(
    gate_up_TG: torch.Tensor, low: torch.Tensor, stack: AdapterStack, rows: AdapterRows, group: int
) -> torch.Tensor:
    if rows.tiles is not None:
        expand_triton(gate_up_TG, low, stack, rows, group)
        return silu_mul(gate_up_TG, group)
    (num_rows, both), b, ranks = gate_up_TG.shape, stack.b, stack.ranks
    block = _outputs_at_once(SILU_WORDS, stack.rank)
    out = torch.empty((num_rows, both // 2), dtype=gate_up_TG.dtype, device=gate_up_TG.device)
    constants: dict[str, Any] = {"RANK": stack.rank, "SPLITS": low.shape[0], "BLOCK_N": block, **overlap(low.device)}
    expand_silu_rows_kernel[(cdiv(num_rows, SILU_TILE), cdiv(both // 2, block))](
        low, b, ranks, rows.order, rows.slots, gate_up_TG, out,
        b.stride(0), ranks.stride(0), gate_up_TG.stride(0), num_rows,
        SIZE=both // 2, GROUP=group or both // 2, SPLITS_PAD=next_power_of_2(low.shape[0]),
        INNER=max(LEAST_INNER, stack.rank), TILE=SILU_TILE, num_warps=SILU_WARPS, num_stages=1, **constants,
    )  # fmt: skip
    return out


def _outputs_at_once(words: int, rank: int) -> int:
    """Outputs of a program that holds so many words of B."""
    return max(16, min(128, words // rank))
