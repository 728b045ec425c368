"""Copies blocks, whole or some layers of them, from this device's pool straight into another pool's memory.

The other pool is named by its address: on the same GPU, or a peer's over NVLink. N blocks to copy, H heads, L layers,
P planes, B slots, D head size; W 64-bit words of a slot.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

WORDS_AT_ONCE = 2048  # 16 KiB: eight 16-byte loads in flight for each of 128 threads


@triton.jit(do_not_specialize=["num_pairs", "first_layer", "num_layers"])
def push_blocks_kernel(
    pool,  # int64 words, blocks at strides of source_block
    target,  # address of the other pool, an integer
    pairs,  # int64 [3, N]: source block, destination block, valid slots
    num_pairs,
    first_layer,
    num_layers,
    source_block,  # words
    target_block,  # words
    NUM_HEADS: tl.constexpr,
    POOL_LAYERS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_WORDS: tl.constexpr,  # B * W
    SLOT_WORDS: tl.constexpr,  # W
    CHUNK: tl.constexpr,
):
    """Grid (programs,): each walks over planes (a head of K or V of a layer of a block), one at a time."""
    other = target.to(tl.pointer_type(tl.int64))
    num_planes = num_pairs * NUM_HEADS * num_layers * PLANES
    for item in range(tl.program_id(0), num_planes, tl.num_programs(0)):
        plane = item % PLANES
        layer = first_layer + (item // PLANES) % num_layers
        head = (item // (PLANES * num_layers)) % NUM_HEADS
        pair = item // (PLANES * num_layers * NUM_HEADS)
        inside = ((head * POOL_LAYERS + layer) * PLANES + plane) * PLANE_WORDS
        source = pool + tl.load(pairs + pair) * source_block + inside
        destination = other + tl.load(pairs + num_pairs + pair) * target_block + inside
        num_words = tl.load(pairs + 2 * num_pairs + pair) * SLOT_WORDS
        for first in tl.static_range(0, PLANE_WORDS, CHUNK):
            words = first + tl.arange(0, CHUNK)
            mask = words < num_words
            tl.store(destination + words, tl.load(source + words, mask=mask), mask=mask)
