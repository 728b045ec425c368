"""Steps in which rows take adapters: the tokens of merged weights, computed layer by layer or over graphs' buffers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from handmade_steps import BLOCK, CPU, MAX_LEN, NUM_BLOCKS, decode_step, new_slot
from tiny_adapters import merged_greedy, tiny_adapter

from tandem.engine.adapters.node_adapters import NodeAdapters
from tandem.engine.contracts.config import LoraOptions, ModelOptions, SchedulerOptions
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.models.loader import load_model
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.running.graphs.decode_graphs import DecodeGraphs
from tandem.engine.running.runner import ModelRunner
from tandem.engine.running.step_inputs import adapter_rows
from tandem.engine.scheduling.step import AdapterLoad, SampleRow, ScheduledRow, SchedulerOutput
from tandem.kernels.products.adapter_rows import AdapterRows
from tiny_models import random_prompt, tiny_model

PROMPTS = {0: random_prompt(33, seed=2), 1: random_prompt(5, seed=1), 3: random_prompt(18, seed=3)}
BLOCKS = {0: (7, 3, 11, 12), 1: (5, 6), 3: (2, 8, 9)}
ADAPTERS = {0: 1, 1: 0, 3: 2}  # slot -> its adapter's


class RunsDirectly(DecodeGraphs):
    """A step is run over the graphs' buffers instead of replayed."""

    num_adapted = 0

    def run(self, rows):  # type: ignore[no-untyped-def]
        size, kind = self.graph_for(rows)
        adapted = kind == "adapted"
        self.num_adapted += adapted
        self.batch.fill(rows, size, adapted)
        return self.batch.forward(size, with_adapters=adapted)[: len(rows)]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("replayed", [False, True])
def test_each_row_takes_its_own_adapter(kind: str, replayed: bool, tmp_path: Path) -> None:
    base, config = tiny_model(kind), load_model_config(tiny_model(kind))
    folders = {slot: tiny_adapter(tmp_path / str(slot), base, seed=slot, rank=2 + slot) for slot in (1, 2)}
    model = load_model(base, config, ModelOptions(str(base)), CPU, torch.float32)
    adapters = NodeAdapters(model.adapter_sites(), LoraOptions(True, max_loras=2, max_lora_rank=8), torch.float32, CPU)
    model.take_adapters(adapters.stacks)
    pool = torch.zeros(NUM_BLOCKS, config.num_kv_heads, config.num_layers, 2, BLOCK, config.head_dim)
    runner = ModelRunner(model, pool, SchedulerOptions(4, 96), BLOCK, MAX_LEN, (), adapters=adapters)
    runner.warmup()
    graphs = RunsDirectly(DecodeBatch(model, runner.state, runner.max_graph_rows, MAX_LEN), with_adapters=True)
    if replayed:
        runner._graphs = graphs
    refs = {slot: AdapterRef(str(folder), b"") for slot, folder in folders.items()}
    refs = {slot: AdapterRef(ref.path, adapters.store.read(ref.path).digest) for slot, ref in refs.items()}
    entering = [new_slot(slot, prompt, BLOCKS[slot]) for slot, prompt in PROMPTS.items()]
    step = SchedulerOutput(
        0,
        tuple(ScheduledRow(slot, 0, len(prompt)) for slot, prompt in PROMPTS.items()),
        tuple(SampleRow(i, slot, len(prompt), 0, 0) for i, (slot, prompt) in enumerate(PROMPTS.items())),
        new_slots=tuple(msgspec.structs.replace(new, adapter=ADAPTERS[new.slot]) for new in entering),
        adapter_loads=tuple(AdapterLoad(slot, ref) for slot, ref in refs.items()),
    )
    made = [runner.execute(step).result().token_ids.tolist()]
    for index in range(1, 8):
        positions = {slot: len(prompt) + index - 1 for slot, prompt in PROMPTS.items()}
        made.append(runner.execute(decode_step(index, positions)).result().token_ids.tolist())
    for place, (slot, prompt) in enumerate(PROMPTS.items()):
        number = ADAPTERS[slot]
        merged = tmp_path / f"merged {number}" if number else base
        expected = merged_greedy(merged, base, folders.get(number, base), prompt, 8).token_ids
        assert [tokens[place] for tokens in made] == expected
    assert graphs.num_adapted == (8 if replayed else 0)
    alone = decode_step(9, {1: 13})
    runner.execute(alone).result()
    assert graphs.num_adapted == (8 if replayed else 0), "a step of rows without adapters is a plain one"


def test_rows_are_sorted_by_adapter_and_prompts_come_in_tiles() -> None:
    def sort(adapters: list[int], lengths: list[int]) -> AdapterRows:
        rows = adapter_rows(np.array(adapters), np.array(lengths), CPU)
        assert rows is not None
        return rows

    assert adapter_rows(np.zeros(2), np.array([1, 5]), CPU) is None
    decodes = sort([1, 1, 0, 2, 1], [1] * 5)
    assert (decodes.order.tolist(), decodes.slots.tolist()) == ([2, 0, 1, 4, 3], [0, 1, 1, 1, 2])
    assert decodes.tiles is None
    prompts = sort([2, 1, 1, 0], [1, 60, 70, 3])
    assert prompts.order.tolist() == [131, 132, 133, *range(1, 131), 0]
    assert prompts.slots.tolist() == [0] * 3 + [1] * 130 + [2]
    assert prompts.tiles is not None
    assert prompts.tiles.tolist() == [[3, 64, 1], [67, 64, 1], [131, 2, 1], [133, 1, 2]]
