"""Guesses and what becomes of them: options, the index, how many pay, and that no output depends on them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from engine_harness import Harness

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.request import EngineEvent, TokensEvent
from tandem.engine.scheduling.speculation.lengths import FIRST_CHANCE, Acceptance, Costs, num_worthwhile
from tandem.engine.scheduling.speculation.options import (
    DraftModelOptions,
    EagleOptions,
    MtpOptions,
    PromptLookup,
    read_speculative_config,
)
from tandem.engine.scheduling.speculation.token_index import CANDIDATES, TokenIndex
from tandem.engine.scheduling.speculation.verdicts import Run, runs_of
from tandem.engine.scheduling.step import RunnerOutput, SchedulerOutput

# --- options ------------------------------------------------------------------------------------------------


def test_options_are_those_of_vllm() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    assert read_speculative_config(text) == PromptLookup(4, 4, 2)
    assert read_speculative_config("") is None
    assert read_speculative_config('{"num_speculative_tokens": 3}') == PromptLookup(3, 5, 5)
    assert read_speculative_config('{"model": "x", "num_speculative_tokens": 3}') == DraftModelOptions(3, "x")
    eagle = '{"method": "eagle3", "model": "x", "num_speculative_tokens": 3}'
    assert read_speculative_config(eagle) == EagleOptions(3, "x")
    for method in ("mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp"):
        text = f'{{"method": "{method}", "num_speculative_tokens": 1}}'
        assert read_speculative_config(text) == MtpOptions(1)
    assert read_speculative_config('{"num_speculative_tokens": 3, "prompt_lookup_min": 2}') == PromptLookup(3, 2, 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ngram", "no JSON object"),
        ("[]", "no JSON object"),
        (
            '{"method": "medusa", "num_speculative_tokens": 3}',
            "'medusa' is not built; there are",
        ),
        ('{"method": "mtp", "model": "x", "num_speculative_tokens": 3}', "model is nothing that mtp takes"),
        ('{"method": "mtp"}', "lacks num_speculative_tokens"),
        ('{"model": 3, "num_speculative_tokens": 3}', "model is 3"),
        ('{"method": "draft_model", "num_speculative_tokens": 3}', "lacks model"),
        ('{"method": "eagle3", "num_speculative_tokens": 3}', "lacks model"),
        ('{"model": "x"}', "lacks num_speculative_tokens"),
        ('{"model": "x", "num_speculative_tokens": 2, "prompt_lookup_max": 2}', "nothing that draft_model takes"),
        ('{"method": "oracle", "num_speculative_tokens": 3}', "'oracle' is not known"),
        ('{"method": "ngram"}', "lacks num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "from 1 to 16"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "from 1 to 16"),
        ('{"method": "ngram", "num_speculative_tokens": 99}', "from 1 to 16"),
        ('{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 3}', "1 to 2"),
        ('{"method": "ngram", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}', "draft_tensor_parallel"),
    ],
)
def test_what_is_not_there_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_speculative_config(text)


# --- the index ----------------------------------------------------------------------------------------------


def index_of(tokens: list[int], least: int = 2, most: int = 3, num_prompt: int | None = None) -> TokenIndex:
    cut = len(tokens) if num_prompt is None else num_prompt
    index = TokenIndex(np.array(tokens[:cut], np.int32), least, most)
    index.extend(tokens[cut:])
    return index


def test_the_longest_place_is_taken_and_of_those_alike_the_newest() -> None:
    assert index_of([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]).continuation(2) == [4, 9]  # 1 2 3 before 2 3
    assert index_of([2, 3, 4, 2, 3, 5, 2, 3]).continuation(1) == [5]
    assert index_of([1, 2, 3, 4]).continuation(3) == []
    assert index_of([7], least=1).continuation(3) == []
    assert index_of([], least=1).continuation(3) == []


def test_loops_go_on_and_images_are_never_guessed() -> None:
    assert index_of([5, 6, 5, 6]).continuation(5) == [5, 6, 5, 6, 5]
    assert index_of([3, 3], least=1).continuation(3) == [3, 3, 3]
    assert index_of([1, 2, 8, -4, 9, 1, 2]).continuation(4) == [8]
    assert index_of([1, -4, 8, 3, 1, -4]).continuation(1) == [8]  # but looked for, in a prompt and in output
    assert index_of([1, -4, 8, 3, 1, -4], num_prompt=0).continuation(1) == [8]


def test_an_index_finds_what_a_search_finds_wherever_the_prompt_ends() -> None:
    rng = random.Random(0)
    for case in range(300):
        tokens = [rng.randrange(3 + case % 9) for _ in range(rng.randrange(30))]
        least = rng.randrange(1, 4)
        most = least + rng.randrange(3)
        for num_prompt in (0, rng.randrange(len(tokens) + 1), len(tokens)):
            found = index_of(tokens, least, most, num_prompt).continuation(1)
            assert found == searched(tokens, least, most), (tokens, least, most, num_prompt)


def searched(tokens: list[int], least: int, most: int) -> list[int]:
    """The same by looking at every place, the newest first; no more of them than the index compares."""
    best, longest, num_seen = [], 0, 0
    for end in range(len(tokens) - 2, least - 2, -1):
        length = 0
        while length < most and length <= end and tokens[end - length] == tokens[-1 - length]:
            length += 1
        num_seen += length >= least
        if length >= least and length > longest and num_seen <= CANDIDATES:
            best, longest = [tokens[end + 1]], length
    return best


# --- how many pay -------------------------------------------------------------------------------------------


def flat(tokens: int) -> float:
    return 0.005


def steep(tokens: int) -> float:
    return 0.001 * tokens


def costs(step_s: Callable[[int], float], stall_s: float = 0.0, guess_s: float = 0.0, streams: int = 3) -> Costs:
    return Costs(step_s(streams), step_s, stall_s, guess_s)


def test_rows_that_cost_nothing_are_all_taken_and_dear_ones_are_not() -> None:
    chances = [[0.5, 0.25], [0.1], []]
    assert num_worthwhile(chances, 3, 3, 100, costs(flat)) == [2, 1, 0]
    assert num_worthwhile(chances, 3, 3, 2, costs(flat)) == [2, 0, 0]
    assert num_worthwhile(chances, 3, 3, 100, costs(steep)) == [0, 0, 0]


def test_the_wait_for_the_host_must_be_made_good() -> None:
    assert num_worthwhile([[0.5, 0.25]], 1, 1, 100, costs(flat, 0.003)) == [2]
    assert num_worthwhile([[0.5, 0.25]], 1, 1, 100, costs(flat, 0.004)) == [0]  # 1.75 tokens in 9 ms, 1 in 5
    assert num_worthwhile([[0.9]] + [[]] * 63, 64, 64, 100, costs(flat, 0.001)) == [0] * 64


def test_drafts_compete_with_what_turns_without_them_take() -> None:
    assert num_worthwhile([[0.5]], 1, 1, 100, Costs(0.02, flat, 0.006, 0.0)) == [1]  # a host slower than the device
    assert num_worthwhile([[0.5]], 1, 1, 100, Costs(0.007, flat, 0.006, 0.0)) == [0]  # 1.5 tokens in 11 ms, 1 in 7


def test_guessing_itself_costs_by_its_depth() -> None:
    assert num_worthwhile([[0.9, 0.8, 0.7]], 1, 1, 100, costs(flat, 0.0, 0.002)) == [3]
    assert num_worthwhile([[0.9, 0.8, 0.1]], 1, 1, 100, costs(flat, 0.0, 0.002)) == [2]
    assert num_worthwhile([[0.3]], 1, 1, 100, costs(flat, 0.0, 0.002)) == [0]
    assert num_worthwhile([[0.3]] * 3, 3, 3, 100, costs(flat, 0.0, 0.001)) == [1, 1, 1]  # one guess for all


def test_without_measured_steps_drafts_must_be_likely() -> None:
    assert num_worthwhile([[0.5, 0.25, 0.1]], 1, 1, 100, None) == [2]
    assert num_worthwhile([[0.5]], 64, 1, 100, None) == [0]


def test_acceptance_is_learned_and_forgotten() -> None:
    seen = Acceptance()
    for _ in range(40):
        seen.learn(4, 0)
    assert seen.chance < 0.05
    again = Acceptance()
    again.chance = seen.chance
    for _ in range(200):
        seen.forget()
    again.forget(200)
    assert again.chance == pytest.approx(seen.chance)
    assert abs(seen.chance - FIRST_CHANCE) < 0.05
    for _ in range(10):
        seen.learn(4, 4)
    assert seen.chance > 0.95


# --- verdicts -----------------------------------------------------------------------------------------------


def test_behind_a_wrong_draft_all_is_void_and_the_next_sequence_is_not() -> None:
    drafts = [-1, 5, 6, 7, -1, 8]
    assert runs_of(drafts, [5, 6, 0, 7, 8, 1]) == [Run(0, 3, 4), Run(4, 6, 6)]
    assert runs_of(drafts, [0, 6, 7, 7, 9, 1]) == [Run(0, 1, 4), Run(4, 5, 6)]
    assert runs_of(drafts, [5, 6, 7, 7, 8, 1]) == [Run(0, 4, 4), Run(4, 6, 6)]
    assert runs_of([], []) == []


# --- steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [64, 14], ids=["room", "preempted"])
def test_outputs_are_those_of_their_definition(num_blocks: int) -> None:
    harness = Harness(num_blocks, speculates=True, max_num_batched_tokens=24)
    for number in range(6):
        samples = (0, 1) if number % 3 == 0 else (0,)
        harness.add(f"r{number}", [number, 1, 2], samples, max_tokens=20 + number, ignore_eos=number % 2 == 0)
    harness.run()
    for name, samples in harness.samples.items():
        for sample in samples:
            harness.assert_output(name, sample)
    assert harness.scheduler.speculator is not None
    counters = harness.scheduler.speculator.counters
    assert 0 < counters["spec_accepted_tokens"] < counters["spec_draft_tokens"]
    assert num_blocks == 64 or harness.scheduler.state.num_preemptions
    harness.assert_empty()


def test_a_right_guess_saves_steps_and_never_passes_max_tokens() -> None:
    steps = {}
    for speculates in (False, True):
        harness = Harness(64, speculates=speculates)
        harness.add("one", [1, 2, 3], max_tokens=24)
        harness.run()
        harness.assert_output("one")
        steps[speculates] = harness.scheduler.num_steps
    assert steps[True] < 0.7 * steps[False]


def test_what_a_step_makes_of_a_sequence_is_told_at_once() -> None:
    harness = Harness(64, speculates=True)
    told: list[int] = []
    take_events = harness.scheduler.state.take_events

    def noted() -> list[EngineEvent]:
        events = take_events()
        told.extend(len(event.token_ids) for event in events if isinstance(event, TokensEvent))
        return events

    harness.scheduler.state.take_events = noted  # type: ignore[method-assign]
    harness.add("one", [1, 2, 3], max_tokens=24, ignore_eos=True)
    harness.run()
    harness.assert_output("one")
    assert sum(told) == 24
    assert len(told) <= harness.scheduler.num_steps
    assert max(told) > 1


def test_outputs_are_the_same_while_drafts_cease_and_come_back() -> None:
    now, drafted, rng = 0.0, [], random.Random(0)
    harness = Harness(64, speculates=True, clock=StepClock(lambda: now))
    harness.scheduler.state.step_times.measured({16: 0.005})
    run = harness.runner._run

    def timed(output: SchedulerOutput) -> RunnerOutput:
        nonlocal now
        now += rng.choice((0.006, 0.012)) if output.has_drafts else 0.005
        drafted.append(output.has_drafts)
        return run(output)

    harness.runner._run = timed  # type: ignore[method-assign]
    for number in range(24):
        for name in (f"{number}a", f"{number}b"):
            harness.add(name, [number, 1, 2 + len(harness.requests) % 2], max_tokens=60)
        harness.run()
        harness.assert_output(f"{number}a")
        harness.assert_output(f"{number}b")
    assert 20 < sum(drafted) < len(drafted) / 2
    assert any(not now_has and had for had, now_has in zip(drafted, drafted[20:], strict=False))
    harness.assert_empty()


def test_a_failed_step_with_drafts_fails_its_requests_once() -> None:
    harness = Harness(64, speculates=True)
    harness.runner.failing = {3}
    for name in ("a", "b"):
        harness.add(name, [1, 2, ord(name)], max_tokens=30)
    harness.run()
    assert harness.failed == {"a": "out_of_memory", "b": "out_of_memory"}
    harness.assert_empty()
