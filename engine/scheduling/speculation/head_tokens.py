"""Guesses by a head of the served model's own, which reads that model's hidden states (docs/speculation.md).

The head's keys and values are a layer of the pool, and the model's runner has its slots: nothing is kept here of a
sequence. Whatever a head saw, the worst is a guess that is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.request import Request
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

    def guess(self, rows: Sequence[HeadRow], appends: Sequence[BlockAppend]) -> list[list[int]] | None:
        """The guesses of each row, fewer and fewer; blocks until they are on the host. `appends`: blocks that
        tables gain with the step that is being decided. None: the device has no memory for it."""


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

    def guess(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        ordered = sorted(wanted, key=wanted.__getitem__, reverse=True)
        appends = [
            BlockAppend(request.slot, index, request.block_ids[index])
            for request in ordered
            for index in range(request.num_table_blocks, len(request.block_ids))
        ]
        began = self._clock.now()
        guessed = self._runner.guess([_row(request, wanted[request]) for request in ordered], appends)
        if guessed is None:
            return {}
        if self.times.are_measured and not any(request.num_in_flight for request in ordered):
            self.times.observed(len(ordered), (self._clock.now() - began) / max(wanted.values()))
        return dict(zip(ordered, guessed, strict=True))


def _row(request: Request, count: int) -> HeadRow:
    position, [sample_index] = request.num_tokens - 1, request.sample_indices
    token = int(request.known_token_ids(position)[0])
    output_index = position + 1 - request.prompt.num_true_tokens
    return HeadRow(request.slot, position, token, count, sample_index, output_index)
