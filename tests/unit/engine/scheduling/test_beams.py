"""The search alone, and what becomes of its sequences. Against transformers: tests/cluster/test_beams.py."""

from __future__ import annotations

import pytest
from engine_harness import BLOCK, Harness, expected_beams, receive

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import Candidates
from tandem.engine.scheduling.beams.search import BeamSearch

END = 9


def search(width: int, max_tokens: int = 8, **settings: object) -> BeamSearch:
    sampling = SamplingParams(beam_width=width, temperature=0.0, **settings)  # type: ignore[arg-type]
    return BeamSearch(sampling, [END], max_tokens)


def given(logprobs: dict[int, float], ends: tuple[int, ...] = ()) -> Candidates:
    best = sorted(logprobs.items(), key=lambda each: -each[1])
    return Candidates(tuple(token for token, _ in best), tuple(logprob for _, logprob in best), ends)


def found(searched: BeamSearch) -> list[tuple[list[int], float]]:
    return [([beam.token_id for beam in h.beam.path()], round(float(h.score), 4)) for h in searched.hypotheses]


def beams(searched: BeamSearch) -> list[tuple[int, int]]:
    return [(beam.parent, beam.token_id) for beam in searched.beams]


def test_the_best_of_all_continuations_go_on_whoever_made_them() -> None:
    searched = search(2)
    searched.advance([given({1: -1.0, 2: -2.0, 3: -3.0})])
    assert beams(searched) == [(0, 1), (0, 2)]
    searched.advance([given({1: -3.0, 2: -4.0}), given({1: -0.5, 2: -0.25})])
    assert beams(searched) == [(1, 2), (1, 1)]
    searched.advance([given({4: -9.0, 5: -9.5}), given({4: -1.0, 5: -20.0})])
    assert beams(searched) == [(1, 4), (0, 4)]


def test_only_ends_among_the_best_count() -> None:
    searched = search(2)
    searched.advance([given({1: -1.0, 2: -1.5, END: -2.0})])
    assert found(searched) == []
    searched.advance([given({END: -1.0, 1: -2.0}), given({END: -9.0, 2: -1.0, 3: -1.2})])
    assert found(searched) == [([1, END], -1.0)]
    assert beams(searched) == [(1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_over"),
    [(True, 1.0, True), (False, 1.0, True), ("never", 1.0, False), ("never", 0.0, True), (False, -1.0, True)],
)
def test_when_a_search_is_over(early_stopping: bool | str, length_penalty: float, is_over: bool) -> None:
    """Two hypotheses of -1 and -1.1; the best beam has -1.2, and may have eight tokens."""
    searched = search(2, early_stopping=early_stopping, length_penalty=length_penalty)
    searched.advance([given({1: -0.5, 2: -0.55, 3: -9.0})])
    searched.advance([given({END: -0.5, 1: -0.7, 2: -8.0}), given({END: -0.55, 3: -1.0})])
    assert len(searched.hypotheses) == 2
    assert searched.is_over == is_over


def test_the_length_ends_all() -> None:
    searched = search(2, max_tokens=2)
    searched.advance([given({1: -1.0, 2: -2.0})])
    searched.advance([given({3: -1.0, 4: -2.0}), given({5: -1.5, 6: -5.0})])
    assert searched.is_over
    assert found(searched) == [([1, 3], -1.0), ([1, 4], -1.5)]
    assert {h.beam.finish_reason for h in searched.hypotheses} == {"length"}


def test_a_grammar_may_have_fewer_outputs_than_there_are_beams() -> None:
    searched = search(3)
    searched.advance([given({1: -1.0, 2: -2.0}, ends=(2,))])
    assert beams(searched) == [(0, 1)]
    searched.advance([given({4: -2.5}, ends=(4,))])
    assert searched.is_over
    assert found(searched) == [([1, 4], -1.75), ([2], -2.0)]
    searched = search(3)
    searched.advance([given({})])
    assert searched.is_over
    assert found(searched) == []


def test_an_end_before_min_tokens_is_a_token() -> None:
    searched = search(1, min_tokens=1)
    searched.advance([given({END: -1.0, 1: -2.0})])
    assert found(searched) == []
    assert beams(searched) == [(0, END)]


def test_log_probabilities_have_rank_and_rivals() -> None:
    searched = search(2, max_tokens=1, num_logprobs=1)
    searched.advance([given({1: -1.0, 2: -2.0})])
    entry = searched.hypotheses[1].beam.logprobs
    assert entry is not None
    assert (entry.token_ids, entry.logprobs, entry.rank) == ((2, 1), (-2.0, -1.0), 2)


SETTINGS = {"beam_width": 3, "max_tokens": 12, "temperature": 0.0, "ignore_eos": False}


@pytest.mark.parametrize("length", [1, 4, 7])
def test_forks_share_full_blocks_and_copy_the_last(length: int) -> None:
    harness = Harness()
    prompt = list(range(length))
    harness.add("a", prompt, (0, 1, 2), **SETTINGS)
    most = 0
    while harness.core.has_work():
        harness.step()
        most = max(most, harness.pool.num_blocks - harness.pool.num_free)
    for sample in range(3):
        harness.assert_output("a", sample)
    assert most <= length // BLOCK + 3 * (-(-(length + 12) // BLOCK) - length // BLOCK), "more than was reserved"
    harness.assert_empty()


def test_a_prompt_from_a_peer_begins_with_its_candidates() -> None:
    harness = Harness()
    receive(harness, "a", list(range(6)), (0, 1, 2), **SETTINGS)
    num_computed = harness.runner.num_computed_tokens
    harness.run()
    assert num_computed == 0
    for sample in range(3):
        harness.assert_output("a", sample)
    harness.assert_empty()


def test_one_token_of_a_peers_prompt_is_a_whole_search() -> None:
    harness = Harness()
    receive(harness, "a", list(range(6)), (0, 1, 2), **{**SETTINGS, "max_tokens": 1})
    harness.run()
    assert harness.runner.num_rows == 0
    harness.assert_output("a", 2)
    harness.assert_empty()


def test_others_go_on_beside_a_search() -> None:
    """Its own rows come every other step: the step before must be read."""
    harness = Harness(num_blocks=64)
    harness.add("a", [1, 2], (0, 1), **SETTINGS)
    harness.add("b", [3], max_tokens=30)
    harness.run()
    harness.assert_output("a", 1)
    harness.assert_output("b")
    harness.assert_empty()


def test_what_does_not_fit_at_its_longest_is_refused() -> None:
    harness = Harness(num_blocks=9, max_num_seqs=4)
    harness.add("fits", range(4), **{**SETTINGS, "beam_width": 2, "max_tokens": 16})
    harness.add("blocks", range(4), **{**SETTINGS, "beam_width": 3, "max_tokens": 16})
    harness.add("slots", range(4), **{**SETTINGS, "beam_width": 5, "max_tokens": 1})
    harness.run()
    harness.assert_output("fits")
    assert harness.failed == {"blocks": "too_large_for_pool", "slots": "invalid_request"}


def test_nobody_starts_into_the_blocks_of_a_search() -> None:
    harness = Harness(num_blocks=13)
    harness.add("a", range(4), **{**SETTINGS, "ignore_eos": True, "early_stopping": "never"})
    harness.add("b", range(8), max_tokens=4)
    harness.run()
    assert harness.scheduler.state.num_preemptions == 0
    assert len(expected_beams(list(range(4)), harness.requests["a"].prompt.sampling)) == 3
    harness.assert_output("a")
    harness.assert_output("b")


@pytest.mark.parametrize("caching", [True, False])
def test_beams_whose_blocks_are_taken_go_on_one_at_a_time(caching: bool) -> None:
    """Somebody else takes blocks after the start, so that two beams never fit beside each other."""
    harness = Harness(num_blocks=16, caching=caching)
    harness.add("a", range(5), (0, 1), **{**SETTINGS, "ignore_eos": True})
    for _ in range(4):
        harness.step()
    for request in list(harness.scheduler.state.queues.running):
        harness.scheduler.state.preempt(request)
    taken = harness.pool.allocate(11)
    assert taken is not None
    harness.external.update(taken)
    harness.run()
    assert harness.scheduler.state.num_preemptions > 3
    harness.external.clear()
    harness.pool.free(taken, None)
    for sample in range(2):
        harness.assert_output("a", sample)
    harness.assert_empty()
