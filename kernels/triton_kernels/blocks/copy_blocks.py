"""Copies the first slots of blocks inside a pool, all heads and layers: the tail copy of a copy-on-write fork."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import cdiv

CHUNK = 2048  # elements a program copies; a guess; what it reaches: docs/measurements.md#copies-norms-and-sampling
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def copy_blocks_kernel(
    pool,  # [num_blocks, planes, S * D] as raw integers, strides (pool_block, plane_size, 1)
    sources,  # int64 [n]
    destinations,  # int64 [n]
    counts,  # int64 [n]: slots to copy
    pool_block,
    plane_size,
    head_size,
    CHUNK: tl.constexpr,
):
    """Grid (n, planes, ceil(S * D / CHUNK)): one chunk of one plane (a head of K or V of a layer) of one block."""
    pair = tl.program_id(0)
    offsets = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    mask = offsets < tl.load(counts + pair) * head_size
    inside = tl.program_id(1).to(tl.int64) * plane_size + offsets
    source = pool + tl.load(sources + pair) * pool_block + inside
    tl.store(pool + tl.load(destinations + pair) * pool_block + inside, tl.load(source, mask=mask), mask=mask)


def copy_blocks(pool: torch.Tensor, src_ids: Sequence[int], dst_ids: Sequence[int], num_tokens: Sequence[int]) -> None:
    """Copies the first tokens of blocks within pool [num_blocks, heads, layers, 2, S, D]. The caller checks that no
    destination is a source or repeats. Raises ValueError when blocks are not contiguous."""
    if not src_ids:
        return
    if not pool[0].is_contiguous():
        raise ValueError("each block of the pool must be one contiguous run")
    block_size, head_size = pool.shape[-2:]
    raw = pool.view(_RAW[pool.element_size()])
    pairs = torch.tensor([list(src_ids), list(dst_ids), list(num_tokens)], dtype=torch.int64, device=pool.device)
    plane_size = block_size * head_size
    planes = pool[0].numel() // plane_size
    copy_blocks_kernel[(len(src_ids), planes, cdiv(plane_size, CHUNK))](
        raw, pairs[0], pairs[1], pairs[2], pool.stride(0), plane_size, head_size, CHUNK=CHUNK, num_warps=4
    )
