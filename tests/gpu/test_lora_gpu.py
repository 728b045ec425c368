"""Adapters on a GPU: both kernels against float64 in 16 bit, and replayed steps that make merged weights' tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from gpu_checks import relative_error
from handmade_steps import decode_step, new_slot
from tiny_adapters import merged_greedy, tiny_adapter

from tandem.engine.adapters.node_adapters import NodeAdapters
from tandem.engine.contracts.config import LoraOptions, ModelOptions, SchedulerOptions
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.models.loader import load_model
from tandem.engine.parallel.sharding import Shard
from tandem.engine.running.runner import ModelRunner
from tandem.engine.running.step_inputs import adapter_rows
from tandem.engine.scheduling.step import AdapterLoad, SampleRow, ScheduledRow, SchedulerOutput
from tandem.kernels.products.adapters import AdapterStack, add_adapters
from tiny_models import random_prompt, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("parts", "size", "group"), [((4096, 1024, 1024), 4096, 0), ((3584, 3584), 4096, 8), ((4096,), 14336, 0)]
)
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("lengths", [[1] * 64, [1, 1, 700, 35]])
def test_products(
    lengths: list[int], rank: int, parts: tuple[int, ...], size: int, group: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    padded, slots, num_rows = max(16, rank), 9, sum(lengths)
    a = (torch.randn(slots, len(parts) * padded, size, device=CUDA) / size**0.5).to(dtype)
    b = (torch.randn(slots, sum(parts), padded, device=CUDA) / rank**0.5).to(dtype)
    ranks = torch.full((slots, len(parts)), rank, dtype=torch.int32, device=CUDA)
    x, out = (
        torch.randn(num_rows, size, device=CUDA).to(dtype),
        torch.randn(num_rows, sum(parts), device=CUDA).to(dtype),
    )
    adapter_R = np.arange(len(lengths)) % (slots + 1)
    rows = adapter_rows(adapter_R, np.array(lengths), CUDA)
    assert rows is not None
    expected, first = out.double(), 0
    for adapter, length in zip(adapter_R.tolist(), lengths, strict=True):
        begin = 0
        for part, outputs in enumerate(parts if adapter else ()):
            a_RK = a[adapter - 1, part * padded : part * padded + rank].double()
            b_NR = b[adapter - 1, begin : begin + outputs, :rank].double()
            added = x[first : first + length].double() @ a_RK.t() @ b_NR.t()
            columns = torch.arange(outputs, device=CUDA)
            columns = columns // group * 2 * group + part * group + columns % group if group else begin + columns
            expected[first : first + length, columns] += added
            begin += outputs
        first += length
    add_adapters(out, x, AdapterStack(a, b, ranks, parts), rows, group)
    assert relative_error(out, expected) < {torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]


@pytest.mark.parametrize("replayed", [False, True])
def test_each_row_takes_its_own_adapter(replayed: bool, tmp_path: Path) -> None:
    base, config = tiny_model("llama"), load_model_config(tiny_model("llama"))
    folders = {slot: tiny_adapter(tmp_path / str(slot), base, seed=slot, rank=2 + slot) for slot in (1, 2)}
    model = load_model(base, config, ModelOptions(str(base)), CUDA, torch.float32)
    adapters = NodeAdapters(config, Shard(0, 1), LoraOptions(True, max_loras=2, max_lora_rank=8), torch.float32, CUDA)
    model.take_adapters(adapters.stacks)
    pool = torch.zeros(32, config.num_kv_heads, config.num_layers, 2, 16, config.head_dim, device=CUDA)
    runner = ModelRunner(model, pool, SchedulerOptions(8, 128), 16, 128, (), adapters=adapters)
    runner.warmup()
    if replayed:
        runner.capture_decode_steps()
    refs = {slot: AdapterRef(str(folder), adapters.store.read(str(folder)).digest) for slot, folder in folders.items()}
    prompts = {slot: random_prompt(9 + 5 * slot, seed=slot) for slot in range(5)}
    of_slot = {slot: slot % 3 for slot in prompts}
    entering = [new_slot(slot, prompt, tuple(range(4 * slot, 4 * slot + 4))) for slot, prompt in prompts.items()]
    step = SchedulerOutput(
        0,
        tuple(ScheduledRow(slot, 0, len(prompt)) for slot, prompt in prompts.items()),
        tuple(SampleRow(i, slot, len(prompt), 0, 0) for i, (slot, prompt) in enumerate(prompts.items())),
        new_slots=tuple(msgspec.structs.replace(new, adapter=of_slot[new.slot]) for new in entering),
        adapter_loads=tuple(AdapterLoad(slot, ref) for slot, ref in refs.items()),
    )
    made = [runner.execute(step).result().token_ids.tolist()]
    for index in range(1, 8):
        positions = {slot: len(prompt) + index - 1 for slot, prompt in prompts.items()}
        made.append(runner.execute(decode_step(index, positions)).result().token_ids.tolist())
    for slot, prompt in prompts.items():
        number = of_slot[slot]
        merged = tmp_path / f"merged {number}" if number else base
        expected = merged_greedy(merged, base, folders.get(number, base), prompt, 8).token_ids
        assert [tokens[slot] for tokens in made] == expected
