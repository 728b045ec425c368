"""A head's guesses, which the host sees before they are checked only where it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine_harness import Harness

from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.speculation.head_tokens import HeadRow, HeadTokens
from tandem.engine.scheduling.speculation.speculator import Speculator, UnseenGuesses
from tandem.engine.scheduling.step import UNSEEN, BlockAppend, SampleRow

PENALISED = [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}]
GUIDED = [{"grammar": "json:{}"}, {"allowed_token_ids": (3,)}, {"bad_words": ((3, 4),)}]


class Head:
    """A `HeadRunner` that guesses the numbers behind a sequence's position."""

    def __init__(self, may_place: bool = True) -> None:
        self.may_place = may_place
        self.was_in_place: list[bool] = []
        self.num_seen = 0

    def guess(
        self, rows: Sequence[HeadRow], appends: Sequence[BlockAppend], in_place: bool = False
    ) -> Callable[[], list[list[int]]] | None:
        self.was_in_place.append(in_place)

        def see() -> list[list[int]]:
            self.num_seen += 1
            return [[row.position + 1 + place for place in range(row.num_guesses)] for row in rows]

        return see


def requests(*settings: dict[str, Any]) -> list[Request]:
    harness = Harness()
    made = [harness.request(f"r{index}", range(5 + index), **each) for index, each in enumerate(settings)]
    for slot, request in enumerate(made):
        request.slot = slot
    return made


def guesser(head: Head) -> HeadTokens:
    return HeadTokens(head, 3, StepClock(lambda: 0.0))


def test_what_nobody_must_see_stays_unseen_until_it_was_checked() -> None:
    head, (first, second) = Head(), requests({}, {"temperature": 0.7, "top_k": 5})
    guessed = guesser(head).guess({first: 1, second: 3})
    assert isinstance(guessed, UnseenGuesses)
    assert (head.was_in_place, head.num_seen) == ([True], 0)
    assert guessed.counts == {first: 1, second: 3}
    assert guessed.see() == {first: [5], second: [6, 7, 8]}


@pytest.mark.parametrize("settings", [*PENALISED, *GUIDED])
def test_masks_and_penalties_see_them_first(settings: dict[str, Any]) -> None:
    head, (first, second) = Head(), requests({}, settings)
    assert guesser(head).guess({first: 2, second: 1}) == {first: [5, 6], second: [6]}
    assert head.was_in_place == [False], "all of a step are seen, or none"


def test_behind_tokens_in_flight_and_beside_other_ranks_they_are_seen() -> None:
    head, [request] = Head(), requests({})
    request.num_in_flight = 1
    assert guesser(head).guess({request: 2}) == {request: [5, 6]}
    others, [request] = Head(may_place=False), requests({})
    assert guesser(others).guess({request: 2}) == {request: [5, 6]}
    assert head.was_in_place == others.was_in_place == [False]


def test_unseen_drafts_are_looked_up_by_sequence() -> None:
    harness, (first, second) = Harness(), requests({}, {})
    speculator = Speculator(guesser(Head()), harness.scheduler.state, lambda: 0.0)
    drafts = speculator._guess({first: 2, second: 1})
    assert drafts == {first: (UNSEEN, UNSEEN), second: (UNSEEN,)}
    samples = [SampleRow(row, 0, 9, 0, 0, draft) for row, draft in enumerate([-1, UNSEEN, -1, UNSEEN, UNSEEN, -1])]
    owners = [second, second, first, first, first, first]
    assert speculator.drafts_of(samples, owners) == [-1, 6, -1, 5, 6, -1]
    assert speculator.drafts_of(samples[:1], owners[:1]) == [-1]
