"""The node's KV blocks: who holds how many references, which are free, which are found by hash. Ids only, no memory.

A block has a reference count; at 0 it is in the free queue, ordered from first to last to be reused. A free block
keeps its hash, and so its content, until it is reused. Steps run in order on one stream: a freed block is *cooling*
until the newest launched step that may still write it has completed. The same stream may reuse it at once (its
writes come later), but it is not grantable to any other writer.

The hash table is prefix-closed: a block whose parent leaves it leaves with it, so what is found here or published can
always be reached from the root. A block is matched by later steps of the same stream from `register` on; the world
hears of it (`drain_events`) when the step that computes it has completed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from tandem.engine.blocks.free_queue import FreeQueue
from tandem.engine.blocks.prefix_tree import PrefixTree
from tandem.engine.blocks.publication import NO_STEP, BlockPublication
from tandem.engine.blocks.reservations import Reservations
from tandem.engine.blocks.window import NO_WINDOW, BlockWindow
from tandem.engine.blocks.window_blocks import WindowBlocks
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.tenants import TenantBlocks, TenantShares


class BlockPool:
    """Pool of `num_blocks` blocks, ids 0 … num_blocks-1. One owner thread; nothing here blocks or knows time."""

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool,
        shares: TenantShares | None = None,
        window: BlockWindow = NO_WINDOW,
    ) -> None:
        """`shares` says how many of the pool's blocks each tenant may have cached; None: there are no quotas."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}; give the KV cache more memory")
        self.num_blocks = num_blocks
        self.enable_caching, self.window = enable_caching, window
        # Stands in lists of blocks where a sequence gave one back. It may be touched and freed like any other, but has
        # two references of nobody: so it never becomes free, and nobody may write it.
        self.null_block = num_blocks
        self._ref_counts, self._generations = [0] * num_blocks + [2], [0] * num_blocks
        self._free = FreeQueue(num_blocks)
        # The hash table, and the tree that its prefixes form.
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self.windows = WindowBlocks(window, self._ref_counts, self._hash_of, self._free)
        self._tree = PrefixTree()
        self._tenant_of: dict[bytes, bytes] = {}  # hash -> tenant, for blocks that belong to one
        self.shares = shares or TenantShares()
        self._tenants = TenantBlocks(self.shares, num_blocks)
        self._publication = BlockPublication()
        self.num_hidden = 0  # blocks that left the table while somebody held them
        self.reservations = Reservations(self, num_blocks)  # of those who hold blocks without running

    # --- counts ---------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_grantable(self) -> int:
        """Free blocks that no launched step can write any more."""
        return self._free.num_grantable

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by hash, in use or not."""
        return len(self._block_of)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def block_hash(self, block_id: int) -> bytes | None:
        return self._hash_of[block_id]

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def parent(self, block_hash: bytes) -> bytes | None:
        return self._tree.parent_of[block_hash]

    def children(self, block_hash: bytes) -> Iterable[bytes]:
        """Cached hashes that are reached through this one alone."""
        return self._tree.children(block_hash)

    def is_unused(self, block_hash: bytes) -> bool:
        """Whether it is cached and nobody holds it."""
        return block_hash in self._block_of and self._block_of[block_hash] in self._free

    def tenant(self, block_hash: bytes) -> bytes:
        return self._tenant_of.get(block_hash, b"")

    def is_published(self, block_hash: bytes) -> bool:
        """Whether the block is cached and complete: nothing writes it until its generation changes."""
        return block_hash in self._block_of and not self._publication.awaits(block_hash)

    def generation(self, block_id: int) -> int:
        """How often the block was given away to be written anew. A reader without a reference compares the number
        before and after: when it is the same, what was read of a published block is whole."""
        return self._generations[block_id]

    def cold_end(self, limit: int, begin: int = 0) -> list[bytes]:
        """Published hashes of the next `limit` blocks to be reused after the next `begin`, or whose window blocks these
        are, in that order."""
        found = dict.fromkeys(map(self.windows.found_as, islice(self._free, begin, begin + limit)))
        return [each for each in found if each is not None and not self._publication.awaits(each)]

    def is_writable(self, block_id: int) -> bool:
        """Whether a block may be written: only one with one holder and without a hash may."""
        return self._ref_counts[block_id] == 1 and self._hash_of[block_id] is None

    def is_cooling(self, block_id: int) -> bool:
        return self._free.cooling.is_cooling(block_id)

    # --- references -----------------------------------------------------------------------------------------

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `hashes`. No side effect: `touch` what you keep, then allocate."""
        found = []
        for block_hash in hashes:
            if (block_id := self._block_of.get(block_hash)) is None:
                break
            found.append(block_id)
        return found

    def num_unused(self, block_ids: Sequence[int]) -> int:
        """How many of `block_ids` are in the free queue: what touching them takes from `num_free`."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids) + self.windows.num_unused(block_ids)

    def touch(self, block_ids: Iterable[int], num_passed: int = 0) -> None:
        """Adds one reference to each of these blocks, and to window blocks but for the first `num_passed`."""
        for place, block_id in enumerate(block_ids):
            if self._ref_counts[block_id] == 0:
                self._leave_free_queue(block_id)
            self._ref_counts[block_id] += 1
            if self.windows.num_each and place >= num_passed:
                self.windows.need(block_id)

    def passed(self, num: int) -> list[int]:
        """So many places of the null block in a list of blocks, with one reference each."""
        self._ref_counts[self.null_block] += num
        return [self.null_block] * num

    def cost(self, num: int, num_bare: int = 0) -> int:
        """How many blocks `num` of a sequence take with their window blocks, which the first `num_bare` lack."""
        return num + self.windows.num_each * (num - num_bare)

    def allocate(self, num: int, num_bare: int = 0) -> list[int] | None:
        """`num` blocks to be written by this node's own stream, or None (and no change) when fewer are free. The first
        `num_bare` have no window blocks."""
        if (needed := self.cost(num, num_bare)) > len(self._free):
            return None
        return self.windows.hand_out([self._take(next(iter(self._free))) for _ in range(needed)], num, num_bare)

    def allocate_grantable(self, num: int, num_bare: int = 0) -> list[int] | None:
        """`num` blocks that anyone may write: no launched step still writes them. None when there are fewer."""
        if (needed := self.cost(num, num_bare)) > self.num_grantable:
            return None
        return self.windows.hand_out([self._take(each) for each in self._free.grantable(needed)], num, num_bare)

    def free(self, block_ids: Sequence[int], last_step: int | None, num_passed: int = 0) -> None:
        """Gives one reference to each back, with window blocks but for the first `num_passed`. `block_ids` in order of
        position: of a chain, children are reused first.

        `last_step` is the newest step, launched or about to be, that may write them for this holder; None: no step.
        """
        for place, block_id in reversed(list(enumerate(block_ids))):
            assert self._ref_counts[block_id] > 0, f"block {block_id} is freed and has no holder"
            self._ref_counts[block_id] -= 1
            if last_step is not None:
                self._free.cooling.may_write(last_step, block_id)
            if self._ref_counts[block_id] == 0:
                self._free.enter(block_id, self._hash_of[block_id] is not None)
                if tenant := self._tenant_of_block(block_id):
                    self._tenants.free(tenant, block_id)
                    self._keep_to_quota(tenant)
            if self.windows.num_each and place >= num_passed:
                self.windows.pass_by((block_id,), last_step)

    def _take(self, block_id: int) -> int:
        if (block_hash := self._hash_of[block_id]) is not None:
            self._forget(block_hash)
        self.windows.reuse(block_id)
        self._leave_free_queue(block_id)
        self._generations[block_id] += 1
        self._ref_counts[block_id] = 1
        return block_id

    def _leave_free_queue(self, block_id: int) -> None:
        self._free.leave(block_id)
        if tenant := self._tenant_of_block(block_id):
            self._tenants.held(tenant, block_id)

    def reuse_first(self, hashes: Sequence[bytes]) -> None:
        """Has these cached blocks, which nobody holds, reused before all others, but for those that hold nothing or
        were put first before them. Children come first, and all of them: what is reached through a block leaves the
        table with it."""
        if hashes:
            found_as = self.windows.found_as
            self._free.put_first([self._block_of[each] for each in hashes], lambda each: found_as(each) is None)

    def goes_first(self, block_hash: bytes) -> bool:
        """Whether it was put before others, and was not used since."""
        return self._free.goes_first(self._block_of.get(block_hash))

    # --- hashes ---------------------------------------------------------------------------------------------

    def register(
        self,
        block_id: int,
        block_hash: bytes,
        parent: bytes | None = None,
        step: int | None = None,
        tenant: bytes = b"",
    ) -> bool:
        """Makes a full block findable; returns whether it was inserted.

        `step` writes its last token (None: the content is there); the stored event waits for it. `parent` is the hash
        of the block before it, None for a first block; `tenant` is who it was computed for. A block is not inserted
        when caching is off, the hash is taken (first insert wins), it has a hash, or its parent is not cached.
        """
        assert self._ref_counts[block_id] > 0, f"block {block_id} is registered and has no holder"
        if not self.enable_caching or self._hash_of[block_id] is not None:
            return False
        if (known := self._block_of.get(block_hash)) is not None:
            if self.windows.is_better(block_id, known) and not self._publication.awaits(block_hash):
                self._put_in_place_of(known, block_id, block_hash, NO_STEP if step is None else step)
            return False
        if not self._tree.add(block_hash, parent):
            return False
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        self._publication.stored(block_hash, parent, NO_STEP if step is None else step)
        if tenant:
            self._tenant_of[block_hash] = tenant
            self._tenants.cached(tenant)
            self._keep_to_quota(tenant)
        return True

    def _put_in_place_of(self, known: int, block_id: int, block_hash: bytes, step: int) -> None:
        """Has a block found in place of one that has lost its window blocks."""
        self._hash_of[known], self._hash_of[block_id], self._block_of[block_hash] = None, block_hash, block_id
        if self._free.forget(known):
            self._tenants.held(self.tenant(block_hash), known)
        else:
            self.num_hidden += 1
        self._publication.rewritten(block_hash, step)
        self.windows.turn(block_hash)

    def _keep_to_quota(self, tenant: bytes) -> None:
        """A tenant beyond its share gives up its own blocks, those that nobody holds and that were used longest ago."""
        while (block_id := self._tenants.excess(tenant)) is not None:
            block_hash = self._hash_of[block_id]
            assert block_hash is not None, "a tenant's block is cached"
            self._forget(block_hash)

    def _tenant_of_block(self, block_id: int) -> bytes:
        block_hash = self._hash_of[block_id]
        return b"" if block_hash is None else self.tenant(block_hash)

    def _forget(self, block_hash: bytes) -> None:
        """Takes a hash and all that descend from it out of the table, children first."""
        for gone in self._tree.remove(block_hash):
            block_id = self._block_of.pop(gone)
            self._hash_of[block_id] = None
            self.num_hidden += not self._free.forget(block_id)
            was_whole = self.windows.lose(block_id)
            if tenant := self._tenant_of.pop(gone, b""):
                self._tenants.forgotten(tenant, block_id)
            self._publication.removed(gone, was_whole)

    def flush(self) -> None:
        """Drops every cached block that nobody holds."""
        self.spoil(list(self._free))

    def cached_hashes(self) -> list[bytes]:
        """Published hashes, parents before children: a snapshot for the directory."""
        return [block_hash for block_hash in self._block_of if not self._publication.awaits(block_hash)]

    def drain_events(self) -> list[BlockEvent]:
        """What was stored and removed since the last call, in order: parents stored first, children removed first."""
        return self._publication.drain_events()

    # --- steps ----------------------------------------------------------------------------------------------

    def step_launched(self, step_id: int) -> None:
        self._free.cooling.step_launched(step_id)

    def step_completed(self, step_id: int) -> None:
        """Every write of steps up to `step_id` has landed: blocks cool down, hashes are published."""
        self._free.cooling.step_completed(step_id)
        self._publication.completed(step_id)

    def has_completed(self, step_id: int) -> bool:
        return self._free.cooling.has_completed(step_id)

    def step_failed(self, step_id: int) -> None:
        """Drops the hashes of blocks that step `step_id`, which wrote nothing, or a later step should have filled.
        Any sequence that holds blocks may hold some of those, so all of them must end."""
        for block_hash in self._publication.from_step(step_id):
            if block_hash in self._block_of:
                self._forget(block_hash)
        self.step_completed(step_id)

    def filled_from(self, step_id: int) -> list[int]:
        """Cached blocks that step `step_id`, which has not completed yet, or a later one fills."""
        return [self._block_of[block_hash] for block_hash in self._publication.from_step(step_id)]

    def spoil(self, block_ids: Iterable[int]) -> None:
        """Takes the hashes of these blocks, and of those behind them: what they hold is not to be found."""
        for block_id in block_ids:
            if (block_hash := self._hash_of[block_id]) is not None:
                self._forget(block_hash)

    # --- integrity ------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of this class does not hold. Linear in the size of the pool."""
        _check_references(self)
        self.windows.check_integrity()
        _check_hashes(self)


def _check_references(pool: BlockPool) -> None:
    assert min(pool._ref_counts) >= 0, "a reference count is negative"
    assert pool._ref_counts[pool.null_block] >= 2, "somebody gave back a place of the null block twice"
    pool._free.check_integrity({block_id for block_id in range(pool.num_blocks) if pool._ref_counts[block_id] == 0})


def _check_hashes(pool: BlockPool) -> None:
    hashed = {block_id: h for block_id, h in enumerate(pool._hash_of) if h is not None}
    assert {h: b for b, h in hashed.items()} == pool._block_of, "hashes and blocks don't map one to one"
    assert len(hashed) == len(pool._block_of), "two blocks have one hash"
    assert pool.enable_caching or not hashed, "a block is cached though caching is off"
    assert set(pool._tree.parent_of) == set(pool._block_of)
    pool._tree.check_integrity()
    assert set(pool._tenant_of) <= set(pool._block_of), "a tenant of what is not cached"
    free: dict[bytes, set[int]] = {}
    for block_hash, tenant in pool._tenant_of.items():
        if pool._block_of[block_hash] in pool._free:
            free.setdefault(tenant, set()).add(pool._block_of[block_hash])
    pool._tenants.check_integrity(Counter(pool._tenant_of.values()), free)
    pool._publication.check_integrity(pool._tree.parent_of)
