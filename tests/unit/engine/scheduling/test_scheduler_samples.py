"""Samples of one request: forked from a prompt computed here, or from KV that a peer wrote."""

from __future__ import annotations

import pytest
from engine_harness import EOS, Harness, expected, receive

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.scheduling.request import RequestState

# --- forks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 7, 8, 10, 16])
def test_samples_fork_from_one_prompt(length: int, caching: bool) -> None:
    harness = Harness(caching=caching)
    harness.add("a", range(length), samples=(0, 1, 2), max_tokens=7)
    harness.run()
    for sample in range(3):
        harness.assert_output("a", sample)
    assert harness.runner.num_computed_tokens == length + 3 * 6, "the prompt is computed once"
    harness.assert_empty()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_samples_without_a_slot_still_come(max_num_seqs: int) -> None:
    harness = Harness(max_num_seqs=max_num_seqs)
    harness.add("a", range(10), samples=(0, 1, 2, 3), max_tokens=7)
    harness.run()
    for sample in range(4):
        harness.assert_output("a", sample)
    harness.assert_empty()


@pytest.mark.parametrize("num_blocks", [5, 6, 7, 9])
def test_samples_without_a_block_still_come(num_blocks: int) -> None:
    harness = Harness(num_blocks=num_blocks)
    harness.add("a", range(10), samples=(0, 1, 2, 3), max_tokens=9)
    harness.run()
    for sample in range(4):
        harness.assert_output("a", sample)
    harness.assert_empty()


def test_samples_end_each_for_itself() -> None:
    harness = Harness()
    request = harness.add("a", range(6), samples=tuple(range(6)), max_tokens=30, ignore_eos=False)
    harness.run()
    for sample in range(6):
        harness.assert_output("a", sample)
    assert "stop" in harness.finished.values()
    assert len({len(harness.tokens["a", sample]) for sample in range(6)}) > 2, "they end at different times"
    assert request.state is RequestState.FINISHED
    harness.assert_empty()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_tail_is_copied_though_its_owner_is_gone(victim: int) -> None:
    """Between the fork and the copy in the next step, parent or child may be aborted and its blocks reused."""
    harness = Harness(num_blocks=8, max_num_batched_tokens=32)
    harness.add("a", range(6), samples=(0, 1, 2), max_tokens=8)
    harness.step()
    assert len(harness.scheduler.state.queues.running) == 3
    harness.scheduler.state.abort(AttemptKey("a", 0), (victim,))
    harness.check()
    harness.add("b", range(20, 33), max_tokens=3)
    harness.run()
    harness.assert_output("b")
    for sample in {0, 1, 2} - {victim}:
        harness.assert_output("a", sample)
    harness.assert_empty()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_tail_is_copied_though_its_owner_was_preempted(victim: int) -> None:
    harness = Harness()
    harness.add("a", range(6), samples=(0, 1, 2), max_tokens=8)
    harness.step()
    harness.scheduler.state.preempt(harness.scheduler.state.queues.running[victim])
    harness.check()
    harness.run()
    for sample in range(3):
        harness.assert_output("a", sample)
    harness.assert_empty()


# --- committed KV -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [3, 4, 8, 10])
def test_committed_kv_is_decoded_and_forked(length: int, caching: bool) -> None:
    harness = Harness(caching=caching)
    prompt = list(range(length))
    receive(harness, "a", prompt, (0, 1, 2), max_tokens=6)
    harness.run()
    for sample in range(3):
        harness.assert_output("a", sample)
    assert harness.runner.num_computed_tokens == 3 * 5, "nothing of the prompt is computed here"
    harness.assert_empty()


def test_committed_kv_serves_as_prefix() -> None:
    harness = Harness()
    receive(harness, "a", list(range(10)), max_tokens=3)
    assert {event.stored for event in harness.pool.drain_events()} == {True}
    hit = harness.add("b", range(11), max_tokens=3)
    harness.run()
    assert hit.num_cached_tokens == 8
    receive(harness, "c", list(range(10)), max_tokens=3)
    harness.run()
    for name in "abc":
        harness.assert_output(name)
    harness.assert_empty()


def test_a_committed_tail_outlives_its_owner_until_it_is_copied() -> None:
    """Nothing cools it: without a reference of the copy's own, a peer could be granted it at once."""
    harness = Harness(num_blocks=6)
    receive(harness, "a", list(range(6)), (0, 1), max_tokens=6)
    harness.scheduler.state.abort(AttemptKey("a", 0), (0,))
    harness.check()
    granted = harness.pool.allocate_grantable(harness.pool.num_grantable)
    assert granted is not None
    assert len(granted) == 3, "prompt, copy and copied block are held"
    harness.runner.peer_writes(granted, [99] * 4 * len(granted))
    harness.external.update(granted)
    harness.step()
    harness.pool.free(granted, None)
    harness.external.clear()
    harness.run()
    harness.assert_output("a", 1)
    harness.assert_empty()


def test_only_unfinished_samples_go_on() -> None:
    harness = Harness()
    prompt = next(
        p
        for p in ([seed, 2, 3, 4, 5] for seed in range(1000))
        if [expected(p, sample, SamplingParams(max_tokens=4))[0][0] == EOS for sample in range(3)]
        == [True, False, True]
    )
    receive(harness, "a", prompt, (0, 1, 2), max_tokens=4, ignore_eos=False)
    harness.run()
    assert len(harness.tokens["a", 0]) == len(harness.tokens["a", 2]) == 1
    harness.assert_output("a", 1)
    harness.assert_empty()


def test_nothing_is_kept_when_every_sample_has_finished() -> None:
    harness = Harness()
    receive(harness, "a", list(range(6)), (0, 1), max_tokens=1)
    harness.assert_empty()


@pytest.mark.parametrize("num_blocks", [3, 4, 5, 8])
@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_committed_samples_wait_for_slots_and_blocks(max_num_seqs: int, num_blocks: int) -> None:
    harness = Harness(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    receive(harness, "a", list(range(10)), (0, 1, 2), max_tokens=3)
    harness.run()
    for sample in range(3):
        harness.assert_output("a", sample)
    harness.assert_empty()


def test_a_running_request_and_committed_kv_never_wait_for_each_other() -> None:
    """One slot, and blocks that both need: the less important starts over."""
    for priority in (0, 9):
        harness = Harness(num_blocks=7, max_num_seqs=1)
        harness.add("running", range(9), max_tokens=18, priority=5)
        for _ in range(3):
            harness.step()
        receive(harness, "received", [5] * 16, max_tokens=4, priority=priority)
        harness.run()
        harness.assert_output("running")
        harness.assert_output("received")
        harness.assert_empty()


def test_committed_kv_comes_before_new_prompts() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("running", range(4), max_tokens=4)
    harness.step()
    harness.add("prompt", range(9), max_tokens=2)
    receive(harness, "received", [5] * 8, max_tokens=2)
    harness.run()
    assert [key[0] for key in harness.finished] == ["running", "received", "prompt"]


def test_committed_kv_that_is_too_long_here_fails_by_name() -> None:
    harness = Harness()
    receive(harness, "a", list(range(64)), max_tokens=9)
    harness.run()
    assert harness.failed == {"a": "too_long"}
    harness.assert_empty()


def test_committed_requests_ask_for_no_prompt_logprobs_again() -> None:
    harness = Harness()
    request = receive(harness, "a", list(range(10)), max_tokens=6, num_prompt_logprobs=0)
    harness.step()
    harness.scheduler.state.preempt(request)
    harness.run()
    harness.assert_output("a")
    assert harness.prompt_logprobs == {}
    assert harness.runner.num_computed_tokens < 10 + 6, "and so may use the cache"
