"""What somebody pushes out of the pool who takes many blocks at once: saved before, and no more than that."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import NO_WINDOW, BlockWindow
from tandem.kv_connector.directory.kept import KeptElsewhere
from tandem.kv_connector.tiers import write_back
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import JobDone, Save
from tandem.kv_connector.tiers.ways import WAY_S
from tandem.kv_connector.tiers.write_back import WriteBack

TAKER = "taker"


@pytest.fixture(autouse=True)
def nothing_else_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_back, "SAVED_AHEAD", 0)


def chain_of(name: str, num: int) -> list[bytes]:
    return [f"{name}{index}".encode().ljust(16) for index in range(num)]


class Node:
    """A pool, and host memory below it, into which four blocks are copied at a time."""

    def __init__(self, num_blocks: int, num_host: int = 64, num_disk: int = 0, window: BlockWindow = NO_WINDOW) -> None:
        self.now = 0.0
        self.kept = KeptElsewhere(lambda: self.now)
        self.pool, self.host = BlockPool(num_blocks, enable_caching=True, window=window), TierIndex(num_host)
        disk = TierIndex(num_disk) if num_disk else None
        self.back = WriteBack(self.pool, self.host, disk, lambda event: None, 4, self.kept, lambda: self.now)
        self.saves: list[Save] = []

    def fill(self, name: str, num: int) -> list[bytes]:
        """Caches a prompt, and has a turn."""
        hashes = self.cache(name, num)
        assert self.turn() == []
        return hashes

    def cache(self, name: str, num: int) -> list[bytes]:
        hashes, blocks = chain_of(name, num), self.pool.allocate(num)
        assert blocks is not None
        for index, block_id in enumerate(blocks):
            self.pool.register(block_id, hashes[index], hashes[index - 1] if index else None)
        self.pool.free(blocks, None)
        return hashes

    def makes_way(self, num: int, taker: str = TAKER, prompt: Sequence[bytes] = ()) -> bool:
        is_made = self.back.make_way(taker, num, prompt, self.pool.match_prefix(prompt))
        self.back.check_integrity()
        return is_made

    def turn(self) -> list[bytes]:
        """A turn of the loop; what it begins to save."""
        self.back.on_turn(self.pool.drain_events(), False)
        begun = [job for job in self.back.drain_jobs() if isinstance(job, Save)]
        self.saves += begun
        self.host.check_integrity()
        self.back.check_integrity()
        return [each for job in begun for each in job.hashes]

    def saved(self, bad: bool = False) -> None:
        """The oldest copy ends."""
        job = self.saves.pop(0)
        self.back.on_done(JobDone(job, 0.0, job.hashes if bad else ()))

    def make(self, num: int, taker: str = TAKER, prompt: Sequence[bytes] = ()) -> list[bytes]:
        """Makes way to the end; what was saved for that."""
        begun = []
        for _ in range(200):
            if self.makes_way(num, taker, prompt):
                return begun
            begun += self.turn()
            if self.saves:
                self.saved()
        raise AssertionError("no way is made")

    def take(self, num: int, taker: str = TAKER) -> list[int]:
        """What the taker does then; it pushes out what the pool has to give."""
        blocks = self.pool.allocate_grantable(num)
        assert blocks is not None
        self.back.ended(taker)
        self.turn()
        return blocks

    @property
    def num_lost(self) -> int:
        return self.back.counters.blocks_lost


def test_just_what_goes_is_saved_the_warmest_first() -> None:
    node = Node(20)
    cold, warm = node.fill("cold", 4), node.fill("warm", 8)
    assert node.make(8 + 7) == [warm[5], warm[6], warm[7], *cold]
    node.take(8 + 7)
    assert node.num_lost == 0
    assert all(map(node.host.is_ready, [*cold, *warm[5:]]))
    assert node.pool.find(warm[4]) is not None


def test_without_it_what_goes_is_lost() -> None:
    node = Node(20)
    node.fill("cold", 12)
    node.turn()
    node.take(15)
    assert node.num_lost == 7


def test_a_pool_with_enough_blocks_that_hold_nothing_saves_nothing() -> None:
    node = Node(20)
    node.fill("cold", 8)
    assert node.makes_way(12)
    assert node.turn() == []


def test_more_than_one_copy_is_under_way_and_no_more_than_were_asked_for() -> None:
    node = Node(40)
    node.fill("cold", 40)
    assert not node.makes_way(24)
    begun = [len(node.turn()) for _ in range(6)]
    assert begun == [4, 4, 4, 4, 0, 0]
    node.back.ended(TAKER)
    while node.saves:
        node.saved()
    assert len(node.turn()) == 0, "nobody waits any more"


def test_hits_stay_and_others_go_in_their_place() -> None:
    node = Node(12)
    prompt, other = node.fill("mine", 4), node.fill("other", 8)
    assert set(node.make(3, prompt=prompt)) == set(other[5:])
    hits = node.pool.match_prefix(prompt)
    node.pool.touch(hits)
    node.take(3)
    assert node.num_lost == 0


def test_what_he_will_load_is_kept() -> None:
    node = Node(8, num_host=8)
    prompt = node.fill("mine", 4)
    node.make(8)
    node.pool.free(node.take(8), None)
    others = node.fill("others", 8)
    node.make(8, "another", prompt)
    assert all(map(node.host.is_ready, prompt))
    assert not any(map(node.host.is_ready, others)), "half of the host is kept already"


def test_blocks_that_a_step_may_still_write_are_not_taken_and_as_many_more_go() -> None:
    node = Node(12)
    void = node.pool.allocate(4)
    assert void is not None
    cold = node.fill("cold", 8)
    node.pool.step_launched(1)
    node.pool.free(void, 1)
    assert set(node.make(3)) == set(cold[5:])
    node.take(3)
    assert node.num_lost == 0


def test_what_is_below_or_at_a_peer_is_not_saved() -> None:
    node = Node(12)
    node.fill("cold", 12)
    a = chain_of("cold", 12)
    node.host.reserve(a[11], a[10])
    node.back.commit_on_host(a[11], True)
    node.kept.answer((a[10], a[9]), 0.0)
    saved = node.make(5)
    assert set(saved) == {a[10], a[9], a[8], a[7]}, "what a saved block is reached through is left to nobody"
    left = Node(12)
    left.fill("cold", 12)
    left.kept.answer(a[8:], 0.0)
    assert left.makes_way(4)
    left.take(4)
    assert (left.back.counters.blocks_left, left.num_lost) == (4, 0)


def test_what_is_on_disk_is_not_saved() -> None:
    node = Node(8, num_disk=8)
    hashes, disk = node.cache("cold", 8), node.back._disk
    assert disk is not None
    for index, block_hash in enumerate(hashes):
        disk.reserve(block_hash, hashes[index - 1] if index else None)
        disk.commit(block_hash)
    node.turn()
    assert node.makes_way(8)


def test_it_has_its_time_and_no_more() -> None:
    node = Node(20)
    node.fill("cold", 20)
    assert not node.makes_way(20)
    node.turn()
    node.now = WAY_S - 0.01
    assert not node.makes_way(20)
    node.now = WAY_S
    assert node.makes_way(20)
    assert node.makes_way(20), "asked again"
    assert node.turn() == []
    node.take(20)
    assert node.num_lost > 0


def test_nothing_is_kept_for_who_does_not_ask_again() -> None:
    node = Node(20)
    node.fill("cold", 20)
    node.makes_way(20)
    for _ in range(3):
        node.turn()
        node.saved()
    assert len(node.host.unpinned_hashes()) < len(node.host)
    node.now = WAY_S
    node.turn()
    assert len(node.host.unpinned_hashes()) == sum(map(node.host.is_ready, chain_of("cold", 20)))


def test_who_could_not_take_for_long_has_his_time_once_more() -> None:
    node = Node(20)
    node.fill("cold", 20)
    assert not node.makes_way(20)
    for _ in range(2):
        node.now += 2 * WAY_S
        node.turn()
        assert node.makes_way(20) == (node.now > 3 * WAY_S)
    node.take(20)
    assert node.num_lost > 0
    made = Node(20)
    made.fill("cold", 8)
    made.make(16)
    made.pool.allocate(4)
    made.now = 2 * WAY_S
    made.make(16)
    made.take(16)
    assert made.num_lost == 0


def test_saves_that_fail_keep_nobody_waiting() -> None:
    node = Node(20)
    node.fill("cold", 20)
    assert not node.makes_way(20)
    node.turn()
    node.saved(bad=True)
    assert node.makes_way(20)


def test_what_others_take_meanwhile_is_not_waited_for() -> None:
    node = Node(20)
    node.fill("cold", 20)
    assert not node.makes_way(8)
    others = node.pool.allocate(8)
    assert others is not None
    assert len(node.make(8)) >= 8, "the next ones"
    lost = node.num_lost
    node.take(8)
    assert node.num_lost == lost


def test_two_who_take_one_after_the_other() -> None:
    node = Node(24)
    node.fill("cold", 24)
    assert not node.makes_way(8, "first")
    assert not node.makes_way(8, "second")
    node.make(8, "first")
    node.take(8, "first")
    node.make(8, "second")
    node.take(8, "second")
    assert node.num_lost == 0


def test_no_more_than_half_of_the_host_is_taken_for_them_and_that_is_the_warmest() -> None:
    node = Node(20, num_host=8)
    hashes = node.fill("cold", 20)
    node.make(20)
    node.take(20)
    assert [each for each in hashes if node.host.is_ready(each)] == hashes[:4]
    assert node.num_lost == 16


def test_a_full_host_gives_its_coldest_and_never_what_was_just_saved() -> None:
    node = Node(16, num_host=32)
    for turn in range(4):
        node.fill(f"old{turn}", 16)
        node.make(16, f"taker{turn}")
        node.pool.free(node.take(16, f"taker{turn}"), None)
    assert node.host.num_free == 0
    assert node.num_lost == 0
    last = node.fill("last", 16)
    node.make(16)
    node.take(16)
    assert node.num_lost == 0
    assert all(map(node.host.is_ready, last))


def test_a_tenant_without_room_on_the_host_does_not_keep_others_waiting() -> None:
    node = Node(16)
    node.host._quota_of = lambda tenant: 1 if tenant else None
    blocks = node.pool.allocate(8)
    assert blocks is not None
    for block_id, block_hash in zip(blocks, chain_of("its", 8), strict=True):
        node.pool.register(block_id, block_hash, None, tenant=b"t")
    node.pool.free(blocks, None)
    node.turn()
    others = node.fill("others", 8)
    node.make(16)
    assert all(map(node.host.is_ready, others))
    assert sum(map(node.host.is_ready, chain_of("its", 8))) == 1


def test_a_flush_ends_it() -> None:
    node = Node(20)
    node.fill("cold", 20)
    node.makes_way(20)
    for _ in range(2):
        node.turn()
        node.saved()
    node.pool.flush()
    node.back.flush()
    assert node.makes_way(20)
    while node.saves:
        node.saved()
    node.turn()
    assert len(node.host) == 0


def test_blocks_with_window_blocks_are_saved_with_these() -> None:
    node = Node(24, window=BlockWindow(8, 4, 1))
    hashes = node.fill("cold", 12)
    node.make(10)
    node.take(5)
    assert node.num_lost == 0
    gone = [
        each for each in hashes if node.pool.find(each) is None or not node.pool.windows.is_whole(node.pool.find(each))
    ]
    assert gone
    assert all(map(node.host.is_whole, gone))


def test_what_takes_the_place_of_a_block_without_window_blocks_is_saved_when_it_is_written() -> None:
    node = Node(24, window=BlockWindow(8, 4, 1))
    pool, hashes = node.pool, node.fill("cold", 9)
    assert not node.makes_way(12)
    bare = pool.find(hashes[8])
    assert bare is not None
    pool.windows.reuse(pool.windows.of(bare)[0])
    again = pool.allocate(1)
    assert again is not None
    pool.step_launched(7)
    pool.register(again[0], hashes[8], hashes[7], 7)
    assert pool.find(hashes[8]) == again[0]
    begun = node.turn() + node.turn() + node.turn()
    assert begun
    assert hashes[8] not in begun, "it is being written"
    pool.step_completed(7)
    pool.free(again, 7)
    assert hashes[8] in node.make(12)


def test_who_takes_no_more_than_is_saved_anyway_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(20)
    node.fill("cold", 20)
    monkeypatch.setattr(write_back, "SAVED_AHEAD", 4)
    assert node.makes_way(4)
    assert not node.makes_way(5)


@pytest.mark.parametrize("num_seeds", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_whatever_happens_before_it_who_was_told_that_way_is_made_loses_nothing(num_seeds: int) -> None:
    num_taken = 0
    for seed in range(num_seeds):
        chance = random.Random(seed)
        node = Node(32, num_host=chance.choice([72, 200]))
        held: list[list[int]] = []
        asked_at: dict[str, float] = {}
        for turn in range(120):
            kind = chance.random()
            if kind < 0.3 and node.pool.num_free >= 8:
                if chance.random() < 0.5:
                    node.cache(f"p{turn} ", chance.randrange(1, 8))
                else:
                    held += [node.pool.allocate(chance.randrange(1, 4)) or []]
            elif kind < 0.4 and held:
                node.pool.free(held.pop(chance.randrange(len(held))), None)
            elif kind < 0.65:
                taker, num = chance.choice(["a", "b"]), chance.randrange(4, 12)
                node.turn()
                lost = node.num_lost
                asked_at[taker] = asked_at.get(taker, node.now)
                if num <= node.pool.num_free and node.makes_way(num, taker):
                    held.append(node.take(num, taker))
                    num_taken += 1
                    assert node.num_lost == lost or node.now >= asked_at[taker] + WAY_S
                    del asked_at[taker]
            elif kind < 0.7:
                gone = chance.choice(["a", "b"])
                node.back.ended(gone)
                asked_at.pop(gone, None)
            elif kind < 0.71:
                node.pool.flush()
                node.back.flush()
                asked_at.update(dict.fromkeys(asked_at, -WAY_S))
            elif kind < 0.73:
                node.now += WAY_S / 3
            elif node.saves and kind < 0.9:
                node.saved()
            else:
                node.turn()
    assert num_taken > 2 * num_seeds
