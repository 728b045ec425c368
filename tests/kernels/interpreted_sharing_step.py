"""An engine's decode step over shared prefixes, kernels interpreted: its logits are those of the step without sharing.

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.engine.contracts.config import ModelOptions, SchedulerOptions
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.models.loader import load_model
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import NewSlot, SampleRow, ScheduledRow, SchedulerOutput
from tandem.kernels.prefixes import prefix_groups
from tiny_models import random_prompt, tiny_model

BLOCK, LENGTH, SLOTS = 16, 66, 4  # each row and layer takes the interpreter most of a second
SHARED = 4  # blocks
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    """Slots 0 to 2 begin with the same 4 blocks, which slot 0 computes; slot 3 has blocks of its own."""
    folder = tiny_model("llama")
    config = load_model_config(folder)
    model = load_model(folder, config, ModelOptions(model=str(folder)), CPU, torch.float32, "triton")
    pool = torch.zeros(24, config.num_kv_heads, config.num_layers, 2, BLOCK, config.head_dim)
    options = SchedulerOptions(max_num_seqs=6, max_num_batched_tokens=512, share_prefixes=True)
    runner = ModelRunner(model, pool, options, BLOCK, 128, ())
    prompt = random_prompt(LENGTH, seed=1)
    for slot in range(SLOTS):
        tokens = np.array(prompt if slot < 3 else prompt[::-1], np.int32)
        blocks = (*range(SHARED), SHARED + slot) if slot < 3 else tuple(range(10, 15))
        new = NewSlot(slot, tokens, LENGTH, blocks, SamplingParams(temperature=0.0), 0)
        start = SHARED * BLOCK if 0 < slot < 3 else 0
        rows, samples = (ScheduledRow(slot, start, LENGTH - start),), (SampleRow(0, slot, LENGTH, 0, 0),)
        runner.execute(SchedulerOutput(slot, rows, samples, (new,))).result()
    return runner


@pytest.fixture(autouse=True)
def _share_whatever_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_ROW", 0)
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_LAUNCHES", 0)


def test_a_batch_for_replay(runner: ModelRunner) -> None:
    """As a graph would run it, with padding rows. fp32 sums in another order: equal to some 1e-6 of the largest."""
    slots, size = (3, 1, 0), 4
    batch = DecodeBatch(runner.model, runner.state, size, 128)
    rows = [ScheduledRow(slot, LENGTH, 1) for slot in slots]
    assert runner.sharing is not None
    with torch.inference_mode():
        batch.fill(rows, size)
        expected = batch.forward(size)[: len(rows)]
        captured = runner.sharing.nothing(size)
        nothing = batch.forward(size, captured)[: len(rows)]
        assert runner.sharing.of_rows(rows) is not None
        assert captured.row_lens.any()
        output = batch.forward(size, captured)[: len(rows)]
    tolerance = 5e-6 * float(expected.abs().max())
    torch.testing.assert_close(output, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(nothing, expected, rtol=0, atol=tolerance)


def test_a_mixed_step(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows beside a prompt, layer by layer: the tokens sampled are those of the step without sharing."""
    prompt = np.array(random_prompt(9, seed=7), np.int32)
    tokens, slots = [], (3, 0, 1)
    for step, shares in enumerate((True, False)):
        if not shares:
            monkeypatch.setattr(prefix_groups, "BYTES_FOR_LAUNCHES", 1 << 40)
        new = NewSlot(5, prompt, 9, (20,), SamplingParams(temperature=0.0), 0)
        rows = (ScheduledRow(5, 0, 9), *(ScheduledRow(slot, LENGTH, 1) for slot in slots))
        samples = tuple(SampleRow(i, row.slot, row.start + row.num_tokens, 0, 0) for i, row in enumerate(rows))
        output = runner.execute(SchedulerOutput(10 + step, rows, samples, (new,))).result()
        tokens.append(output.token_ids.tolist())
        assert runner.sharing is not None
        assert (runner.sharing.of_rows(rows[1:]) is not None) == shares
    assert tokens[0] == tokens[1]
