"""Multilinear sums of blocks for their digests; see kernels/blocks/digest.py for the definition."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import cdiv

SLICE = 2048  # words of a segment whose multipliers a program keeps in registers; a guess
SPLITS = 8  # programs that share a block's segments; a guess; what it reaches: docs/measurements.md#2026-11-21-kernels
BLOCKS_AT_ONCE = 8  # whose layers share multipliers; a guess


@triton.jit(do_not_specialize=["num_blocks"])
def block_sums_kernel(
    words,  # int64, blocks at strides of block_words
    job,  # int64 [3 n + 2 segments]: sums, zeroed; block ids; words of each run that count; segments' keys
    table,  # int64 [2, SEGMENT]
    num_blocks,  # n
    block_words,
    run_words,
    num_runs,  # of a block, one after the other
    SEGMENT: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Grid (n, SEGMENT / SLICE, SPLITS): one slice of every SPLITS-th segment of one block. The words that count are
    numbered through without gaps."""
    block = tl.program_id(0)
    inside = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    first = tl.load(table + inside)
    second = tl.load(table + SEGMENT + inside)
    start = words + tl.load(job + num_blocks + block) * block_words
    taken = tl.load(job + 2 * num_blocks + block).to(tl.int32)
    keys = job + 3 * num_blocks
    num_words = taken * num_runs
    total = tl.zeros([SLICE], tl.int64)
    for segment in range(tl.program_id(2), tl.cdiv(num_words, SEGMENT), tl.num_programs(2)):
        at = segment * SEGMENT + inside
        if taken == run_words:
            word = tl.load(start + at, mask=at < num_words, other=0)
        else:
            word = tl.load(start + (at // taken) * run_words + at % taken, mask=at < num_words, other=0)
        total += word * ((first ^ tl.load(keys + 2 * segment)) | 1)
        total += (word >> 32) * ((second ^ tl.load(keys + 2 * segment + 1)) | 1)
    tl.atomic_add(job + block, tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_blocks", "first_layer"])
def layer_sums_kernel(
    words,  # int64, head 0 of layer 0 of block 0
    listed,  # int64 [4, n]: of each block its id, (not read), (not read), and which sum takes it up
    keys,  # int64 [segments, 2]
    table,  # int64 [2, SEGMENT]
    sums,  # int64, added to
    num_blocks,  # n
    first_layer,
    block_words,  # from one block to the next, and so on
    head_words,
    layer_words,
    NUM_LAYERS: tl.constexpr,  # of a block
    LAYER_WORDS: tl.constexpr,  # of one head
    SEGMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLICE: tl.constexpr,  # divides LAYER_WORDS and SEGMENT
):
    """Grid (n / BLOCKS, heads, layers * LAYER_WORDS / SLICE): a slice of one layer of a head, BLOCKS whole blocks."""
    begin = tl.program_id(0) * BLOCKS
    head = tl.program_id(1)
    layer = tl.program_id(2) // (LAYER_WORDS // SLICE)
    inside = (tl.program_id(2) % (LAYER_WORDS // SLICE)) * SLICE + tl.arange(0, SLICE)
    at = (head * NUM_LAYERS + first_layer + layer) * LAYER_WORDS + inside
    key = keys + 2 * (at // SEGMENT)
    factor = (tl.load(table + at % SEGMENT) ^ tl.load(key)) | 1
    other = (tl.load(table + SEGMENT + at % SEGMENT) ^ tl.load(key + 1)) | 1
    start = words + head * head_words + (first_layer + layer) * layer_words + inside
    for block in range(begin, tl.minimum(begin + BLOCKS, num_blocks)):
        word = tl.load(start + tl.load(listed + block) * block_words)
        index = tl.load(listed + 3 * num_blocks + block)
        tl.atomic_add(sums + index, tl.sum(word * factor + (word >> 32) * other, 0))


def add_layer_sums(
    words_NHLW: torch.Tensor,
    listed_4N: torch.Tensor,
    layers: range,
    keys_S2: torch.Tensor,
    table: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Adds what `layers` of whole blocks contribute: blocks `listed_4N[0]` of `words_NHLW` (int64, W the words of one
    layer of a head, contiguous) to `sums[listed_4N[3]]`."""
    _, heads, num_layers, layer_words = words_NHLW.shape
    segment, num_blocks = table.shape[1], listed_4N.shape[1]
    piece = math.gcd(layer_words, segment, SLICE)
    layer_sums_kernel[(cdiv(num_blocks, BLOCKS_AT_ONCE), heads, len(layers) * (layer_words // piece))](
        words_NHLW, listed_4N, keys_S2, table, sums, num_blocks, layers.start,
        *words_NHLW.stride()[:3], NUM_LAYERS=num_layers, LAYER_WORDS=layer_words, SEGMENT=segment,
        BLOCKS=BLOCKS_AT_ONCE, SLICE=piece, num_warps=4,
    )  # fmt: skip


def add_block_sums(
    words_NW: torch.Tensor, job: torch.Tensor, num_blocks: int, run_words: int, table: torch.Tensor
) -> None:
    """`job` (kernels/blocks/digest.py, BlockRuns.job) of blocks of `words_NW`, int64 with contiguous rows, which
    consist of runs of `run_words`: its leading `num_blocks` numbers become their sums."""
    segment = table.shape[1]
    block_sums_kernel[(num_blocks, segment // SLICE, SPLITS)](
        words_NW, job, table, num_blocks, words_NW.stride(0), run_words, words_NW.shape[1] // run_words,
        SEGMENT=segment, SLICE=SLICE, num_warps=4,
    )  # fmt: skip
