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

from tandem.kernels.api.spec import Reach
from tandem.kernels.triton_kernels.common import multiprocessors
from tandem.kernels.triton_kernels.prefill.prefill_hopper import prefill_hopper_kernel
from tandem.kernels.triton_kernels.prefill.prefill_loads import COLUMNS, HALF, ITEM_FIELDS, QUERY_TILE

HEAD_SIZES = {
    64: 64,
    80: 128,
    96: 128,
    128: 128,
    256: 256,
}  # -> columns in shared memory; the copy engine fills up with zeros
SMALLEST_BOX = 16  # rows, as many as a product of the tensor cores takes at least
BOX_ROWS, BOX_COLUMNS, QUERIES, FIELDS = HALF.value, COLUMNS.value, QUERY_TILE.value, ITEM_FIELDS.value
ROW, FIRST_TOKEN = 0, 2  # places of these fields in a piece of work
_compiled: dict[tuple[Any, ...], Any] = {}


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
    token, head, element = tensor.stride()
    size = tensor.element_size()
    if element != 1 or tensor.data_ptr() % 16 or token * size % 16 or head * size % 16:
        return f"{name} rows don't start at multiples of 16 bytes"
    if token == 0 or head == 0:
        return f"{name} rows lie on each other"
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
    """int32 [pieces, 8]: row, query tile, the row's first token, new and earlier tokens, and zeros; most keys first
    (longest processing time first, Graham 1969)."""
    new, total = np.asarray(query_lens, np.int64), np.asarray(seq_lens, np.int64)
    tiles = -(-new // QUERIES)
    row = np.repeat(np.arange(len(new)), tiles)
    tile = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    work = np.zeros((len(row), FIELDS), np.int32)
    for field, values in enumerate((row, tile, (np.cumsum(new) - new)[row], new[row], (total - new)[row])):
        work[:, field] = values
    keys = work[:, 4] + tile * QUERIES
    ordered: np.ndarray = work[np.argsort(-keys, kind="stable")]
    return ordered


@functools.cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@functools.lru_cache(maxsize=4096)
def _describe_queries(
    pointer: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> TensorDescriptor:
    """[T, heads, D] as [heads, T, D]."""
    num_tokens, num_heads, head_size = shape
    return TensorDescriptor(
        Address(pointer, dtype), [num_heads, num_tokens, head_size], [strides[1], strides[0], 1],
        [1, BOX_ROWS, BOX_COLUMNS], _layout(3),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _describe_rows(
    pointer: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> TensorDescriptor:
    """[T, heads, D] as [heads, T + 1, BOX_ROWS, D]."""
    num_tokens, num_heads, head_size = shape
    token, head, _ = strides
    start = Address(pointer - BOX_ROWS * token * dtype.itemsize, dtype)
    return TensorDescriptor(
        start, [num_heads, num_tokens + 1, BOX_ROWS, head_size], [head, token, token, 1],
        [1, 1, BOX_ROWS, BOX_COLUMNS], _layout(4),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _describe_nothing(pointer: int, dtype: torch.dtype, box: int) -> TensorDescriptor:
    """A box of memory that is there, for reads past its end."""
    return TensorDescriptor(
        Address(pointer, dtype), [1, 1, box, BOX_COLUMNS], [box * BOX_COLUMNS, box * BOX_COLUMNS, BOX_COLUMNS, 1],
        [1, 1, box, BOX_COLUMNS], _layout(4),
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


@functools.cache
def hopper_constants(
    num_heads: int,
    group: int,
    head_size: int,
    block_size: int,
    has_cache: bool,
    has_alibi: bool,
    window_kind: int,
    has_soft_cap: bool,
    causal: bool = True,
    has_sinks: bool = False,
) -> dict[str, Any]:
    """The kernel's compile-time constants, in its order."""
    columns = HEAD_SIZES[head_size]
    return {
        "HEADS": num_heads, "GROUP": group, "D": columns, "BLOCK_SIZE": block_size,
        "KEY_TILE": 64 if columns == 256 else 128, "BOX": box_of(block_size), "STAGES": 4 if columns == 64 else 2,
        "Q_SLOTS": 1 if columns == 256 else 2, "HAS_CACHE": has_cache, "HAS_ALIBI": has_alibi, "WINDOW": window_kind,
        "HAS_SOFT_CAP": has_soft_cap, "HAS_SINKS": has_sinks, "CAUSAL": causal,
    }  # fmt: skip


def launch_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    block_tables: torch.Tensor,
    work: torch.Tensor,
    scale: float,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    reach: Reach = Reach(),
    soft_cap: float | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes what paged_prefill does; `work` is `list_work` of the rows, on the device. What doesn't fit must have
    been refused; not `causal` also takes no window, and every row must have keys. Tokens of no piece are left as they
    are in `out`, and pieces of no new tokens write nothing."""
    shape, dtype, device = query.shape, query.dtype, query.device
    num_heads, head_size = shape[1], shape[2]
    output = torch.empty(shape, dtype=dtype, device=device) if out is None else out
    num_items = work.shape[0] * num_heads
    if num_items == 0:
        return output
    keys = _describe_rows(key.data_ptr(), dtype, key.shape, key.stride())
    if key_cache is None or value_cache is None:
        tiles, block_size = CacheTiles(keys, 0, 0, 0), BOX_ROWS
    else:
        pointer, block_size = key_cache.data_ptr(), key_cache.shape[2]
        tiles = _cache_tiles(
            pointer, dtype, key_cache.shape, key_cache.stride(), value_cache.data_ptr() - pointer
        )  # fmt: skip
    constants = hopper_constants(
        num_heads, num_heads // key.shape[1], head_size, block_size, key_cache is not None,
        alibi_slopes is not None, reach.kind, soft_cap is not None, causal, sinks is not None,
    )  # fmt: skip
    arguments = (
        _describe_queries(query.data_ptr(), dtype, shape, query.stride()), keys,
        _describe_rows(value.data_ptr(), dtype, value.shape, value.stride()), tiles.desc,
        _describe_nothing(query.data_ptr(), dtype, constants["BOX"]),
        _describe_rows(output.data_ptr(), dtype, shape, output.stride()), work, num_items, block_tables,
        work if alibi_slopes is None else alibi_slopes, work if sinks is None else sinks, scale, soft_cap or 0.0,
        reach.size, block_tables.stride(0),
        tiles.block_units, tiles.head_units, tiles.value_units, *constants.values(),
    )  # fmt: skip
    grid = (min(num_items, multiprocessors(device)), 1, 1)
    variant = (device, dtype, head_size, *constants.values())
    compiled = _compiled.get(variant)
    if compiled is None:
        _compiled[variant] = prefill_hopper_kernel[grid](*arguments, num_warps=4)
    else:  # nothing else tells variants apart: past the search for one, which takes longer than the launch
        compiled[grid](*arguments)
    return output
