"""The tiers below a node's device pool: decides what is saved and what is loaded, and holds blocks meanwhile.

Pure, on the step loop: jobs are drained by the shell, their results and the pool's events come in. Implements
LowerTiers of engine/scheduling/ports.py. docs/tiers.md tells the whole story.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.rate import Rate
from tandem.engine.scheduling.ports import Taker
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.step import StepMeta
from tandem.kv_connector.directory.kept import KeptElsewhere
from tandem.kv_connector.protocol.jobs import LayerLoad
from tandem.kv_connector.tiers.index import StoredBlock, TierIndex
from tandem.kv_connector.tiers.jobs import Fetch, JobDone, Load, TierJob, with_loads
from tandem.kv_connector.tiers.promoter import Promoter
from tandem.kv_connector.tiers.promotions import PromotionStage
from tandem.kv_connector.tiers.usable_load import usable_load
from tandem.kv_connector.tiers.worth_loading import num_worth_loading
from tandem.kv_connector.tiers.write_back import WriteBack


@dataclass
class TierCounters:
    """What the tiers brought to requests of this node."""

    host_hit_tokens: int = 0  # of prompts that started here, without what was loaded for peers
    disk_hit_tokens: int = 0
    loads_declined: int = 0  # requests for which computing was faster


class TierManager:
    """The tiers of one node. Implements LowerTiers. Only this object changes `host` and `disk`; `pool` is shared with
    the scheduler."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        host: TierIndex,
        disk: TierIndex | None,
        make_step_load: Callable[[Load], LayerLoad] | None,
        compute_rate: Rate,
        batch_blocks: int = 32,
        kept: KeptElsewhere | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        """`make_step_load` makes a load that ConnectorWorker runs beside a step's layers; None: layers wait for
        nothing. `compute_rate` measures prompt tokens, as the step clock does. `batch_blocks` is how many blocks one
        job copies; `kept` says what peers keep; `clock` returns monotonic seconds."""
        self._pool, self._host, self._disk = pool, host, disk
        self._block_size = block_size
        self._events: list[BlockEvent] = []
        self._write_back = WriteBack(pool, host, disk, self._events.append, batch_blocks, kept, clock)
        self.promoter = Promoter(pool, host, disk, self._write_back)
        self.counters = TierCounters()
        self._make_step_load = make_step_load
        self.compute_rate = compute_rate
        self._step_loads: list[Load] = []  # of the step that is being planned

    def restore(self, restored: Sequence[StoredBlock]) -> None:
        """Takes in the blocks that the disk holds from an earlier process. Must come before anything else."""
        assert self._disk is not None
        self._disk.restore(restored)
        self._events += [BlockEvent(each.block_hash, True, "disk") for each in restored]

    # --- the planner's questions ----------------------------------------------------------------------------

    def prepare(
        self, taker: Taker, hashes: Sequence[bytes], hits: Sequence[int], runs_alone: bool, num_taken: int = 0
    ) -> int | None:
        """See LowerTiers."""
        num_loaded = self._load(taker, hashes, hits, runs_alone)
        if num_loaded is None or not num_taken:
            return num_loaded
        is_made = self._write_back.make_way(taker, self._pool.cost(num_taken), hashes, hits)
        return num_loaded if is_made else None

    def _load(self, taker: Taker, hashes: Sequence[bytes], hits: Sequence[int], runs_alone: bool) -> int | None:
        """How many tokens are loaded under the taker's first step; None: something is being loaded."""
        promotion = self.promoter.promotion_of(taker)
        if promotion is not None:
            if promotion.stage is PromotionStage.FETCHED:
                self.promoter.load_outside(promotion)
            return 0 if promotion.stage in (PromotionStage.LOADED, PromotionStage.OVER) else None
        has_windows = self._pool.windows.num_each > 0
        known = self._pool.match_prefix(hashes) if has_windows else list(hits)
        if len(known) < len(hashes) and self.promoter.is_moving(hashes[len(known)]):
            return None  # another request's load brings it
        found = self._found(hashes[len(known) :])
        first = len(known)
        if has_windows:
            first, found = usable_load(self._pool, self.is_whole_below, hashes, known, len(found), len(hits))
            if any(map(self.promoter.is_moving, found)):
                return None
        if not found:
            return 0
        num_worth = self._num_worth(found)
        if not num_worth or (has_windows and num_worth < len(found)):
            self.counters.loads_declined += 1
            self.promoter.decline(taker)
            return 0
        wanted = found[:num_worth]
        under_step = runs_alone and self._make_step_load is not None and first == len(hits)
        if under_step and all(self._host.is_ready(block_hash) for block_hash in wanted):
            return len(wanted) * self._block_size
        if not self._pool.reservations.may_wait_with(self._pool.cost(first + len(wanted))):
            return None if self.promoter.is_copying else 0
        parent = hashes[first - 1] if first else None
        passed = self._pool.window.num_passed((first + len(wanted)) * self._block_size)
        num_bare = max(0, passed - first) if has_windows else 0
        return None if self.promoter.promote(taker, known[:first], parent, wanted, num_bare) else 0

    def load_with_step(self, request: Request, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """See LowerTiers."""
        assert self._host.is_ready(hashes[0])
        self._count_hits(request, hashes, frozenset())
        self._step_loads.append(self.promoter.load_with_step(hashes, block_ids))

    def step_meta(self, step_id: int, meta: StepMeta | None) -> StepMeta | None:
        """See LowerTiers."""
        make = self._make_step_load
        loads = () if make is None else tuple(make(load) for load in self._step_loads)
        self._step_loads.clear()
        return with_loads(step_id, meta, loads)

    def started(self, taker: Taker, hashes: Sequence[bytes]) -> None:
        """See LowerTiers."""
        self._host.use(hashes)
        if self._disk is not None:
            self._disk.use(hashes)
        promotion = self.promoter.promotion_of(taker)
        if promotion is not None and promotion.stage is PromotionStage.LOADED:
            self._count_hits(taker, promotion.hashes, promotion.from_disk)
        self.ended(taker)

    def ended(self, taker: Taker) -> None:
        """See LowerTiers."""
        self.promoter.ended(taker)
        self._write_back.ended(taker)

    def _count_hits(self, taker: Taker, hashes: Sequence[bytes], from_disk: frozenset[bytes]) -> None:
        """Counts each prompt once, where it starts. Blocks taken for a peer don't count."""
        if not isinstance(taker, Request) or taker.was_started:
            return
        num_from_disk = sum(block_hash in from_disk for block_hash in hashes)
        self.counters.disk_hit_tokens += num_from_disk * self._block_size
        self.counters.host_hit_tokens += (len(hashes) - num_from_disk) * self._block_size

    # --- what there is ----------------------------------------------------------------------------------------

    def _found(self, missing: Sequence[bytes]) -> list[bytes]:
        """The leading hashes that the host pool or the disk has, and that nothing moves yet."""
        found = []
        for block_hash in missing:
            on_disk = self._disk is not None and self._disk.is_ready(block_hash) and block_hash not in self._host
            if self.promoter.is_moving(block_hash) or not (on_disk or self._host.is_ready(block_hash)):
                break
            found.append(block_hash)
        return found

    def _num_worth(self, found: Sequence[bytes]) -> int:
        load_rate, fetch_rate = self.promoter.load_rate, self.promoter.fetch_rate
        load, fetch = load_rate.seconds, fetch_rate.seconds
        seconds = [load if block_hash in self._host else load + fetch for block_hash in found]
        num = num_worth_loading(seconds, self.compute_rate.seconds * self._block_size)
        if num < len(found):
            (load_rate if found[num] in self._host else fetch_rate).doubt()
        return num

    def is_only_way(self, block_hash: bytes) -> bool:
        """Whether the tiers have what is reached through this block, and not all of the block."""
        return self._write_back.is_only_way(block_hash)

    def is_whole_below(self, block_hash: bytes) -> bool:
        """Whether the host pool or the disk has the block with its window blocks."""
        on_disk = self._disk is not None and self._disk.is_whole(block_hash) and block_hash not in self._host
        return on_disk or self._host.is_whole(block_hash)

    # --- the loop -------------------------------------------------------------------------------------------

    def on_turn(self, pool_events: Sequence[BlockEvent], is_idle: bool) -> None:
        """Takes the pool's events after each turn of the step loop, and whether the node has nothing else to do."""
        self.promoter.on_turn()
        self._write_back.on_turn(pool_events, is_idle)

    def on_done(self, done: JobDone) -> None:
        """Takes in what a thread has copied, or could not copy."""
        if isinstance(done.job, Load):
            self.promoter.on_loaded(done.job, done)
        elif isinstance(done.job, Fetch):
            self.promoter.on_fetched(done.job, done)
        else:
            self._write_back.on_done(done)

    def drain_jobs(self) -> list[TierJob]:
        return self.promoter.drain_jobs() + self._write_back.drain_jobs()

    def drain_events(self) -> list[BlockEvent]:
        """The events for the directory since the last call."""
        events = self._events[:]
        self._events.clear()
        return events

    def flush(self) -> None:
        """Forgets all blocks that nobody reads at the moment."""
        self._write_back.flush()

    def is_on_host(self, block_hash: bytes) -> bool:
        return self._host.is_ready(block_hash)

    def is_on_disk(self, block_hash: bytes) -> bool:
        return self._disk is not None and self._disk.is_ready(block_hash)

    def counts(self) -> dict[str, float]:
        disk, disk_capacity = (0, 0) if self._disk is None else (len(self._disk), self._disk.capacity)
        sizes = {"host_blocks": len(self._host), "host_capacity": self._host.capacity}
        sizes |= {"disk_blocks": disk, "disk_capacity": disk_capacity}
        counts = {**sizes, **vars(self.counters), **vars(self.promoter.counters), **vars(self._write_back.counters)}
        return {f"tier_{name}": float(value) for name, value in counts.items()}

    # --- integrity ------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        self._host.check_integrity()
        if self._disk is not None:
            self._disk.check_integrity()
        self._write_back.check_integrity()
        self.promoter.check_integrity()
