"""Guesses by a draft model, which runs on the same device before the step that checks them (docs/speculation.md).

Its keys and values lie beside the served model's: each block of the pool has a twin in a pool of the draft's own, which
goes by the same id. So nothing is allocated for a draft, and nothing freed. A twin holds what the draft computed there,
perhaps of another sequence: what a sequence lacks is computed before it is guessed for, its prompt as well, wherever
the served model's keys came from. Whatever a twin holds, the worst is a guess that is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.ports import Runner, StepHandle
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.step import BlockAppend, NewSlot, SampleRow, ScheduledRow, SchedulerOutput
from tandem.engine.scheduling.times.step_times import StepTimes

# Known tokens with which a sequence may begin to be guessed for: its newest, and its last draft if all were right.
FIRST_TOKENS = 2
# Most tokens of prompts, and of what came while nothing was guessed, that are computed before one step: every stream
# waits for them. A guess.
CATCH_UP_TOKENS = 512


@dataclass(slots=True)
class DraftedSequence:
    """What the draft's runner has of a sequence."""

    entered: tuple[int, int]  # slot and number of preemptions; with others it is a sequence that the runner lacks
    num_computed: int = 0  # leading tokens whose keys the twins of its blocks hold
    num_noted: int = 0  # full blocks whose twins are known by their hash
    num_blocks: int = 0  # in its table; 0: it is not in its slot yet
    num_known: int = 0  # tokens when it was guessed for last
    guessed: Sequence[int] = ()  # behind those

    def take_verdict(self, request: Request) -> None:
        """Counts the guesses that became the sequence's tokens. The last one was drawn, not computed."""
        tokens = request.known_token_ids(self.num_known).tolist() if self.guessed else []
        for guess, token in zip(self.guessed[:-1], tokens, strict=False):
            if guess != token:
                break
            self.num_computed += 1
        self.guessed = ()


class DraftedTokens:
    """Implements `Guesser`."""

    def __init__(
        self, runner: Runner, num_speculative_tokens: int, block_size: int, max_model_len: int, clock: StepClock
    ) -> None:
        """`runner`: the draft's, whose pool has as many blocks as the served model's; `max_model_len`: the draft's."""
        self.num_speculative_tokens = num_speculative_tokens
        self.times = StepTimes()  # of the draft's steps; measured when the device is warm
        self._runner, self._block_size, self._max_model_len, self._clock = runner, block_size, max_model_len, clock
        self._sequences: dict[Request, DraftedSequence] = {}
        self._held: dict[int, bytes] = {}  # block id -> the hash of what its twin holds
        self._new_slots: list[NewSlot] = []  # for the next step
        self._unread: list[StepHandle] = []  # steps of which nothing is drawn
        self._next_step = 0

    def could_guess(self, request: Request, count: int) -> int:
        if request.prompt.media:
            return 0
        return max(0, min(count, self._max_model_len - request.num_tokens))

    def seconds(self, num_sequences: int) -> float:
        return self.times.seconds(num_sequences) if self.times.are_measured else 0.0

    def keep(self, running: Collection[Request]) -> None:
        self._sequences = {each: self._sequences[each] for each in running if each in self._sequences}

    def guess(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        unread, self._unread = self._unread, []
        if any(handle.result().failure is not None for handle in unread):
            self._lose_all()
        for request in wanted:
            self._update(request)
        has_caught_up = self._catch_up(wanted)
        ready = {request: count for request, count in wanted.items() if self._is_ready(request)}
        if not ready:
            return {}
        is_alone = not has_caught_up and not any(request.num_in_flight for request in ready)
        began = self._clock.now()
        guessed = self._draw(ready)
        if is_alone and guessed and self.times.are_measured:
            self.times.observed(len(ready), (self._clock.now() - began) / max(ready.values()))
        return guessed

    # --- what it has of a sequence --------------------------------------------------------------------------

    def _update(self, request: Request) -> None:
        entered = request.slot, request.num_preemptions
        sequence = self._sequences.get(request)
        if sequence is None or sequence.entered != entered:
            self._sequences[request] = sequence = DraftedSequence(entered)
        if not sequence.num_blocks:
            sequence.num_computed = self._num_held(request)
        sequence.take_verdict(request)
        self._note_held(request, sequence)

    def _note_held(self, request: Request, sequence: DraftedSequence) -> None:
        """Notes which full blocks' twins are complete, for whoever shares them."""
        full = min(sequence.num_computed // self._block_size, len(request.block_hashes))
        for index in range(sequence.num_noted, full):
            self._held[request.block_ids[index]] = request.block_hashes[index]
        sequence.num_noted = max(sequence.num_noted, full)

    def _num_held(self, request: Request) -> int:
        """Leading tokens but the newest whose keys the twins of its blocks hold, since others computed them."""
        num_full = 0
        for block_id, block_hash in zip(request.block_ids, request.block_hashes, strict=False):
            if self._held.get(block_id) != block_hash:
                break
            num_full += 1
        return min(num_full * self._block_size, request.num_tokens - 1)

    def _is_ready(self, request: Request) -> bool:
        """Whether the runner lacks nothing of it but a few tokens, all behind the prompt but for its last."""
        sequence = self._sequences[request]
        num_left = request.num_tokens - sequence.num_computed
        is_behind_prompt = sequence.num_computed >= request.num_prompt_tokens - 1
        return bool(sequence.num_blocks) and num_left <= FIRST_TOKENS and is_behind_prompt

    def _writes(self, request: Request, start: int, end: int) -> None:
        """Notes that a step overwrites what twins hold at these positions."""
        for block_id in self._blocks_of(request, start, end):
            self._held.pop(block_id, None)

    def _blocks_of(self, request: Request, start: int, end: int) -> set[int]:
        return set(request.block_ids[start // self._block_size : -(-end // self._block_size)])

    # --- steps ----------------------------------------------------------------------------------------------

    def _catch_up(self, wanted: Collection[Request]) -> bool:
        """Computes, of those that aren't ready, what is missing before the newest token, as far as one step may."""
        rows, left = [], CATCH_UP_TOKENS
        written: set[int] = set()
        for request in wanted:
            sequence = self._sequences[request]
            start = sequence.num_computed
            end = min(request.num_tokens - 1, start + left)
            if self._is_ready(request) or (start < request.num_tokens - 1 and end <= start):
                continue
            blocks = self._blocks_of(request, start, end)
            if not written.isdisjoint(blocks):
                continue  # another sequence computes what they share
            self._enter(request, sequence)
            if end > start:
                written |= blocks
                self._writes(request, start, end)
                rows.append(ScheduledRow(request.slot, start, end - start))
                sequence.num_computed, left = end, left - (end - start)
                self._note_held(request, sequence)
        if rows:
            self._unread.append(self._launch(rows, [], []))
        return bool(rows)

    def _enter(self, request: Request, sequence: DraftedSequence) -> None:
        """Has the next step begin with all tokens of the sequence that are known by now."""
        block_ids = tuple(request.block_ids[: -(-self._max_model_len // self._block_size)])
        sequence.num_blocks = len(block_ids)
        self._new_slots.append(
            NewSlot(
                slot=request.slot,
                token_ids=request.known_token_ids(),
                num_prompt_tokens=request.prompt.num_true_tokens,
                block_ids=block_ids,
                sampling=_as_drafted(request.prompt.sampling),
                sample_index=request.sample_indices[0],
            )
        )

    def _draw(self, ready: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        """Launches step behind step, each of which draws one more token of the sequences that want one, and reads them
        all."""
        rows, samples, appends, own = self._first_rows(ready)
        handles, owners = [self._launch(rows, samples, appends)], [own]
        for place in range(1, max(ready.values())):
            own = {request: index for index, request in enumerate(r for r, count in ready.items() if count > place)}
            starts = [(request, request.num_tokens - 1 + place) for request in own]
            rows = [ScheduledRow(request.slot, start, 1) for request, start in starts]
            samples = [_sample(index, request, start) for index, (request, start) in enumerate(starts)]
            handles.append(self._launch(rows, samples, []))
            owners.append(own)
        guessed: dict[Request, list[int]] = {request: [] for request in ready}
        results = [handle.result() for handle in handles]
        if any(result.failure is not None for result in results):
            self._lose_all()
            return {}
        for result, own in zip(results, owners, strict=True):
            for request, index in own.items():
                guessed[request].append(int(result.token_ids[index]))
        for request, tokens in guessed.items():
            sequence = self._sequences[request]
            sequence.num_computed = sequence.num_known = request.num_tokens
            sequence.guessed = tokens
        return guessed

    def _first_rows(
        self, ready: Mapping[Request, int]
    ) -> tuple[list[ScheduledRow], list[SampleRow], list[BlockAppend], dict[Request, int]]:
        """Rows of known tokens, which go into the slots' tables with the step: whatever was guessed there before may
        have been wrong. Also says which sample is a sequence's last."""
        rows: list[ScheduledRow] = []
        samples: list[SampleRow] = []
        appends: list[BlockAppend] = []
        own: dict[Request, int] = {}
        most_blocks = -(-self._max_model_len // self._block_size)
        for request, count in ready.items():
            sequence = self._sequences[request]
            num_blocks = min(len(request.block_ids), most_blocks)
            fresh = range(sequence.num_blocks, num_blocks)
            appends += [BlockAppend(request.slot, index, request.block_ids[index]) for index in fresh]
            sequence.num_blocks = num_blocks
            start = sequence.num_computed
            self._writes(request, start, request.num_tokens + count - 1)
            for position, token in enumerate(request.known_token_ids(start).tolist(), start):
                samples.append(_sample(len(rows), request, position, token))
                rows.append(ScheduledRow(request.slot, position, 1))
            own[request] = len(samples) - 1
        return rows, samples, appends, own

    def _launch(
        self, rows: Sequence[ScheduledRow], samples: Sequence[SampleRow], appends: Sequence[BlockAppend]
    ) -> StepHandle:
        new_slots, self._new_slots = tuple(self._new_slots), []
        step = SchedulerOutput(self._next_step, tuple(rows), tuple(samples), new_slots, block_appends=tuple(appends))
        self._next_step += 1
        return self._runner.execute(step)

    def _lose_all(self) -> None:
        """Forgets what the runner has, since a step was not computed."""
        self._sequences.clear()
        self._held.clear()


def _sample(row: int, request: Request, start: int, token: int = -1) -> SampleRow:
    """What follows the token at `start`, drawn by the number of its place, as the served model draws it."""
    [sample_index], position = request.sample_indices, start + 1
    return SampleRow(row, request.slot, position, sample_index, position - request.prompt.num_true_tokens, token)


def _as_drafted(sampling: SamplingParams) -> SamplingParams:
    """How a draft draws: without what hangs on the output so far, which for a guess would cost too much."""
    return msgspec.structs.replace(
        sampling,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        num_logprobs=None,
        num_prompt_logprobs=None,
        grammar="",
        allowed_token_ids=(),
        bad_words=(),
    )
