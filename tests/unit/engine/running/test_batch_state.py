"""Patching of slots, and what the sampler is given for the rows of a step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.device.upload import upload
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.sampler import sample
from tandem.engine.scheduling.step import BlockAppend, ForkSlot, NewSlot, SampleRow

VOCAB, EOS = 32, (30, 31)
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def make_state() -> BatchState:
    return BatchState(4, 40, 8, VOCAB, EOS, CPU)


def new_slot(slot, tokens, blocks=(1,), sampling=GREEDY, num_prompt_tokens=None) -> NewSlot:
    num_prompt_tokens = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return NewSlot(slot, np.array(tokens, np.int32), num_prompt_tokens, tuple(blocks), sampling, 0)


def run_sampler(state: BatchState, logits: torch.Tensor, samples: list[SampleRow]) -> list[int]:
    """One sampling as the runner does it."""
    batch, slots, positions = state.sampling_batch(samples)
    tokens, _ = sample(logits.clone(), batch)
    state.write_tokens(slots, positions, tokens)
    state.count_outputs(samples, slots, tokens)
    return tokens.tolist()


def test_upload_keeps_values_shapes_and_kinds():
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.empty(0), np.array([0.1, -math.inf]), np.array([True])]
    sent = upload(arrays, CPU)
    assert [t.dtype for t in sent] == [torch.int64, torch.float64, torch.float64, torch.int64]
    for array, tensor in zip(arrays, sent, strict=True):
        assert tensor.numpy().tolist() == array.tolist()


def test_patches_touch_only_their_entries():
    state = make_state()
    state.apply([new_slot(1, [5, 6, 7], (3, 9)), new_slot(2, [8], (4,))], [])
    state.apply([], [BlockAppend(1, 2, 11), BlockAppend(2, 1, 12)])
    assert state.block_table_SB[1].tolist() == [3, 9, 11, 0, 0]
    assert state.block_table_SB[2].tolist() == [4, 12, 0, 0, 0]
    assert state.token_ids_SC[1, :4].tolist() == [5, 6, 7, 0]
    assert state.token_ids_SC[2, :2].tolist() == [8, 0]
    assert state.token_ids_SC[0].sum() == state.token_ids_SC[3].sum() == 0


def test_settings_that_cannot_be_taken_are_named_and_cost_no_other_slot():
    state = make_state()
    odd = SamplingParams(temperature=0.5, top_k=1 << 70, logit_bias=((3, 1.0),))
    failed = state.apply([new_slot(1, [5, 6, 7], (3, 9), odd), new_slot(2, [8], (4,))], [])
    assert list(failed) == [1]
    assert "sampling parameters" in failed[1]
    assert state.block_table_SB[1].tolist() == [3, 9, 0, 0, 0]
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(2, 1)
    assert run_sampler(state, logits, [SampleRow(0, 1, 3, 0, 0), SampleRow(1, 2, 1, 0, 0)]) == [VOCAB - 1] * 2
    assert state.are_plain([SampleRow(0, 1, 3, 0, 0)])


def test_fork_copies_tokens_settings_and_counts():
    state = make_state()
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias=((4, 1.0),), min_tokens=1)
    state.apply([new_slot(0, [1, 2, 3, 3], (5, 6), params, num_prompt_tokens=2)], [])
    state.fork([ForkSlot(3, 0, 4, (5, 7), 1)])
    assert state.token_ids_SC[3, :5].tolist() == [1, 2, 3, 3, 0]
    assert state.block_table_SB[3, :2].tolist() == [5, 7]
    logits = torch.zeros(2, VOCAB)
    logits[:, 3] = 4.5  # two earlier outputs of token 3 cost 4.0: below token 4's bias
    samples = [SampleRow(0, 0, 4, 0, 0), SampleRow(0, 3, 4, 1, 0)]
    assert run_sampler(state, logits, samples) == [4, 4]
    logits[:, 4] = logits[:, 5] = 3.2  # one output of 4 (bias 1, penalty 2) leaves it 2.2, below 5
    run_sampler(state, logits[:1], [SampleRow(0, 0, 5, 0, 1)])
    assert state._output_counts_SV[0, [3, 4, 5]].tolist() == [2, 1, 1]
    assert state._output_counts_SV[3, [3, 4, 5]].tolist() == [2, 1, 0]


@pytest.mark.parametrize(("output_index", "expected"), [(0, 2), (1, 2), (2, 31)])
def test_min_tokens_ban_eos_and_stop_ids(output_index, expected):
    state = make_state()
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    state.apply([new_slot(0, [1], sampling=params)], [])
    logits = torch.zeros(1, VOCAB)
    logits[0, [31, 30, 7, 2]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    assert run_sampler(state, logits, [SampleRow(0, 0, 1, 0, output_index)]) == [expected]


def test_ignored_eos_is_an_ordinary_token():
    state = make_state()
    state.apply([new_slot(0, [1], sampling=SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True))], [])
    logits = torch.zeros(1, VOCAB)
    logits[0, 31] = 1.0
    assert run_sampler(state, logits, [SampleRow(0, 0, 1, 0, 0)]) == [31]


class TestPenalties:
    def test_prompt_counts_for_repetition_only(self):
        state = make_state()
        logits = torch.zeros(1, VOCAB)
        logits[0, [5, 6]] = torch.tensor([3.0, 2.0])
        row = [SampleRow(0, 0, 2, 0, 0)]
        state.apply([new_slot(0, [5, 1], sampling=SamplingParams(temperature=0.0, presence_penalty=2.0))], [])
        assert run_sampler(state, logits, row) == [5]
        state.apply([new_slot(0, [5, 1], sampling=SamplingParams(temperature=0.0, repetition_penalty=2.0))], [])
        assert run_sampler(state, logits, row) == [6]

    def test_tail_of_an_earlier_attempt_counts_as_output(self):
        state = make_state()
        params = SamplingParams(temperature=0.0, presence_penalty=2.0)
        logits = torch.zeros(1, VOCAB)
        logits[0, [5, 6]] = torch.tensor([3.0, 2.0])
        state.apply([new_slot(0, [1, 5], sampling=params, num_prompt_tokens=1)], [])
        assert run_sampler(state, logits, [SampleRow(0, 0, 2, 0, 1)]) == [6]

    def test_sampled_tokens_count_before_the_host_knows_them(self):
        state = make_state()
        params = SamplingParams(temperature=0.0, frequency_penalty=0.6)
        state.apply([new_slot(0, [1], sampling=params), new_slot(1, [1])], [])
        logits = torch.zeros(2, VOCAB)
        logits[:, [5, 6]] = torch.tensor([2.0, 1.0])
        steps = [
            run_sampler(state, logits, [SampleRow(0, 0, 1 + i, 0, i), SampleRow(1, 1, 1 + i, 0, i)]) for i in range(5)
        ]
        assert steps == [[5, 5], [5, 5], [6, 5], [5, 5], [6, 5]]
        assert state.token_ids_SC[0, :6].tolist() == [1, 5, 5, 6, 5, 6]

    def test_a_new_sequence_in_the_slot_starts_afresh(self):
        state = make_state()
        params = SamplingParams(temperature=0.0, presence_penalty=5.0)
        logits = torch.zeros(1, VOCAB)
        logits[0, 5] = 3.0
        for _ in range(2):
            state.apply([new_slot(0, [1], sampling=params)], [])
            assert run_sampler(state, logits, [SampleRow(0, 0, 1, 0, 0)]) == [5]
            assert run_sampler(state, logits, [SampleRow(0, 0, 2, 0, 1)]) == [0]

    def test_tables_are_made_only_when_asked_for(self):
        state = make_state()
        state.apply([new_slot(0, [1])], [])
        run_sampler(state, torch.zeros(1, VOCAB), [SampleRow(0, 0, 1, 0, 0)])
        assert state._output_counts_SV is None


def test_a_row_draws_the_same_token_alone_and_among_others_in_any_slot():
    torch.manual_seed(5)
    logits = torch.randn(4, VOCAB)
    params = [
        SamplingParams(temperature=0.9, seed=(1 << 64) - 3, top_k=9),
        SamplingParams(temperature=0.0, presence_penalty=0.5),
        SamplingParams(temperature=1.3, seed=8, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, seed=8, min_p=0.02, logit_bias=((3, 1.5),)),
    ]

    def tokens_of(rows: list[int], slots: list[int]) -> list[int]:
        state = make_state()
        state.apply([new_slot(s, [1, 2, r], sampling=params[r]) for r, s in zip(rows, slots, strict=True)], [])
        samples = [SampleRow(i, s, 3, r, 40 + r) for i, (r, s) in enumerate(zip(rows, slots, strict=True))]
        return run_sampler(state, logits[rows], samples)

    together = tokens_of([0, 1, 2, 3], [0, 1, 2, 3])
    assert [tokens_of([row], [3 - row])[0] for row in range(4)] == together
    assert tokens_of([3, 1, 0, 2], [2, 0, 3, 1]) == [together[row] for row in (3, 1, 0, 2)]


def test_same_seed_other_sample_index_differs():
    state = make_state()
    state.apply([new_slot(0, [1], sampling=SamplingParams(seed=4))], [])
    flat = torch.zeros(16, VOCAB)
    samples = [SampleRow(0, 0, 1, sample_index, 0) for sample_index in range(16)]
    assert len(set(run_sampler(state, flat, samples))) > 8
