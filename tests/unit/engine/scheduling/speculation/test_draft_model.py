"""A draft model's guesses: what its runner is told, on shadow memory that checks each read, and what comes of them."""

from __future__ import annotations

import pytest
from engine_harness import BLOCK, EOS, Harness, receive

from fake_runner import FakeDraft


def harness_of(num_blocks: int = 64, wrong_every: int = 0, **options: int) -> tuple[Harness, FakeDraft]:
    draft = FakeDraft(num_blocks, BLOCK, 8, [EOS], wrong_every)
    return Harness(num_blocks, draft=draft, **{"max_num_batched_tokens": 24, **options}), draft  # type: ignore[arg-type]


def share_right(harness: Harness) -> float:
    counters = harness.scheduler.spec_counters
    return counters["spec_accepted_tokens"] / counters["spec_draft_tokens"]


@pytest.mark.parametrize("num_blocks", [64, 16], ids=["room", "preempted"])
@pytest.mark.parametrize("wrong_every", [0, 1, 3])
def test_outputs_are_those_of_their_definition(num_blocks: int, wrong_every: int) -> None:
    harness, _ = harness_of(num_blocks, wrong_every)
    for number in range(6):
        samples = (0, 1) if number % 3 == 0 else (0,)
        prompt = [1, 2, 3, 4, 5, 6, number]  # the first block is everybody's
        harness.add(
            f"r{number}", prompt, samples, max_tokens=20 + number, ignore_eos=number % 2 == 0, adapter=number % 3
        )
    harness.run()
    for name, samples in harness.samples.items():
        for sample in samples:
            harness.assert_output(name, sample)
    if wrong_every == 1:
        assert share_right(harness) < 0.1  # behind a wrong guess one may be right by chance
    elif not wrong_every:  # what came behind an end is not counted as right
        assert share_right(harness) > 0.9
    assert num_blocks == 64 or harness.scheduler.state.num_preemptions
    harness.assert_empty()


def test_right_guesses_save_steps() -> None:
    harness, draft = harness_of()
    harness.add("one", [1, 2, 3], max_tokens=40)
    harness.run()
    harness.assert_output("one")
    assert share_right(harness) == 1
    counters = harness.scheduler.spec_counters
    by_place = [counters[f"spec_accepted_at_{place}"] for place in range(4)]
    assert sum(by_place) == counters["spec_accepted_tokens"]
    assert counters["spec_drafts"] == by_place[0] >= by_place[2] > 0  # a block is not left: the fourth has no room
    assert harness.scheduler.num_steps <= 40 / 5 + 4
    assert draft.num_computed_tokens <= 3 + 40 + 10  # nothing twice but the newest token, now and then


def test_a_prompt_whose_keys_came_from_elsewhere_is_computed_by_the_draft() -> None:
    harness, draft = harness_of()
    receive(harness, "handed over", [4, 1] * 8, max_tokens=20)
    harness.run()
    harness.assert_output("handed over")
    assert share_right(harness) == 1
    first = draft.num_computed_tokens
    receive(harness, "the same", [4, 1] * 8 + [2], max_tokens=2)  # ends before it could be guessed for
    harness.add("again", [4, 1] * 8 + [3], max_tokens=20)
    harness.run()
    assert draft.num_computed_tokens - first < 16 + 20  # the blocks that it has in the cache it doesn't compute again


def test_a_failed_step_of_the_draft_costs_its_guesses_alone() -> None:
    harness, draft = harness_of()
    draft.failing = {2, 9}
    for name in ("a", "b"):
        harness.add(name, [1, 2, ord(name)], max_tokens=30)
    harness.run()
    assert not harness.failed
    for name in ("a", "b"):
        harness.assert_output(name)
    assert not draft.failing
    harness.assert_empty()


def test_long_prompts_are_caught_up_with_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.scheduling.speculation.draft_model.CATCH_UP_TOKENS", 6)
    harness, _ = harness_of()
    for name in range(3):
        harness.add(str(name), [name, 1, 2, 3] * 5, max_tokens=30)
    harness.run()
    for name in range(3):
        harness.assert_output(str(name))
    assert share_right(harness) > 0.9
