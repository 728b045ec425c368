"""What the scheduler tells the runner for one step, and what the runner answers. Plain data, no torch.

Slots: the runner keeps batch state on the device in `max_num_seqs` slots (token ids, block table, sampling
parameters, penalty counts). The scheduler owns the slot numbers; a step patches only what changed. The input of
a decode row is gathered from the slot's token table at the row's start position, so a token sampled by the step
before never has to visit the host.

The plan is made of msgspec structs: a step has one or two for each sequence, they are made ten times as fast as frozen
dataclasses, and they go to other ranks as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import AdapterRef, Candidates, TokenLogprobs


class NewSlot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence enters (or re-enters after preemption) the batch; the slot's old content is void.

    `token_ids` are all tokens known to the host, prompt and output. Tokens from index `num_prompt_tokens` on are
    output for penalties and min_tokens, `sampling` applies to the sequence's `sample_index`. Tokens below 0 belong to
    the spans of `media`.
    """

    slot: int
    token_ids: np.ndarray  # int32 [num_tokens]
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    sample_index: int
    media: tuple[MediaItem, ...] = ()
    adapter: int = 0  # the slot of its adapter; 0: none
    window_ids: tuple[tuple[int, ...], ...] = ()  # its lists of window blocks, the null block where it needs none


class ForkSlot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A fork: `slot` becomes a copy of `parent_slot` (token table and block table) before its sampled token is
    written."""

    slot: int
    parent_slot: int
    num_tokens: int
    block_ids: tuple[int, ...]
    sample_index: int
    window_ids: tuple[tuple[int, ...], ...] = ()


class BlockAppend(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Block table patch: entry `index` of `slot` is `block_id` from this step on; the null block, where the sequence
    gave back what it had there. `table` 0 is that of its blocks, the others are those of its window blocks."""

    slot: int
    index: int
    block_id: int
    table: int = 0


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy the first `num_tokens` slots of a block, all layers, on the compute stream before the step's forward."""

    source: int
    destination: int
    num_tokens: int


UNSEEN = (1 << 31) - 1  # a draft that the device has put into its slot's table, and the host hasn't seen; no token


class SampleRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token to sample. `row` indexes `rows`; `slot` gets the token at table position `position`.

    `draft`: a guess, which is put into the slot's table before the step, at the position of the row's only token, or is
    there (UNSEEN). The sample before is the one that the guess is for. Below 0: the row's token is known to be the
    sequence's own.
    """

    row: int
    slot: int
    position: int
    sample_index: int
    output_index: int
    draft: int = -1


class ScheduledRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of a step: `num_tokens` tokens of `slot` from position `start` on, to be computed in this step."""

    slot: int
    start: int
    num_tokens: int
    prompt_logprobs: bool = False


def rows_follow(rows: Sequence[ScheduledRow]) -> bool:
    """Whether several of these rows are one sequence's, so that one reads what another stores. Slots below 0 are
    nobody's."""
    slots = [row.slot for row in rows if row.slot >= 0]
    return len(set(slots)) < len(slots)


class WrittenSlots(NamedTuple):
    """Slots start … end-1 of a block, which a step has written or may have."""

    block_id: int
    start: int
    end: int


class StepMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Tells the runner that KV moves beside a step. What moves is said in the connector's subclass (StepMoves of
    kv_connector/protocol/jobs.py). `by_layer` False: nothing happens between the layers, so that they need not be
    launched one by one."""

    by_layer: bool = True


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An adapter that a slot for adapters holds from this step on, in place of what it held."""

    slot: int
    ref: AdapterRef


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step. Order of effect: adapter_loads, new_slots, block_appends, drafts, copies, forward over rows, forks,
    sampling."""

    step_id: int
    rows: tuple[ScheduledRow, ...]
    samples: tuple[SampleRow, ...]
    new_slots: tuple[NewSlot, ...] = ()
    forks: tuple[ForkSlot, ...] = ()
    block_appends: tuple[BlockAppend, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    adapter_loads: tuple[AdapterLoad, ...] = ()
    connector_meta: StepMeta | None = None  # made by KVConnectorScheduler.build_connector_meta and LowerTiers.step_meta

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def has_drafts(self) -> bool:
        """Whether it depends on the step itself which of its tokens are kept."""
        return any(sample.draft >= 0 for sample in self.samples)

    @property
    def drafted_rows(self) -> set[int]:
        """Indices of rows whose token is a guess."""
        return {sample.row for sample in self.samples if sample.draft >= 0}

    @property
    def is_decode(self) -> bool:
        """Whether each row brings one token and samples one, and nothing else happens to the KV."""
        return (
            self.connector_meta is None
            and not self.forks
            and len(self.samples) == len(self.rows)
            and all(row.num_tokens == 1 and not row.prompt_logprobs for row in self.rows)
            and all(sample.row == index for index, sample in enumerate(self.samples))
        )

    @property
    def is_layered(self) -> bool:
        """Whether KV moves beside its layers, so that they are launched one by one."""
        return self.connector_meta is not None and self.connector_meta.by_layer

    @property
    def is_only_rows(self) -> bool:
        """Whether nothing happens to the KV but that its rows are computed, and no row is sampled twice."""
        return (
            not self.is_layered
            and not self.forks
            and not any(row.prompt_logprobs for row in self.rows)
            and len({sample.row for sample in self.samples}) == len(self.samples)
        )

    def token_rows(self) -> list[ScheduledRow]:
        """Each token as a row of its own: first the sampled ones in the samples' order, then all others."""
        sampled = {sample.row for sample in self.samples}
        last = [self.rows[sample.row] for sample in self.samples]
        rows = [ScheduledRow(row.slot, row.start + row.num_tokens - 1, 1) for row in last]
        for index, row in enumerate(self.rows):
            end = row.start + row.num_tokens - (index in sampled)
            rows += [ScheduledRow(row.slot, position, 1) for position in range(row.start, end)]
        return rows


@dataclass(slots=True)
class RunnerOutput:
    """Host-side result of one step. `token_ids[i]` belongs to `SchedulerOutput.samples[i]`."""

    step_id: int
    token_ids: np.ndarray  # int32 [num_samples]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # empty when no sample asked
    # (row index) -> entries predicting positions start+1 .. start+num_tokens (the last only if it is in the prompt)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failure: str | None = None  # why nothing was computed: the step's requests end with it
    failed_slots: dict[int, str] = field(default_factory=dict)  # whose sequence alone ends, and why
    spoiled_slots: Mapping[int, str] = field(default_factory=dict)  # whose rows lacked KV, and why
    ended: Collection[int] = ()  # samples whose token is the last that their grammar has room for
    misled: Mapping[int, str] = field(default_factory=dict)  # samples whose grammar can't be followed, and why
    candidates: dict[int, Candidates] = field(default_factory=dict)  # of samples that are beams
    num_overflows: int = 0  # values that fp8 could not hold, on this device up to this step's end; 0: not counted
