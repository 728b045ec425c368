"""The caches of a simulated node. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tandem.engine.contracts.directory import BlockEvent


class TieredCache:
    """Blocks of a node: what leaves the GPU tier goes to the host tier, what leaves that is gone. Least recently used
    first; of one request the deepest first. A block is in one tier."""

    def __init__(self, num_gpu_blocks: int, num_host_blocks: int) -> None:
        self._gpu: OrderedDict[bytes, None] = OrderedDict()
        self._host: OrderedDict[bytes, None] = OrderedDict()
        self._num_gpu, self._num_host = num_gpu_blocks, num_host_blocks
        self.events: list[BlockEvent] = []

    def drain_events(self) -> list[BlockEvent]:
        """What the directory is to hear of, since the last call."""
        events, self.events = self.events, []
        return events

    def match(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Returns how many leading blocks are here, and how many of these are in the host tier."""
        length = in_host = 0
        for block_hash in hashes:
            if block_hash in self._host:
                in_host += 1
            elif block_hash not in self._gpu:
                break
            length += 1
        return length, in_host

    def use(self, hashes: Sequence[bytes]) -> None:
        """Puts all of them into the GPU tier, the first as the most recent."""
        for block_hash in reversed(hashes):
            if block_hash in self._gpu:
                self._gpu.move_to_end(block_hash)
                continue
            self._gpu[block_hash] = None
            self.events.append(BlockEvent(block_hash, True, "gpu"))
            if block_hash in self._host:
                del self._host[block_hash]
                self.events.append(BlockEvent(block_hash, False, "cpu"))
        while len(self._gpu) > self._num_gpu:
            block_hash, _ = self._gpu.popitem(last=False)
            self.events.append(BlockEvent(block_hash, False, "gpu"))
            if self._num_host:
                self._host[block_hash] = None
                self.events.append(BlockEvent(block_hash, True, "cpu"))
        while len(self._host) > self._num_host:
            self.events.append(BlockEvent(self._host.popitem(last=False)[0], False, "cpu"))

    def check_integrity(self) -> None:
        assert len(self._gpu) <= self._num_gpu
        assert len(self._host) <= self._num_host
        assert not self._gpu.keys() & self._host.keys()
