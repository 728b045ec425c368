"""Steps with prompts as graphs between attentions, on CUDA: beside what is launched by kernel, alone and split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from near_ties import check_against_reference

import tandem.deploy
from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.config import ModelOptions, SchedulerOptions
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.models.loader import load_model
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import NewSlot, SampleRow, ScheduledRow, SchedulerOutput
from tiny_models import random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
BLOCK, NUM_BLOCKS, MAX_LEN, LARGEST = 16, 128, 1024, 400
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def runner_of(folder: Path, dtype: torch.dtype) -> ModelRunner:
    config = load_model_config(folder)
    device = torch.device("cuda")
    model = load_model(folder, config, ModelOptions(model=str(folder)), device, dtype)
    shape = (NUM_BLOCKS, config.num_kv_heads, config.num_layers, 2, BLOCK, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    options = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=512)
    runner = ModelRunner(model, pool, options, BLOCK, MAX_LEN, ())
    runner.warmup()
    return runner


def steps_of(prompt: list[int], beside: list[int]) -> list[SchedulerOutput]:
    """A short prompt that decodes beside the chunks of a long one."""
    blocks = (tuple(range(1, 65)), (70, 71, 72, 73))
    slots = [NewSlot(i, torch.tensor(p, dtype=torch.int32).numpy(), len(p), blocks[i], GREEDY, sample_index=0)
             for i, p in enumerate((prompt, beside))]  # fmt: skip
    first = SchedulerOutput(
        0, (ScheduledRow(1, 0, len(beside)),), (SampleRow(0, 1, len(beside), 0, 0),), new_slots=(slots[1],)
    )
    steps, begin = [first], 0
    for size in (1, 33, 250, 399, 17):
        rows = (ScheduledRow(1, len(beside) + len(steps) - 1, 1), ScheduledRow(0, begin, size))
        samples = [SampleRow(0, 1, rows[0].start + 1, 0, 1)]
        begin += size
        if begin == len(prompt):
            samples.append(SampleRow(1, 0, begin, 0, 0))
        new = (slots[0],) if len(steps) == 1 else ()
        steps.append(SchedulerOutput(len(steps), rows, tuple(samples), new_slots=new))
    return steps


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_the_cache_is_what_launched_steps_write(kind: str) -> None:
    """In fp32, as far as products of more rows round otherwise; padding is written nowhere."""
    replaying, launched = (runner_of(tiny_model(kind), torch.float32) for _ in range(2))
    replaying.capture_decode_steps(LARGEST)
    assert replaying.prompt_graph_sizes[-1] == LARGEST
    for step in steps_of(random_prompt(700, seed=4), random_prompt(30, seed=2)):
        for runner in (replaying, launched):
            runner.execute(step).result()
    torch.testing.assert_close(replaying.pool, launched.pool, rtol=1e-3, atol=1e-3)
    assert torch.equal(replaying.pool == 0, launched.pool == 0)


@pytest.mark.several_gpus
@pytest.mark.parametrize("way", ["local", "tcp"])
def test_layers_are_handed_over_between_replays(way: str) -> None:
    nodes = []
    for index, role in enumerate(["decode", "prefill"]):
        common = {"device": "cuda", "num_blocks": 256, "device_index": index % torch.cuda.device_count()}
        options = node_options(role, DEMO, **common, prompt_graph_tokens=512)
        fields = {**vars(options), "model": ModelOptions(str(DEMO), dtype="float32"), "transport": way}
        nodes.append(Node(type(options)(**fields)))
    sampling = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    with client_of(nodes) as client:
        prompts = {n: random_prompt(n, seed=n, vocab_size=2048) for n in (5, 333, 700)}
        results = {
            n: client.submit(str(n), p, sampling, decode=nodes[0].info, prefill=nodes[1].info)
            for n, p in prompts.items()
        }
        client.wait()
        for length, prompt in prompts.items():
            assert results[length].failed is None, results[length].failed
            check_against_reference(DEMO, prompt, results[length].output(), torch.float32)
        assert nodes[0].process.logic.handoffs.sink.counters.commits == len(prompts)
