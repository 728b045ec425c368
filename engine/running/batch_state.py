"""Batch state in `max_num_seqs` slots, patched by each step and never rebuilt.

On the device: token ids, block tables and (once some slot asks for penalties) token counts; what the sampler needs
of a token's past is there before the host has seen that token. On the host: sampling settings, as arrays over slots,
and sparse logit biases and banned ids, from which the rows of a step are gathered and sent in one copy.

Shape legend: S slots, C table columns (tokens), B block table columns, V vocabulary, N sampled rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.device.upload import upload
from tandem.engine.process.process_log import RateLimited
from tandem.engine.running.sampler import LogitEdits, Penalties, RandomSettings, SamplingBatch
from tandem.engine.scheduling.beams.search import num_candidates
from tandem.engine.scheduling.step import UNSEEN, BlockAppend, ForkSlot, NewSlot, SampleRow, ScheduledRow
from tandem.engine.scheduling.stop import end_ids

limited = RateLimited(logging.getLogger(__name__))

PROMPT_LOGPROB_ROWS = 256  # positions whose whole-vocabulary log-probabilities are held at once; a guess
MIN_TEMPERATURE = 1e-5  # keeps logits / temperature finite in float32; below it sampling is greedy but for exact ties

SETTINGS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("min_tokens", np.int64),
        ("num_prompt_tokens", np.int64),
        ("num_logprobs", np.int64),  # -1: off; of a beam as many as it needs candidates
        ("num_prompt_logprobs", np.int64),  # -1: off
        ("penalised", np.bool_),
        ("edited", np.bool_),  # has logit_bias or min_tokens
        ("guided", np.bool_),  # has masks
        ("beam", np.bool_),  # its candidates are wanted, not a token
        ("adapter", np.int32),  # slot of its adapter; 0: none
        ("plain", np.bool_),  # greedy and asks for nothing that the sampler would have to do
    ]
)


class BatchState:
    """The slots of one runner, on host and device. Every method that changes the device only enqueues work on the
    current stream."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        num_windows: int = 0,
    ) -> None:
        """`num_windows`: how many lists of window blocks a sequence has beside its blocks."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.device = device
        self.max_blocks = -(-max_model_len // block_size)
        # Two columns more than the model's length: a token past the end may be in flight when a sequence stops.
        self.token_ids_SC = torch.zeros((max_num_seqs, max_model_len + 2), dtype=torch.int32, device=device)
        tables = torch.zeros((1 + num_windows, max_num_seqs, self.max_blocks), dtype=torch.int32, device=device)
        self.tables_SB = list(tables)  # of blocks, then of window blocks
        self.host_block_table_SB = np.zeros((max_num_seqs, self.max_blocks), np.int32)  # as on the device
        self.num_table_changes = 0  # appended blocks don't count
        self.settings = np.zeros(max_num_seqs, SETTINGS)
        self._eos_token_ids = tuple(eos_token_ids)
        self._bias: list[tuple[np.ndarray, np.ndarray]] = [_EMPTY_BIAS] * max_num_seqs
        self._banned_early: list[np.ndarray] = [_EMPTY_IDS] * max_num_seqs
        self._banned_first: list[np.ndarray] = [_EMPTY_IDS] * max_num_seqs
        self._output_counts_SV: torch.Tensor | None = None
        self._in_prompt_SV: torch.Tensor | None = None

    # --- patches --------------------------------------------------------------------------------------------

    def apply(
        self,
        new_slots: Sequence[NewSlot],
        block_appends: Sequence[BlockAppend],
        samples: Sequence[SampleRow] = (),
    ) -> dict[int, str]:
        """Takes in sequences that enter, blocks that tables gained and drafts of `samples`, before the step's forward
        pass. Returns slot -> why its settings can't be used; such a slot is computed as a greedy one, and its tokens
        must be dropped."""
        drafted = [sample for sample in samples if 0 <= sample.draft < UNSEEN]
        if not (new_slots or block_appends or drafted):
            return {}
        failed = {}
        for new in new_slots:
            try:
                self._set_settings(new)
            except Exception as error:
                limited.exception("the sampling parameters %r can't be used", new.sampling)
                failed[new.slot] = f"its sampling parameters can't be used: {error!r}"
                self._set_settings(msgspec.structs.replace(new, sampling=_NEUTRAL))
        patches = self._table_patches(new_slots)
        for table, (_, at, values) in enumerate(patches):
            appends = [each for each in block_appends if each.table == table]
            at.append(np.array([a.slot * self.max_blocks + a.index for a in appends], np.int64))
            values.append(np.array([a.block_id for a in appends], np.int64))
        assert all(0 <= a.index < self.max_blocks for a in block_appends), "a block beyond max_model_len"
        for append in block_appends:
            if append.table == 0:
                self.host_block_table_SB[append.slot, append.index] = append.block_id
        columns = self.token_ids_SC.shape[1]
        token_at = [new.slot * columns + np.arange(len(new.token_ids)) for new in new_slots]
        token_values = [new.token_ids for new in new_slots]
        token_at.append(np.array([each.slot * columns + each.position - 1 for each in drafted], np.int64))
        token_values.append(np.array([each.draft for each in drafted], np.int64))
        self._scatter([*patches, (self.token_ids_SC, token_at, token_values)])
        penalised = [new for new in new_slots if self.settings["penalised"][new.slot]]
        if penalised:
            self._count_tokens(penalised)
        return failed

    def fork(self, forks: Sequence[ForkSlot]) -> None:
        """Makes slots copies of their parents; after the forward pass, before sampling."""
        if not forks:
            return
        for fork in forks:
            self.settings[fork.slot] = self.settings[fork.parent_slot]
            self._bias[fork.slot] = self._bias[fork.parent_slot]
            self._banned_early[fork.slot] = self._banned_early[fork.parent_slot]
            self._banned_first[fork.slot] = self._banned_first[fork.parent_slot]
            self.token_ids_SC[fork.slot, : fork.num_tokens] = self.token_ids_SC[fork.parent_slot, : fork.num_tokens]
            if self.settings["penalised"][fork.slot]:
                counts_SV, in_prompt_SV = self._penalty_tables()
                counts_SV[fork.slot] = counts_SV[fork.parent_slot]
                in_prompt_SV[fork.slot] = in_prompt_SV[fork.parent_slot]
        self._scatter(self._table_patches(forks))

    def write_tokens(self, slot_N: torch.Tensor, position_N: torch.Tensor, token_N: torch.Tensor) -> None:
        """Writes sampled tokens into the table, where the next step reads its input."""
        self.token_ids_SC[slot_N, position_N] = token_N.to(torch.int32)

    def count_outputs(self, samples: Sequence[SampleRow], slot_N: torch.Tensor, token_N: torch.Tensor) -> None:
        """Counts the sampled tokens of rows with penalties."""
        if not self.settings["penalised"][[sample.slot for sample in samples]].any():
            return
        counts_SV, _ = self._penalty_tables()  # slots without penalties are counted too: void at their next NewSlot
        kept_N = self._kept(samples, token_N).to(torch.int32)
        counts_SV.index_put_((slot_N, token_N), kept_N, accumulate=True)

    def _kept(self, samples: Sequence[SampleRow], token_N: torch.Tensor) -> torch.Tensor:
        """bool [N]: which samples stand behind their sequence's own tokens, as `verdicts.runs_of` says, before the
        host has seen `token_N`."""
        drafts = np.array([sample.draft for sample in samples], np.int64)
        if (drafts < 0).all():
            return torch.ones_like(token_N, dtype=torch.bool)
        [draft_N] = upload([drafts], self.device)
        is_own_N = draft_N < 0
        is_right_N = token_N.roll(1) == draft_N
        kept_N = is_own_N
        for _ in range(_longest_run(drafts >= 0)):
            kept_N = is_own_N | (kept_N.roll(1) & is_right_N)
        return kept_N

    @property
    def block_table_SB(self) -> torch.Tensor:
        return self.tables_SB[0]

    def _table_patches(
        self, slots: Sequence[NewSlot] | Sequence[ForkSlot]
    ) -> list[tuple[torch.Tensor, list[np.ndarray], list[np.ndarray]]]:
        """What `_scatter` takes, for each table."""
        assert all(len(entry.block_ids) <= self.max_blocks for entry in slots), "a block beyond max_model_len"
        self.num_table_changes += len(slots)
        for entry in slots:
            self.host_block_table_SB[entry.slot, : len(entry.block_ids)] = entry.block_ids
        at = [entry.slot * self.max_blocks + np.arange(len(entry.block_ids)) for entry in slots]
        lists = [(entry.block_ids, *entry.window_ids) for entry in slots]
        return [
            (table_SB, list(at), [np.array(each[index], np.int64) for each in lists])
            for index, table_SB in enumerate(self.tables_SB)
        ]

    def _scatter(self, patches: list[tuple[torch.Tensor, list[np.ndarray], list[np.ndarray]]]) -> None:
        """Sets table.flat[indices] = values for each (table, flat indices, values), all sent in one copy."""
        needed = [patch for patch in patches if any(map(len, patch[1]))]
        if not needed:
            return
        sent = upload([np.concatenate(parts) for _, *both in needed for parts in both], self.device)
        for (table, _, _), at, values in zip(needed, sent[::2], sent[1::2], strict=True):
            table.view(-1).index_copy_(0, at, values.to(table.dtype))

    def _set_settings(self, new: NewSlot) -> None:
        params, slot = new.sampling, new.slot
        bias = _EMPTY_BIAS
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            bias = np.array(ids, np.int64), np.array(values, np.float64)
        eos = () if params.ignore_eos else self._eos_token_ids
        banned = np.array(sorted({*params.stop_token_ids, *eos}), np.int64) if params.min_tokens else _EMPTY_IDS
        self._bias[slot], self._banned_early[slot] = bias, banned
        self._banned_first[slot] = first = np.array(params.banned_first_ids, np.int64)
        num_logprobs = -1 if params.num_logprobs is None else params.num_logprobs
        if params.beam_width:
            num_logprobs = max(num_logprobs, num_candidates(params, len(end_ids(params, self._eos_token_ids))))
        is_edited = bool(bias[0].size or banned.size or first.size)
        self.settings[slot] = _settings_row(params, new.num_prompt_tokens, is_edited, num_logprobs, new.adapter)

    def _count_tokens(self, new_slots: Sequence[NewSlot]) -> None:
        counts_SV, in_prompt_SV = self._penalty_tables()
        for new in new_slots:
            split = min(new.num_prompt_tokens, len(new.token_ids))
            prompt, output = upload([_ids_in(new.token_ids[:split]), new.token_ids[split:]], self.device)
            in_prompt_SV[new.slot].zero_().index_fill_(0, prompt, True)
            counts_SV[new.slot].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _penalty_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(output counts int32 [S, V], prompt presence bool [S, V]), made when first needed."""
        if self._output_counts_SV is None or self._in_prompt_SV is None:
            shape = (len(self.settings), self.vocab_size)
            self._output_counts_SV = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._in_prompt_SV = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return self._output_counts_SV, self._in_prompt_SV

    # --- what the sampler gets ------------------------------------------------------------------------------

    def are_plain(self, samples: Sequence[SampleRow]) -> bool:
        """Whether every sample is greedy and asks for nothing that the sampler would have to do."""
        return self.all_plain(list({sample.slot for sample in samples}))

    def all_plain(self, slots: Sequence[int]) -> bool:
        """Whether what is drawn in these slots is greedy and asks for nothing that the sampler would have to do."""
        return bool(self.settings["plain"][slots].all())

    def prompt_logprob_runs(self, row: ScheduledRow) -> list[tuple[int, int]]:
        """(first, count) of runs of the row's tokens, at most PROMPT_LOGPROB_ROWS each, whose hidden states are needed
        for the log-probabilities of the prompt's next tokens; empty when nobody asks for those."""
        if not row.prompt_logprobs or self.settings["num_prompt_logprobs"][row.slot] < 0:
            return []
        num_entries = min(row.num_tokens, int(self.settings["num_prompt_tokens"][row.slot]) - 1 - row.start)
        firsts = range(0, num_entries, PROMPT_LOGPROB_ROWS)
        return [(first, min(PROMPT_LOGPROB_ROWS, num_entries - first)) for first in firsts]

    def sampling_batch(self, samples: Sequence[SampleRow]) -> tuple[SamplingBatch, torch.Tensor, torch.Tensor]:
        """(settings of the rows, slot_N, position_N) on the device, both int64 [N], sent in one copy."""
        slots, positions = np.array([[s.slot for s in samples], [s.position for s in samples]], np.int64)
        indices = [s.sample_index for s in samples], [s.output_index for s in samples]
        sample_indices, output_indices = np.array(indices, np.int64)
        assert positions.max() < self.token_ids_SC.shape[1], "a token beyond max_model_len"
        rows = self.settings[slots]
        if rows["plain"].all():
            slot_N, position_N = upload([slots, positions], self.device)
            return SamplingBatch(), slot_N, position_N
        random = rows[rows["temperature"] > 0]
        penalised = np.flatnonzero(rows["penalised"])
        with_logprobs = np.flatnonzero(rows["num_logprobs"] >= 0)
        edit_rows, edit_tokens, edit_values = self._edits(slots, rows, output_indices)
        arrays = [slots, positions, with_logprobs, edit_rows, edit_tokens, edit_values, penalised]
        arrays += [rows[name][penalised] for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")]
        arrays += _drafts_before(samples, penalised)
        if random.size:
            arrays += [np.stack([rows[name] for name in ("temperature", "top_p", "min_p")]), rows["top_k"]]
            arrays += [rows["seed"].view(np.int64), sample_indices, output_indices]
        sent = upload(arrays, self.device)
        batch = SamplingBatch(
            edits=LogitEdits(sent[3], sent[4], sent[5].float()) if edit_rows.size else None,
            penalties=self._penalties(sent[0], *sent[6:12]) if penalised.size else None,
            random=_random_settings(random, sent[12:]) if random.size else None,
            logprob_row_L=sent[2] if with_logprobs.size else None,
            max_num_logprobs=max(int(rows["num_logprobs"].max()), 0),
            is_guided=bool(rows["guided"].any()),
            is_beam_L=self._beams_among(rows[with_logprobs]),
        )
        return batch, sent[0], sent[1]

    def _beams_among(self, rows: np.ndarray) -> torch.Tensor | None:
        """Which of these rows are beams whose candidates must be those that edits and masks leave, bool [L]; None: no
        beam is edited or masked."""
        if not (rows["beam"] & (rows["edited"] | rows["guided"])).any():
            return None
        [is_beam_L] = upload([rows["beam"].astype(np.int64)], self.device)
        return is_beam_L.bool()

    def _edits(
        self, slots: np.ndarray, rows: np.ndarray, output_indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sparse (row, token, value) of biases, and of ids banned while output_index < min_tokens."""
        row_parts, token_parts, value_parts = [_EMPTY_IDS], [_EMPTY_IDS], [_EMPTY_BIAS[1]]
        for row in np.flatnonzero(rows["edited"]):
            ids, values = self._bias[slots[row]]
            banned = self._banned_early[slots[row]] if output_indices[row] < rows["min_tokens"][row] else _EMPTY_IDS
            if output_indices[row] == 0:
                banned = np.concatenate((banned, self._banned_first[slots[row]]))
            ids = np.concatenate((ids, banned))
            values = np.concatenate((values, np.full(len(banned), -np.inf)))
            row_parts.append(np.full(len(ids), row, np.int64))
            token_parts.append(ids)
            value_parts.append(values)
        return np.concatenate(row_parts), np.concatenate(token_parts), np.concatenate(value_parts)

    def _penalties(
        self,
        slot_N: torch.Tensor,
        row_P: torch.Tensor,
        repetition_P: torch.Tensor,
        presence_P: torch.Tensor,
        frequency_P: torch.Tensor,
        place_E: torch.Tensor,
        draft_E: torch.Tensor,
    ) -> Penalties:
        """`place_E`, `draft_E`: for each of these rows (by its place among them) the drafts that it stands behind."""
        counts_SV, in_prompt_SV = self._penalty_tables()
        slot_P = slot_N[row_P]
        settings = repetition_P.float(), presence_P.float(), frequency_P.float()
        counts_PV = counts_SV[slot_P]
        if len(place_E):
            counts_PV.index_put_((place_E, draft_E), torch.ones_like(place_E, dtype=torch.int32), accumulate=True)
        return Penalties(row_P, *settings, counts_PV, in_prompt_SV[slot_P])


_NEUTRAL = SamplingParams(temperature=0.0)
_EMPTY_IDS = np.empty(0, np.int64)
_EMPTY_BIAS = (_EMPTY_IDS, np.empty(0, np.float64))


def _longest_run(flags: np.ndarray) -> int:
    """The most flags in a row that are set."""
    ends = np.flatnonzero(~np.concatenate(([False], flags, [False])))
    return int(np.diff(ends).max()) - 1


def _drafts_before(samples: Sequence[SampleRow], penalised: np.ndarray) -> list[np.ndarray]:
    """(place, draft): each draft that a penalised row stands behind, its own included; `place` counts those rows."""
    places, drafts = [], []
    for place, index in enumerate(penalised.tolist()):
        while samples[index].draft >= 0:
            places.append(place)
            drafts.append(samples[index].draft)
            index -= 1
    return [np.array(places, np.int64), np.array(drafts, np.int64)]


def _ids_in(token_ids: np.ndarray) -> np.ndarray:
    """The distinct token ids; spans of media, whose ids are below 0, hold none."""
    found = np.unique(token_ids)
    return found[found >= 0]


def _settings_row(
    params: SamplingParams, num_prompt_tokens: int, edited: bool, num_logprobs: int, adapter: int
) -> tuple:
    """One record of SETTINGS."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    penalised = params.is_penalised
    return (
        0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE),
        params.top_p,
        params.min_p,
        *penalties,
        params.top_k,
        params.seed,
        params.min_tokens,
        num_prompt_tokens,
        num_logprobs,
        -1 if params.num_prompt_logprobs is None else params.num_prompt_logprobs,
        penalised,
        edited,
        params.is_guided,
        params.beam_width > 0,
        adapter,
        params.greedy and not penalised and not edited and num_logprobs < 0 and not params.is_guided,
    )


def _random_settings(random: np.ndarray, sent: list[torch.Tensor]) -> RandomSettings:
    """What `sample_tokens` takes. `random`: the settings of the rows that are not greedy; `sent`: those of all rows."""
    fractions_3N, top_k, seed, sample_index, output_index = sent
    temperature, top_p, min_p = fractions_3N.float()
    return RandomSettings(
        temperature_N=temperature,
        top_k_N=top_k,
        top_p_N=top_p,
        min_p_N=min_p,
        seed_N=seed,
        sample_index_N=sample_index,
        output_index_N=output_index,
        filtered=bool(((random["top_k"] > 0) | (random["top_p"] < 1) | (random["min_p"] > 0)).any()),
    )
