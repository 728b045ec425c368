"""The scheduler under the pipelined loop: lengths, budgets, order, stops.

The device runs each step late and checks every KV slot that it reads (tests/fakes/fake_runner.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_harness import BLOCK, MAX_MODEL_LEN, Harness, prompt_that_stops

from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.request import Prompt, Request
from tandem.engine.scheduling.times.prompt_budget import PromptBudget
from tandem.engine.scheduling.times.step_times import StepTimes

# --- length -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 40])
def test_a_request_runs_to_its_length(length: int, caching: bool, pipelined: bool) -> None:
    harness = Harness(pipelined=pipelined, caching=caching)
    harness.add("a", range(length), max_tokens=9)
    harness.run()
    harness.assert_output("a")
    assert harness.finished == {("a", 0): "length"}
    assert harness.runner.num_computed_tokens == length + 8, "no row was launched in vain"
    harness.assert_empty()


def test_model_length_ends_a_request() -> None:
    harness = Harness()
    harness.add("a", range(60), max_tokens=100)
    harness.run()
    assert len(harness.tokens["a", 0]) == MAX_MODEL_LEN - 60
    harness.assert_output("a")


def test_output_of_prior_attempts_counts() -> None:
    """The tail of the prompt is output that the client has: max_tokens, min_tokens and output_index go on from it."""
    prompt, tokens = prompt_that_stops(6, 8)
    for prior in range(1, 6):
        harness = Harness()
        harness.add("a", [*prompt, *tokens[:prior]], num_prior_output_tokens=prior, max_tokens=12, ignore_eos=False)
        harness.run()
        harness.assert_output("a")
        assert [*tokens[:prior], *harness.tokens["a", 0]] == tokens


def test_nothing_left_to_make_fails_by_name() -> None:
    harness = Harness()
    harness.add("a", range(MAX_MODEL_LEN), max_tokens=4)
    harness.add("b", range(9), num_prior_output_tokens=4, max_tokens=4)
    harness.run()
    assert harness.failed == {"a": "too_long", "b": "too_long"}
    harness.assert_empty()


# --- budgets and order --------------------------------------------------------------------------------------


def chunks(harness: Harness, num_steps: int) -> list[list[int]]:
    sizes = []
    execute = harness.runner.execute

    def spy(output, *hooks):  # type: ignore[no-untyped-def]
        sizes.append([row.num_tokens for row in output.rows])
        return execute(output, *hooks)

    harness.runner.execute = spy  # type: ignore[method-assign]
    for _ in range(num_steps):
        harness.step()
    return sizes


@pytest.mark.parametrize(
    ("options", "expected_chunks"),
    [
        ({"max_num_batched_tokens": 64}, [[22], [1]]),
        ({"max_num_batched_tokens": 10}, [[8], [8], [6], [1]]),
        ({"max_num_batched_tokens": 64, "max_prefill_chunk": 9}, [[8], [8], [6], [1]]),
        ({"max_num_batched_tokens": 64, "max_prefill_chunk": 8}, [[8], [8], [6], [1]]),
        ({"max_num_batched_tokens": 3}, [*[[3]] * 7, [1], [1]]),
    ],
)
def test_chunks_end_on_block_boundaries_when_they_can(
    options: dict[str, int], expected_chunks: list[list[int]]
) -> None:
    harness = Harness(**options)
    harness.add("a", range(22), max_tokens=4)
    assert chunks(harness, len(expected_chunks)) == expected_chunks


def test_running_decodes_come_before_prompt_chunks() -> None:
    harness = Harness(max_num_batched_tokens=6)
    harness.add("a", [1, 2], max_tokens=20)
    chunks(harness, 3)
    harness.add("b", range(30), max_tokens=1)
    assert chunks(harness, 2) == [[1, 4], [1, 4]]


def test_several_prompts_share_a_step() -> None:
    harness = Harness(max_num_batched_tokens=12)
    for name in "abc":
        harness.add(name, [ord(name)] * 5, max_tokens=2)
    assert chunks(harness, 2) == [[5, 5, 2], [1, 1, 3]]


@pytest.mark.parametrize(("limits", "second_step"), [(True, [1, 4]), (False, [1, 28])])
def test_prompt_work_beside_decodes_is_bounded_on_decode_nodes(limits: bool, second_step: list[int]) -> None:
    harness = Harness(limits_prompt_work=limits, max_num_batched_tokens=64, decode_prompt_budget=5)
    harness.add("a", range(9), max_tokens=20)
    assert chunks(harness, 1) == [[9]], "nothing decodes yet: no bound"
    harness.add("b", range(28, 0, -1), max_tokens=2)
    assert chunks(harness, 1) == [second_step]
    harness.run()
    harness.assert_output("b")


def test_measured_step_times_bound_prompt_work_beside_decodes() -> None:
    """7 ms hold 20 tokens; beside one decode 19 are left, cut to whole blocks. Too slow a device still gets on."""
    for milliseconds, second_step in ((5.0, [1, 16]), (50.0, [1, 4])):
        harness = Harness(limits_prompt_work=True, max_num_batched_tokens=64, itl_max_ms=6)
        harness.scheduler.state.step_times.measured({16: milliseconds / 1e3, 24: milliseconds / 1e3 + 0.004})
        harness.add("a", range(9), max_tokens=20)
        assert chunks(harness, 1) == [[9]], "nothing decodes yet: no bound"
        harness.add("b", range(28, 0, -1), max_tokens=2)
        assert chunks(harness, 1) == [second_step]
        harness.run()
        harness.assert_output("b")


def test_steps_with_long_prompts_are_cut_to_whole_waves() -> None:
    """Of 27 tokens, since 20 are the fastest by the token. What fits is not cut."""
    harness = Harness(num_blocks=100, max_num_batched_tokens=27)
    harness.scheduler.state.step_sizes.measured({12: 0.0100, 20: 0.0125, 26: 0.0200})
    harness.add("a", range(9), max_tokens=20)
    chunks(harness, 1)
    harness.add("b", range(20, 70), max_tokens=1)
    assert chunks(harness, 3) == [[1, 16], [1, 16], [1, 18]]
    harness.add("c", range(70, 95), max_tokens=1)
    assert chunks(harness, 1) == [[1, 25]]
    harness.add("d", [*range(20, 40), *range(39, 15, -1)], max_tokens=1)
    assert chunks(harness, 1) == [[1, 24]], "what is cached is not computed"
    harness.run()
    for name in "abcd":
        harness.assert_output(name)


def test_a_long_chunk_takes_all_of_its_step() -> None:
    """One of few blocks ends with a block, of four tokens."""
    for num_tokens, expected in ((18, [16, 16, 18]), (38, [38, 12])):
        harness = Harness(num_blocks=100, max_num_batched_tokens=num_tokens)
        harness.add("a", range(50), max_tokens=1)
        assert chunks(harness, len(expected)) == [[n] for n in expected]
        harness.run()
        harness.assert_output("a")


@pytest.mark.parametrize(("num_decodes", "num_prompt_tokens"), [(1, 15), (6, 10), (10, 20), (24, 8), (27, 20)])
def test_beside_slow_decodes_a_prompt_has_what_the_graph_has_room_for(num_decodes: int, num_prompt_tokens: int) -> None:
    """Up to the next size that was measured, if that is worth a chunk; 20 at most, a block."""
    harness = Harness(
        num_blocks=400, limits_prompt_work=True, max_num_seqs=64, max_num_batched_tokens=640, itl_max_ms=6
    )
    times = harness.scheduler.state.step_times
    times.measured({16: 0.050, 32: 0.060, 64: 0.070})
    state = harness.scheduler.state
    budget = PromptBudget(state.options, 20, state.clock, times)
    promised = Request(Prompt(AttemptKey("p", 0), np.zeros(1, np.int32), SamplingParams()))
    promised.targets = harness.scheduler.state.targets
    assert budget.beside([promised] * num_decodes) == num_prompt_tokens
    for number in range(num_decodes):
        harness.add(f"{number}", [number], max_tokens=20)
    assert harness.scheduler.prompt_s_per_token == pytest.approx(times.seconds(640) / 640)
    assert times.seconds(640) == pytest.approx(0.7)
    chunks(harness, 1)
    assert harness.scheduler.prompt_s_per_token == pytest.approx(times.seconds(num_decodes + BLOCK) / BLOCK)


@pytest.mark.parametrize(
    ("given", "seconds_per_token", "largest_graph", "num_tokens"),
    [
        (0, 0.0, 0, 2048),
        (0, 50e-6, 0, 2048),
        (0, 12.5e-6, 0, 4000),
        (0, 1e-6, 0, 8192),
        (256, 1e-6, 0, 256),
        (0, 12.5e-6, 2112, 2111),
        (0, 12.5e-6, 512, 4000),
        (3000, 12.5e-6, 2112, 3000),
    ],
)
def test_what_promises_nothing_has_prompts_beside_it_by_time(
    given: int, seconds_per_token: float, largest_graph: int, num_tokens: int
) -> None:
    """50 ms, and 2,048 tokens at least, of which a graph of prompts has room; unless a number was given. Graphs of
    decodes alone count for nothing."""
    clock, times = StepClock(lambda: 0.0), StepTimes()
    if seconds_per_token:
        clock.prompt_rate.measured(8192, 8192 * seconds_per_token)
    if largest_graph:
        times.measured({largest_graph: largest_graph * seconds_per_token}, largest_graph)
    options = SchedulerOptions(max_num_batched_tokens=8192, decode_prompt_budget=given)
    budget = PromptBudget(options, 16, clock, times)
    assert budget.beside([Request(Prompt(AttemptKey("p", 0), np.zeros(1, np.int32), SamplingParams()))]) == num_tokens


@pytest.mark.parametrize(
    ("num_streams", "lengths", "adapter", "num_tokens"),
    [
        (1, [128] * 40, None, 2048),
        (1, [300] * 40, None, 2111),
        (1, [40] * 16, None, 2111),
        (1, [40] * 40, None, 4000),
        (1, [40] * 15 + [3000] * 9, None, 2111),
        (256, [128] * 40, None, 1856),
        (257, [128] * 40, None, 4000),
        (1, [300] * 40, AdapterRef("/a", b"a"), 4000),
    ],
)
def test_graphs_of_prompts_bound_those_that_they_have_room_for(
    num_streams: int, lengths: list[int], adapter: AdapterRef | None, num_tokens: int
) -> None:
    """Of many short prompts, beside many streams and with adapters, as many are launched at once as 50 ms have time
    for."""
    clock, times = StepClock(lambda: 0.0), StepTimes()
    clock.prompt_rate.measured(8192, 8192 * 12.5e-6)
    times.measured({2112: 0.03}, 2112)
    budget = PromptBudget(SchedulerOptions(max_num_batched_tokens=8192), 16, clock, times)
    requests = [
        Request(Prompt(AttemptKey(f"{place}", 0), np.zeros(length, np.int32), SamplingParams(), adapter=adapter))
        for place, length in enumerate([1] * num_streams + lengths)
    ]
    assert budget.beside(requests[:num_streams], requests[num_streams:]) == num_tokens


def test_step_times_are_read_between_their_points() -> None:
    times = StepTimes()
    times.measured({16: 0.004, 32: 0.004, 64: 0.006, 128: 0.005, 256: 0.012})
    assert times.most_tokens(0.003) == 0
    assert times.most_tokens(0.004) == 32
    assert times.most_tokens(0.005) == 48
    assert times.most_tokens(0.006) == 128, "what looked faster than a smaller step counts as equal"
    assert times.most_tokens(0.009) == 192
    assert times.most_tokens(0.024) == 512, "in proportion beyond the last"


def test_steps_that_graphs_run_take_as_long_as_the_next_graph() -> None:
    times = StepTimes()
    times.measured({16: 0.004, 32: 0.005, 64: 0.009, 128: 0.010, 256: 0.020}, largest_graph=128)
    seconds = {8: 4, 16: 4, 17: 5, 32: 5, 33: 9, 64: 9, 65: 10, 128: 10, 192: 15, 256: 20, 512: 40}
    assert {tokens: round(1e3 * times.seconds(tokens), 6) for tokens in seconds} == seconds
    assert [times.most_tokens(each / 1e3) for each in (3, 4, 5, 8, 9, 10, 15, 20, 40)] == [
        0, 16, 32, 32, 64, 128, 192, 256, 512,
    ]  # fmt: skip
    assert (times.num_free_beside(33), times.num_free_beside(64)) == (31, 0)


def test_step_times_learn_what_serving_adds() -> None:
    times = StepTimes()
    times.measured({16: 0.004, 256: 0.012})
    for _ in range(100):
        times.observed(136, 0.010)  # a quarter longer than measured
    assert times.most_tokens(0.010) == pytest.approx(136, abs=2)
    times.observed(136, 60.0)  # a stopped process, say
    assert times.most_tokens(0.010) == pytest.approx(133, abs=2)
    for _ in range(300):
        times.observed(136, 60.0)
    assert times.most_tokens(0.030) == pytest.approx(196, abs=2), "at most three times as slow"
    for _ in range(100):
        times.observed(8, 0.001)
    assert times.most_tokens(0.008) == pytest.approx(136, abs=2), "never faster than measured"


def test_only_steps_with_both_kinds_of_work_teach() -> None:
    observed = []
    harness = Harness(limits_prompt_work=True, max_num_batched_tokens=64)
    times = harness.scheduler.state.step_times
    times.measured({16: 0.001, 64: 0.001})
    times.observed = lambda tokens, seconds: observed.append(tokens)  # type: ignore[method-assign]
    harness.add("a", range(9), max_tokens=20)
    for _ in range(3):
        harness.step()
    harness.add("b", range(28, 0, -1), max_tokens=2)
    harness.run()
    assert observed == [29]
    harness.assert_output("b")


def test_priority_comes_before_arrival() -> None:
    harness = Harness(max_num_seqs=1)
    for name, priority in (("late", 5), ("early", 0), ("middle", 3)):
        harness.add(name, [priority] * 6, max_tokens=2, priority=priority)
    harness.run()
    assert [key[0] for key in harness.finished] == ["early", "middle", "late"]


def test_large_requests_are_not_starved_by_small_ones() -> None:
    harness = Harness(num_blocks=8, max_num_seqs=4)
    harness.add("running", range(9), max_tokens=12)
    harness.step()
    harness.add("large", range(20, 44), max_tokens=2)
    for index in range(6):
        harness.add(f"small{index}", [index] * 5, max_tokens=2)
    harness.run()
    assert list(harness.finished)[:2] == [("running", 0), ("large", 0)]
    harness.assert_empty()


# --- stops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipelined", [True, False])
def test_eos_ends_with_at_most_one_overshoot(pipelined: bool) -> None:
    prompt, tokens = prompt_that_stops(4, 8)
    harness = Harness(pipelined=pipelined)
    harness.add("a", prompt, max_tokens=30, ignore_eos=False)
    harness.run()
    assert harness.tokens["a", 0] == tokens
    assert harness.finished["a", 0] == "stop"
    assert harness.runner.num_rows == len(tokens) + pipelined
    harness.assert_empty()


def test_a_stop_id_ends_and_eos_may_be_ignored() -> None:
    prompt, tokens = prompt_that_stops(2, 4)
    harness = Harness()
    harness.add("ignored", prompt, max_tokens=10)
    harness.add("stop id", prompt, max_tokens=10, stop_token_ids=(tokens[0],))
    harness.run()
    assert len(harness.tokens["ignored", 0]) == 10
    assert harness.tokens["stop id", 0] == tokens[:1]


def test_a_stop_before_min_tokens_does_not_end() -> None:
    prompt, tokens = prompt_that_stops(3, 3)
    for min_tokens in (3, 4):
        harness = Harness()
        harness.add("a", prompt, max_tokens=12, min_tokens=min_tokens, ignore_eos=False)
        harness.run()
        harness.assert_output("a")
        assert (harness.tokens["a", 0] == tokens) == (min_tokens == 3), "EOS may be the token after min_tokens"


def test_a_last_token_that_is_a_stop_counts_as_stop() -> None:
    prompt, tokens = prompt_that_stops(3, 3)
    harness = Harness()
    harness.add("a", prompt, max_tokens=len(tokens), ignore_eos=False)
    harness.run()
    assert harness.finished["a", 0] == "stop"


def test_the_overshoot_token_is_never_cached() -> None:
    """The step after EOS may have filled a block; what is found later are known tokens only."""
    prompt, tokens = prompt_that_stops(4, 4)
    assert (len(prompt) + len(tokens)) % BLOCK == 0
    harness = Harness()
    harness.add("a", prompt, max_tokens=30, ignore_eos=False)
    harness.run()
    assert harness.pool.num_cached <= 2
    follow = harness.add("b", [*prompt, *tokens, 3, 3], max_tokens=3)
    harness.run()
    assert follow.num_cached_tokens in (BLOCK, 2 * BLOCK)
    harness.assert_output("b")


def test_chunks_below_a_block_take_the_whole_budget() -> None:
    harness = Harness(limits_prompt_work=True, max_num_batched_tokens=64, decode_prompt_budget=3)
    harness.add("a", range(9), max_tokens=20)
    harness.step()
    harness.add("b", range(10, 0, -1), max_tokens=2)
    assert chunks(harness, 4) == [[1, 3], [1, 3], [1, 3], [1, 1]]
    harness.run()
    harness.assert_output("b")


# --- tokens behind KV of a peer that is not verified yet -----------------------------------------------------


@pytest.mark.parametrize("num_withheld", [1, 2, 5, 8])
@pytest.mark.parametrize("trusted", ["before the launch", "while steps run"])
def test_withheld_tokens_come_before_those_behind_them(num_withheld: int, trusted: str) -> None:
    """Also where the KV is verified between a launch and what is read next, be that the last token."""
    harness = Harness()
    request = harness.add("a", range(5), max_tokens=8)
    harness.core.launch()
    request.doubt()
    for _ in range(num_withheld):
        assert not harness.core.read(), "a token was told that may be wrong"
        harness.core.launch()
    request.trust()
    if trusted == "while steps run":
        for event in harness.core.read():
            harness._take(event)
    harness.run()
    harness.assert_output("a")
    assert request.output_token_ids == harness.tokens["a", 0]
    harness.assert_empty()
