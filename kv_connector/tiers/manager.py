"""The tiers below a node's device pool: what is saved when, what is loaded for whom, who holds what meanwhile.

Pure, on the step loop: jobs are drained by the shell, their results and the pool's events come in. Implements
engine.interfaces.LowerTiers. docs/tiers.md tells the whole story.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.engine.block_pool import BlockPool
from tandem.engine.interfaces import BlockEvent
from tandem.engine.request import Request
from tandem.kv_connector.meta import SourceStepMeta
from tandem.kv_connector.tiers.index import StoredBlock, TierIndex
from tandem.kv_connector.tiers.jobs import Fetch, JobDone, Load, LoadingStepMeta, StepLoads, TierJob
from tandem.kv_connector.tiers.promotions import IN_FLIGHT, Promotion, Stage
from tandem.kv_connector.tiers.rates import Rate, num_worth_loading
from tandem.kv_connector.tiers.write_back import WriteBack


@dataclass
class TierCounters:
    host_hits: int = 0  # blocks
    disk_hits: int = 0
    loads_declined: int = 0  # requests for which computing was faster
    loads_failed: int = 0
    disk_dropped: int = 0  # blocks that were not what was written, or could not be read


class TierManager:
    """`host` and `disk` are this object's to change, `pool` is shared with the scheduler."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        host: TierIndex,
        disk: TierIndex | None,
        make_step_load: Callable[[Load], object],
        batch_blocks: int = 16,
    ) -> None:
        """`make_step_load`: what ConnectorWorker runs beside a step's layers. `batch_blocks`: copied by one job."""
        self._pool = pool
        self._block_size = block_size
        self._host, self._disk = host, disk
        self._make_step_load = make_step_load
        self.compute_seconds_per_token: Callable[[], float] = lambda: 0.0
        self.load_rate, self.fetch_rate = Rate(), Rate()
        self.counters = TierCounters()
        self._events: list[BlockEvent] = []
        self._write_back = WriteBack(pool, host, disk, self._events.append, batch_blocks)
        self._promotions: dict[Request, Promotion] = {}
        self._by_number: dict[int, Promotion] = {}
        self._num_promotions = 0
        self._moving: set[bytes] = set()  # hashes on their way to the host pool from disk, or to the device
        self._step_loads: list[Load] = []  # of the step that is being planned
        self._jobs: list[TierJob] = []

    def restore(self, restored: Sequence[StoredBlock]) -> None:
        """Before anything else: what the disk holds from an earlier process."""
        assert self._disk is not None
        self._disk.restore(restored)
        self._events += [BlockEvent(each.block_hash, True, "disk") for each in restored]

    # --- the planner's questions ----------------------------------------------------------------------------

    def prepare(self, request: Request, hashes: Sequence[bytes], hits: Sequence[int], runs_alone: bool) -> int | None:
        """See LowerTiers."""
        promotion = self._promotions.get(request)
        if promotion is not None:
            if promotion.stage is Stage.FETCHED:
                self._load_outside(promotion)
            return 0 if promotion.stage in (Stage.LOADED, Stage.OVER) else None
        missing = hashes[len(hits) :]
        if missing and missing[0] in self._moving:
            return None  # somebody else's load brings it
        found = self._found(missing)
        if not found:
            return 0
        num_worth = self._num_worth(found)
        if not num_worth:
            self.counters.loads_declined += 1
            self._promotions[request] = Promotion(0, [], None, [], Stage.OVER)  # and is not asked about again
            return 0
        wanted = found[:num_worth]
        if runs_alone and all(self._host.is_ready(block_hash) for block_hash in wanted):
            return len(wanted) * self._block_size
        if self._num_held() + len(hashes) > self._pool.num_blocks // 2 and self._by_number:
            return None if any(p.stage in IN_FLIGHT for p in self._by_number.values()) else 0
        self._promote(request, list(hits), hashes[len(hits) - 1] if hits else None, wanted)
        return None if request in self._promotions else 0

    def load_with_step(self, request: Request, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """See LowerTiers."""
        assert self._host.is_ready(hashes[0])
        self.counters.host_hits += len(hashes)
        self._host.pin(hashes)
        self._step_loads.append(self._make_load(hashes, block_ids))

    def step_meta(self, step_id: int, meta: object | None) -> object | None:
        """See LowerTiers. What was complete before the step is pushed after it: it may be what is being loaded."""
        if not self._step_loads:
            return meta
        loads = tuple(self._make_step_load(load) for load in self._step_loads)
        self._step_loads.clear()
        if meta is None:
            return StepLoads(loads)
        assert isinstance(meta, SourceStepMeta)
        whole = tuple(replace(push, step_id=step_id) for push in meta.whole)
        return LoadingStepMeta(step_id, meta.pushes, whole, loads)

    def started(self, request: Request, hashes: Sequence[bytes]) -> None:
        """See LowerTiers."""
        self._host.use(hashes)
        if self._disk is not None:
            self._disk.use(hashes)
        self.ended(request)

    def ended(self, request: Request) -> None:
        """See LowerTiers."""
        promotion = self._promotions.pop(request, None)
        if promotion is not None:
            self._let_go(promotion)

    def give_way(self, besides: Request | None = None) -> None:
        """See LowerTiers."""
        for request, promotion in self._promotions.items():
            if request is not besides:
                self._let_go(promotion)

    # --- promotions -----------------------------------------------------------------------------------------

    def _found(self, missing: Sequence[bytes]) -> list[bytes]:
        """The leading hashes that the host pool or the disk has, and that nothing moves yet."""
        found = []
        for block_hash in missing:
            on_disk = self._disk is not None and self._disk.is_ready(block_hash) and block_hash not in self._host
            if block_hash in self._moving or not (on_disk or self._host.is_ready(block_hash)):
                break
            found.append(block_hash)
        return found

    def _num_worth(self, found: Sequence[bytes]) -> int:
        load, fetch = self.load_rate.seconds, self.fetch_rate.seconds
        seconds = [load if block_hash in self._host else load + fetch for block_hash in found]
        num = num_worth_loading(seconds, self.compute_seconds_per_token() * self._block_size)
        if num < len(found):
            (self.load_rate if found[num] in self._host else self.fetch_rate).doubt()
        return num

    def _promote(self, request: Request, hits: list[int], parent: bytes | None, wanted: list[bytes]) -> None:
        """Holds the hits and starts on the blocks after them; they may turn out to be fewer."""
        on_host = [block_hash for block_hash in wanted if block_hash in self._host]
        self._host.pin(on_host)
        fetched, slots, taken = [], [], len(wanted)
        for index, block_hash in enumerate(wanted):
            if block_hash in self._host:
                continue
            assert self._disk is not None
            before = wanted[index - 1] if index else parent
            slot = self._write_back.reserve_on_host(block_hash, before, self._disk.tenant(block_hash))
            if slot is None:
                taken = index
                break
            fetched.append(block_hash)
            slots.append(slot)
        self._host.unpin([block_hash for block_hash in wanted[taken:] if block_hash in on_host])
        if not taken:
            return
        self._num_promotions += 1
        promotion = Promotion(self._num_promotions, hits, parent, wanted[:taken], Stage.FETCHED)
        self._promotions[request] = self._by_number[promotion.number] = promotion
        self._moving.update(promotion.hashes)
        self._pool.touch(hits)
        if fetched:
            assert self._disk is not None
            promotion.stage = Stage.FETCHING
            self._disk.pin(fetched)
            disk_slots = tuple(self._disk.slot(block_hash) for block_hash in fetched)
            self._jobs.append(Fetch(promotion.number, tuple(fetched), disk_slots, tuple(slots)))
        else:
            self._load_outside(promotion)

    def _load_outside(self, promotion: Promotion) -> None:
        """Not yet, when blocks have to cool down first."""
        blocks = self._pool.allocate_grantable(len(promotion.hashes))
        if blocks is not None:
            promotion.block_ids = blocks
            promotion.stage = Stage.LOADING
            self._jobs.append(self._make_load(promotion.hashes, blocks, promotion.number))

    def _make_load(self, hashes: Sequence[bytes], block_ids: Sequence[int], number: int = 0) -> Load:
        slots = tuple(self._host.slot(block_hash) for block_hash in hashes)
        return Load(number, tuple(hashes), slots, tuple(block_ids))

    def _let_go(self, promotion: Promotion) -> None:
        """Whatever it holds it gives back: now, or when its copy has ended."""
        promotion.is_wanted = False
        if promotion.stage in IN_FLIGHT or promotion.stage is Stage.OVER:
            return
        if promotion.stage is Stage.FETCHED:
            self._host.unpin(promotion.hashes)
            self._moving.difference_update(promotion.hashes)
        self._pool.free(promotion.held, None)
        promotion.hits, promotion.block_ids, promotion.stage = [], [], Stage.OVER
        del self._by_number[promotion.number]

    def _num_held(self) -> int:
        return sum(len(p.hits) + len(p.hashes) for p in self._by_number.values())

    # --- results --------------------------------------------------------------------------------------------

    def on_done(self, done: JobDone) -> None:
        """What a thread has copied, or could not copy."""
        if isinstance(done.job, Load):
            self._on_loaded(done.job, done)
        elif isinstance(done.job, Fetch):
            self._on_fetched(done.job, done)
        else:
            self._write_back.on_done(done)

    def _on_loaded(self, job: Load, done: JobDone) -> None:
        self._host.unpin(job.hashes)
        self.load_rate.measured(len(job.hashes), done.seconds)
        if not job.number:
            assert not done.bad, "a load that a step has computed with can't fail"
            return
        promotion = self._by_number[job.number]
        self._moving.difference_update(promotion.hashes)
        if done.bad:
            self.counters.loads_failed += 1
            promotion.is_wanted = False
        else:
            self.counters.host_hits += len(job.hashes)
            parent = promotion.parent
            for block_id, block_hash in zip(promotion.block_ids, promotion.hashes, strict=True):
                self._pool.register(block_id, block_hash, parent, None, self._host.tenant(block_hash))
                parent = block_hash
        promotion.stage = Stage.LOADED
        if not promotion.is_wanted:
            self._let_go(promotion)

    def _on_fetched(self, job: Fetch, done: JobDone) -> None:
        assert self._disk is not None
        promotion = self._by_number[job.number]
        self._disk.unpin(job.hashes)
        self.fetch_rate.measured(len(job.hashes), done.seconds)
        self.counters.disk_hits += len(job.hashes) - len(done.bad)
        for block_hash in job.hashes:
            if block_hash in done.bad:
                self._write_back.drop_from_host(block_hash)
                self._write_back.drop_from_disk(block_hash)
                self.counters.disk_dropped += 1
            else:
                self._write_back.commit_on_host(block_hash)
                self._host.pin([block_hash])
        good = [each in done.bad for each in promotion.hashes].index(True) if done.bad else len(promotion.hashes)
        lost = promotion.hashes[good:]
        self._moving.difference_update(lost)
        self._host.unpin([block_hash for block_hash in lost if block_hash not in done.bad])
        promotion.hashes = promotion.hashes[:good]
        promotion.stage = Stage.FETCHED
        if done.bad:
            self.counters.loads_failed += 1
        if not promotion.is_wanted or not good:
            self._let_go(promotion)

    # --- the loop -------------------------------------------------------------------------------------------

    def on_turn(self, pool_events: Sequence[BlockEvent], is_idle: bool) -> None:
        """After each turn of the step loop: what the pool has told, and whether the node has nothing else to do."""
        self._write_back.on_turn(pool_events, is_idle)

    def drain_jobs(self) -> list[TierJob]:
        jobs = self._jobs + self._write_back.drain_jobs()
        self._jobs = []
        return jobs

    def drain_events(self) -> list[BlockEvent]:
        """For the directory."""
        events = self._events[:]
        self._events.clear()
        return events

    def flush(self) -> None:
        """Forgets whatever nobody reads at the moment."""
        self._write_back.flush()

    def is_on_host(self, block_hash: bytes) -> bool:
        return self._host.is_ready(block_hash)

    def is_on_disk(self, block_hash: bytes) -> bool:
        return self._disk is not None and self._disk.is_ready(block_hash)

    @property
    def is_moving(self) -> bool:
        return any(promotion.stage in IN_FLIGHT for promotion in self._by_number.values())

    def counts(self) -> dict[str, float]:
        disk = 0 if self._disk is None else len(self._disk)
        counted = {**vars(self.counters), **vars(self._write_back.counters)}
        counts = {"host_blocks": len(self._host), "disk_blocks": disk, **counted}
        return {f"tier_{name}": float(value) for name, value in counts.items()}

    # --- integrity ------------------------------------------------------------------------------------------

    def references(self) -> Counter[int]:
        """block_id -> references to blocks of the pool that are held here."""
        return Counter(block_id for promotion in self._by_number.values() for block_id in promotion.held)

    def check_integrity(self) -> None:
        self._host.check_integrity()
        if self._disk is not None:
            self._disk.check_integrity()
        self._write_back.check_integrity()
        for block_id, count in self.references().items():
            assert self._pool.ref_count(block_id) >= count, f"block {block_id} is held here and free"
        moving = [h for p in self._by_number.values() if p.stage is not Stage.LOADED for h in p.hashes]
        assert len(moving) == len(set(moving)), "a block is loaded twice"
        assert set(moving) == self._moving, "what moves is miscounted"
        for promotion in self._by_number.values():
            assert promotion.stage is not Stage.OVER, "a promotion that is over is kept"
            if promotion.stage is Stage.LOADING:
                for block_id in promotion.block_ids:
                    assert self._pool.is_writable(block_id), (
                        f"block {block_id} is loaded into and not its loader's alone"
                    )
        for promotion in self._promotions.values():
            assert promotion.stage is Stage.OVER or promotion.number in self._by_number
