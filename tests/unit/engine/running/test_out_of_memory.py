"""A device that runs out of memory in the middle of a step: same tokens in smaller pieces, or an honest end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from handmade_steps import RecordingConnector, decode_step, make_runner, new_slot, prompt_step

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.running.runner import ModelRunner
from tandem.engine.running.step_pieces import split_step
from tandem.engine.scheduling.step import ForkSlot, SampleRow, ScheduledRow, SchedulerOutput, StepMeta
from tiny_models import random_prompt, reference_greedy, tiny_model

PROMPTS = {0: random_prompt(33, seed=2), 1: random_prompt(21, seed=3), 2: random_prompt(5, seed=1)}
BLOCKS = {0: (7, 3, 11), 1: (2, 8), 2: (5,)}


class SmallDevice:
    """Stands before the runner's model and has memory for `most` tokens at once."""

    def __init__(self, model: object, most: int, group: object) -> None:
        self._model = model
        self.group = group
        self.most = most
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def __call__(self, input_ids: torch.Tensor, *args: object) -> torch.Tensor:
        if len(input_ids) > self.most:
            raise torch.OutOfMemoryError("tried to allocate more than there is")
        self.sizes.append(len(input_ids))
        call: Callable[..., torch.Tensor] = self._model  # type: ignore[assignment]
        return call(input_ids, *args)


def small_runner(
    most: int, connector: RecordingConnector | None = None, group: object = None
) -> tuple[ModelRunner, SmallDevice]:
    def before_model(model: object) -> SmallDevice:
        return SmallDevice(model, most, group)

    runner = make_runner(tiny_model("llama"), connector=connector, before_model=before_model)
    return runner, cast("SmallDevice", runner.model)


@pytest.mark.parametrize("most", [59, 30, 16])
def test_a_step_in_pieces_makes_the_tokens_of_the_whole(most: int) -> None:
    runner, device = small_runner(most)
    step = prompt_step(PROMPTS, BLOCKS)
    backwards = msgspec.structs.replace(step, samples=step.samples[::-1])
    tokens = runner.execute(backwards).result().token_ids.tolist()[::-1]
    assert tokens == [reference_greedy(tiny_model("llama"), prompt, 1).token_ids[0] for prompt in PROMPTS.values()]
    assert sum(device.sizes) == 59
    assert max(device.sizes) <= most
    assert runner.counters["steps_out_of_memory"] == {59: 0, 30: 1, 16: 2}[most]
    decoded = runner.execute(decode_step(1, {slot: len(prompt) for slot, prompt in PROMPTS.items()})).result()
    expected = [reference_greedy(tiny_model("llama"), prompt, 2).token_ids[1] for prompt in PROMPTS.values()]
    assert decoded.token_ids.tolist() == expected


def test_forks_and_prompt_logprobs_in_pieces() -> None:
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=2, num_logprobs=1)
    prompt = PROMPTS[0]
    step = SchedulerOutput(
        0,
        (ScheduledRow(0, 0, 33, prompt_logprobs=True),),
        (SampleRow(0, 3, 33, 1, 0), SampleRow(0, 0, 33, 0, 0)),
        new_slots=(new_slot(0, prompt, (4, 9, 6), sampling),),
        forks=(ForkSlot(3, 0, 33, (4, 9, 13), sample_index=1),),
    )
    whole = make_runner(tiny_model("llama")).execute(step).result()
    runner, _ = small_runner(16)
    pieces = runner.execute(step).result()
    assert pieces.token_ids.tolist() == whole.token_ids.tolist()
    for left, right in zip(pieces.prompt_logprobs[0], whole.prompt_logprobs[0], strict=True):
        assert left.token_ids == right.token_ids
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)


def test_the_connector_sees_a_step_in_pieces_once() -> None:
    connector = RecordingConnector()
    runner, _ = small_runner(30, connector=connector)
    num_layers = len(runner.model.attention_layers)
    connector.calls.clear()
    runner.execute(msgspec.structs.replace(prompt_step(PROMPTS, BLOCKS), connector_meta=StepMeta()))
    assert connector.calls == ["start", *["wait"] * num_layers, *["save"] * num_layers, "saved"]


def test_a_step_in_pieces_that_had_a_graph_waits_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces may load kernels, so no stream waits meanwhile."""
    connector = RecordingConnector()
    runner, _ = small_runner(30, connector=connector)
    first = runner._eager._compute_piece

    def without_memory(*args: Any) -> torch.Tensor:
        monkeypatch.setattr(runner._eager, "_compute_piece", first)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(runner._eager, "_compute_piece", without_memory)
    settled: list[int] = []
    monkeypatch.setattr(connector, "wait_for_kv_layer", lambda layer: settled.append(connector.num_settled))
    runner.execute(msgspec.structs.replace(prompt_step(PROMPTS, BLOCKS), connector_meta=StepMeta()))
    assert settled
    assert settled[0] > 0


def test_a_device_without_any_memory_ends_the_step_and_not_the_runner() -> None:
    connector = RecordingConnector()
    runner, device = small_runner(0, connector=connector)
    result = runner.execute(prompt_step(PROMPTS, BLOCKS)).result()
    assert result.failure is not None
    assert "--gpu-memory-utilization" in result.failure
    assert result.token_ids.size == 0
    assert connector.calls[-1] == "saved"
    device.most = 96
    tokens = runner.execute(prompt_step(PROMPTS, BLOCKS, step_id=1)).result().token_ids.tolist()
    assert tokens == [reference_greedy(tiny_model("llama"), prompt, 1).token_ids[0] for prompt in PROMPTS.values()]


def test_every_token_and_sample_is_in_exactly_one_piece() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(1, 40, rng.integers(1, 8)).tolist()
        rows = tuple(ScheduledRow(slot, int(rng.integers(0, 9)), length) for slot, length in enumerate(lengths))
        order = rng.permutation(len(rows))[: rng.integers(0, len(rows) + 1)].tolist()
        output = SchedulerOutput(0, rows, tuple(SampleRow(row, row, 0, 0, 0) for row in order))
        most = int(rng.integers(1, 50))
        pieces = split_step(output, most)
        assert all(0 < piece.num_tokens <= most for piece in pieces)
        next_token = [row.start for row in rows]
        for piece in pieces:
            for row, parent in zip(piece.rows, piece.parents, strict=True):
                assert (row.slot, row.start) == (rows[parent].slot, next_token[parent])
                next_token[parent] += row.num_tokens
            for sample, at in zip(piece.samples, piece.sampled, strict=True):
                parent = output.samples[sample].row
                assert piece.parents[at] == parent
                assert next_token[parent] == rows[parent].start + rows[parent].num_tokens
        assert next_token == [row.start + row.num_tokens for row in rows]
        assert sorted(index for piece in pieces for index in piece.samples) == list(range(len(order)))
