"""Launches the Hopper prefill kernel: what it can serve, its work list and its tensor descriptors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.kernels.triton_kernels.prefill_hopper import COLUMNS, HALF, KEY_TILE, QUERY_TILE, prefill_hopper_kernel

HEAD_SIZES = (64, 128)
SMALLEST_BOX = 16
BOX_ROWS, BOX_COLUMNS, QUERIES, KEYS = HALF.value, COLUMNS.value, QUERY_TILE.value, KEY_TILE.value


@dataclass(frozen=True)
class Address:
    """Where a descriptor starts: before the tensor, so that a box's two token coordinates add up to its first row."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


@dataclass(frozen=True)
class CacheTiles:
    """A layer's cache as one line of tiles of S slots: how far apart blocks, heads, keys and values are in it."""

    desc: TensorDescriptor
    block_units: int
    head_units: int
    value_units: int


def why_not_tiles(name: str, tensor: torch.Tensor) -> str | None:
    """Why the copy engine can't read [T, heads, D] rows, or None."""
    if tensor.data_ptr() % 16 or any(stride * tensor.element_size() % 16 for stride in tensor.stride()[:2]):
        return f"{name} rows don't start at multiples of 16 bytes"
    return None


def why_not_cache(key_cache: torch.Tensor, value_cache: torch.Tensor) -> str | None:
    """Why [num_blocks, K, S, D] views don't form a line of tiles, or None."""
    block_size, head_size = key_cache.shape[2:]
    tile = block_size * head_size
    apart = value_cache.data_ptr() - key_cache.data_ptr()
    if block_size % SMALLEST_BOX:
        return f"block size {block_size} is no multiple of {SMALLEST_BOX}"
    if key_cache.stride()[2:] != (head_size, 1) or any(stride % tile for stride in key_cache.stride()[:2]):
        return "blocks, heads and layers are not whole tiles apart"
    if apart < 0 or apart % (tile * key_cache.element_size()) or key_cache.data_ptr() % 16:
        return "values don't lie whole tiles after their keys"
    return None


def box_of(block_size: int) -> int:
    """Rows of a box: the largest power of two up to BOX_ROWS that divides the block."""
    return min(BOX_ROWS, block_size & -block_size)


def list_work(query_lens: Sequence[int], seq_lens: Sequence[int]) -> np.ndarray:
    """int32 [pieces, 2]: row and query tile of every program, the one with most keys first (longest processing time
    first, Graham 1969)."""
    pieces, keys = [], []
    for row, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        tiles = np.arange(-(-new // QUERIES), dtype=np.int32)
        pieces.append(np.stack((np.full_like(tiles, row), tiles), axis=1))
        keys.append(total - new + tiles.astype(np.int64) * QUERIES)
    if not pieces:
        return np.zeros((0, 2), np.int32)
    order = np.argsort(-np.concatenate(keys), kind="stable")
    work: np.ndarray = np.concatenate(pieces)[order]
    return work


@functools.cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def _describe_rows(tensor: torch.Tensor) -> TensorDescriptor:
    """[T, heads, D] as [heads, T + 1, BOX_ROWS, D]."""
    num_tokens, num_heads, head_size = tensor.shape
    token, head, _ = tensor.stride()
    start = Address(tensor.data_ptr() - BOX_ROWS * token * tensor.element_size(), tensor.dtype)
    return TensorDescriptor(
        start, [num_heads, num_tokens + 1, BOX_ROWS, head_size], [head, token, token, 1],
        [1, 1, BOX_ROWS, BOX_COLUMNS], _layout(4),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _cache_tiles(
    pointer: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], apart: int
) -> CacheTiles:
    num_blocks, num_kv_heads, block_size, head_size = shape
    tile, box = block_size * head_size, box_of(block_size)
    block_units, head_units, value_units = strides[0] // tile, strides[1] // tile, apart // (tile * dtype.itemsize)
    num_units = (num_blocks - 1) * block_units + (num_kv_heads - 1) * head_units + value_units + 1
    desc = TensorDescriptor(
        Address(pointer - box * head_size * dtype.itemsize, dtype), [num_units, block_size + 1, box, head_size],
        [tile, head_size, head_size, 1], [1, 1, box, BOX_COLUMNS], _layout(4),
    )  # fmt: skip
    return CacheTiles(desc, block_units, head_units, value_units)


def hopper_constants(
    group: int, head_size: int, block_size: int, *, has_cache: bool, has_window: bool, has_soft_cap: bool
) -> dict[str, Any]:
    """The kernel's compile-time constants and launch options."""
    return {
        "GROUP": group, "D": head_size, "BLOCK_SIZE": block_size, "BOX": box_of(block_size),
        "STAGES": 2 if head_size == 128 else 4, "HAS_CACHE": has_cache, "HAS_WINDOW": has_window,
        "HAS_SOFT_CAP": has_soft_cap, "TAKE_TURNS": True, "num_warps": 4,
    }  # fmt: skip


def launch_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    work: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """As paged_prefill; `work` is `list_work` of the rows, on the device. What doesn't fit must have been refused."""
    num_tokens, num_heads, head_size = query.shape
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if work.shape[0] == 0:
        return output
    queries = TensorDescriptor(
        query, [num_heads, num_tokens, head_size], [query.stride(1), query.stride(0), 1], [1, BOX_ROWS, BOX_COLUMNS],
        _layout(3),
    )  # fmt: skip
    keys = _describe_rows(key)
    if key_cache is None or value_cache is None:
        tiles, block_size = CacheTiles(keys, 0, 0, 0), BOX_ROWS
    else:
        apart, block_size = value_cache.data_ptr() - key_cache.data_ptr(), key_cache.shape[2]
        tiles = _cache_tiles(key_cache.data_ptr(), key_cache.dtype, key_cache.shape, key_cache.stride(), apart)
    constants = hopper_constants(
        num_heads // key.shape[1], head_size, block_size, has_cache=key_cache is not None,
        has_window=window is not None, has_soft_cap=soft_cap is not None,
    )  # fmt: skip
    prefill_hopper_kernel[(num_heads, work.shape[0])](
        queries, keys, _describe_rows(value), tiles.desc, _describe_rows(output), work, block_tables, query_start_loc,
        seq_lens, scale, soft_cap or 0.0, window or 0, block_tables.stride(0),
        tiles.block_units, tiles.head_units, tiles.value_units, **constants,
    )  # fmt: skip
    return output
