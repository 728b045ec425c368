"""Steps with prompts as graphs between attentions, on CUDA: beside what is launched kernel by kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from handmade_steps import BLOCK, chunk_step, prompt_step

from tandem.engine.contracts.config import ModelOptions, SchedulerOptions
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.models.loader import load_model
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import SchedulerOutput
from tiny_models import random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_BLOCKS, MAX_LEN, LARGEST = 128, 1024, 400


def runner_of(folder: Path) -> ModelRunner:
    config = load_model_config(folder)
    device, dtype = torch.device("cuda"), torch.float32
    model = load_model(folder, config, ModelOptions(model=str(folder)), device, dtype)
    shape = (NUM_BLOCKS, config.num_kv_heads, config.num_layers, 2, BLOCK, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    options = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=512)
    runner = ModelRunner(model, pool, options, BLOCK, MAX_LEN, ())
    runner.warmup()
    return runner


def steps_of(prompt: list[int], beside: list[int]) -> list[SchedulerOutput]:
    """A short prompt that decodes beside the chunks of a long one."""
    steps, begin = [prompt_step({1: beside}, {1: (70, 71, 72, 73)})], 0
    for size in (1, 33, 250, 399, 17):
        steps.append(chunk_step(len(steps), 0, prompt, begin, begin + size, len(beside) + len(steps) - 1))
        begin += size
    return steps


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_the_cache_is_what_launched_steps_write(kind: str) -> None:
    """In fp32, as far as products of more rows round otherwise; padding is written nowhere."""
    replaying, launched = (runner_of(tiny_model(kind)) for _ in range(2))
    replaying.capture_decode_steps(LARGEST)
    assert replaying.prompt_graph_sizes[-1] == LARGEST
    for step in steps_of(random_prompt(700, seed=4), random_prompt(30, seed=2)):
        for runner in (replaying, launched):
            runner.execute(step).result()
    torch.testing.assert_close(replaying.pool, launched.pool, rtol=1e-3, atol=1e-3)
    assert torch.equal(replaying.pool == 0, launched.pool == 0)
