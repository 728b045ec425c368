"""Lists the tiles of keys that block-sparse decode reads: for each row and KV head, those that some query head of its
group sees (the pattern: spec.BlockSparse). Made once a step; decode walks the lists and reads nothing else.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.api.spec import BlockSparse
from tandem.kernels.triton_kernels.common import begin, next_power_of_2, overlap
from tandem.kernels.triton_kernels.decode.decode_launch import SparseTiles, first_sparse_head
from tandem.kernels.triton_kernels.decode.decode_segment import sparse_shift

TILES_AT_ONCE = 256  # a guess


@triton.jit(do_not_specialize=["list_row", "local_blocks", "head_step", "first_head"])
def list_tiles_kernel(
    lists,  # out int32 [N, K, list_row]
    counts,  # out int32 [N, K]
    seq_lens,  # int32 [N]
    list_row,
    local_blocks,
    head_step,
    first_head,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N, K). BLOCK is a multiple of TILE: a tile lies in one sparse block."""
    begin(PDL)
    row, kv_head = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + row)
    own_block = (seq_len - 1) // BLOCK
    segment = row * tl.num_programs(1) + kv_head
    members = tl.arange(0, GROUP_PAD)
    shifts = sparse_shift(kv_head, kv_head * GROUP + tl.minimum(members, GROUP - 1), first_head, head_step)
    count = 0
    for first in range(0, (seq_len + TILE - 1) // TILE, CHUNK):
        tiles = first + tl.arange(0, CHUNK)
        blocks = tiles * TILE // BLOCK
        vertical = tl.max(((blocks[:, None] + shifts[None, :]) % STRIDE == 0).to(tl.int32), 1)
        seen = (tiles * TILE < seq_len) & ((vertical > 0) | (blocks > own_block - local_blocks))
        places = count + tl.cumsum(seen.to(tl.int32), 0) - 1
        tl.store(lists + segment.to(tl.int64) * list_row + places, tiles, mask=seen)
        count += tl.sum(seen.to(tl.int32), 0)
    tl.store(counts + segment, count)


def list_sparse_tiles(
    pattern: BlockSparse, seq_lens: torch.Tensor, max_seq_len: int, num_heads: int, num_kv_heads: int, tile: int
) -> SparseTiles:
    """The lists for rows of these lengths (int32 [N], none above `max_seq_len`), in tiles of `tile` tokens."""
    assert pattern.block_size % tile == 0
    num_rows, device, group = len(seq_lens), seq_lens.device, num_heads // num_kv_heads
    lists = torch.empty((num_rows, num_kv_heads, max(1, -(-max_seq_len // tile))), dtype=torch.int32, device=device)
    counts = torch.empty((num_rows, num_kv_heads), dtype=torch.int32, device=device)
    if num_rows:
        list_tiles_kernel[(num_rows, num_kv_heads)](
            lists, counts, seq_lens, lists.stride(1), pattern.local_blocks, pattern.head_sliding_step,
            first_sparse_head(pattern, num_heads, num_kv_heads), GROUP=group,
            GROUP_PAD=next_power_of_2(group), STRIDE=pattern.vert_stride, BLOCK=pattern.block_size, TILE=tile,
            CHUNK=TILES_AT_ONCE, **overlap(device),
        )  # fmt: skip
    return SparseTiles(lists, counts)
