"""The table of one tier: finds each block's slot, and chooses the block to evict when there is no room. Pure.

Eviction is LFU-DA (least frequently used with dynamic aging: Arlitt, Cherkasova, Dilley, Friedrich, Jin 2000): an
entry's rank is the number of its uses, capped, plus the rank of the entry evicted last before that use; equals go by
recency. Copies of blocks that the tier above holds go first of all: those used last before others, as that tier will
keep them longest. So two tiers hold together nearly what they have room for. Only leaves are evicted, entries that are
no other entry's parent: a block without its parent is never found. An entry that is being written (`reserve` …
`commit`) is not found, one that is pinned is not evicted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

MAX_USES = 8  # uses that count: a block stays about so many turnovers of the tier after its last use; a guess
Rank = tuple[int, int]  # (age + uses, time of last use); for a copy (COPY, -time of last use)
COPY = 0


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that was in a tier before this process began."""

    slot: int
    block_hash: bytes
    parent: bytes | None
    tenant: bytes
    is_whole: bool = True


@dataclass(slots=True)
class TierEntry:
    """One block of a tier. `parent` is the hash of the block before it; None for a prompt's first block."""

    slot: int
    parent: bytes | None
    tenant: bytes
    uses: int = 1
    worth: Rank = (0, 0)  # the rank of the entry while it is no copy
    num_pins: int = 0
    is_ready: bool = False
    is_copy: bool = False  # whether the tier above has the block, too
    is_whole: bool = True  # whether its window blocks are there as well

    @property
    def rank(self) -> Rank:
        return (COPY, -self.worth[1]) if self.is_copy else self.worth


class TierIndex:
    """The blocks of a tier with `capacity` slots, 0 … capacity-1. `quota_of`: how many of them a tenant may have; None:
    as many as there are."""

    def __init__(self, capacity: int, quota_of: Callable[[bytes], int | None] = lambda tenant: None) -> None:
        self.capacity = capacity
        self._quota_of = quota_of
        self._entries: dict[bytes, TierEntry] = {}
        self._num_children: Counter[bytes] = Counter()  # by parent, which need not be in this tier
        self._free = list(range(capacity - 1, -1, -1))
        self._leaves: list[tuple[Rank, bytes]] = []  # a heap, which also holds outdated entries
        self._leaves_of: dict[bytes, list[tuple[Rank, bytes]]] = {}  # the same for each tenant but b""
        self._num_of_tenant: Counter[bytes] = Counter()
        self._age = 0
        self._time = 0

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block is here or being written here."""
        return block_hash in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def has_children(self, block_hash: bytes) -> bool:
        """Whether blocks are here whose parent this one is, wherever it is."""
        return bool(self._num_children.get(block_hash))

    def is_ready(self, block_hash: bytes) -> bool:
        entry = self._entries.get(block_hash)
        return entry is not None and entry.is_ready

    def is_copy(self, block_hash: bytes) -> bool:
        """Whether the tier above has the block, by the last `note_copy`."""
        return self._entries[block_hash].is_copy

    def is_whole(self, block_hash: bytes) -> bool:
        """Whether the block is here and complete, with its window blocks."""
        return self.is_ready(block_hash) and self._entries[block_hash].is_whole

    def slot(self, block_hash: bytes) -> int:
        return self._entries[block_hash].slot

    def parent(self, block_hash: bytes) -> bytes | None:
        return self._entries[block_hash].parent

    def tenant(self, block_hash: bytes) -> bytes:
        return self._entries[block_hash].tenant

    def unpinned_hashes(self) -> list[bytes]:
        """The blocks that can be removed at once."""
        return [block_hash for block_hash, entry in self._entries.items() if entry.is_ready and not entry.num_pins]

    def may_go(self, block_hash: bytes) -> bool:
        """Whether it is not here, or could be removed."""
        entry = self._entries.get(block_hash)
        return entry is None or (entry.is_ready and not entry.num_pins)

    # --- coming ---------------------------------------------------------------------------------------------

    def reserve(
        self, block_hash: bytes, parent: bytes | None, tenant: bytes = b"", kept: Container[bytes] = ()
    ) -> tuple[int, bytes | None] | None:
        """Returns a slot to write the block into, and the hash of the block evicted for it, if any; None when there is
        no room. `parent` and `kept` are not evicted."""
        quota, victim = self._quota_of(tenant), None
        is_over = quota is not None and self._num_of_tenant[tenant] >= quota
        if is_over or not self._free:
            victim = self._pop_victim(parent, kept, tenant if is_over else None)
            if victim is None:
                return None
        slot = self._free.pop()
        self._enter(slot, block_hash, parent, tenant)
        return slot, victim

    def commit(self, block_hash: bytes, is_whole: bool = True) -> None:
        """Notes that the block is complete in its slot, so that it can be found from here on. `is_whole`: with its
        window blocks."""
        entry = self._entries[block_hash]
        assert not entry.is_ready, "committed twice"
        entry.is_ready, entry.is_whole = True, is_whole
        self._rank(block_hash, entry)

    def restore(self, stored: Iterable[StoredBlock]) -> None:
        """Puts blocks of an earlier process into this empty tier, in the order in which they came."""
        assert not self._entries, "restored before anything else"
        free = set(self._free)
        for block in stored:
            free.remove(block.slot)
            self._enter(block.slot, block.block_hash, block.parent, block.tenant)
            self.commit(block.block_hash, block.is_whole)
        self._free = sorted(free, reverse=True)

    def _enter(self, slot: int, block_hash: bytes, parent: bytes | None, tenant: bytes) -> None:
        assert block_hash not in self._entries, "a block is in one slot, once"
        self._entries[block_hash] = TierEntry(slot, parent, tenant)
        self._num_of_tenant[tenant] += 1
        if parent is not None:
            self._num_children[parent] += 1

    # --- staying --------------------------------------------------------------------------------------------

    def use(self, block_hashes: Sequence[bytes]) -> None:
        """Counts one more use of the blocks of a prefix, given in order, that this tier holds; parents are counted
        last."""
        for block_hash in reversed(block_hashes):
            entry = self._entries.get(block_hash)
            if entry is not None and entry.is_ready:
                entry.uses = min(MAX_USES, entry.uses + 1)
                self._rank(block_hash, entry)

    def note_copy(self, block_hash: bytes, is_copy: bool) -> None:
        """Notes whether the tier above holds the block, which need not be in this tier."""
        entry = self._entries.get(block_hash)
        if entry is not None and entry.is_copy != is_copy:
            entry.is_copy = is_copy
            self._offer(block_hash, entry)

    def pin(self, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            assert self._entries[block_hash].is_ready, "only what is complete is copied from"
            self._entries[block_hash].num_pins += 1

    def unpin(self, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            entry = self._entries[block_hash]
            assert entry.num_pins > 0, "an entry is unpinned once too often"
            entry.num_pins -= 1
            self._offer(block_hash, entry)

    def _rank(self, block_hash: bytes, entry: TierEntry) -> None:
        self._time += 1
        entry.worth = (self._age + entry.uses, self._time)
        self._offer(block_hash, entry)

    def _offer(self, block_hash: bytes, entry: TierEntry) -> None:
        if not self._is_evictable(block_hash, entry):
            return
        heapq.heappush(self._leaves, (entry.rank, block_hash))
        if entry.tenant:
            heapq.heappush(self._leaves_of.setdefault(entry.tenant, []), (entry.rank, block_hash))
        if len(self._leaves) > 4 * self.capacity + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        self._leaves_of.clear()
        self._leaves = [(e.rank, h) for h, e in self._entries.items() if self._is_evictable(h, e)]
        for rank, block_hash in self._leaves:
            if tenant := self._entries[block_hash].tenant:
                self._leaves_of.setdefault(tenant, []).append((rank, block_hash))
        for heap in (self._leaves, *self._leaves_of.values()):
            heapq.heapify(heap)

    def _is_evictable(self, block_hash: bytes, entry: TierEntry) -> bool:
        return entry.is_ready and not entry.num_pins and not self._num_children[block_hash]

    # --- going ----------------------------------------------------------------------------------------------

    def remove(self, block_hash: bytes) -> None:
        """Frees the block's slot, whether it is written, being written or bad. Children, if any, stay."""
        entry = self._entries.pop(block_hash)
        assert not entry.num_pins, "an entry that is copied from is removed"
        self._free.append(entry.slot)
        self._num_of_tenant[entry.tenant] -= 1
        parent = entry.parent
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
                if parent in self._entries:
                    self._offer(parent, self._entries[parent])

    def _pop_victim(self, parent: bytes | None, kept: Container[bytes], tenant: bytes | None) -> bytes | None:
        """Evicts the leaf of the lowest rank (of `tenant`, unless None) and returns its hash; None if nothing can
        go."""
        with closing(self._lowest(tenant)) as lowest:
            victim = next((each for each in lowest if each != parent and each not in kept), None)
        if victim is not None:
            self._age = max(self._age, self._entries[victim].rank[0])  # COPY is younger than any age
            self.remove(victim)
        return victim

    def _lowest(self, tenant: bytes | None) -> Generator[bytes, None, None]:
        """Yields evictable entries, lowest first. Entries that were passed by are back in the heap when it is
        closed."""
        leaves = self._leaves if tenant is None else self._leaves_of.get(tenant, [])
        passed: dict[bytes, Rank] = {}
        try:
            while leaves:
                rank, block_hash = heapq.heappop(leaves)
                entry = self._entries.get(block_hash)
                if entry is None or entry.rank != rank or block_hash in passed:
                    continue
                if self._is_evictable(block_hash, entry):
                    passed[block_hash] = rank
                    yield block_hash
        finally:
            for block_hash, rank in passed.items():
                heapq.heappush(leaves, (rank, block_hash))

    def next_to_go(self, limit: int) -> list[bytes]:
        """The blocks that the next `limit` evictions would take, without copies, in order: children before parents."""
        order: list[bytes] = []
        gone: Counter[bytes] = Counter()
        ancestors: list[tuple[Rank, bytes]] = []
        with closing(self._lowest(None)) as leaves:
            leaf = next(leaves, None)
            for _ in range(limit):
                if leaf is None and not ancestors:
                    break
                if leaf is not None and (not ancestors or self._entries[leaf].rank <= ancestors[0][0]):
                    block_hash, leaf = leaf, next(leaves, None)
                else:
                    _, block_hash = heapq.heappop(ancestors)
                if not self.is_copy(block_hash):
                    order.append(block_hash)
                parent = self._entries[block_hash].parent
                entry = None if parent is None else self._entries.get(parent)
                if parent is not None and entry is not None:
                    gone[parent] += 1
                    if entry.is_ready and not entry.num_pins and gone[parent] == self._num_children[parent]:
                        heapq.heappush(ancestors, (entry.rank, parent))
        return order

    # --- integrity ------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant does not hold. Linear in the size of the tier."""
        slots = [entry.slot for entry in self._entries.values()]
        assert sorted(slots + self._free) == list(range(self.capacity)), "a slot is lost or shared"
        children = Counter(entry.parent for entry in self._entries.values() if entry.parent is not None)
        assert children == +self._num_children, "children are miscounted"
        assert Counter(entry.tenant for entry in self._entries.values()) == +self._num_of_tenant
        offered = set(self._leaves)
        offered_of = {tenant: set(leaves) for tenant, leaves in self._leaves_of.items()}
        for block_hash, entry in self._entries.items():
            assert entry.num_pins >= 0
            assert entry.is_ready or not entry.num_pins, "an entry that is written is copied from"
            if self._is_evictable(block_hash, entry):
                leaf = (entry.rank, block_hash)
                assert leaf in offered, "an entry could never be evicted"
                assert not entry.tenant or leaf in offered_of[entry.tenant], "nor for its own tenant"
