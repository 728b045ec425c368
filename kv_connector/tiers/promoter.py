"""Promotions: brings blocks up from lower tiers and holds them for their request until it starts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Kind
from tandem.engine.contracts.rate import Rate
from tandem.engine.scheduling.ports import Taker
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import Fetch, JobDone, Load, TierJob
from tandem.kv_connector.tiers.promotions import IN_FLIGHT, Promotion, PromotionStage
from tandem.kv_connector.tiers.write_back import WriteBack


@dataclass
class PromoterCounters:
    """How many blocks were found in lower tiers, and how many of those were of no use."""

    host_hits: int = 0  # blocks
    disk_hits: int = 0
    loads_failed: int = 0
    disk_dropped: int = 0  # blocks that were damaged or could not be read


class Promoter:
    """Carries out the promotions that `TierManager` decides on, until each request starts or ends."""

    def __init__(self, pool: BlockPool, host: TierIndex, disk: TierIndex | None, write_back: WriteBack) -> None:
        self._pool = pool
        self._host, self._disk = host, disk
        self._write_back = write_back
        self.load_rate, self.fetch_rate = Rate(), Rate()
        self.counters = PromoterCounters()
        self._promotions: dict[Taker, Promotion] = {}
        self._by_number: dict[int, Promotion] = {}
        self._num_promotions = 0
        self._moving: set[bytes] = set()  # hashes on their way to the host pool from disk, or to the device
        self._jobs: list[TierJob] = []
        self._num_hidden = 0  # of the pool's held blocks, as far as was looked at

    # --- questions ------------------------------------------------------------------------------------------

    def promotion_of(self, taker: Taker) -> Promotion | None:
        return self._promotions.get(taker)

    def is_moving(self, block_hash: bytes) -> bool:
        return block_hash in self._moving

    @property
    def is_copying(self) -> bool:
        return any(promotion.stage in IN_FLIGHT for promotion in self._by_number.values())

    # --- promotions -----------------------------------------------------------------------------------------

    def promote(
        self, taker: Taker, hits: list[int], parent: bytes | None, wanted: list[bytes], num_bare: int = 0
    ) -> bool:
        """Holds the hits and starts to bring up the blocks after them, perhaps fewer than `wanted`; the first
        `num_bare` without window blocks. False: none at all."""
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
            return False
        self._num_promotions += 1
        promotion = Promotion(self._num_promotions, hits, parent, wanted[:taken], PromotionStage.FETCHED, num_bare)
        self._promotions[taker] = self._by_number[promotion.number] = promotion
        self._moving.update(promotion.hashes)
        self._pool.touch(hits)
        num_blocks, give_back = self._pool.cost(len(hits) + taken), partial(self._let_go, promotion)
        promotion.hold = self._pool.reservations.add(Kind.LOAD, num_blocks, give_back, taker)
        if fetched:
            assert self._disk is not None
            promotion.stage, promotion.from_disk = PromotionStage.FETCHING, frozenset(fetched)
            self._disk.pin(fetched)
            disk_slots = tuple(self._disk.slot(block_hash) for block_hash in fetched)
            self._jobs.append(Fetch(promotion.number, tuple(fetched), disk_slots, tuple(slots)))
        else:
            self.load_outside(promotion)
        return True

    def decline(self, taker: Taker) -> None:
        """Notes that nothing is promoted for this taker, so that nobody need ask again."""
        self._promotions[taker] = Promotion(0, [], None, [], PromotionStage.OVER)

    def load_with_step(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> Load:
        """Makes the load that a step does by itself. Its end is reported like that of others."""
        self.counters.host_hits += len(hashes)
        self._host.pin(hashes)
        return self._make_load(hashes, block_ids)

    def on_turn(self) -> None:
        """Goes on where the taker may never be asked again: blocks that it can't begin from yet are held for it, and
        counted once more among those that it lacks. What is held and found no more would only take its room."""
        if self._num_hidden != self._pool.num_hidden:
            self._num_hidden = self._pool.num_hidden
            self._let_go_of_hidden()
        for promotion in self._by_number.values():
            if promotion.stage is not PromotionStage.FETCHED:
                continue
            if len(self._pool.windows.usable(promotion.hits)) < len(promotion.hits):
                self.load_outside(promotion)

    def _let_go_of_hidden(self) -> None:
        """Ends promotions that hold blocks that others have taken the place of: what is cached then the taker finds."""
        for promotion in list(self._by_number.values()):
            is_loaded = promotion.stage is PromotionStage.LOADED  # else what it loads has no hash yet
            if any(self._pool.block_hash(each) is None for each in (promotion.held if is_loaded else promotion.hits)):
                self._let_go(promotion)

    def load_outside(self, promotion: Promotion) -> None:
        """Starts the loads of what is fetched, unless blocks have to cool down first."""
        num_blocks = len(promotion.hashes)
        blocks = self._pool.allocate_grantable(num_blocks, min(num_blocks, promotion.num_bare))
        if blocks is not None:
            promotion.block_ids = blocks
            promotion.stage = PromotionStage.LOADING
            self._jobs.append(self._make_load(promotion.hashes, blocks, promotion.number))

    def _make_load(self, hashes: Sequence[bytes], block_ids: Sequence[int], number: int = 0) -> Load:
        slots = tuple(self._host.slot(block_hash) for block_hash in hashes)
        return Load(number, tuple(hashes), slots, tuple(block_ids), tuple(map(self._pool.windows.of, block_ids)))

    def ended(self, taker: Taker) -> None:
        promotion = self._promotions.pop(taker, None)
        if promotion is not None:
            self._let_go(promotion)

    def _let_go(self, promotion: Promotion) -> None:
        """Gives back whatever the promotion holds: now, or when its copy has ended."""
        promotion.is_wanted = False
        if promotion.stage in IN_FLIGHT or promotion.stage is PromotionStage.OVER:
            return
        if promotion.stage is PromotionStage.FETCHED:
            self._host.unpin(promotion.hashes)
            self._moving.difference_update(promotion.hashes)
        self._pool.free(promotion.held, None)
        self._pool.reservations.end(promotion.hold)
        promotion.hits, promotion.block_ids, promotion.stage = [], [], PromotionStage.OVER
        del self._by_number[promotion.number]

    # --- results --------------------------------------------------------------------------------------------

    def drain_jobs(self) -> list[TierJob]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def on_loaded(self, job: Load, done: JobDone) -> None:
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
            self._hold_what_is_found(promotion)
        promotion.stage = PromotionStage.LOADED
        if not promotion.is_wanted:
            self._let_go(promotion)

    def _hold_what_is_found(self, promotion: Promotion) -> None:
        """Exchanges loaded blocks for those that others have computed meanwhile: these are the ones that are found, and
        ours, held beside them, would only take room from the request that they are for. So would blocks that it can't
        begin from, behind which others were to come."""
        found = self._pool.windows.usable([*promotion.hits, *self._pool.match_prefix(promotion.hashes)])
        self._pool.touch(found)
        self._pool.free(promotion.held, None)
        promotion.hits, promotion.block_ids = found[: len(promotion.hits)], found[len(promotion.hits) :]

    def on_fetched(self, job: Fetch, done: JobDone) -> None:
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
                self._write_back.commit_on_host(block_hash, self._disk.is_whole(block_hash))
                self._host.pin([block_hash])
        good = [each in done.bad for each in promotion.hashes].index(True) if done.bad else len(promotion.hashes)
        lost = promotion.hashes[good:]
        self._moving.difference_update(lost)
        self._host.unpin([block_hash for block_hash in lost if block_hash not in done.bad])
        promotion.hashes = promotion.hashes[:good]
        promotion.stage = PromotionStage.FETCHED
        if done.bad:
            self.counters.loads_failed += 1
        if not promotion.is_wanted or not good:
            self._let_go(promotion)

    def references(self) -> Counter[int]:
        """The number of references held here to each block of the pool, by block id."""
        return Counter(block_id for promotion in self._by_number.values() for block_id in promotion.held)

    def check_integrity(self) -> None:
        for block_id, count in self.references().items():
            assert self._pool.ref_count(block_id) >= count, f"block {block_id} is held here and free"
        moving = [h for p in self._by_number.values() if p.stage is not PromotionStage.LOADED for h in p.hashes]
        assert len(moving) == len(set(moving)), "a block is loaded twice"
        assert set(moving) == self._moving, "what moves is miscounted"
        for promotion in self._by_number.values():
            assert promotion.stage is not PromotionStage.OVER, "a promotion that is over is kept"
            if promotion.stage is PromotionStage.LOADING:
                for block_id in promotion.block_ids:
                    assert self._pool.is_writable(block_id), (
                        f"block {block_id} is loaded into and not its loader's alone"
                    )
        for promotion in self._promotions.values():
            assert promotion.stage is PromotionStage.OVER or promotion.number in self._by_number
