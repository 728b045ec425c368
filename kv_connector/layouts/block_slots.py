"""A row of equal buffers on a pool's device, in which blocks made of short runs are packed to travel as one piece.

Wire order of a block as in geometry.py; a slot holds blocks one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tandem.kv_connector.layouts.geometry import BlockGeometry
from tandem.kv_connector.layouts.packed_parts import packed_parts

NUM_SLOTS = 4  # a guess; what it reaches: docs/measurements.md#transports-within-a-host
SLOT_BYTES = 4 << 20  # a guess


class BlockSlots:
    """The buffers (slots) over `memory`, uint8 [NUM_SLOTS * slot_bytes]; each slot holds at least one block."""

    def __init__(self, geometry: BlockGeometry, device: torch.device) -> None:
        self._geometry = geometry
        self.slot_bytes = max(SLOT_BYTES, geometry.num_heads * geometry.head_bytes)
        self.memory = torch.empty(NUM_SLOTS * self.slot_bytes, dtype=torch.uint8, device=device)

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        """The slot's first bytes, uint8 [nbytes], not a copy."""
        return self.memory[slot * self.slot_bytes : slot * self.slot_bytes + nbytes]

    def groups(self, num_layers: int, num_valid: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Splits the blocks into consecutive groups [first, end) that fit into one slot; yields (first, end, bytes)."""
        first, nbytes = 0, 0
        for index, valid in enumerate(num_valid):
            block_bytes = self._geometry.payload_bytes(num_layers, valid)
            if nbytes + block_bytes > self.slot_bytes:
                yield first, index, nbytes
                first, nbytes = index, 0
            nbytes += block_bytes
        if nbytes:
            yield first, len(num_valid), nbytes

    def pack(
        self,
        slot: int,
        pool_NHLPBD: torch.Tensor,
        block_ids: Sequence[int],
        layers: range,
        num_valid: Sequence[int],
    ) -> None:
        """Copies blocks into a slot; on CUDA asynchronously, on the current stream."""
        for packed_nHLPbD, part in self._parts(slot, pool_NHLPBD, block_ids, layers, num_valid):
            blocks = _indexable(pool_NHLPBD)[:, :, layers.start : layers.stop, :, : packed_nHLPbD.shape[4]]
            if pool_NHLPBD.is_cuda:
                packed_nHLPbD.copy_(blocks.index_select(0, torch.tensor(part, device=pool_NHLPBD.device)))
            else:
                for index, block_id in enumerate(part):
                    packed_nHLPbD[index].copy_(blocks[block_id])

    def unpack(
        self,
        slot: int,
        pool_NHLPBD: torch.Tensor,
        block_ids: Sequence[int],
        layers: range,
        num_valid: Sequence[int],
    ) -> None:
        """Copies a slot into blocks, whose other token slots and layers stay as they are. Returns when it is done."""
        for packed_nHLPbD, part in self._parts(slot, pool_NHLPBD, block_ids, layers, num_valid):
            blocks = _indexable(pool_NHLPBD)[:, :, layers.start : layers.stop, :, : packed_nHLPbD.shape[4]]
            if pool_NHLPBD.is_cuda:
                blocks.index_copy_(0, torch.tensor(part, device=pool_NHLPBD.device), packed_nHLPbD)
            else:
                for index, block_id in enumerate(part):
                    blocks[block_id].copy_(packed_nHLPbD[index])
        if pool_NHLPBD.is_cuda:
            torch.cuda.current_stream(pool_NHLPBD.device).synchronize()

    def _parts(
        self,
        slot: int,
        pool_NHLPBD: torch.Tensor,
        block_ids: Sequence[int],
        layers: range,
        num_valid: Sequence[int],
    ) -> Iterator[tuple[torch.Tensor, list[int]]]:
        memory = self.memory[slot * self.slot_bytes :]
        return packed_parts(self._geometry, memory, _indexable(pool_NHLPBD), block_ids, layers, num_valid)


def _indexable(pool_NHLPBD: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 where it is fp8, which torch can't index."""
    return pool_NHLPBD.view(torch.uint8) if pool_NHLPBD.element_size() == 1 else pool_NHLPBD
