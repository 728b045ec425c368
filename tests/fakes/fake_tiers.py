"""Host pool and disk of the late device's shadow: copies take turns, read what is there when they run, and may fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fake_runner import FakeRunner, Prefix
from tandem.engine.block_pool import BlockPool
from tandem.engine.hashing import hash_blocks
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import Fetch, JobDone, Load, Save, Spill, TierJob
from tandem.kv_connector.tiers.manager import TierManager

Cells = dict[int, Prefix]


@dataclass
class FakeStepLoad:
    """Runs when the device reaches its step, before the step reads anything."""

    tiers: FakeTiers
    load: Load

    def run(self) -> None:
        self.tiers.carry_out(self.load)


class FakeTiers:
    """`lag`: turns that a copy takes. `bad_every`: each so-many-th copy fails for its last block; 0: none.

    A save reads the first half of its blocks when it begins and the rest when it ends, so that it can be torn.
    """

    def __init__(
        self, pool: BlockPool, runner: FakeRunner, host_blocks: int, disk_blocks: int, lag: int = 0, bad_every: int = 0
    ) -> None:
        disk = TierIndex(disk_blocks) if disk_blocks else None
        self.host_index, self.disk_index = TierIndex(host_blocks), disk
        self.manager = TierManager(
            pool, runner.block_size, self.host_index, disk, lambda load: FakeStepLoad(self, load), batch_blocks=2
        )
        self.host: list[Cells] = [{} for _ in range(host_blocks)]
        self.disk: list[Cells] = [{} for _ in range(disk_blocks)]
        self.num_done = 0
        self._pool, self._runner = pool, runner
        self._lag, self._bad_every = lag, bad_every
        self._jobs: deque[tuple[int, TierJob, list[Cells]]] = deque()
        self._turn = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def turn(self, is_idle: bool) -> None:
        """What the shell does after each turn of the step loop."""
        self._turn += 1
        while self._jobs and self._jobs[0][0] <= self._turn:
            _, job, begun = self._jobs.popleft()
            self.carry_out(job, begun)
        self.manager.on_turn(self._pool.drain_events(), is_idle)
        for job in self.manager.drain_jobs():
            begun = [self._first_half(block_id) for block_id in job.block_ids] if isinstance(job, Save) else []
            self._jobs.append((self._turn + self._lag, job, begun))

    def carry_out(self, job: TierJob, begun: Sequence[Cells] = ()) -> None:
        self.num_done += 1
        may_fail = isinstance(job, Fetch | Spill) or (isinstance(job, Load) and job.number > 0)
        fails = may_fail and self._bad_every > 0 and self.num_done % self._bad_every == 0
        bad = (job.hashes[-1],) if fails else ()
        for index, block_hash in enumerate(job.hashes):
            if block_hash not in bad:
                self._copy(job, index, begun)
        self.manager.on_done(JobDone(job, 0.001, bad))

    def _copy(self, job: TierJob, index: int, begun: Sequence[Cells]) -> None:
        memory = self._runner.memory
        if isinstance(job, Save):
            whole = {**memory[job.block_ids[index]], **begun[index]}
            self.host[job.host_slots[index]] = whole
        elif isinstance(job, Load):
            block_id = job.block_ids[index]
            assert block_id not in self._runner.peer_blocks, "a load writes into a block that is granted to a peer"
            memory[block_id] = dict(self.host[job.host_slots[index]])
        elif isinstance(job, Spill):
            self.disk[job.disk_slots[index]] = dict(self.host[job.host_slots[index]])
        else:
            assert isinstance(job, Fetch)
            self.host[job.host_slots[index]] = dict(self.disk[job.disk_slots[index]])

    def _first_half(self, block_id: int) -> Cells:
        cells = self._runner.memory[block_id]
        return {offset: cells[offset] for offset in range(self._runner.block_size // 2) if offset in cells}

    def check(self, roots: Collection[bytes]) -> None:
        """Whatever can be found in a tier is what its hash names."""
        self.manager.check_integrity()
        for index, places in ((self.host_index, self.host), (self.disk_index, self.disk)):
            for block_hash in [] if index is None else index.unpinned_hashes():
                assert index is not None
                check_cells(block_hash, places[index.slot(block_hash)], self._runner.block_size, roots)


def check_cells(block_hash: bytes, cells: Cells, block_size: int, roots: Collection[bytes]) -> None:
    assert len(cells) == block_size, "a block is not full"
    prefix = cells[block_size - 1]
    start = len(prefix) - block_size
    assert [cells[offset] for offset in range(block_size)] == [prefix[: start + i + 1] for i in range(block_size)], (
        "torn"
    )
    found = {hash_blocks(np.array(prefix, np.int32), block_size, root)[-1] for root in roots}
    assert block_hash in found, "a block holds other tokens than its hash says"
