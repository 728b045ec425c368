"""Where the bytes of a partial block lie in a pool, and the order in which they travel.

Wire order of one block: C order of block_HLPBD[:, layers, :, :num_valid, :]. Every transport that serialises uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.contracts.kv_layout import DTYPE_BYTES, KVLayout
from tandem.kernels.blocks.quantization import as_bytes


class BlockGeometry:
    """Byte arithmetic of one pool layout. `block_stride_bytes` is the distance between two blocks in that pool."""

    def __init__(self, layout: KVLayout, block_stride_bytes: int | None = None) -> None:
        group = layout.group
        self.num_heads, self.num_layers, self.num_planes = group.num_kv_heads, group.num_layers, group.num_planes
        self.block_size = layout.block_size
        self.slot_bytes = group.head_dim * DTYPE_BYTES[group.dtype]
        self.plane_bytes = self.block_size * self.slot_bytes
        self.layer_bytes = self.num_planes * self.plane_bytes
        self.head_bytes = self.num_layers * self.layer_bytes
        self.block_stride_bytes = layout.stride_bytes if block_stride_bytes is None else block_stride_bytes

    def payload_bytes(self, num_layers: int, num_valid: int) -> int:
        """Bytes that move for one block, `num_valid` token slots of `num_layers` layers."""
        return self.num_heads * num_layers * self.num_planes * num_valid * self.slot_bytes

    def runs(self, block_id: int, layers: range, num_valid: int) -> list[tuple[int, int]]:
        """Where these bytes lie: (offset from the pool's start, length), both in bytes, in wire order, with contiguous
        neighbours merged."""
        start = block_id * self.block_stride_bytes
        if num_valid == self.block_size:
            if len(layers) == self.num_layers:
                return [(start, self.num_heads * self.head_bytes)]
            length = len(layers) * self.layer_bytes
            first = start + layers.start * self.layer_bytes
            return [(first + head * self.head_bytes, length) for head in range(self.num_heads)]
        length = num_valid * self.slot_bytes
        return [
            (start + head * self.head_bytes + layer * self.layer_bytes + plane * self.plane_bytes, length)
            for head in range(self.num_heads)
            for layer in layers
            for plane in range(self.num_planes)
        ]


def pool_stride_bytes(pool_NHLPBD: torch.Tensor) -> int:
    """The distance in bytes between the starts of two blocks. The blocks themselves must be contiguous."""
    assert pool_NHLPBD.dim() == 6, f"a pool has 6 dimensions, not {pool_NHLPBD.dim()}"
    assert pool_NHLPBD[0].is_contiguous(), "a block must be one contiguous run"
    return pool_NHLPBD.stride(0) * pool_NHLPBD.element_size()


def byte_view(pool_NHLPBD: torch.Tensor) -> memoryview:
    """The memory of a CPU pool from its first block on, writable, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8).set_(pool_NHLPBD.untyped_storage())
    return memoryview(flat.numpy())[pool_NHLPBD.storage_offset() * pool_NHLPBD.element_size() :]  # type: ignore[arg-type]


def shape_pool(storage: torch.Tensor, layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """A pool_NHLPBD over `storage`, uint8 [num_blocks * layout.stride_bytes] or longer; see `as_moved`."""
    group = layout.group
    dtype = getattr(torch, group.dtype)
    inner = (group.num_kv_heads, group.num_layers, group.num_planes, layout.block_size, group.head_dim)
    item_bytes = DTYPE_BYTES[group.dtype]
    assert layout.stride_bytes % item_bytes == 0, "blocks must begin on an element"
    strides = [layout.stride_bytes // item_bytes]
    for axis in range(1, len(inner) + 1):
        strides.append(torch.Size(inner[axis:]).numel())
    shaped = storage[: num_blocks * layout.stride_bytes].view(dtype).as_strided((num_blocks, *inner), strides)
    return as_moved(shaped)


def as_moved(pool_NHLPBD: torch.Tensor) -> torch.Tensor:
    """The pool as transports see it: fp8 as uint8, since torch has only some operations for fp8 and moving needs
    none."""
    return as_bytes(pool_NHLPBD)


def copy_blocks(
    source_NHLPBD: torch.Tensor,
    destination_NHLPBD: torch.Tensor,
    pairs: Sequence[tuple[int, int]],
    layers: range | None,
    num_valid: Sequence[int],
) -> None:
    """Copies block `pairs[i][0]` of one pool of this address space to block `pairs[i][1]` of another: `layers` (None:
    all), the first `num_valid[i]` token slots. Asynchronous where a CUDA pool takes part."""
    span = slice(None) if layers is None else slice(layers.start, layers.stop)
    block_size = source_NHLPBD.shape[4]
    if layers is None and not source_NHLPBD.is_cuda and all(valid == block_size for valid in num_valid):
        theirs, ours = _block_rows(destination_NHLPBD), _block_rows(source_NHLPBD)
        for source, destination in pairs:
            np.copyto(theirs[destination], ours[source])
        return
    for (source, destination), valid in zip(pairs, num_valid, strict=True):
        destination_NHLPBD[destination, :, span, :, :valid].copy_(
            source_NHLPBD[source, :, span, :, :valid], non_blocking=True
        )


def _block_rows(pool_NHLPBD: torch.Tensor) -> np.ndarray:
    """A view of a CPU pool, uint8 [num_blocks, bytes of a block]: torch copies a whole block slower than numpy."""
    return pool_NHLPBD.flatten(1).view(torch.uint8).numpy()
