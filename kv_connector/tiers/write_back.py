"""Write-back: saves from the device to the host pool, and spills from there to disk. Pure; see docs/tiers.md."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.directory import BlockEvent
from tandem.kv_connector.directory.kept import KeptElsewhere
from tandem.kv_connector.directory.question import is_whole_in, question_about
from tandem.kv_connector.directory.spare_blocks import is_kept
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import JobDone, Save, Spill, TierJob
from tandem.kv_connector.tiers.ways import WAY_SAVES, Ways

ASKED_AHEAD = 1024  # blocks, of which the directory is asked before they are among those that are saved; a guess
# How many of the blocks next to be evicted are copied ahead of that: to the host as many as a long prompt takes at
# once.
SAVED_AHEAD, SPILLED_AHEAD = 256, 64  # docs/measurements.md#conversations-over-tiers; 64 is a guess


@dataclass
class WriteBackCounters:
    """How many blocks were saved, spilled, evicted and lost."""

    saves: int = 0  # blocks
    saves_torn: int = 0  # blocks given away while they were copied
    spills: int = 0
    spills_failed: int = 0
    host_evictions: int = 0
    disk_evictions: int = 0
    blocks_lost: int = 0  # evicted from the device before they were saved
    blocks_left: int = 0  # evicted from the device and not saved, since a peer keeps them


def _no_time() -> float:
    """The clock where nobody waits."""
    return 0.0


class _NotIn:
    """A container of every block that `tier` has no copy of."""

    def __init__(self, tier: TierIndex | None) -> None:
        self._tier = tier

    def __contains__(self, block_hash: object) -> bool:
        assert isinstance(block_hash, bytes)
        return self._tier is None or not self._tier.is_ready(block_hash)


class WriteBack:
    """Chooses what is copied down. One Save and one Spill are under way at a time, so that the next blocks are chosen
    as late as possible; more Saves while somebody waits for them."""

    def __init__(
        self,
        pool: BlockPool,
        host: TierIndex,
        disk: TierIndex | None,
        tell: Callable[[BlockEvent], None],
        batch_blocks: int,
        kept: KeptElsewhere | None = None,
        clock: Callable[[], float] = _no_time,
    ) -> None:
        """`kept`: what peers keep of the blocks that it is asked for, which are left to them; None: nothing is.
        `clock`: monotonic seconds, for those who wait."""
        self._kept = kept
        self.counters = WriteBackCounters()
        self._pool, self._host, self._disk = pool, host, disk
        self._tiers = (host,) if disk is None else (host, disk)
        self._tell = tell
        self._batch = batch_blocks
        self._unsaved: dict[bytes, None] = {}  # published blocks that only the device pool has
        self._unspilled: dict[bytes, None] = {}  # blocks of the host pool that are not on disk
        self._saving = 0  # Saves under way
        self._spilling = self._has_failed = False
        self._ways = Ways(pool, host, self._lacks, clock)
        self._num_flushes = 0
        self._jobs: list[TierJob] = []

    def drain_jobs(self) -> list[TierJob]:
        jobs, self._jobs = self._jobs, []
        return jobs

    # --- the tables -----------------------------------------------------------------------------------------

    def reserve_on_host(
        self, block_hash: bytes, parent: bytes | None, tenant: bytes, kept: Container[bytes] = ()
    ) -> int | None:
        """Reserves a slot of the host pool, by eviction if need be, but not of blocks in `kept`. None: there is no
        room."""
        found = self._host.reserve(block_hash, parent, tenant, kept)
        if found is None:
            return None
        slot, evicted = found
        if evicted is not None:
            self.counters.host_evictions += 1
            self._left_host(evicted)
        return slot

    def commit_on_host(self, block_hash: bytes, is_whole: bool) -> None:
        self._host.commit(block_hash, is_whole)
        self._host.note_copy(block_hash, self._pool.is_published(block_hash))
        self._unsaved.pop(block_hash, None)
        if self._disk is not None and block_hash not in self._disk:
            self._unspilled[block_hash] = None
        self._tell(BlockEvent(block_hash, True, "cpu"))

    def drop_from_host(self, block_hash: bytes) -> None:
        was_ready = self._host.is_ready(block_hash)
        self._host.remove(block_hash)
        if was_ready:
            self._left_host(block_hash)

    def _left_host(self, block_hash: bytes) -> None:
        self._unspilled.pop(block_hash, None)
        self._note_unsaved(block_hash)
        self._tell(BlockEvent(block_hash, False, "cpu"))

    def drop_from_disk(self, block_hash: bytes) -> None:
        assert self._disk is not None
        was_ready = self._disk.is_ready(block_hash)
        self._disk.remove(block_hash)
        if was_ready:
            self._left_disk(block_hash)

    def _left_disk(self, block_hash: bytes) -> None:
        if self._host.is_ready(block_hash):
            self._unspilled[block_hash] = None
        self._note_unsaved(block_hash)
        self._tell(BlockEvent(block_hash, False, "disk"))

    def _note_unsaved(self, block_hash: bytes) -> None:
        """Notes a block of which the device pool has the only copy."""
        is_below = self._host.is_ready(block_hash) or self._is_on_disk(block_hash)
        if not is_below and self._pool.is_published(block_hash):
            self._unsaved[block_hash] = None

    def _is_on_disk(self, block_hash: bytes) -> bool:
        return self._disk is not None and self._disk.is_ready(block_hash)

    def flush(self) -> None:
        self._num_flushes += 1
        self._ways.flush()
        for block_hash in self._host.unpinned_hashes():
            self.drop_from_host(block_hash)
        for block_hash in self._disk.unpinned_hashes() if self._disk is not None else ():
            self.drop_from_disk(block_hash)

    # --- who takes many blocks at once ----------------------------------------------------------------------

    def make_way(self, taker: Hashable, num_blocks: int, hashes: Sequence[bytes], hits: Sequence[int]) -> bool:
        """Whether `taker` may take `num_blocks` blocks: what they push out is saved, or has had its time. False: it is
        being saved, ask again. `hits` stay, the pool's blocks of the first of `hashes`, which `taker` will want. Who
        takes no more than is saved ahead anyway doesn't wait."""
        if self._has_failed or num_blocks <= SAVED_AHEAD:
            return True
        return self._ways.is_made(taker, num_blocks, hashes, hits)

    def ended(self, taker: Hashable) -> None:
        """Hears that `taker` has its blocks, or needs none any more. Idempotent."""
        self._ways.ended(taker)

    # --- what goes next -------------------------------------------------------------------------------------

    def on_turn(self, pool_events: Sequence[BlockEvent], is_idle: bool) -> None:
        for event in pool_events:
            self._host.note_copy(event.block_hash, event.stored)
            if event.stored:
                self._note_unsaved(event.block_hash)
            elif event.block_hash in self._unsaved:
                del self._unsaved[event.block_hash]
                is_left = self._is_left(event.block_hash, event.was_whole)
                self.counters.blocks_left += is_left
                self.counters.blocks_lost += not is_left
        self._ways.let_go()
        most = WAY_SAVES if self._ways.has_unsaved else 1
        if self._saving < most and self._unsaved and not self._has_failed:
            self._save(is_idle)
        if self._disk is not None and not self._spilling and self._unspilled:
            self._spill(is_idle)

    def _save(self, is_idle: bool) -> None:
        """Saves what the pool will reuse next, then what somebody waits for, at the price of the host's coldest. An
        idle node saves any block, but only into free slots or, as long as the disk has room, those of blocks that are
        on disk: otherwise blocks would go round for ever."""
        cold = self._pool.cold_end(min(SAVED_AHEAD, -(-self._host.capacity // 2)))
        if self._kept is not None:
            soon = self._pool.cold_end(ASKED_AHEAD)
            if self._pool.windows.num_each:  # `_is_left` leaves no others
                soon = list(filter(self._pool.goes_first, soon))
            self._kept.ask(question_about(self._pool, soon))
            is_idle = False  # what peers keep of it is not known yet
        chosen = list(islice(filter(self._lacks, cold), self._batch)) or self._ways.next(self._batch)
        kept: Container[bytes] = frozenset(cold) if chosen else ()  # otherwise they would displace each other for ever
        if not chosen and is_idle:
            room = min(self._batch, max(self._host.num_free, 0 if self._disk is None else self._disk.num_free))
            is_written, is_on_host = self._pool.is_published, self._host.__contains__
            chosen = list(islice((each for each in self._unsaved if is_written(each) and not is_on_host(each)), room))
            kept = _NotIn(self._disk)
        taken = []
        for block_hash in chosen:
            tenant = self._pool.tenant(block_hash)
            self._drop_below(block_hash)
            slot = self.reserve_on_host(block_hash, self._pool.parent(block_hash), tenant, kept)
            if slot is None:
                if self._ways.skip(block_hash):
                    continue
                break
            block_id = self._pool.find(block_hash)
            assert block_id is not None
            window_ids = self._pool.windows.of(block_id)
            taken.append((block_hash, block_id, slot, self._generations(block_id, window_ids), window_ids))
        if taken:
            hashes, block_ids, slots, every_generation, every_window = zip(*taken, strict=True)
            self._saving += 1
            self._jobs.append(Save(hashes, block_ids, slots, every_generation, self._num_flushes, every_window))

    def _generations(self, block_id: int, window_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self._pool.generation, (block_id, *window_ids)))

    def _lacks(self, block_hash: bytes) -> bool:
        """Whether a block of the pool is to be saved, and is not on its way. One that was told of may be being written:
        when it has taken the place of another that lacked window blocks."""
        is_written = self._pool.is_published(block_hash)
        return is_written and self._should_be_saved(block_hash) and not self._is_left(block_hash)

    def _should_be_saved(self, block_hash: bytes) -> bool:
        """Whether a block of the pool is nowhere below, or only without the window blocks that it has here."""
        if block_hash in self._unsaved or not self._pool.windows.num_each:
            return block_hash in self._unsaved and block_hash not in self._host
        known = self._pool.find(block_hash)
        is_better = known is not None and self._pool.windows.is_whole(known)
        return is_better and all(tier.may_go(block_hash) and not tier.is_whole(block_hash) for tier in self._tiers)

    def _drop_below(self, block_hash: bytes) -> None:
        """Drops copies without window blocks, in whose place one with them comes."""
        if block_hash in self._host:
            self.drop_from_host(block_hash)
        if self._disk is not None and block_hash in self._disk:
            self.drop_from_disk(block_hash)

    def _is_left(self, block_hash: bytes, was_whole: bool = False) -> bool:
        """Whether a peer surely keeps it, and nothing here could be reached through it alone. Window blocks may go long
        before what is found through them: of blocks that have any, those are left that go first, with all behind
        them. `was_whole`: it has left the pool with its window blocks."""
        if self._kept is None or block_hash not in self._kept or self.is_only_way(block_hash):
            return False
        if not self._pool.windows.num_each or self._pool.find(block_hash) is None:
            return not was_whole or self._kept.is_end(block_hash)
        return self._pool.goes_first(block_hash) and is_kept(self._kept, self._pool, block_hash)

    def is_only_way(self, block_hash: bytes) -> bool:
        """Whether the tiers have what is reached through this block, and not the block, or not the window blocks that
        the pool has of it."""
        leads_on = any(tier.has_children(block_hash) for tier in self._tiers)
        has_all = TierIndex.is_whole if is_whole_in(self._pool, block_hash) else TierIndex.is_ready
        return leads_on and not any(has_all(tier, block_hash) for tier in self._tiers)

    def _spill(self, is_idle: bool) -> None:
        """Spills blocks of the host pool to disk, chosen in the same way."""
        assert self._disk is not None
        chosen: list[bytes] = []
        cold: list[bytes] = []
        if self._host.num_free < SPILLED_AHEAD:
            cold = self._host.next_to_go(min(SPILLED_AHEAD, -(-self._disk.capacity // 2)))
            chosen = [each for each in cold if each in self._unspilled][: self._batch]
        if not chosen and is_idle:
            room = min(self._batch, self._disk.num_free)
            chosen = [each for _, each in zip(range(room), self._unspilled, strict=False)]
        kept = frozenset(cold)
        taken = []
        for block_hash in chosen:
            parent, tenant = self._host.parent(block_hash), self._host.tenant(block_hash)
            found = self._disk.reserve(block_hash, parent, tenant, kept)
            if found is None:
                break
            if found[1] is not None:
                self.counters.disk_evictions += 1
                self._left_disk(found[1])
            is_whole = self._host.is_whole(block_hash)
            taken.append((block_hash, parent, tenant, self._host.slot(block_hash), found[0], is_whole))
        if taken:
            hashes, parents, tenants, host_slots, disk_slots, are_whole = zip(*taken, strict=True)
            self._host.pin(hashes)
            self._spilling = True
            self._jobs.append(Spill(hashes, parents, tenants, host_slots, disk_slots, are_whole))

    # --- what has gone --------------------------------------------------------------------------------------

    def on_done(self, done: JobDone) -> None:
        if isinstance(done.job, Save):
            self._saving -= 1
            # After one no more are made: copying memory does not fail unless something is wrong.
            self._has_failed = self._has_failed or bool(done.bad)
            self._on_saved(done.job, done.bad)
        else:
            assert isinstance(done.job, Spill)
            self._spilling = False
            self._on_spilled(done.job, done.bad)

    def _on_saved(self, job: Save, bad: Iterable[bytes]) -> None:
        for index, (block_hash, block_id) in enumerate(zip(job.hashes, job.block_ids, strict=True)):
            window_ids = job.window_ids[index]
            now = self._generations(block_id, window_ids)
            is_torn = now[0] != job.generations[index][0]
            is_whole = len(window_ids) == self._pool.windows.num_each and now == job.generations[index]
            self.counters.saves_torn += is_torn
            if is_torn or block_hash in bad or job.flushes != self._num_flushes:
                self._host.remove(block_hash)
            else:
                self.counters.saves += 1
                self.commit_on_host(block_hash, is_whole)
                self._ways.on_saved(block_hash)

    def _on_spilled(self, job: Spill, bad: Iterable[bytes]) -> None:
        assert self._disk is not None
        self._host.unpin(job.hashes)
        for block_hash, is_whole in zip(job.hashes, job.are_whole, strict=True):
            self._unspilled.pop(block_hash, None)
            if block_hash in bad:  # is not tried again: the disk may stay full for long
                self.counters.spills_failed += 1
                self._disk.remove(block_hash)
            else:
                self.counters.spills += 1
                self._disk.commit(block_hash, is_whole)
                self._tell(BlockEvent(block_hash, True, "disk"))

    def check_integrity(self) -> None:
        self._ways.check_integrity()
        for block_hash in self._unsaved:
            assert not self._host.is_ready(block_hash), "what was saved waits to be saved"
            assert not self._is_on_disk(block_hash), "what is on disk waits to be saved"
        for block_hash in self._unspilled:
            assert self._disk is not None
            assert self._host.is_ready(block_hash), "what is not in the host pool waits to be spilled"
            assert not self._disk.is_ready(block_hash), "what is on disk waits to be spilled"
