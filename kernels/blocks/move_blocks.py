"""Moving KV blocks by kernels: to a peer GPU's pool, to pinned host memory and back, into and out of packed buffers.

A block has H heads, L layers, P planes (keys, values), B slots, D head size. What a kernel moves it can also sum for
digests, so that the bytes are read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.kernels.blocks.digest import BlockSums

WORD_BYTES = 8


@dataclass(frozen=True)
class BlockPlaces:
    """Where blocks lie: the address of layer 0 of block 0, and the bytes from one block, head and layer to the next."""

    address: int
    block_bytes: int
    head_bytes: int
    layer_bytes: int

    @classmethod
    def of(cls, blocks_NHLPBD: torch.Tensor) -> BlockPlaces:
        strides = (stride * blocks_NHLPBD.element_size() for stride in blocks_NHLPBD.stride()[:3])
        return cls(blocks_NHLPBD.data_ptr(), *strides)

    def starting_at(self, layer: int) -> BlockPlaces:
        """The same blocks from `layer` on, which counts as layer 0."""
        return BlockPlaces(self.address + layer * self.layer_bytes, self.block_bytes, self.head_bytes, self.layer_bytes)


def why_not_words(blocks_NHLPBD: torch.Tensor) -> str:
    """ "" if kernels can move such blocks as 64-bit words, else why not."""
    itemsize = blocks_NHLPBD.element_size()
    slot_bytes = blocks_NHLPBD.shape[-1] * itemsize
    if slot_bytes % WORD_BYTES:
        return f"a slot of one head has {slot_bytes} bytes, no multiple of {WORD_BYTES}"
    if any(stride * itemsize % WORD_BYTES for stride in blocks_NHLPBD.stride()[:3]):
        return f"blocks don't begin on {WORD_BYTES}-byte boundaries"
    if not blocks_NHLPBD[0, 0, 0].is_contiguous():
        return "the planes of a layer don't lie together"
    return ""


def move_blocks(
    like_NHLPBD: torch.Tensor,
    source: BlockPlaces,
    target: BlockPlaces,
    pairs_4N: torch.Tensor,
    layers: range | None,
    num_programs: int,
    sums: BlockSums | None = None,
) -> None:
    """Launches on the device of `pairs_4N` (int64: source block, target block, valid slots, which of `sums` takes the
    block up; three rows do without). `like_NHLPBD` gives the sizes of a block. Both places name layer 0; `layers` are
    moved (None: all)."""
    from tandem.kernels.triton_kernels.blocks.move_blocks import PAIRS_AT_ONCE, WORDS_AT_ONCE, move_blocks_kernel

    num_pairs = pairs_4N.shape[1]
    if num_pairs == 0:
        return
    _, num_heads, num_layers, planes, block_size, head_size = like_NHLPBD.shape
    chosen = range(num_layers) if layers is None else layers
    source, target = source.starting_at(chosen.start), target.starting_at(chosen.start)
    slot_words = head_size * like_NHLPBD.element_size() // WORD_BYTES
    plane_words = block_size * slot_words
    strides = [
        stride // WORD_BYTES
        for side in (source, target)
        for stride in (side.block_bytes, side.head_bytes, side.layer_bytes)
    ]
    summed = (pairs_4N, pairs_4N, pairs_4N) if sums is None else (sums.sums_N, sums.keys_S2, sums.table)
    with torch.cuda.device_of(pairs_4N):
        move_blocks_kernel[(min(num_programs, num_pairs * num_heads * len(chosen) * planes),)](
            source.address, target.address, pairs_4N, num_pairs, num_heads, chosen.start, len(chosen), *strides,
            *summed,
            POOL_LAYERS=num_layers, PLANES=planes, PLANE_WORDS=plane_words, SLOT_WORDS=slot_words,
            CHUNK=min(WORDS_AT_ONCE, 1 << (plane_words - 1).bit_length()), PAIRS=PAIRS_AT_ONCE,
            ALIGNMENT=16 if (source.address | target.address) % 16 == 0 else WORD_BYTES,
            HAS_SUMS=sums is not None, SEGMENT=1 if sums is None else sums.table.shape[1], num_warps=4,
        )  # fmt: skip
