"""The scheduler under the pipelined loop: prefix cache, prompt logprobs that pass it by, preemption.

The device runs each step late and checks every KV slot that it reads (tests/fakes/fake_runner.py).
"""

from __future__ import annotations

import pytest
from engine_harness import Harness, prompt_that_stops

from tandem.engine.scheduling.request import RequestState

# --- prefix cache -------------------------------------------------------------------------------------------


def test_a_prefix_is_computed_once() -> None:
    harness = Harness()
    harness.add("a", range(12), max_tokens=2)
    harness.run()
    request = harness.add("b", [*range(12), 30, 31], max_tokens=2)
    harness.run()
    assert request.num_cached_tokens == 12
    again = harness.add("c", range(12), max_tokens=2)
    harness.run()
    assert again.num_cached_tokens == 8, "a hit ends below the prompt's last token"
    for name in "abc":
        harness.assert_output(name)
    harness.assert_empty()


def test_a_running_prompt_is_shared_by_later_steps_not_by_its_own() -> None:
    harness = Harness(max_num_batched_tokens=64)
    first = harness.add("a", range(17), max_tokens=6)
    second = harness.add("b", range(17), max_tokens=6)
    harness.step()
    third = harness.add("c", range(17), max_tokens=6)
    harness.run()
    assert [r.num_cached_tokens for r in (first, second, third)] == [0, 0, 16]
    harness.assert_empty()


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    harness = Harness()
    harness.add("a", range(6), max_tokens=11)
    harness.run()
    turn = harness.add("b", [*range(6), *harness.tokens["a", 0], 1, 2], max_tokens=2)
    harness.run()
    assert turn.num_cached_tokens == 16
    harness.assert_output("b")


def test_reads_of_the_cache_can_be_declined_and_salts_are_apart() -> None:
    harness = Harness()
    harness.add("a", range(12), max_tokens=2)
    harness.run()
    declined = harness.add("b", range(12), max_tokens=2, use_prefix_cache=False)
    salted = harness.add("c", range(12), max_tokens=2, salt=b"tenant")
    harness.run()
    assert declined.num_cached_tokens == salted.num_cached_tokens == 0
    salted_again = harness.add("d", range(12), max_tokens=2, salt=b"tenant")
    harness.run()
    assert salted_again.num_cached_tokens == 8


def test_hashes_beyond_the_prompt_are_not_believed() -> None:
    harness = Harness()
    request = harness.request("a", range(6), max_tokens=8)
    harness.scheduler.state.kv.extend_hashes(request)
    request.block_hashes += [b"x" * 16] * 3
    harness.scheduler.state.add(request)
    harness.run()
    assert harness.pool.match_prefix([b"x" * 16]) == []


# --- prompt logprobs ----------------------------------------------------------------------------------------


def test_prompt_logprobs_come_whole_and_skip_the_cache() -> None:
    harness = Harness(max_num_batched_tokens=6)
    harness.add("a", range(14), max_tokens=2)
    harness.run()
    request = harness.add("b", range(14), samples=(0, 1), max_tokens=2, num_prompt_logprobs=0)
    harness.run()
    assert request.num_cached_tokens == 0
    assert harness.prompt_logprobs == {"b": list(range(1, 14))}


@pytest.mark.parametrize("moment", range(1, 7))
def test_prompt_logprobs_survive_preemption(moment: int) -> None:
    harness = Harness(max_num_batched_tokens=6)
    request = harness.add("a", range(14), max_tokens=5, num_prompt_logprobs=0)
    for _ in range(moment):
        harness.step()
    harness.scheduler.state.preempt(request)
    harness.run()
    assert harness.prompt_logprobs == {"a": list(range(1, 14))}
    harness.assert_output("a")
    harness.assert_empty()


# --- preemption ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("pipelined", [True, False])
def test_preemption_loses_no_token(pipelined: bool, caching: bool) -> None:
    harness = Harness(num_blocks=10, pipelined=pipelined, caching=caching)
    for name in "abcd":
        harness.add(name, [ord(name), 1, 2, 3, 4], max_tokens=20)
    harness.run()
    assert harness.scheduler.state.num_preemptions > 0
    for name in "abcd":
        harness.assert_output(name)
    harness.assert_empty()


@pytest.mark.parametrize("moment", range(1, 12))
def test_preempted_in_any_moment_and_stopped_by_a_token_in_flight(moment: int) -> None:
    prompt, _ = prompt_that_stops(6, 6)
    harness = Harness(max_num_batched_tokens=2)
    request = harness.add("a", prompt, max_tokens=9, ignore_eos=False)
    for _ in range(moment):
        harness.step()
    if request.state is RequestState.RUNNING:
        harness.scheduler.state.preempt(request)
        harness.check()
        assert not request.block_ids
    harness.run()
    harness.assert_output("a")
    harness.assert_empty()


def test_a_preempted_request_restarts_when_its_token_has_landed() -> None:
    harness = Harness()
    request = harness.add("a", range(5), max_tokens=9)
    harness.step()
    assert request.num_in_flight == 1
    harness.scheduler.state.preempt(request)
    harness.step()  # nothing is launched; the step in flight is read
    assert (request.state, request.num_in_flight) == (RequestState.PREEMPTED, 0)
    assert len(harness.tokens["a", 0]) == 1
    harness.step()
    assert request.state is RequestState.RUNNING
    harness.run()
    harness.assert_output("a")


def test_the_least_important_is_preempted() -> None:
    harness = Harness(num_blocks=8)
    low = harness.add("low", [1] * 8, max_tokens=20, priority=5)
    for _ in range(4):
        harness.step()
    high = harness.add("high", [2] * 8, max_tokens=20, priority=0)
    harness.run()
    assert low.num_preemptions > 0
    assert high.num_preemptions == 0
    harness.assert_empty()


def test_a_more_important_prompt_takes_the_blocks_of_decodes() -> None:
    """Decodes are planned first; a decode that loses its blocks to a prompt of the same step loses its row too."""
    harness = Harness(num_blocks=9, max_num_batched_tokens=5)
    low = harness.add("low", [1] * 3, max_tokens=30, priority=5)
    harness.step()
    prompt = harness.add("prompt", range(30), max_tokens=2, priority=0)
    harness.run()
    assert (prompt.num_preemptions, low.num_preemptions) == (0, 1)
    for name in ("prompt", "low"):
        harness.assert_output(name)
    harness.assert_empty()


def test_what_can_never_fit_fails_by_name() -> None:
    harness = Harness(num_blocks=4)
    harness.add("prompt", range(20), max_tokens=1)
    harness.add("growth", range(8), max_tokens=40)
    harness.add("exact", range(16), max_tokens=1)
    harness.run()
    assert harness.failed == {"prompt": "too_large_for_pool", "growth": "too_large_for_pool"}
    harness.assert_output("exact")
    harness.assert_empty()


def test_a_request_that_outgrows_the_pool_takes_all_its_samples_along() -> None:
    harness = Harness(num_blocks=6)
    harness.add("a", range(9), samples=(0, 1), max_tokens=50)
    harness.add("b", range(5), max_tokens=3)
    harness.run()
    assert harness.failed == {"a": "too_large_for_pool"}
    harness.assert_output("b")
    harness.assert_empty()


def test_counts_that_the_status_shows() -> None:
    harness = Harness(max_num_seqs=1, max_num_batched_tokens=8)
    harness.add("a", range(20), max_tokens=2)
    harness.add("b", range(5), max_tokens=2)
    queues = harness.scheduler.state.queues
    assert (len(queues.running), len(queues.waiting), queues.num_waiting_tokens) == (0, 2, 25)
    harness.step()
    assert (len(queues.running), len(queues.waiting), queues.num_waiting_tokens) == (1, 1, 17)
    harness.run()
    assert (len(queues.running), len(queues.waiting), queues.num_waiting_tokens) == (0, 0, 0)
    assert not harness.scheduler.state.has_work()
