"""How requests leave early: aborts in every state, failed steps, errors of ours; each case ends with nothing held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_harness import Harness, receive

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.scheduling import stop
from tandem.engine.scheduling.step import RunnerOutput, SchedulerOutput

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
    for request in list(harness.scheduler.state.queues.running):
        harness.scheduler.state.preempt(request)


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
        harness.scheduler.state.abort(AttemptKey("a", 0), samples)
        harness.check()
    harness.scheduler.state.abort(AttemptKey("a", 1))  # another attempt
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
    harness.scheduler.state.abort(AttemptKey("a", 0))
    harness.run()
    harness.assert_output("b")
    harness.assert_empty()


def test_an_aborted_requests_blocks_cool_until_its_step_has_run() -> None:
    harness = Harness(num_blocks=4)
    harness.add("a", range(7), max_tokens=6)
    harness.step()
    harness.scheduler.state.abort(AttemptKey("a", 0))
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
            harness.scheduler.state.preempt(harness.scheduler.state.queues.running[0])
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


# --- exceptions that nobody expected ------------------------------------------------------------------------


def failing_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, at_call: int) -> None:
    """The method works until its call number `at_call`, which raises before it has done anything."""
    method, calls = getattr(owner, name), iter(range(at_call + 1))

    def fails(*args: object, **named: object) -> object:
        if next(calls, -1) == at_call:
            raise KeyError("nobody expected this")
        return method(*args, **named)

    monkeypatch.setattr(owner, name, fails)


@pytest.mark.parametrize("fails", ["planned", "asked", "token"])
@pytest.mark.parametrize("samples", [(0,), (0, 1, 2)])
def test_an_error_in_what_is_for_one_request_costs_this_one(
    monkeypatch: pytest.MonkeyPatch, fails: str, samples: tuple[int, ...]
) -> None:
    harness = Harness(num_blocks=40, max_num_batched_tokens=64)
    harness.num_faults = 1
    if fails == "planned":
        failing_once(monkeypatch, harness.scheduler.state.kv, "cached_prefix", 1)
    elif fails == "asked":
        failing_once(monkeypatch, harness.scheduler.state.tiers, "prepare", 1)
    else:
        failing_once(monkeypatch, stop, "finish_reason", 1)
    harness.add("a", range(22), max_tokens=7)
    harness.add("b", range(30, 50), samples, max_tokens=7)
    harness.add("c", range(22), max_tokens=7)
    harness.run()
    assert harness.failed == {"b": "internal_error"}
    harness.assert_output("a")
    harness.assert_output("c")
    harness.assert_empty()


def test_an_error_of_planning_after_blocks_have_changed_hands_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(num_blocks=40)
    failing_once(monkeypatch, harness.scheduler.state, "enter_batch", 0)
    harness.add("a", range(22), max_tokens=7)
    with pytest.raises(KeyError):
        harness.step()


def test_settings_that_the_device_side_cannot_take_cost_their_request() -> None:
    """Its prompt's siblings end with it; what was cached of its prompt is right."""
    harness = Harness(num_blocks=40, max_num_batched_tokens=64)
    harness.num_faults = 1
    run = harness.runner._run

    def run_without(output: SchedulerOutput) -> RunnerOutput:
        result = run(output)
        result.failed_slots = {new.slot: "odd settings" for new in output.new_slots if len(new.token_ids) == 20}
        return result

    harness.runner._run = run_without  # type: ignore[method-assign]
    harness.add("a", range(22), max_tokens=7)
    harness.add("b", range(30, 50), samples=(0, 1, 2), max_tokens=7)
    harness.run()
    assert harness.failed == {"b": "internal_error"}
    assert not any(name == "b" for name, _ in harness.tokens)
    harness.assert_output("a")
    harness.assert_empty()
