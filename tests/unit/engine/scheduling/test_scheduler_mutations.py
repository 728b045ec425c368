"""Do the late device and the checks bite? Traffic that finds nothing must find each deliberate bug."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from engine_harness import BLOCK, Harness

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.scheduling.allocator import KVAllocator
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.builder import StepBuilder
from tandem.engine.scheduling.request import Request, RequestState

Patch = pytest.MonkeyPatch


def traffic(seed: int) -> None:
    """Requests with common prefixes and samples, aborts, and a peer that takes grants and writes them at once."""
    chance = random.Random(seed)
    harness = Harness(chance.randint(9, 16), max_num_seqs=chance.randint(2, 5), max_num_batched_tokens=16)
    granted: list[list[int]] = []
    for turn in range(60):
        if chance.random() < 0.3:
            prompt = [chance.randint(0, 1)] * chance.choice((1, 3, 6, 7, 11, 18)) + [chance.randint(0, 2)]
            samples = chance.choice([(0,), (0, 1, 2)])
            eos = chance.random() < 0.5
            harness.add(f"r{turn}", prompt, samples, max_tokens=chance.randint(1, 12), ignore_eos=eos)
        if chance.random() < 0.1 and harness.requests:
            harness.abort_one(chance)
        blocks = harness.pool.allocate_grantable(2) if chance.random() < 0.2 else None
        if blocks is not None:
            granted.append(blocks)
            harness.external.update(blocks)
            harness.runner.peer_blocks |= set(blocks)
            harness.runner.peer_writes(blocks, [99] * 2 * BLOCK)
        elif granted and (chance.random() < 0.3 or turn > 50):
            returned = granted.pop(0)
            harness.external -= Counter(returned)
            harness.runner.peer_blocks -= set(returned)
            harness.pool.free(returned, None)
        harness.step()
    for blocks in granted:
        harness.external -= Counter(blocks)
        harness.runner.peer_blocks -= set(blocks)
        harness.pool.free(blocks, None)
    harness.run()
    for name in harness.requests:
        for sample in harness.samples[name]:
            if name not in harness.failed:
                harness.assert_output(name, sample)
    harness.assert_empty()


NUM_SEEDS = 12


def much_traffic() -> None:
    for seed in range(NUM_SEEDS):
        traffic(seed)


def test_without_a_bug_nothing_is_found() -> None:
    much_traffic()


# --- bugs ---------------------------------------------------------------------------------------------------


def cooling_blocks_are_granted(patch: Patch) -> None:
    patch.setattr(BlockPool, "allocate_grantable", BlockPool.allocate)


def freed_blocks_do_not_cool(patch: Patch) -> None:
    free = BlockPool.free
    patch.setattr(BlockPool, "free", lambda self, blocks, last_step, num_passed=0: free(self, blocks, None, num_passed))


def blocks_are_freed_twice(patch: Patch) -> None:
    release = KVAllocator.release

    def twice(self: KVAllocator, request: Request) -> None:
        self.pool.free(request.block_ids[-1:], None)
        release(self, request)

    patch.setattr(KVAllocator, "release", twice)


def tails_are_not_copied(patch: Patch) -> None:
    take = KVAllocator.take_copies
    patch.setattr(KVAllocator, "take_copies", lambda self, step_id: take(self, step_id) and ())


def forks_share_their_tail(patch: Patch) -> None:
    def fork(self: KVAllocator, parent: Request, child: Request, num_tokens: int) -> bool:
        child.block_ids = parent.block_ids[: self.num_blocks_for(num_tokens)]
        self.pool.touch(child.block_ids)
        return True

    patch.setattr(KVAllocator, "fork", fork)
    patch.setattr(KVAllocator, "check_writable", lambda *_: None)


def a_hit_may_cover_the_last_token(patch: Patch) -> None:
    def cached_prefix(self: KVAllocator, request: Request) -> list[int]:
        self.extend_hashes(request)
        return self.pool.match_prefix(request.block_hashes)

    patch.setattr(KVAllocator, "cached_prefix", cached_prefix)


def a_miss_is_taken_for_a_hit(patch: Patch) -> None:
    match = BlockPool.match_prefix

    def match_prefix(self: BlockPool, hashes: list[bytes]) -> list[int]:
        found = match(self, hashes)
        missed = [b for b in self._block_of.values() if b not in found][:1]
        return found + (missed if len(found) < len(hashes) else [])

    patch.setattr(BlockPool, "match_prefix", match_prefix)


def a_reused_block_keeps_its_hash(patch: Patch) -> None:
    patch.setattr(BlockPool, "_forget", lambda *_: None)


def a_block_is_cached_before_it_is_full(patch: Patch) -> None:
    register = KVAllocator.register_full_blocks

    def early(self: KVAllocator, request: Request, step: int | None) -> None:
        request.num_computed_tokens += 1
        register(self, request, step)
        request.num_computed_tokens -= 1

    patch.setattr(KVAllocator, "register_full_blocks", early)


def a_block_is_shared_within_its_own_step(patch: Patch) -> None:
    """As if the hash table were filled while the step is still being planned."""
    start = KVAllocator.start

    def start_and_register(self: KVAllocator, request: Request, hits: list[int], *others: object) -> bool:
        if not start(self, request, hits, *others) or not self.grow(request, request.num_tokens):
            return False
        self.extend_hashes(request)
        for index in range(len(hits), request.num_tokens // self.block_size):
            parent = request.block_hashes[index - 1] if index else None
            self.pool.register(request.block_ids[index], request.block_hashes[index], parent, 10**9)
        return True

    patch.setattr(KVAllocator, "start", start_and_register)
    patch.setattr(KVAllocator, "check_writable", lambda *_: None)


def preemption_does_not_wait_for_the_token_in_flight(patch: Patch) -> None:
    preempt = SchedulerState.preempt

    def forget(self: SchedulerState, request: Request) -> None:
        preempt(self, request)
        request.num_in_flight = 0

    patch.setattr(SchedulerState, "preempt", forget)


def samples_share_a_slot(patch: Patch) -> None:
    add = StepBuilder._add_sample

    def add_sample(self: StepBuilder, row: int, request: Request, sample_index: int, position: int) -> None:
        slot, request.slot = request.slot, self._rows[row].slot
        add(self, row, request, sample_index, position)
        request.slot = slot

    patch.setattr(StepBuilder, "_add_sample", add_sample)


def overshoot_is_delivered(patch: Patch) -> None:
    patch.setattr("tandem.engine.scheduling.scheduler.RequestState", type("Blind", (), {"FINISHED": None}))
    finish = SchedulerState.finish
    patch.setattr(
        SchedulerState, "finish", lambda self, r: None if r.state is RequestState.FINISHED else finish(self, r)
    )


DEVICE = "granted to a peer|foreign KV|never written|two rows write|nobody made|behind a hole|order"
BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (cooling_blocks_are_granted, "granted to a peer|foreign KV"),
    (freed_blocks_do_not_cool, "granted to a peer|foreign KV"),
    (blocks_are_freed_twice, "references|holder"),
    (tails_are_not_copied, DEVICE),
    (forks_share_their_tail, DEVICE),
    (a_hit_may_cover_the_last_token, "no logits"),
    (a_miss_is_taken_for_a_hit, DEVICE),
    (a_reused_block_keeps_its_hash, "cached block"),
    (a_block_is_cached_before_it_is_full, "not full"),
    (a_block_is_shared_within_its_own_step, DEVICE),
    (preemption_does_not_wait_for_the_token_in_flight, "in_flight"),
    (samples_share_a_slot, DEVICE),
    (overshoot_is_delivered, "after the end"),
]


@pytest.mark.parametrize(("bug", "message"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_a_bug_is_found(bug: Callable[[Patch], None], message: str, monkeypatch: Patch) -> None:
    """`message`: what finds it, where that matters (the device, say, and not only the books)."""
    bug(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError), match=message):
        much_traffic()
