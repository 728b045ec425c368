"""A row of equal buffers beside a pool, on its device: where blocks whose runs are short travel packed.

Wire order of a block as in geometry.py; a slot holds blocks one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tandem.kv_connector.layouts.geometry import BlockGeometry

NUM_SLOTS = 4  # a guess; what it reaches: docs/measurements.md#transports-within-a-host
SLOT_BYTES = 4 << 20  # a guess


class BlockSlots:
    """`memory`: uint8 [NUM_SLOTS * slot_bytes]; a slot holds at least one block."""

    def __init__(self, geometry: BlockGeometry, device: torch.device) -> None:
        self._geometry = geometry
        self.slot_bytes = max(SLOT_BYTES, geometry.num_heads * geometry.head_bytes)
        self.memory = torch.empty(NUM_SLOTS * self.slot_bytes, dtype=torch.uint8, device=device)

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], the slot's first bytes."""
        return self.memory[slot * self.slot_bytes : slot * self.slot_bytes + nbytes]

    def groups(self, num_layers: int, num_valid: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(first, end, bytes) of consecutive blocks that fit into one slot."""
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
        """Blocks into a slot. On CUDA asynchronous, on the current stream."""
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
        """A slot into blocks, other slots and layers untouched. Returns when it is done."""
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
        """(packed_nHLPbD over the slot, block ids) for each run of blocks with equally many valid slots."""
        geometry = self._geometry
        offset, first = slot * self.slot_bytes, 0
        for end in range(1, len(block_ids) + 1):
            if end < len(block_ids) and num_valid[end] == num_valid[first]:
                continue
            part, valid = list(block_ids[first:end]), num_valid[first]
            nbytes = len(part) * geometry.payload_bytes(len(layers), valid)
            shape = (len(part), geometry.num_heads, len(layers), geometry.num_planes, valid, pool_NHLPBD.shape[5])
            yield self.memory[offset : offset + nbytes].view(_indexable(pool_NHLPBD).dtype).view(shape), part
            offset, first = offset + nbytes, end


def _indexable(pool_NHLPBD: torch.Tensor) -> torch.Tensor:
    """torch indexes no fp8; bytes do as well."""
    return pool_NHLPBD.view(torch.uint8) if pool_NHLPBD.element_size() == 1 else pool_NHLPBD
