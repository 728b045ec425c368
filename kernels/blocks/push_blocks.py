"""Pushing KV blocks from one GPU pool into another pool's memory, which may lie on a peer GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kernels.blocks.digest import BlockSums
from tandem.kernels.blocks.move_blocks import BlockPlaces, move_blocks, why_not_words


def can_push(pool_NHLPBD: torch.Tensor) -> str:
    """ "" if blocks of such a pool can be pushed, else why not."""
    if not pool_NHLPBD.is_cuda:
        return f"the pool is on {pool_NHLPBD.device}"
    return why_not_words(pool_NHLPBD)


def push_blocks(
    pool_NHLPBD: torch.Tensor,
    target_address: int,
    target_stride_bytes: int,
    pairs: Sequence[tuple[int, int]],
    layers: range | None,
    num_valid: Sequence[int],
    num_programs: int = 16,
    sums: BlockSums | None = None,
    sum_indices: Sequence[int] = (),
) -> None:
    """Copies `layers` (None: all) of the first `num_valid[i]` slots of block `pairs[i][0]` of `pool_NHLPBD` into block
    `pairs[i][1]` of the pool at `target_address`, which has the same shape but for its blocks' stride.

    Enqueued on the current stream. Few programs leave the GPU to the computation beside them: 8 move some 120 GB/s
    over NVLink, 16 some 250. `sums` takes up what is moved: pair i at `sum_indices[i]`, without indices at i. Raises
    ValueError for a pool that can't be pushed.
    """
    problem = can_push(pool_NHLPBD)
    if problem:
        raise ValueError(problem)
    listed = list_pairs(pairs, num_valid, sum_indices, pool_NHLPBD.device)
    push_listed(pool_NHLPBD, target_address, target_stride_bytes, listed, layers, num_programs, sums)


def list_pairs(
    pairs: Sequence[tuple[int, int]], num_valid: Sequence[int], sum_indices: Sequence[int], device: torch.device
) -> torch.Tensor:
    """int64 [4, N] on `device`, for `push_listed`; arguments as of `push_blocks`."""
    rows = [[s for s, _ in pairs], [d for _, d in pairs], list(num_valid), list(sum_indices or range(len(pairs)))]
    listed = torch.tensor(rows, dtype=torch.int64)
    return listed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else listed


def push_listed(
    pool_NHLPBD: torch.Tensor,
    target_address: int,
    target_stride_bytes: int,
    listed_4N: torch.Tensor,
    layers: range | None,
    num_programs: int,
    sums: BlockSums | None,
) -> None:
    """`push_blocks` of pairs that are on the device already, as they are for all layers of a push but the first."""
    places = BlockPlaces.of(pool_NHLPBD)
    target = BlockPlaces(target_address, target_stride_bytes, places.head_bytes, places.layer_bytes)
    move_blocks(pool_NHLPBD, places, target, listed_4N, layers, num_programs, sums)
