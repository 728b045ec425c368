"""Multilinear sums of blocks for their digests; see kernels/digest.py for the definition."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

SLICE = 2048  # words of a segment whose multipliers a program keeps in registers
SPLITS = 4  # programs that share a block's segments


@triton.jit(do_not_specialize=["num_words", "num_segments"])
def block_sums_kernel(
    words,  # int64, blocks at strides of block_words
    block_ids,  # int64 [n]
    keys,  # int64 [num_segments, 2]: what the segment's multipliers are XORed with
    table,  # int64 [2, SEGMENT]
    sums,  # int64 [n], zeroed
    block_words,
    num_words,  # of a block
    num_segments,
    SEGMENT: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Grid (n, SEGMENT / SLICE, SPLITS): one slice of every SPLITS-th segment of one block."""
    block = tl.program_id(0)
    inside = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    first = tl.load(table + inside)
    second = tl.load(table + SEGMENT + inside)
    start = words + tl.load(block_ids + block) * block_words
    total = tl.zeros([SLICE], tl.int64)
    for segment in range(tl.program_id(2), num_segments, tl.num_programs(2)):
        at = segment * SEGMENT + inside
        word = tl.load(start + at, mask=at < num_words, other=0)
        total += word * ((first ^ tl.load(keys + 2 * segment)) | 1)
        total += (word >> 32) * ((second ^ tl.load(keys + 2 * segment + 1)) | 1)
    tl.atomic_add(sums + block, tl.sum(total, 0))


def block_sums(
    words_NW: torch.Tensor, block_ids: torch.Tensor, keys_S2: torch.Tensor, table: torch.Tensor, num_words: int
) -> torch.Tensor:
    """int64 [n] of rows `block_ids` (int64 [n]) of `words_NW`, int64 with contiguous rows."""
    sums = torch.zeros(len(block_ids), dtype=torch.int64, device=words_NW.device)
    segment = table.shape[1]
    block_sums_kernel[(len(block_ids), segment // SLICE, SPLITS)](
        words_NW, block_ids, keys_S2, table, sums, words_NW.stride(0), num_words, len(keys_S2),
        SEGMENT=segment, SLICE=SLICE, num_warps=4,
    )  # fmt: skip
    return sums
