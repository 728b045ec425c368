"""Host pool and disk of the late device's shadow: copies take turns, read what is there when they run, and may fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from fake_runner import FakeRunner, Prefix
from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.hashing import hash_blocks
from tandem.engine.contracts.rate import Rate
from tandem.kv_connector.protocol.jobs import LoadEvent
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import Fetch, JobDone, Load, Save, Spill, TierJob
from tandem.kv_connector.tiers.manager import TierManager

Cells = dict[int, Prefix]
TURN_S = 0.01


@dataclass
class FakeStepLoad:
    """Runs when the device reaches its step, before the step reads anything."""

    tiers: FakeTiers
    load: Load

    def start(self, pool: object) -> dict[int, LoadEvent]:
        self.tiers.carry_out(self.load)
        return {}


@dataclass
class _Copy:
    job: TierJob
    ends: int  # turn
    bad: tuple[bytes, ...] = ()
    begun: list[list[Cells]] = field(default_factory=list)  # of a save: what was read of each block when it began
    is_early: bool = False  # of a load: all was written when it began


class FakeTiers:
    """`lag`: turns that a copy takes. `bad_every`: each so-many-th copy fails for its last block; 0: none.

    A save reads the first half of its blocks when it begins and the rest when it ends, so that it can be torn. Of
    the loads one half writes when it begins, at once with steps that are still to run, the other half when it ends.
    """

    def __init__(
        self, pool: BlockPool, runner: FakeRunner, host_blocks: int, disk_blocks: int, lag: int = 0, bad_every: int = 0
    ) -> None:
        disk = TierIndex(disk_blocks) if disk_blocks else None
        self._turn = self._num_begun = 0
        self.host_index, self.disk_index = TierIndex(host_blocks), disk
        self.manager = TierManager(
            pool,
            runner.block_size,
            self.host_index,
            disk,
            lambda load: FakeStepLoad(self, load),
            Rate(),
            batch_blocks=2,
            clock=lambda: TURN_S * self._turn,
        )
        self.host: list[list[Cells]] = [[] for _ in range(host_blocks)]  # a block, then its window blocks
        self.disk: list[list[Cells]] = [[] for _ in range(disk_blocks)]
        self.published: dict[str, set[bytes]] = {"cpu": set(), "disk": set()}
        self._pool, self._runner = pool, runner
        self._lag, self._bad_every = lag, bad_every
        self._copies: deque[_Copy] = deque()
        runner.on_launch = self.step_launched

    @property
    def is_busy(self) -> bool:
        return bool(self._copies)

    def turn(self, is_idle: bool) -> None:
        """What the shell does after each turn of the step loop."""
        self._turn += 1
        while self._copies and self._copies[0].ends <= self._turn:
            self._end(self._copies.popleft())
        self.manager.on_turn(self._pool.drain_events(), is_idle)
        for event in self.manager.drain_events():
            held = self.published[event.tier]
            assert event.stored != (event.block_hash in held), "the directory hears of something twice"
            (held.add if event.stored else held.discard)(event.block_hash)
        self._begin()

    def step_launched(self) -> None:
        """Copies begin at any time: also while the device is two steps behind what was just scheduled."""
        self._begin()

    def _begin(self) -> None:
        for job in self.manager.drain_jobs():
            self._num_begun += 1
            fails = not isinstance(job, Save) and self._bad_every > 0 and self._num_begun % self._bad_every == 0
            copy = _Copy(job, self._turn + self._lag, (job.hashes[-1],) if fails else ())
            if isinstance(job, Save):
                every = zip(job.block_ids, job.window_ids, strict=True)
                copy.begun = [[self._first_half(each) for each in (one, *windows)] for one, windows in every]
            elif isinstance(job, Load):
                copy.is_early = self._num_begun % 2 == 0
                for index, block_id in enumerate(job.block_ids):
                    for each in (block_id, *job.window_ids[index]):
                        self._runner.memory[each] = dict.fromkeys(range(self._runner.block_size), (-1,))
                    if copy.is_early:
                        self._move(copy, index)
            self._copies.append(copy)

    def _end(self, copy: _Copy) -> None:
        if not copy.is_early:
            for index in range(len(copy.job.hashes)):
                self._move(copy, index)
        self.manager.on_done(JobDone(copy.job, 0.001, copy.bad))

    def carry_out(self, load: Load) -> None:
        """Of a step, when the device has reached it."""
        self._end(_Copy(load, self._turn))

    def _move(self, copy: _Copy, index: int) -> None:
        job, memory = copy.job, self._runner.memory
        if job.hashes[index] in copy.bad:
            return
        if isinstance(job, Save):
            read = zip((job.block_ids[index], *job.window_ids[index]), copy.begun[index], strict=True)
            self.host[job.host_slots[index]] = [{**memory[block_id], **begun} for block_id, begun in read]
        elif isinstance(job, Load):
            for place, block_id in enumerate((job.block_ids[index], *job.window_ids[index])):
                assert block_id not in self._runner.peer_blocks, "a load writes into a block that is granted to a peer"
                memory[block_id] = dict(self.host[job.host_slots[index]][place])
        elif isinstance(job, Spill):
            self.disk[job.disk_slots[index]] = [dict(each) for each in self.host[job.host_slots[index]]]
        else:
            assert isinstance(job, Fetch)
            self.host[job.host_slots[index]] = [dict(each) for each in self.disk[job.disk_slots[index]]]

    def _first_half(self, block_id: int) -> Cells:
        cells = self._runner.memory[block_id]
        return {offset: cells[offset] for offset in range(self._runner.block_size // 2) if offset in cells}

    def check(self, roots: Collection[bytes]) -> None:
        """Whatever can be found in a tier is what its hash names."""
        self.manager.check_integrity()
        for index, places in ((self.host_index, self.host), (self.disk_index, self.disk)):
            for block_hash in [] if index is None else index.unpinned_hashes():
                assert index is not None
                cells = places[index.slot(block_hash)]
                if index.is_whole(block_hash):
                    assert len(cells) == 1 + self._pool.windows.num_each
                for each in cells if index.is_whole(block_hash) else cells[:1]:
                    check_cells(block_hash, each, self._runner.block_size, roots)


def check_cells(block_hash: bytes, cells: Cells, block_size: int, roots: Collection[bytes]) -> None:
    assert len(cells) == block_size, "a block is not full"
    prefix = cells[block_size - 1]
    start = len(prefix) - block_size
    assert [cells[offset] for offset in range(block_size)] == [prefix[: start + i + 1] for i in range(block_size)], (
        "torn"
    )
    found = {hash_blocks(np.array(prefix, np.int32), block_size, root)[-1] for root in roots}
    assert block_hash in found, "a block holds other tokens than its hash says"
