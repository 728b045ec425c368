"""Steps made by hand for a real runner on CPU, graphs that need no GPU, and a connector that keeps a diary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tandem.engine.contracts.config import ModelOptions, SchedulerOptions
from tandem.engine.contracts.kv_layout import LayerPlace, places_of_layers
from tandem.engine.contracts.model_config import ModelConfig, load_model_config
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.models.loader import load_model
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.running.graphs.decode_graphs import DecodeGraphs
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import NewSlot, SampleRow, ScheduledRow, SchedulerOutput, StepMeta

BLOCK = 16
NUM_BLOCKS = 24
MAX_LEN = 128
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


class RunsDirectly(DecodeGraphs):
    """The graphs' buffers and choices; a step is run instead of replayed."""

    num_runs = 0

    def run(self, rows: Sequence[ScheduledRow]) -> torch.Tensor:
        self.num_runs += 1
        size, _ = self.graph_for(rows)
        self.batch.fill(rows, size)
        return self.batch.forward(size)[: len(rows)]


class RecordingConnector:
    """The worker half, as a diary: what was called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_settled = 0

    def register_kv_cache(self, pool: torch.Tensor) -> None:
        self.calls.append("register")

    def start_load_kv(self, meta: StepMeta, between_layers: object) -> None:
        self.calls.append("start")

    def settle(self) -> None:
        self.num_settled += 1

    def wait_for_kv_layer(self, layer_name: str) -> None:
        self.calls.append("wait")

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        self.calls.append("save")

    def wait_for_save(self) -> None:
        self.calls.append("saved")

    def spoiled_slots(self, step_id: int) -> dict[int, str]:
        return {}


def make_runner(
    folder: Path,
    num_slots: int = 4,
    connector: RecordingConnector | None = None,
    max_chunk: int = 0,
    before_model: Callable[[Any], Any] = lambda model: model,
    apart: bool = False,
) -> ModelRunner:
    """`before_model` makes what stands before the model. `apart`: layers that slide have window blocks, of as many
    numbers as there are blocks for each list of them, see `with_windows`."""
    config = load_model_config(folder)
    model = before_model(load_model(folder, config, ModelOptions(model=str(folder)), CPU, torch.float32))
    places = places_of_layers([config.window_of(layer) for layer in range(config.num_layers)]) if apart else ()
    pool = torch.zeros(pool_shape(config, places, NUM_BLOCKS))
    options = SchedulerOptions(max_num_seqs=num_slots, max_num_batched_tokens=96, max_prefill_chunk=max_chunk)
    return ModelRunner(model, pool, options, BLOCK, MAX_LEN, (), connector, places=places)


def direct_graphs(runner: ModelRunner, max_rows: int = 0) -> RunsDirectly:
    """Graphs over the runner's slots, of `max_rows` or else as many rows as the runner's own."""
    return RunsDirectly(DecodeBatch(runner.model, runner.state, max_rows or runner.max_graph_rows, MAX_LEN))


def pool_shape(config: ModelConfig, places: Sequence[LayerPlace], num_blocks: int) -> tuple[int, ...]:
    """Room for `num_blocks` blocks, and as many window blocks of each list."""
    num_layers = 1 + max(place.layer for place in places) if places else config.num_layers
    num_tables = 1 + max((place.table for place in places), default=0)
    return num_blocks * num_tables, config.num_kv_heads, num_layers, 2, BLOCK, config.head_dim


def with_windows(step: SchedulerOutput, runner: ModelRunner, num_blocks: int = NUM_BLOCKS) -> SchedulerOutput:
    """The same step of a runner whose layers are apart: nothing has slid out."""
    lists = range(1, len(runner.state.tables_SB))
    new = [
        msgspec.structs.replace(
            slot, window_ids=tuple(tuple(num_blocks * each + block for block in slot.block_ids) for each in lists)
        )
        for slot in step.new_slots
    ]
    return msgspec.structs.replace(step, new_slots=tuple(new))


def new_slot(slot: int, prompt: list[int], blocks: tuple[int, ...], sampling: SamplingParams = GREEDY) -> NewSlot:
    return NewSlot(slot, np.array(prompt, np.int32), len(prompt), blocks, sampling, sample_index=0)


def decode_step(step_id: int, slots: dict[int, int], **extra: tuple) -> SchedulerOutput:
    """One token of each slot from its position on; the output index does not matter to greedy rows."""
    rows = tuple(ScheduledRow(slot, position, 1) for slot, position in slots.items())
    samples = tuple(SampleRow(i, slot, position + 1, 0, 1) for i, (slot, position) in enumerate(slots.items()))
    return SchedulerOutput(step_id, rows, samples, **extra)


def prompt_step(prompts: dict[int, list[int]], blocks: dict[int, tuple[int, ...]], step_id: int = 0) -> SchedulerOutput:
    return SchedulerOutput(
        step_id,
        rows=tuple(ScheduledRow(slot, 0, len(prompt)) for slot, prompt in prompts.items()),
        samples=tuple(SampleRow(i, slot, len(prompt), 0, 0) for i, (slot, prompt) in enumerate(prompts.items())),
        new_slots=tuple(new_slot(slot, prompt, blocks[slot]) for slot, prompt in prompts.items()),
    )


def chunk_step(step_id: int, slot: int, prompt: list[int], begin: int, end: int, *decodes: int) -> SchedulerOutput:
    """Part of a prompt, which samples at its end, beside slots that decode at these positions (slot 1, 2, …)."""
    rows = [ScheduledRow(place, position, 1) for place, position in enumerate(decodes, 1)]
    samples = [SampleRow(i, row.slot, row.start + 1, 0, 1) for i, row in enumerate(rows)]
    if end == len(prompt):
        samples.append(SampleRow(len(rows), slot, end, 0, 0))
    new = () if begin else (new_slot(slot, prompt, tuple(range(1, 1 + len(prompt) // BLOCK + 1))),)
    return SchedulerOutput(step_id, (*rows, ScheduledRow(slot, begin, end - begin)), tuple(samples), new_slots=new)
