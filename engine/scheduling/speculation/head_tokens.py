"""Guesses by a head of the served model's own, which reads that model's hidden states (docs/speculation.md).

The head's keys and values are a layer of the pool, and the model's runner has its slots: nothing is kept here of a
sequence. Whatever a head saw, the worst is a guess that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.speculation.speculator import UnseenGuesses
from tandem.engine.scheduling.step import BlockAppend
from tandem.engine.scheduling.times.step_times import StepTimes

# Known tokens without which nothing is guessed: at position 0 a head has nothing to attend to.
LEAST_TOKENS = 2


HeadVerb = Literal["guess", "warm_up", "capture"]  # what the ranks that share a head out do together


class HeadRow(NamedTuple):
    """A sequence whose next `num_guesses` tokens are to be guessed behind `token`, its newest that is known."""

    slot: int
    position: int  # of that token
    token: int
    num_guesses: int
    sample_index: int
    output_index: int  # of the first guess


class HeadRunner(Protocol):
    """The device side."""

    @property
    def may_place(self) -> bool:
        """Whether it may put guesses into the slots' tables."""

    def guess(
        self, rows: Sequence[HeadRow], appends: Sequence[BlockAppend], in_place: bool = False
    ) -> Callable[[], list[list[int]]] | None:
        """Launches what gives the guesses of each row, fewer and fewer, and returns what waits until they are on the
        host. `appends`: blocks that tables gain with the step that is being decided. `in_place`: they go into the
        slots' tables. None: the device has no memory for it."""


class HeadTokens:
    """Implements `Guesser`."""

    def __init__(self, runner: HeadRunner, num_speculative_tokens: int, clock: StepClock) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.times = StepTimes()  # of the head's steps; measured when the device is warm
        self._runner, self._clock = runner, clock

    def could_guess(self, request: Request, count: int) -> int:
        return 0 if request.prompt.media or request.num_tokens < LEAST_TOKENS else count

    def seconds(self, num_sequences: int) -> float:
        return self.times.seconds(num_sequences) if self.times.are_measured else 0.0

    def keep(self, running: Collection[Request]) -> None:
        """Nothing: nothing is remembered."""

    def guess(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]] | UnseenGuesses:
        """Unseen where the step that checks them can be launched without them, so that the device needn't wait for
        that."""
        ordered = sorted(wanted, key=wanted.__getitem__, reverse=True)
        appends = [
            BlockAppend(request.slot, index, request.block_ids[index])
            for request in ordered
            for index in range(request.num_table_blocks, len(request.block_ids))
        ]
        rows = [_row(request, wanted[request]) for request in ordered]
        nothing_in_flight = not any(request.num_in_flight for request in ordered)
        in_place = nothing_in_flight and self._runner.may_place and not any(map(_must_be_seen, ordered))
        began = self._clock.now()
        see = self._runner.guess(rows, appends, in_place)
        if see is None:
            return {}
        if in_place:
            return UnseenGuesses(wanted, lambda: dict(zip(ordered, see(), strict=True)))
        guessed = see()
        if self.times.are_measured and nothing_in_flight:
            self.times.observed(len(ordered), (self._clock.now() - began) / max(wanted.values()))
        return dict(zip(ordered, guessed, strict=True))


def _must_be_seen(request: Request) -> bool:
    """Whether what is drawn behind a guess depends on it by more than the logits, so that the host sends it along."""
    return request.prompt.sampling.is_guided or request.prompt.sampling.is_penalised


def _row(request: Request, count: int) -> HeadRow:
    position, [sample_index] = request.num_tokens - 1, request.sample_indices
    token = int(request.known_token_ids(position)[0])
    output_index = position + 1 - request.prompt.num_true_tokens
    return HeadRow(request.slot, position, token, count, sample_index, output_index)
