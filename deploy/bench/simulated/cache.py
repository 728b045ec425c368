"""The caches of a simulated node. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from tandem.deploy.bench.trace import TRACE_BLOCK
from tandem.engine.contracts.directory import BlockEvent
from tandem.kv_connector.directory.spare_blocks import ASKED_AT_ONCE, newest_of_colder

# Looked at by a heartbeat of 0.5 s: what a node with blocks of 16 tokens looks at, once a second.
BLOCKS_AT_ONCE = ASKED_AT_ONCE * 16 // TRACE_BLOCK // 2


class TieredCache:
    """Blocks of a node: what leaves the GPU tier goes to the host tier, what leaves that is gone. Least recently used
    first; of one request the deepest first. A block is in one tier. `is_left`: whether a peer keeps a block, so that it
    need not go to the host tier, unless one there is reached through it."""

    def __init__(
        self, num_gpu_blocks: int, num_host_blocks: int, is_left: Callable[[bytes], bool] = lambda block_hash: False
    ) -> None:
        self._is_left = is_left
        self._parents: dict[bytes, bytes | None] = {}  # of blocks that are here
        self._num_children: Counter[bytes | None] = Counter()  # in the host tier, by parent
        self._gpu: OrderedDict[bytes, None] = OrderedDict()
        self._children: dict[bytes | None, set[bytes]] = {}  # in the GPU tier, by parent
        self._given: set[bytes] = set()  # by `give_up_first`
        self._host: OrderedDict[bytes, None] = OrderedDict()
        self._num_gpu, self._num_host = num_gpu_blocks, num_host_blocks
        self.events: list[BlockEvent] = []

    def drain_events(self) -> list[BlockEvent]:
        """What the directory is to hear of, since the last call."""
        events, self.events = self.events, []
        return events

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._gpu or block_hash in self._host

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
        self._parents.update(zip(hashes, (None, *hashes[:-1]), strict=True))
        for block_hash in reversed(hashes):
            if block_hash in self._gpu:
                self._gpu.move_to_end(block_hash)
                continue
            self._gpu[block_hash] = None
            self._children.setdefault(self._parents[block_hash], set()).add(block_hash)
            self.events.append(BlockEvent(block_hash, True, "gpu"))
            if block_hash in self._host:
                self._leave_host(block_hash)
        while len(self._gpu) > self._num_gpu:
            block_hash, _ = self._gpu.popitem(last=False)
            self._leave_gpu(block_hash)
            if self._num_host and (self._num_children[block_hash] or not self._is_left(block_hash)):
                self._host[block_hash] = None
                self._num_children[self._parents[block_hash]] += 1
                self.events.append(BlockEvent(block_hash, True, "cpu"))
            else:
                del self._parents[block_hash]
        while len(self._host) > self._num_host:
            block_hash = next(iter(self._host))
            self._leave_host(block_hash)
            del self._parents[block_hash]

    def give_up_first(self) -> None:
        """Evicts first what peers keep, too, of the blocks that came into the colder half, at the pace of
        SpareBlocks."""
        self._given &= self._gpu.keys()
        leaving = self._spare(newest_of_colder(self._num_gpu, BLOCKS_AT_ONCE))
        for block_hash in reversed(leaving):
            self._gpu.move_to_end(block_hash, last=False)
        self._given.update(leaving)

    def _spare(self, begin: int) -> dict[bytes, None]:
        leaving: dict[bytes, None] = {}
        for block_hash in islice(self._gpu, begin, begin + BLOCKS_AT_ONCE):
            children = self._children.get(block_hash, ())
            may_leave = block_hash not in self._given and not self._num_children[block_hash]
            if may_leave and self._is_left(block_hash) and all(c in leaving or c in self._given for c in children):
                leaving[block_hash] = None
        return leaving

    def _leave_gpu(self, block_hash: bytes) -> None:
        siblings = self._children[self._parents[block_hash]]
        siblings.remove(block_hash)
        if not siblings:
            del self._children[self._parents[block_hash]]
        self.events.append(BlockEvent(block_hash, False, "gpu"))

    def _leave_host(self, block_hash: bytes) -> None:
        del self._host[block_hash]
        parent = self._parents[block_hash]
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
        self.events.append(BlockEvent(block_hash, False, "cpu"))

    def check_integrity(self) -> None:
        assert len(self._gpu) <= self._num_gpu
        assert len(self._host) <= self._num_host
        assert not self._gpu.keys() & self._host.keys()
        assert self._parents.keys() == self._gpu.keys() | self._host.keys()
        assert {each for some in self._children.values() for each in some} == self._gpu.keys()
        assert self._num_children == Counter(self._parents[each] for each in self._host)
