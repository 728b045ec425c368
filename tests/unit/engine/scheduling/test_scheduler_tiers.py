"""Blocks that come back from host memory and disk: what is found, what is computed, who waits, who gives way."""

from __future__ import annotations

import random

import pytest
from engine_harness import BLOCK, Harness

from tandem.engine.contracts.keys import AttemptKey
from tandem.kv_connector.tiers import write_back
from tandem.kv_connector.tiers.write_back import WriteBack

PROMPT = [*range(13), 0, 1, 2, 3, 4, 5, 6, 7]  # 21 tokens: five blocks and one token
OTHER = [12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 12, 11, 10, 9, 8, 7, 6, 5]


def evicted(harness: Harness) -> None:
    """PROMPT is computed, saved, and displaced from the pool by other prompts."""
    harness.add("first", PROMPT, max_tokens=2)
    harness.run()
    harness.settle()
    for turn in range(2):
        harness.add(f"other{turn}", [turn + 1, *OTHER], max_tokens=2)
        harness.run()
        harness.settle()
    assert not harness.pool.match_prefix(harness.requests["first"].block_hashes)


def small(*tiers: int, **options: int) -> Harness:
    return Harness(num_blocks=8, tiers=tiers, **options)  # type: ignore[arg-type]


def again(harness: Harness, name: str = "again", **settings: object) -> int:
    """PROMPT once more; how many of its tokens were computed."""
    before = harness.runner.num_computed_tokens
    harness.add(name, PROMPT, max_tokens=2, **settings)
    harness.run()
    harness.assert_output(name)
    return harness.runner.num_computed_tokens - before


def test_a_prompt_alone_starts_at_once_and_its_blocks_come_under_its_first_step() -> None:
    harness = small(32, 0, 5, 0)
    evicted(harness)
    assert again(harness) == 2
    assert harness.requests["again"].num_cached_tokens == 20
    assert harness.tiers.manager.promoter.counters.host_hits == 5
    assert harness.tiers.manager.counters.host_hit_tokens == harness.scheduler.state.num_cached_tokens == 20
    assert harness.scheduler.state.num_prompt_tokens == 21 + 22 + 22 + 21
    harness.settle()
    harness.assert_empty()


def test_beside_others_it_waits_outside_the_batch_while_they_go_on() -> None:
    harness = small(32, 0, 4, 0)
    evicted(harness)
    harness.add("runs", [9], max_tokens=8)
    harness.step()
    harness.add("again", PROMPT, max_tokens=2)
    for _ in range(3):
        harness.step()
        assert harness.requests["again"].slot < 0, "it runs before its blocks are there"
    assert len(harness.tokens["runs", 0]) >= 2
    harness.run()
    harness.assert_output("again")
    assert harness.requests["again"].num_cached_tokens == 20
    harness.settle()
    harness.assert_empty()


def test_two_requests_for_the_same_blocks_load_them_once() -> None:
    harness = small(32, 0, 2, 0)
    evicted(harness)
    before = harness.runner.num_computed_tokens
    for name in ("a", "b"):
        harness.add(name, PROMPT, max_tokens=2)
    harness.run()
    assert harness.runner.num_computed_tokens - before == 4
    assert harness.tiers.manager.promoter.counters.host_hits == 5


def test_blocks_that_another_request_computes_meanwhile_are_not_held_twice() -> None:
    """Else the request that they are loaded for would lack the blocks to start, for ever."""
    harness = Harness(num_blocks=7, tiers=(32, 0, 4, 0))
    evicted(harness)
    harness.add("again", PROMPT, max_tokens=2)
    harness.add("apart", PROMPT[: 2 * BLOCK], max_tokens=1, use_prefix_cache=False)
    harness.step()
    assert harness.tiers.manager.promoter.is_copying
    harness.run()
    harness.assert_output("again")
    assert harness.requests["again"].num_cached_tokens == 20
    harness.settle()
    harness.assert_empty()


def test_from_disk_by_way_of_the_host_pool() -> None:
    harness = small(3, 32, 1, 0)
    evicted(harness)
    assert again(harness) < 21 - 2 * BLOCK
    counters, num_hits = harness.tiers.manager.counters, harness.tiers.manager.promoter.counters.disk_hits
    assert num_hits >= 2
    assert counters.disk_hit_tokens == num_hits * BLOCK
    assert counters.host_hit_tokens + counters.disk_hit_tokens == harness.requests["again"].num_cached_tokens
    harness.settle()
    harness.assert_empty()


@pytest.mark.parametrize(("num_windows", "bad_every"), [(2, 0), (1, 3)])
def test_what_a_prompt_as_large_as_the_pool_waits_with_never_keeps_it_from_starting(
    num_windows: int, bad_every: int
) -> None:
    """Blocks that have lost their window blocks are held for it while others come from disk behind them, the last of
    which may be damaged."""
    harness = Harness(num_blocks=6 * (1 + num_windows), tiers=(4, 32, 1, bad_every), window=9, num_windows=num_windows)
    for name, prompt in (("first", PROMPT), ("other", [2] * 13)):
        harness.add(name, prompt, max_tokens=2)
        harness.run()
        harness.settle()
    again(harness)
    assert harness.tiers.manager.promoter.counters.disk_hits > 0
    harness.settle()
    harness.assert_empty()


def test_a_copy_that_fails_leaves_the_rest_to_be_computed() -> None:
    harness = small(32, 32, 1, 0)
    evicted(harness)
    harness.tiers._bad_every = 1
    harness.add("runs", [9], max_tokens=8)
    harness.step()
    harness.add("again", PROMPT, max_tokens=2)
    harness.run()
    harness.assert_output("again")
    assert harness.tiers.manager.promoter.counters.loads_failed == 1
    assert harness.requests["again"].num_cached_tokens == 0
    harness.assert_empty()


def test_what_is_computed_faster_is_not_loaded() -> None:
    harness = small(32, 0, 0, 0)
    evicted(harness)
    manager = harness.tiers.manager
    manager.promoter.load_rate.measured(1, 1.0)
    manager.compute_rate.measured(1, 1e-3)
    assert again(harness) == 22
    assert manager.counters.loads_declined >= 1
    assert manager.promoter.load_rate.seconds < 1.0, "the rate that declines is never measured again"


def test_an_aborted_request_lets_go_when_its_load_has_ended() -> None:
    harness = small(32, 0, 6, 0)
    evicted(harness)
    harness.add("runs", [9], max_tokens=4)
    harness.step()
    harness.add("again", PROMPT, max_tokens=2)
    harness.step()
    assert harness.tiers.manager.promoter.is_copying
    harness.scheduler.state.abort(AttemptKey("again", 0))
    assert harness.tiers.manager.promoter.references(), "a block that is written by a load is free"
    harness.run()
    harness.settle()
    harness.assert_empty()


def test_running_requests_take_what_is_held_for_one_that_waits() -> None:
    """The prompt is loaded and waits for its connector; a running one outgrows what is left."""
    harness = small(32, 0, 0, 0)
    evicted(harness)
    harness.connector.parked.add("again")
    harness.add("runs", [9], max_tokens=28)
    harness.step()
    harness.add("again", PROMPT, max_tokens=2, mode="prefill")
    for _ in range(4):
        harness.step()
    assert len(harness.tiers.manager.promoter.references()) == 5
    while not harness.finished.get(("runs", 0)):
        harness.step()
    harness.assert_output("runs")
    assert harness.requests["runs"].num_preemptions == 0
    assert not harness.tiers.manager.promoter.references()
    harness.connector.parked.clear()
    harness.run()
    assert harness.requests["again"].first_tokens


@pytest.mark.parametrize("lag", [0, 3])
def test_flush_forgets_the_tiers_too(lag: int) -> None:
    harness = small(32, 32, lag, 0)
    evicted(harness)
    harness.scheduler.state.flush()
    harness.settle()
    assert again(harness) == 22
    assert harness.tiers.manager.promoter.counters.host_hits == 0


def test_pool_and_host_hold_together_what_they_have_room_for() -> None:
    """Each in its turn, the oldest way to lose everything: what comes back is what has just been displaced."""
    harness = Harness(num_blocks=40, tiers=(48, 0, 1, 0))
    prompts = [[number, *PROMPT[1:]] for number in range(11)]  # 55 blocks and tails
    for turn in range(4):
        for number, prompt in enumerate(prompts):
            request = harness.add(f"{turn} {number}", prompt, max_tokens=1)
            harness.run()
            harness.settle()
            assert request.num_cached_tokens == (20 if turn else 0)
    assert harness.tiers.manager.promoter.counters.host_hits > 80
    harness.assert_empty()


def test_a_long_prompt_takes_its_blocks_at_once_and_what_it_displaces_was_saved() -> None:
    harness = Harness(num_blocks=48, tiers=(32, 0, 1, 0))
    prompts = [[number, *PROMPT[1:]] for number in range(9)]
    for number in (*range(9), *range(6)):  # the host's copies are of those that will be displaced last
        harness.add(f"{number} {len(harness.requests)}", prompts[number], max_tokens=1)
        harness.run()
        harness.settle()
    harness.add("long", [12, *PROMPT, *OTHER, *PROMPT[1:17]], max_tokens=1)
    harness.run()
    harness.settle()
    for number in (6, 7):
        request = harness.add(f"again {number}", prompts[number], max_tokens=1)
        harness.run()
        assert request.num_cached_tokens == 20


def test_without_the_cache_nothing_is_loaded() -> None:
    harness = small(32, 0, 0, 0)
    evicted(harness)
    assert again(harness, use_prefix_cache=False) == 22


def full_pool(lag: int, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """A pool of prompts of which nothing is saved ahead, as of large pools as good as nothing is."""
    monkeypatch.setattr(write_back, "SAVED_AHEAD", 0)
    harness = Harness(num_blocks=20, tiers=(32, 0, lag, 0))
    harness.add("runs", [9], max_tokens=28)
    for number in range(3):
        harness.add(f"cached {number}", [number, *PROMPT[1:]], max_tokens=1)
        for _ in range(8):
            harness.step()
    assert harness.pool.num_cached >= 15
    return harness


TAKES_ALL = pytest.mark.parametrize("takes_all", [{"num_nodes": 2}, {"mode": "prefill"}], ids=str)


@TAKES_ALL
def test_who_takes_all_blocks_at_once_waits_until_what_goes_is_saved_and_others_pass(
    monkeypatch: pytest.MonkeyPatch, takes_all: dict[str, object]
) -> None:
    harness = full_pool(6, monkeypatch)
    harness.add("long", [12, *PROMPT, *OTHER], max_tokens=2, **takes_all)
    harness.add("short", [11, 10], max_tokens=1)
    for _ in range(4):
        harness.step()
        assert harness.requests["long"].slot < 0
    assert harness.finished["short", 0]
    cached = harness.pool.cached_hashes()
    while harness.requests["long"].slot < 0:
        harness.step()
    pushed_out = [each for each in cached if harness.pool.find(each) is None]
    assert len(pushed_out) >= 6
    assert all(map(harness.tiers.manager.is_on_host, pushed_out))
    harness.run()
    if "long" in harness.connector.held:  # handed over
        assert harness.requests["long"].first_tokens
        harness.connector.release("long")
    else:
        harness.assert_output("long")
    for name in ("runs", "short"):
        harness.assert_output(name)
    harness.settle()
    harness.assert_empty()


@TAKES_ALL
def test_who_is_aborted_while_he_waits_for_that_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, takes_all: dict[str, object]
) -> None:
    harness = full_pool(3, monkeypatch)
    harness.add("long", [12, *PROMPT, *OTHER], max_tokens=2, **takes_all)
    for _ in range(6):
        harness.step()
    harness.scheduler.state.abort(AttemptKey("long", 0))
    harness.settle()
    assert len(harness.tiers.host_index.unpinned_hashes()) == len(harness.tiers.host_index) > 0
    harness.run()
    harness.settle()
    harness.assert_empty()


@TAKES_ALL
def test_whatever_takes_all_blocks_at_once_its_tokens_are_right_and_less_is_lost(
    monkeypatch: pytest.MonkeyPatch, takes_all: dict[str, object]
) -> None:
    monkeypatch.setattr(write_back, "SAVED_AHEAD", 0)
    lost = sum(num_lost(seed, takes_all) for seed in range(12))
    monkeypatch.setattr(WriteBack, "make_way", lambda *_: True)
    assert lost < sum(num_lost(seed, takes_all) for seed in range(12)) / 2


def num_lost(seed: int, takes_all: dict[str, object]) -> int:
    """Prompts that all are such, again and again; how many blocks were lost."""
    chance = random.Random(seed)
    tiers = (chance.choice((64, 96)), chance.choice((0, 24)), chance.randint(0, 3), 0)
    harness = Harness(24, max_num_seqs=3, tiers=tiers, keeps_finished=False)
    for turn in range(60):
        if chance.random() < 0.25:
            prompt = [chance.randint(0, 5)] * chance.choice((11, 18, 23, 30)) + [chance.randint(0, 1)]
            harness.add(f"r{turn}", prompt, max_tokens=1, **takes_all)
        if chance.random() < 0.05 and harness.requests:
            harness.abort_one(chance)
        harness.step()
    harness.run()
    for name in [each for each, request in harness.requests.items() if request.prompt.mode == "prefill"]:
        assert harness.requests.pop(name).first_tokens
    harness.run_to_the_end()
    return int(harness.tiers.manager.counts()["tier_blocks_lost"])
