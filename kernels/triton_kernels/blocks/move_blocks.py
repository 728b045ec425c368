"""Copies planes of blocks from anywhere to anywhere that the GPU can address, and sums them for digests on the way.

Both sides are named by address: this GPU's memory, a peer's over NVLink, or pinned host memory. N pairs of blocks,
H heads, L layers of a block, P planes (keys, values), W 64-bit words of a slot.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

# 16 KiB: eight 16-byte loads in flight for each of 128 threads, and as many of the next block; what it reaches:
# docs/measurements.md#copies-norms-and-sampling.
WORDS_AT_ONCE = 2048
PAIRS_AT_ONCE = 8  # a guess


@triton.jit
def _weighted_sum(word, position, mask, keys, table, SEGMENT: tl.constexpr):
    """Part of a block's multilinear sum; see kernels/blocks/digest.py for the definition."""
    segment = keys + 2 * (position // SEGMENT)
    inside = table + position % SEGMENT
    first = tl.load(inside, mask=mask, other=0) ^ tl.load(segment, mask=mask, other=0)
    second = tl.load(inside + SEGMENT, mask=mask, other=0) ^ tl.load(segment + 1, mask=mask, other=0)
    return tl.sum(word * (first | 1) + (word >> 32) * (second | 1), 0)


@triton.jit(do_not_specialize=["num_pairs", "num_heads", "first_layer", "num_layers"])
def move_blocks_kernel(
    source,  # address, an integer: where layer `first_layer` of block 0 begins
    target,  # the same of the other side
    pairs,  # int64 [4, N]: source block, target block, valid slots, index into sums (read only with HAS_SUMS)
    num_pairs,
    num_heads,
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
    POOL_LAYERS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_WORDS: tl.constexpr,  # of all slots
    SLOT_WORDS: tl.constexpr,  # W
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes that divide both addresses
    HAS_SUMS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Grid (programs,): each takes groups of PAIRS pairs, one plane (a head of K or V of a layer) of all of them at a
    time. Planes of a group lie at the same place of their blocks, so they share the sums' multipliers. (Triton takes an
    address that fits for an integer of 32 bits.)"""
    here = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(tl.int64)), ALIGNMENT)
    there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(tl.int64)), ALIGNMENT)
    num_groups = tl.cdiv(num_pairs, PAIRS)
    for item in range(tl.program_id(0), num_groups * num_heads * num_layers * PLANES, tl.num_programs(0)):
        plane = (item // num_groups) % PLANES
        layer = (item // (num_groups * PLANES)) % num_layers
        head = item // (num_groups * PLANES * num_layers)
        begin = (item % num_groups) * PAIRS
        end = tl.minimum(begin + PAIRS, num_pairs)
        origin = here + head * source_head + layer * source_layer + plane * PLANE_WORDS
        destination = there + head * target_head + layer * target_layer + plane * PLANE_WORDS
        index = (head * POOL_LAYERS + first_layer + layer) * PLANES + plane
        for first in tl.static_range(0, PLANE_WORDS, CHUNK):
            words = first + tl.arange(0, CHUNK)
            if HAS_SUMS and PLANE_WORDS % CHUNK == 0 and SEGMENT % CHUNK == 0:
                segment = keys + 2 * ((index * PLANE_WORDS + first) // SEGMENT)
                inside = table + (index * PLANE_WORDS + first) % SEGMENT + tl.arange(0, CHUNK)
                factor = (tl.load(inside) ^ tl.load(segment)) | 1
                other = (tl.load(inside + SEGMENT) ^ tl.load(segment + 1)) | 1
            num_first = (tl.load(pairs + 2 * num_pairs + begin) * SLOT_WORDS).to(tl.int32)
            word = tl.load(origin + tl.load(pairs + begin) * source_block + words, mask=words < num_first, other=0)
            for pair in range(begin, end):
                # The next block is on its way while this one is stored.
                after = tl.minimum(pair + 1, end - 1)
                num_next = (tl.load(pairs + 2 * num_pairs + after) * SLOT_WORDS).to(tl.int32)
                mask = (words < num_next) & (pair + 1 < end)
                following = tl.load(origin + tl.load(pairs + after) * source_block + words, mask=mask, other=0)
                # Read again: of a number carried from turn to turn the compiler doesn't know that 16 bytes divide it.
                num_words = (tl.load(pairs + 2 * num_pairs + pair) * SLOT_WORDS).to(tl.int32)
                block = tl.load(pairs + num_pairs + pair) * target_block
                tl.store(destination + block + words, word, mask=words < num_words)
                if HAS_SUMS:
                    if PLANE_WORDS % CHUNK == 0 and SEGMENT % CHUNK == 0:
                        if num_words == PLANE_WORDS:
                            total = tl.sum(word * factor + (word >> 32) * other, 0)
                        else:
                            total = _weighted_sum(
                                word, index * num_words + words, words < num_words, keys, table, SEGMENT
                            )
                    else:
                        total = _weighted_sum(word, index * num_words + words, words < num_words, keys, table, SEGMENT)
                    tl.atomic_add(sums + tl.load(pairs + 3 * num_pairs + pair), total)
                word = following
