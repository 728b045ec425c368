"""How requests enter and leave: forks, committed KV, aborts in every state; each case ends with nothing held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_harness import BLOCK, EOS, Harness, expected

from tandem.engine.request import Request, RequestState
from tandem.engine.sampling_params import SamplingParams

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
    assert harness.scheduler.num_running == 3
    harness.scheduler.abort("a", 0, (victim,))
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
    harness.scheduler.preempt(harness.scheduler.running[victim])
    harness.check()
    harness.run()
    for sample in range(3):
        harness.assert_output("a", sample)
    harness.assert_empty()


# --- committed KV -------------------------------------------------------------------------------------------


def receive(
    harness: Harness, name: str, prompt: list[int], samples: tuple[int, ...] = (0,), **sampling: int
) -> Request:
    """A peer's KV: hits that the node has, and granted blocks that the peer writes."""
    request = harness.request(name, prompt, samples, mode="decode", **sampling)
    harness.scheduler.kv.extend_hashes(request)
    hits = harness.pool.match_prefix(request.block_hashes)
    harness.pool.touch(hits)
    granted = harness.pool.allocate_grantable(-(-len(prompt) // BLOCK) - len(hits))
    assert granted is not None
    harness.runner.peer_blocks |= set(granted)
    start = len(hits) * BLOCK
    for position in range(start, len(prompt)):
        block_id = granted[(position - start) // BLOCK]
        harness.runner.memory[block_id][position % BLOCK] = tuple(prompt[: position + 1])
    harness.runner.peer_blocks -= set(granted)
    harness.commit(request, hits + granted)
    harness.check()
    return request


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
    harness.scheduler.abort("a", 0, (0,))
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
    harness.add("prompt", range(9), max_tokens=2, priority=-5)
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
    harness.scheduler.preempt(request)
    harness.run()
    harness.assert_output("a")
    assert harness.prompt_logprobs == {}
    assert harness.runner.num_computed_tokens < 10 + 6, "and so may use the cache"


# --- abort --------------------------------------------------------------------------------------------------


def waiting(harness: Harness) -> None:
    harness.add("block", [9] * 4, max_tokens=3, priority=-1)
    harness.add("a", range(11), samples=(0, 1), max_tokens=6)
    harness.step()


def prefilling(harness: Harness) -> None:
    harness.add("a", range(30), samples=(0, 1), max_tokens=6)
    harness.step()


def first_sample_in_flight(harness: Harness) -> None:
    harness.add("a", range(5), samples=(0, 1), max_tokens=6)
    harness.step()


def decoding(harness: Harness) -> None:
    first_sample_in_flight(harness)
    for _ in range(3):
        harness.step()


def last_token_in_flight(harness: Harness) -> None:
    harness.add("a", range(5), samples=(0, 1), max_tokens=2)
    harness.step()
    harness.step()


def preempted_with_a_token_in_flight(harness: Harness) -> None:
    decoding(harness)
    for request in list(harness.scheduler.running):
        harness.scheduler.preempt(request)


def preempted_and_read(harness: Harness) -> None:
    preempted_with_a_token_in_flight(harness)
    harness.step()


def committed_and_waiting(harness: Harness) -> None:
    harness.add("block", [9] * 4, max_tokens=3)
    harness.step()
    receive(harness, "a", list(range(10)), (0, 1), max_tokens=6)


def finished(harness: Harness) -> None:
    harness.add("a", range(5), samples=(0, 1), max_tokens=2)
    harness.run()


def never_heard_of(harness: Harness) -> None:
    pass


MOMENTS = [
    (waiting, 1),
    (prefilling, 8),
    (first_sample_in_flight, 8),
    (decoding, 8),
    (last_token_in_flight, 8),
    (preempted_with_a_token_in_flight, 8),
    (preempted_and_read, 8),
    (committed_and_waiting, 1),
    (finished, 8),
    (never_heard_of, 8),
]


@pytest.mark.parametrize("samples", [(), (0,), (1,), (0, 1), (5,)])
@pytest.mark.parametrize(("moment", "max_num_seqs"), MOMENTS)
def test_abort_in_every_state(moment: Callable[[Harness], None], max_num_seqs: int, samples: tuple[int, ...]) -> None:
    harness = Harness(max_num_seqs=max_num_seqs)
    moment(harness)
    before = {key: list(tokens) for key, tokens in harness.tokens.items()}
    for _ in range(2):
        harness.scheduler.abort("a", 0, samples)
        harness.check()
    harness.scheduler.abort("a", 1)  # another attempt
    harness.run()
    for sample in range(2):
        if "a" not in harness.requests:
            assert ("a", sample) not in harness.tokens
        elif samples and sample not in samples:
            harness.assert_output("a", sample)
        else:
            assert harness.tokens.get(("a", sample)) == before.get(("a", sample)), "a token came after the abort"
    harness.assert_empty()


@pytest.mark.parametrize("moment", range(14))
def test_an_abort_leaves_others_alone(moment: int) -> None:
    harness = Harness(num_blocks=12, max_num_batched_tokens=5)
    harness.add("a", range(11), samples=(0, 1), max_tokens=6)
    harness.add("b", range(9), max_tokens=6)
    for _ in range(moment):
        harness.step()
    harness.scheduler.abort("a", 0)
    harness.run()
    harness.assert_output("b")
    harness.assert_empty()


def test_an_aborted_requests_blocks_cool_until_its_step_has_run() -> None:
    harness = Harness(num_blocks=4)
    harness.add("a", range(7), max_tokens=6)
    harness.step()
    harness.scheduler.abort("a", 0)
    assert harness.pool.num_free == 4
    assert harness.pool.num_grantable == 2
    harness.step()
    assert harness.pool.num_grantable == 4


def test_committed_samples_that_outgrow_the_pool_at_once_fail_together() -> None:
    """The prompt fills the pool to the last slot: no sample has room for the token that it brings along."""
    harness = Harness(num_blocks=4)
    request = harness.request("a", range(16), samples=(0, 1, 2), mode="decode", max_tokens=9)
    blocks = harness.pool.allocate_grantable(4)
    assert blocks is not None
    harness.runner.peer_writes(blocks, range(16))
    harness.commit(request, blocks)
    harness.run()
    harness.step()
    assert harness.failed == {"a": "too_large_for_pool"}
    harness.assert_empty()


def test_a_sequence_preempted_at_the_size_of_the_pool_fails_and_lets_others_pass() -> None:
    harness = Harness(num_blocks=4)
    harness.add("a", range(12), max_tokens=20)
    while len(harness.tokens.get(("a", 0), ())) < 5:
        harness.step()
        if len(harness.tokens.get(("a", 0), ())) == 4:
            harness.scheduler.preempt(harness.scheduler.running[0])
    harness.add("b", range(6), max_tokens=3)
    harness.run()
    assert harness.failed == {"a": "too_large_for_pool"}
    harness.assert_output("b")
    harness.assert_empty()


# --- steps that fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("failing", range(10))
def test_a_step_without_memory_ends_its_requests_and_leaves_nothing_wrong(failing: int, pipelined: bool) -> None:
    """Two prompts share blocks that the failing step may fill, one forks, one comes late, one hits what was cached."""
    harness = Harness(num_blocks=40, pipelined=pipelined)
    harness.runner.failing = {failing}
    harness.add("a", range(22), max_tokens=7)
    harness.add("b", range(22), samples=(0, 1, 2), max_tokens=7)
    harness.add("p", range(40, 60), mode="prefill", max_tokens=7)
    for _ in range(4):
        harness.step()
    harness.add("late", range(21), max_tokens=7)
    harness.run()
    assert harness.failed, "the step failed and nobody heard"
    harness.runner.failing.clear()
    harness.add("after", range(22), max_tokens=7)
    harness.run()
    assert set(harness.failed.values()) == {"out_of_memory"}
    samples = {"a": (0,), "b": (0, 1, 2), "late": (0,), "after": (0,)}
    for name in samples.keys() - harness.failed.keys():
        for sample in samples[name]:
            harness.assert_output(name, sample)
    assert "after" not in harness.failed
    for name in list(harness.connector.held):
        harness.connector.release(name)
    harness.assert_empty()
