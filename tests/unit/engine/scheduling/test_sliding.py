"""Sequences of models whose layers all slide give back what slid out, and only that (docs/sliding_windows.md)."""

from __future__ import annotations

import pytest
from engine_harness import BLOCK, Harness, receive

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import NO_WINDOW, BlockWindow

WINDOW = 6


@pytest.mark.parametrize(("tokens", "size"), [(1, 4), (4, 4), (6, 4), (6, 1), (9, 16)])
def test_no_block_that_is_seen_has_passed_and_every_other_has(tokens: int, size: int) -> None:
    window = BlockWindow(tokens, size)
    for position in range(80):
        seen = set(range(max(0, position - tokens + 1), position + 1))
        unseen = [block for block in range(80) if (block + 1) * size <= min(seen)]
        assert window.num_passed(position) == len(unseen)
    assert NO_WINDOW.num_passed(1 << 40) == 0


def test_a_sequence_never_has_more_than_its_window_and_two_rows() -> None:
    harness = Harness(window=WINDOW, max_num_batched_tokens=4)
    request = harness.add("r", [1] * 30, max_tokens=30)
    most = 0
    while harness.core.has_work():
        harness.step()
        most = max(most, harness.pool.num_blocks - harness.pool.num_free)
    assert most <= BlockWindow(WINDOW, BLOCK).most_held(4)
    assert request.num_preemptions == 0
    harness.assert_output("r")
    harness.assert_empty()


def test_more_sequences_run_at_once_than_would_fit_whole() -> None:
    """Each would have 15 blocks at its end, and the pool has 16."""
    harness = Harness(window=WINDOW, num_blocks=16, max_num_batched_tokens=8, caching=False)
    for index in range(3):
        harness.add(str(index), [index] * 30, max_tokens=30)
    at_once = 0
    while harness.core.has_work():
        harness.step()
        at_once = max(at_once, len(harness.scheduler.state.queues.running))
    assert at_once == 3
    assert harness.scheduler.state.num_preemptions == 0
    for index in range(3):
        harness.assert_output(str(index))
    harness.assert_empty()


def test_what_is_found_again_is_taken_from_the_window_on() -> None:
    harness = Harness(window=WINDOW)
    harness.add("first", [3] * 33, max_tokens=1)
    harness.run()
    again = harness.add("again", [3] * 33, max_tokens=5)
    harness.step()
    assert again.num_cached_tokens == 32
    assert again.num_passed_blocks == BlockWindow(WINDOW, BLOCK).num_passed(32) == 6
    harness.run()
    harness.assert_output("again")
    harness.assert_empty()


@pytest.mark.parametrize("settings", [{"samples": (0, 1, 2)}, {"beam_width": 3}, {"num_prompt_logprobs": 0}])
def test_samples_beams_and_prompt_logprobs_slide(settings: dict) -> None:
    harness = Harness(window=WINDOW, max_num_batched_tokens=8)
    samples = settings.pop("samples", (0,))
    harness.add("r", [2] * 25, samples, max_tokens=20, **settings)
    harness.run()
    for sample in samples:
        harness.assert_output("r", sample)
    harness.assert_empty()


def test_guesses_slide_with_their_sequence() -> None:
    harness = Harness(window=WINDOW, speculates=True)
    harness.add("r", [2] * 25, max_tokens=30)
    harness.run()
    harness.assert_output("r")
    harness.assert_empty()


def test_a_committed_prompt_slides_at_once() -> None:
    harness = Harness(window=WINDOW)
    request = receive(harness, "r", [5] * 30, max_tokens=20)
    assert request.num_passed_blocks == BlockWindow(WINDOW, BLOCK).num_passed(30) > 0
    assert harness.pool.num_blocks - harness.pool.num_free == 8 - request.num_passed_blocks
    harness.run()
    harness.assert_output("r")
    harness.assert_empty()


def test_a_prompt_to_be_handed_over_keeps_its_blocks() -> None:
    harness = Harness(window=WINDOW, max_num_batched_tokens=8)
    request = harness.add("r", [5] * 30, mode="prefill", max_tokens=5)
    while harness.core.has_work():
        harness.step()
        assert request.num_passed_blocks == 0


def test_a_window_that_is_too_narrow_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness would see it if a sequence gave back a block that it still reads."""
    true = BlockWindow.num_passed
    monkeypatch.setattr(BlockWindow, "num_passed", lambda self, position: true(self, position + BLOCK))
    harness = Harness(window=WINDOW, max_num_batched_tokens=4)
    for index in range(2):
        harness.add(str(index), [index] * 30, max_tokens=30)
    with pytest.raises((AssertionError, IndexError)):
        harness.run()


def test_the_null_block_is_nobodys() -> None:
    pool = BlockPool(4, True, window=BlockWindow(WINDOW, BLOCK))
    places = pool.passed(3)
    pool.touch(places)
    pool.free(places + places, None)
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks == 4
    assert not pool.is_writable(pool.null_block)
    assert pool.null_block not in (pool.allocate(4) or ())


def test_of_a_chain_that_has_passed_the_last_blocks_are_reused_first() -> None:
    """What is left of it is found: with its first block all of it would be lost."""
    harness = Harness(window=WINDOW, num_blocks=16)
    request = harness.add("first", [3] * 8, max_tokens=33, ignore_eos=True)
    harness.run()
    tokens = [*request.known_token_ids().tolist(), 1]
    for num_reused in (0, 8, 12):
        taken = harness.pool.allocate(num_reused)
        assert taken is not None
        again = harness.add(f"after {num_reused}", tokens, max_tokens=1)
        found = harness.scheduler.state.kv.cached_prefix(again)
        assert len(found) == min(40 // BLOCK, harness.pool.num_blocks - num_reused)
        harness.scheduler.state.abort(again.key)
        harness.pool.free(taken, None)
    harness.assert_empty()
