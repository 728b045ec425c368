"""Do the late device and the checks bite in the tiers? Traffic that finds nothing must find each deliberate bug."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_harness import Harness

from tandem.engine.blocks.pool import BlockPool
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import JobDone, Load, Save
from tandem.kv_connector.tiers.manager import TierManager
from tandem.kv_connector.tiers.promoter import Promoter
from tandem.kv_connector.tiers.promotions import Promotion, PromotionStage
from tandem.kv_connector.tiers.write_back import WriteBack

Patch = pytest.MonkeyPatch
NUM_SEEDS = 16


def traffic(seed: int) -> int:
    """Few prompts, asked again and again, on pools too small for them; how many blocks came back from the tiers."""
    chance = random.Random(seed)
    tiers = (chance.randint(3, 24), chance.choice((0, 0, 24)), chance.randint(0, 3), chance.choice((0, 0, 3)))
    harness = Harness(chance.randint(9, 14), max_num_seqs=3, max_num_batched_tokens=16, tiers=tiers)
    for turn in range(80):
        if chance.random() < 0.25:
            prompt = [chance.randint(0, 3)] * chance.choice((6, 11, 18, 23)) + [chance.randint(0, 1)]
            eos = chance.random() < 0.7
            harness.add(f"r{turn}", prompt, max_tokens=chance.randint(1, 9), ignore_eos=not eos)
        if chance.random() < 0.1 and harness.requests:
            harness.abort_one(chance)
        harness.step()
    harness.run_to_the_end()
    assert harness.tiers is not None
    return harness.tiers.manager.promoter.counters.host_hits


def findable_before_it_is_loaded(patch: Patch) -> None:
    load_outside = Promoter.load_outside

    def early(self: Promoter, promotion: Promotion) -> None:
        load_outside(self, promotion)
        parent = promotion.parent
        if promotion.stage is PromotionStage.LOADING:
            for block_id, block_hash in zip(promotion.block_ids, promotion.hashes, strict=True):
                self._pool.register(block_id, block_hash, parent, None)
                parent = block_hash

    patch.setattr(Promoter, "load_outside", early)


def loads_into_blocks_that_cool(patch: Patch) -> None:
    patch.setattr(BlockPool, "allocate_grantable", BlockPool.allocate)


def torn_saves_are_kept(patch: Patch) -> None:
    on_saved = WriteBack._on_saved

    def trusting(self: WriteBack, job: Save, bad: object) -> None:
        every = zip(job.block_ids, job.window_ids, strict=True)
        generations = tuple(tuple(map(self._pool.generation, (one, *windows))) for one, windows in every)
        on_saved(self, replace(job, generations=generations), ())

    patch.setattr(WriteBack, "_on_saved", trusting)


def sources_are_not_pinned(patch: Patch) -> None:
    patch.setattr(TierIndex, "pin", lambda self, block_hashes: None)
    patch.setattr(TierIndex, "unpin", lambda self, block_hashes: None)


def lets_go_of_blocks_that_are_written(patch: Patch) -> None:
    let_go = Promoter._let_go

    def at_once(self: Promoter, promotion: Promotion) -> None:
        if promotion.stage is PromotionStage.LOADING:
            self._pool.free(promotion.held, None)
            promotion.hits, promotion.block_ids = [], []
        let_go(self, promotion)

    patch.setattr(Promoter, "_let_go", at_once)


def failed_loads_count_as_loaded(patch: Patch) -> None:
    on_done = TierManager.on_done

    def blind(self: TierManager, done: JobDone) -> None:
        on_done(self, JobDone(done.job, done.seconds) if isinstance(done.job, Load) else done)

    patch.setattr(TierManager, "on_done", blind)


def evicts_parents_first(patch: Patch) -> None:
    def any_entry(self: TierIndex, block_hash: bytes, entry: object) -> bool:
        return entry.is_ready  # type: ignore[attr-defined,no-any-return]

    patch.setattr(TierIndex, "_is_evictable", any_entry)


MUTATIONS: tuple[Callable[[Patch], None], ...] = (
    findable_before_it_is_loaded,
    loads_into_blocks_that_cool,
    torn_saves_are_kept,
    sources_are_not_pinned,
    lets_go_of_blocks_that_are_written,
    failed_loads_count_as_loaded,
    evicts_parents_first,
)


def test_traffic_is_right_and_uses_the_tiers() -> None:
    assert _much_traffic() > 40


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_deliberate_bug_is_found(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        _much_traffic()


def _much_traffic() -> int:
    return sum(traffic(seed) for seed in range(NUM_SEEDS))
