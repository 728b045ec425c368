"""Pushing KV blocks from one GPU pool into another pool's memory, which may lie on a peer GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

WORD_BYTES = 8


def can_push(pool_NHLPBD: torch.Tensor) -> str:
    """ "" if blocks of such a pool can be pushed, else why not."""
    if not pool_NHLPBD.is_cuda:
        return f"the pool is on {pool_NHLPBD.device}"
    if pool_NHLPBD.shape[-1] * pool_NHLPBD.element_size() % WORD_BYTES:
        return f"a slot of one head has {pool_NHLPBD.shape[-1] * pool_NHLPBD.element_size()} bytes, no multiple of 8"
    if pool_NHLPBD.stride(0) * pool_NHLPBD.element_size() % WORD_BYTES:
        return "blocks don't begin on 8-byte boundaries"
    return ""


def push_blocks(
    pool_NHLPBD: torch.Tensor,
    target_address: int,
    target_stride_bytes: int,
    pairs: Sequence[tuple[int, int]],
    layers: range | None,
    num_valid: Sequence[int],
    num_programs: int = 16,
) -> None:
    """Copies `layers` (None: all) of the first `num_valid[i]` slots of block `pairs[i][0]` of `pool_NHLPBD` into block
    `pairs[i][1]` of the pool at `target_address`, which has the same shape but for its blocks' stride.

    Enqueued on the current stream. Few programs leave the GPU to the computation beside them: 8 move some 120 GB/s
    over NVLink, 16 some 250. Raises ValueError for a pool that can't be pushed.
    """
    from tandem.kernels.triton_kernels.push_blocks import WORDS_AT_ONCE, push_blocks_kernel

    problem = can_push(pool_NHLPBD)
    if problem:
        raise ValueError(problem)
    if not pairs:
        return
    _, heads, num_layers, planes, block_size, head_size = pool_NHLPBD.shape
    chosen = range(num_layers) if layers is None else layers
    slot_words = head_size * pool_NHLPBD.element_size() // WORD_BYTES
    host = torch.tensor([[s for s, _ in pairs], [d for _, d in pairs], list(num_valid)], dtype=torch.int64)
    sent = host.pin_memory().to(pool_NHLPBD.device, non_blocking=True)
    words = pool_NHLPBD.view(torch.uint8) if pool_NHLPBD.element_size() == 1 else pool_NHLPBD
    with torch.cuda.device(pool_NHLPBD.device):
        push_blocks_kernel[(num_programs,)](
            words.view(torch.int64), target_address, sent, len(pairs), chosen.start, len(chosen),
            pool_NHLPBD.stride(0) * pool_NHLPBD.element_size() // WORD_BYTES, target_stride_bytes // WORD_BYTES,
            NUM_HEADS=heads, POOL_LAYERS=num_layers, PLANES=planes, PLANE_WORDS=block_size * slot_words,
            SLOT_WORDS=slot_words, CHUNK=min(WORDS_AT_ONCE, 1 << (block_size * slot_words - 1).bit_length()),
            num_warps=4,
        )  # fmt: skip
