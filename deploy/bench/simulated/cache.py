"""The caches of a simulated node. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from tandem.deploy.bench.trace import TRACE_BLOCK
from tandem.engine.contracts.directory import BlockEvent
from tandem.kv_connector.directory.spare_blocks import ASKED_AT_ONCE, newest_of_colder
from tandem.kv_connector.tiers.write_back import SAVED_AHEAD

BLOCK = 16  # tokens of a node's blocks
# Looked at by a heartbeat of 0.5 s: what a node with such blocks looks at, once a second.
BLOCKS_AT_ONCE = ASKED_AT_ONCE * BLOCK // TRACE_BLOCK // 2
BLOCKS_AHEAD = SAVED_AHEAD * BLOCK // TRACE_BLOCK  # that are saved before anybody takes their place


class TieredCache:
    """Blocks of a node: of those that leave the GPU tier the next few were saved to the host tier, what leaves that is
    gone. Least recently used first; of one request the deepest first. Blocks of the GPU tier may have copies in the
    host's, which go before all that it alone has. `is_left`: whether a peer keeps a block, so that it need not be
    saved, unless one in the host tier is reached through it."""

    def __init__(
        self, num_gpu_blocks: int, num_host_blocks: int, is_left: Callable[[bytes], bool] = lambda block_hash: False
    ) -> None:
        self._is_left = is_left
        self._parents: dict[bytes, bytes | None] = {}  # of blocks that are here
        self._num_children: Counter[bytes | None] = Counter()  # in the host tier, by parent
        self._gpu: OrderedDict[bytes, None] = OrderedDict()
        self._children: dict[bytes | None, set[bytes]] = {}  # in the GPU tier, by parent
        self._given: set[bytes] = set()  # by `give_up_first`
        self._host: OrderedDict[bytes, None] = OrderedDict()  # what the GPU tier has not
        self._copies: OrderedDict[bytes, None] = OrderedDict()
        self._num_gpu, self._num_host = num_gpu_blocks, num_host_blocks
        self._most_saved = -(-num_host_blocks // 2)  # for one who takes blocks
        self._num_ahead = min(BLOCKS_AHEAD, self._most_saved)
        self._held: dict[object, int] = {}
        self.num_held = 0  # blocks of the GPU tier that nobody finds
        self.num_lost = 0  # blocks that left the GPU tier unsaved
        self.events: list[BlockEvent] = []

    def drain_events(self) -> list[BlockEvent]:
        """What the directory is to hear of, since the last call."""
        events, self.events = self.events, []
        return events

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._gpu or block_hash in self._host

    def match(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Returns how many leading blocks are here, and how many of these are in the host tier alone."""
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
                del self._host[block_hash]
                self._copies[block_hash] = None
        self._make_room()

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Has what is here of a prompt leave last, the first of it at the very last."""
        for block_hash in reversed(hashes):
            for tier in (self._gpu, self._host):
                if block_hash in tier:
                    tier.move_to_end(block_hash)

    # --- who works with blocks --------------------------------------------------------------------------------

    def hold(self, holder: object, num_blocks: int, most_saved: int = 0) -> int:
        """Gives `holder` so many blocks of the GPU tier that nobody finds, unless it has them. Returns how many blocks
        had to be saved before it: up to `most_saved` of those that leave, the warmest."""
        more = num_blocks - self._held.get(holder, 0)
        if more <= 0:
            return 0
        self._held[holder] = num_blocks
        self.num_held += more
        return self._make_room(most_saved)

    def let_go(self, holder: object) -> None:
        self.num_held -= self._held.pop(holder, 0)

    def is_held_by(self, holder: object) -> bool:
        return holder in self._held

    # --- what leaves ------------------------------------------------------------------------------------------

    def save(self, num_blocks: int) -> None:
        """Copies so many blocks, those next to leave, to the host tier as far as that has room for: what an idle node
        does."""
        room = min(num_blocks, self._num_host - len(self._host) - len(self._copies))
        if room > 0:
            for block_hash in list(islice((each for each in self._gpu if each not in self._copies), room)):
                self._copies[block_hash] = None
                self._enter_host(block_hash)

    def _make_room(self, most_saved: int = 0) -> int:
        num_evicted = num_saved = 0
        num_unsaved = len(self._gpu) + self.num_held - self._num_gpu - min(most_saved, self._most_saved)
        while self._gpu and len(self._gpu) + self.num_held > self._num_gpu:
            block_hash, _ = self._gpu.popitem(last=False)
            self._leave_gpu(block_hash)
            if block_hash in self._copies:
                del self._copies[block_hash]
                self._host[block_hash] = None
            elif self._is_worth_saving(block_hash) and (num_evicted < self._num_ahead or num_evicted >= num_unsaved):
                num_saved += num_evicted >= self._num_ahead
                if len(self._host) + len(self._copies) == self._num_host:
                    self._evict_from_host()
                self._host[block_hash] = None
                self._enter_host(block_hash)
            else:
                self.num_lost += self._is_worth_saving(block_hash)
                del self._parents[block_hash]
            num_evicted += 1
        return num_saved

    def _is_worth_saving(self, block_hash: bytes) -> bool:
        return self._num_children[block_hash] > 0 or not self._is_left(block_hash)

    def _evict_from_host(self) -> None:
        if self._copies:
            block_hash, _ = self._copies.popitem()
        else:
            block_hash, _ = self._host.popitem(last=False)
        parent = self._parents[block_hash]
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
        if block_hash not in self._gpu:
            del self._parents[block_hash]
        self.events.append(BlockEvent(block_hash, False, "cpu"))

    def _enter_host(self, block_hash: bytes) -> None:
        self._num_children[self._parents[block_hash]] += 1
        self.events.append(BlockEvent(block_hash, True, "cpu"))

    def _leave_gpu(self, block_hash: bytes) -> None:
        siblings = self._children[self._parents[block_hash]]
        siblings.remove(block_hash)
        if not siblings:
            del self._children[self._parents[block_hash]]
        self.events.append(BlockEvent(block_hash, False, "gpu"))

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

    def check_integrity(self) -> None:
        assert not self._gpu or len(self._gpu) + self.num_held <= self._num_gpu
        assert self.num_held == sum(self._held.values())
        assert len(self._host) + len(self._copies) <= self._num_host
        assert not self._gpu.keys() & self._host.keys()
        assert self._copies.keys() <= self._gpu.keys()
        assert self._parents.keys() == self._gpu.keys() | self._host.keys()
        assert {each for some in self._children.values() for each in some} == self._gpu.keys()
        assert self._num_children == Counter(self._parents[each] for each in (*self._host, *self._copies))
