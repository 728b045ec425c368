"""Pinned host memory between a CUDA pool and a socket. Wire order is that of geometry.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kv_connector.layouts.geometry import BlockGeometry
from tandem.kv_connector.layouts.packed_parts import packed_parts
from tandem.kv_connector.layouts.rank_pools import RankPools


class Staging:
    """One growing pinned buffer of one thread. Each call returns when the device copies are done."""

    def __init__(self, geometry: BlockGeometry, device: torch.device, ranks: RankPools | None = None) -> None:
        """`scatter` writes through `ranks` if blocks are not whole on `device`."""
        self._geometry, self._ranks = geometry, ranks
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._host = torch.empty(0, dtype=torch.uint8)

    def buffer(self, nbytes: int) -> memoryview:
        """Exactly `nbytes` bytes of the host memory; what an earlier call put there may be lost."""
        if self._host.numel() < nbytes:
            self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return memoryview(self._host.numpy())[:nbytes]  # type: ignore[arg-type]

    def gather(
        self, pool_NHLPBD: torch.Tensor, block_ids: Sequence[int], layers: range, num_valid: Sequence[int]
    ) -> memoryview:
        """Copies blocks of a CUDA pool into the buffer and returns them as wire bytes. Ordered after the current
        stream's work."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        nbytes = sum(self._geometry.payload_bytes(len(layers), valid) for valid in num_valid)
        view = self.buffer(nbytes)
        with torch.cuda.stream(self._stream):
            for host, part in packed_parts(self._geometry, self._host, pool_NHLPBD, block_ids, layers, num_valid):
                index = torch.tensor(part, device=self._device)
                blocks = pool_NHLPBD[:, :, layers.start : layers.stop].index_select(0, index)
                host.copy_(blocks[:, :, :, :, : host.shape[4]], non_blocking=True)
        self._stream.synchronize()
        return view

    def scatter(
        self, pool_NHLPBD: torch.Tensor, block_ids: Sequence[int], layers: range, num_valid: Sequence[int]
    ) -> None:
        """Copies the wire bytes in `buffer` into blocks of a CUDA pool; other slots and layers stay as they are."""
        with torch.cuda.stream(self._stream):
            for host, part in packed_parts(self._geometry, self._host, pool_NHLPBD, block_ids, layers, num_valid):
                if self._ranks is not None:
                    self._scatter_to_ranks(self._ranks, host, part, layers)
                    continue
                index = torch.tensor(part, device=self._device)
                destination = pool_NHLPBD[:, :, layers.start : layers.stop, :, : host.shape[4]]
                destination.index_copy_(0, index, host.to(self._device, non_blocking=True))
        self._stream.synchronize()

    @staticmethod
    def _scatter_to_ranks(ranks: RankPools, host_nHLPbD: torch.Tensor, block_ids: list[int], layers: range) -> None:
        blocks_nHLPBD, valid = ranks.new_blocks(len(block_ids)), host_nHLPbD.shape[4]
        blocks_nHLPBD[:, :, layers.start : layers.stop, :, :valid].copy_(host_nHLPbD, non_blocking=True)
        ranks.scatter(blocks_nHLPBD, block_ids, layers, [valid] * len(block_ids))
