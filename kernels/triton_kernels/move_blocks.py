"""Copies planes of blocks from anywhere to anywhere that the GPU can address, and sums them for digests on the way.

Both sides are named by address: this GPU's memory, a peer's over NVLink, or pinned host memory. N pairs of blocks,
H heads, L layers of a block, P planes (keys, values), W 64-bit words of a slot.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

WORDS_AT_ONCE = 2048  # 16 KiB: eight 16-byte loads in flight for each of 128 threads


@triton.jit
def _weighted_sum(word, position, mask, keys, table, SEGMENT: tl.constexpr):
    """Part of a block's multilinear sum; see kernels/digest.py for the definition."""
    segment = keys + 2 * (position // SEGMENT)
    inside = table + position % SEGMENT
    first = tl.load(inside, mask=mask, other=0) ^ tl.load(segment, mask=mask, other=0)
    second = tl.load(inside + SEGMENT, mask=mask, other=0) ^ tl.load(segment + 1, mask=mask, other=0)
    return tl.sum(word * (first | 1) + (word >> 32) * (second | 1), 0)


@triton.jit
def _sum_in_segment(word, place, keys, table, SEGMENT: tl.constexpr, CHUNK: tl.constexpr):
    """The same of words that follow each other from `place` on and share one segment."""
    segment = keys + 2 * (place // SEGMENT)
    inside = table + place % SEGMENT + tl.arange(0, CHUNK)
    first, second = tl.load(inside) ^ tl.load(segment), tl.load(inside + SEGMENT) ^ tl.load(segment + 1)
    return tl.sum(word * (first | 1) + (word >> 32) * (second | 1), 0)


@triton.jit(do_not_specialize=["num_pairs", "first_layer", "num_layers"])
def move_blocks_kernel(
    source,  # address, an integer: where layer `first_layer` of block 0 begins
    target,  # the same of the other side
    pairs,  # int64 [4, N]: source block, target block, valid slots, index into sums (read only with HAS_SUMS)
    num_pairs,
    first_layer,
    num_layers,
    source_block,  # words from a block to the next; planes of a layer lie together
    source_head,
    source_layer,
    target_block,
    target_head,
    target_layer,
    sums,  # int64, added to
    keys,  # int64 [segments, 2]
    table,  # int64 [2, SEGMENT]
    NUM_HEADS: tl.constexpr,
    POOL_LAYERS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_WORDS: tl.constexpr,  # of all slots
    SLOT_WORDS: tl.constexpr,  # W
    CHUNK: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Grid (programs,): each walks over planes (a head of K or V of a layer of a block), one at a time."""
    here = source.to(tl.pointer_type(tl.int64))
    there = target.to(tl.pointer_type(tl.int64))
    num_planes = num_pairs * NUM_HEADS * num_layers * PLANES
    for item in range(tl.program_id(0), num_planes, tl.num_programs(0)):
        plane = item % PLANES
        layer = (item // PLANES) % num_layers
        head = (item // (PLANES * num_layers)) % NUM_HEADS
        pair = item // (PLANES * num_layers * NUM_HEADS)
        source_place = head * source_head + layer * source_layer + plane * PLANE_WORDS
        target_place = head * target_head + layer * target_layer + plane * PLANE_WORDS
        origin = here + tl.load(pairs + pair) * source_block + source_place
        destination = there + tl.load(pairs + num_pairs + pair) * target_block + target_place
        num_words = (tl.load(pairs + 2 * num_pairs + pair) * SLOT_WORDS).to(tl.int32)
        index = (head * POOL_LAYERS + first_layer + layer) * PLANES + plane
        for first in tl.static_range(0, PLANE_WORDS, CHUNK):
            words = first + tl.arange(0, CHUNK)
            mask = words < num_words
            word = tl.load(origin + words, mask=mask, other=0)
            tl.store(destination + words, word, mask=mask)
            if HAS_SUMS:
                if (PLANE_WORDS % CHUNK == 0) & (SEGMENT % CHUNK == 0) & (num_words == PLANE_WORDS):
                    total = _sum_in_segment(word, index * PLANE_WORDS + first, keys, table, SEGMENT, CHUNK)
                else:
                    total = _weighted_sum(word, index * num_words + words, mask, keys, table, SEGMENT)
                tl.atomic_add(sums + tl.load(pairs + 3 * num_pairs + pair), total)
