"""Steps with prompts as graphs on CUDA, attention between them (fp32) or inside (bf16): beside what is launched kernel
by kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_checks import ON_HOPPER
from handmade_steps import BLOCK, new_slot, pool_shape, with_windows

from tandem.engine.contracts.config import ModelOptions, SchedulerOptions
from tandem.engine.contracts.kv_layout import places_of_layers
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.models.loader import load_model
from tandem.engine.running.graphs import prompt_graphs
from tandem.engine.running.graphs.prompt_graphs import ROWS_BESIDE
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import ScheduledRow, SchedulerOutput
from tiny_models import random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_BLOCKS, MAX_LEN, LARGEST = 128, 1024, 400


def runner_of(folder: Path, dtype: torch.dtype) -> ModelRunner:
    config, device = load_model_config(folder), torch.device("cuda")
    model = load_model(folder, config, ModelOptions(model=str(folder)), device, dtype)
    places = places_of_layers([config.window_of(layer) for layer in range(config.num_layers)])
    pool = torch.zeros(pool_shape(config, places, NUM_BLOCKS), dtype=dtype, device=device)
    options = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=512)
    runner = ModelRunner(model, pool, options, BLOCK, MAX_LEN, (), places=places)
    runner.warmup()
    return runner


def steps_of(prompt: list[int], beside: list[int]) -> list[SchedulerOutput]:
    """Chunks of a long prompt beside single tokens of another, of which all are known: nobody draws any."""
    blocks = {0: tuple(range(1, 60)), 1: (70, 71, 72, 73)}
    rows, begin = [(ScheduledRow(1, 0, 20),)], 0
    for size in (1, 33, 250, 395, 17):
        rows.append((ScheduledRow(1, 19 + len(rows), 1), ScheduledRow(0, begin, size)))
        begin += size
    new = {0: (new_slot(1, beside, blocks[1]),), 1: (new_slot(0, prompt, blocks[0]),)}
    return [SchedulerOutput(step, each, (), new_slots=new.get(step, ())) for step, each in enumerate(rows)]


def check(folder: Path, dtype: torch.dtype, tolerance: float, with_attention: bool = False) -> None:
    """`tolerance`: of the largest value."""
    replaying, launched = (runner_of(folder, dtype) for _ in range(2))
    replaying.capture_decode_steps(LARGEST, with_attention)
    assert replaying.prompt_graph_sizes[-1] == LARGEST + ROWS_BESIDE
    for step in steps_of(random_prompt(720, seed=4), random_prompt(40, seed=2)):
        for runner in (replaying, launched):
            runner.execute(with_windows(step, runner, NUM_BLOCKS)).result()
        atol = tolerance * float(launched.pool.abs().max())
        torch.testing.assert_close(replaying.pool, launched.pool, rtol=0, atol=atol)
        assert torch.equal(replaying.pool == 0, launched.pool == 0), "padding is written nowhere"


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen3_moe", "qwen2_hybrid"])
def test_the_cache_is_what_launched_steps_write(kind: str) -> None:
    """In fp32, whose attention is launched between the graphs: as far as products of more rows round otherwise."""
    check(tiny_model(kind), torch.float32, 1e-3)


@ON_HOPPER[1]
@pytest.mark.parametrize("kind", ["llama_64", "qwen3_64", "mistral_64", "qwen3_hybrid_64"])
def test_graphs_hold_attention_of_16_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "unified_attention", lambda *_: pytest.fail("it is launched between graphs"))
    check(tiny_model(kind), torch.bfloat16, 6e-2, with_attention=True)
