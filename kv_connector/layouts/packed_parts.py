"""Blocks packed one after the other in a buffer, in the wire order of geometry.py, as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tandem.kv_connector.layouts.geometry import BlockGeometry


def packed_parts(
    geometry: BlockGeometry,
    memory: torch.Tensor,
    pool_NHLPBD: torch.Tensor,
    block_ids: Sequence[int],
    layers: range,
    num_valid: Sequence[int],
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yields (packed_nHLPbD, a view of `memory`, uint8, with the pool's dtype; block ids) for each run of blocks with
    equally many valid token slots."""
    offset, first = 0, 0
    for end in range(1, len(block_ids) + 1):
        if end < len(block_ids) and num_valid[end] == num_valid[first]:
            continue
        part, valid = list(block_ids[first:end]), num_valid[first]
        nbytes = len(part) * geometry.payload_bytes(len(layers), valid)
        shape = (len(part), geometry.num_heads, len(layers), geometry.num_planes, valid, pool_NHLPBD.shape[5])
        yield memory[offset : offset + nbytes].view(pool_NHLPBD.dtype).view(shape), part
        offset, first = offset + nbytes, end
