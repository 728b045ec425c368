"""Rows' earlier tokens from an fp8 cache, as 16-bit blocks of a pool made for one step.

The Hopper prefill kernel multiplies what the copy engine brings, so fp8 keys and values are unpacked before it: a read
of the prefix and a write of twice its size, which but a few queries are worth. Every layer
of a step unpacks into the same pool. N rows, K KV heads, S slots a block, D head size, n blocks in all prefixes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import cdiv

CHUNK = 4096  # values that a program unpacks at once; a guess
MOST_BYTES = 256 << 20  # of a pool; a guess
# Rows of queries over each prefix: already 0.41 of the general kernel's time on an H200;
# docs/measurements.md#prefill-attention.
WORTHWHILE_QUERIES = 64


@triton.jit
def unpack_prefix_kernel(
    pool,  # out [n, K, 2, S, D], contiguous
    key_cache,  # [num_blocks, K, S, D], strides (cache_block, cache_head, D, 1)
    value_cache,  # as key_cache
    block_tables,  # int32 [N, B], strides (table_row, 1)
    places,  # int32 [n, 2]: row and table column
    k_scale,  # fp32 [1]
    v_scale,  # fp32 [1]
    table_row,
    cache_block,
    cache_head,
    TILE: tl.constexpr,  # S * D
    CHUNK: tl.constexpr,
):
    """Grid (n, K, 2 * ceil(TILE / CHUNK)): a chunk of the keys or of the values."""
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    is_value = tl.program_id(2) % 2
    inside = tl.program_id(2) // 2 * CHUNK + tl.arange(0, CHUNK)
    mask = inside < TILE
    row, column = tl.load(places + 2 * place), tl.load(places + 2 * place + 1)
    block = tl.load(block_tables + row.to(tl.int64) * table_row + column).to(tl.int64)
    source = block * cache_block + kv_head.to(tl.int64) * cache_head
    target = ((place.to(tl.int64) * tl.num_programs(1) + kv_head) * 2 + is_value) * TILE
    if is_value == 0:
        values = tl.load(key_cache + source + inside, mask=mask, other=0.0).to(tl.float32) * tl.load(k_scale)
    else:
        values = tl.load(value_cache + source + inside, mask=mask, other=0.0).to(tl.float32) * tl.load(v_scale)
    tl.store(pool + target + inside, values.to(pool.dtype.element_ty), mask=mask)


@dataclass(frozen=True, eq=False)
class UnpackedPrefixes:
    """Where a step's prefixes are unpacked: `places` int32 [n, 2], `pool` [n, K, 2, S, D], `block_tables` int32 [N, B]
    of that pool."""

    places: torch.Tensor
    pool: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def allocate(
        cls, query_lens: Sequence[int], seq_lens: Sequence[int], like_HSD: torch.Tensor, dtype: torch.dtype
    ) -> UnpackedPrefixes:
        """Allocates for rows of these lengths; `like_HSD` [num_blocks, K, S, D] is a layer's cache. Raises
        OutOfMemoryError."""
        _, num_kv_heads, block_size, head_size = like_HSD.shape
        device = like_HSD.device
        places, tables = place_prefixes(query_lens, seq_lens, block_size)
        shape = max(len(places), 1), num_kv_heads, 2, block_size, head_size
        return cls(
            torch.from_numpy(places).to(device, non_blocking=True), torch.empty(shape, dtype=dtype, device=device),
            torch.from_numpy(tables).to(device, non_blocking=True),
        )  # fmt: skip

    def fill(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
    ) -> None:
        """Unpacks from a layer's caches [num_blocks, K, S, D], fp8, each block of a head contiguous; scales fp32
        [1]."""
        num_kv_heads, block_size, head_size = key_cache.shape[1:]
        tile = block_size * head_size
        if len(self.places) == 0:
            return
        unpack_prefix_kernel[(len(self.places), num_kv_heads, 2 * cdiv(tile, CHUNK))](
            self.pool, key_cache, value_cache, block_tables, self.places, k_scale, v_scale, block_tables.stride(0),
            key_cache.stride(0), key_cache.stride(1), TILE=tile, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip


def place_prefixes(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [n, 2]: row and table column of each block of a prefix; int32 [N, B]: those blocks' numbers, a table)."""
    earlier = np.asarray(seq_lens, np.int64) - np.asarray(query_lens, np.int64)
    counts = -(-earlier // block_size)
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    tables = np.zeros((len(counts), max(1, int(counts.max(initial=0)))), np.int32)
    tables[row, column] = np.arange(len(row))
    return np.stack((row, column), 1).astype(np.int32), tables


def is_unpacking_worthwhile(
    query_lens: Sequence[int], seq_lens: Sequence[int], num_heads: int, num_kv_heads: int, head_size: int
) -> bool:
    """Whether the rows' prefixes are worth unpacking, and fit the memory that may be taken for it."""
    new = np.asarray(query_lens, np.int64)
    earlier = np.asarray(seq_lens, np.int64) - new
    total = int(earlier.sum())
    queries = int((new * earlier).sum()) * (num_heads // num_kv_heads)
    return queries >= WORTHWHILE_QUERIES * total and 4 * total * num_kv_heads * head_size <= MOST_BYTES
