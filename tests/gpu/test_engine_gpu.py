"""The engine and the hand-off on CUDA: the first token that differs from fp32 on CPU must be a near tie."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from near_ties import check_against_reference

import tandem.deploy
from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.config import ModelOptions, SchedulerOptions
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.models.loader import load_model
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.running.graphs.decode_graphs import DecodeGraphs
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import NewSlot, SampleRow, ScheduledRow, SchedulerOutput
from tandem.kernels.api import selection
from tandem.kernels.triton_kernels.products import fused
from tiny_models import random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
LENGTHS = (1, 2, 5, 8, 17, 64, 333, 700)
NUM_TOKENS = 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("way", "prompts"),
    [("single", ""), ("eager", ""), ("local", ""), ("tcp", ""), ("single", "between"), ("local", "between"),
     ("single", "inside"), ("local", "inside"), ("tcp", "inside")],
)  # fmt: skip
def test_greedy_against_fp32(way: str, prompts: str, dtype: str) -> None:
    """With captured decode steps, with steps with prompts captured as well, attention between these graphs or inside
    them, and step by step ("eager")."""
    graphs = {"prompt_graph_tokens": 512 if prompts else 0, "prompt_graph_attention": prompts == "inside"}
    graphs["cuda_graphs"] = way != "eager"
    common = {"device": "cuda", "num_blocks": 256, **graphs}
    roles = ["unified"] if way in ("single", "eager") else ["decode", "prefill"]
    nodes = []
    for index, role in enumerate(roles):
        options = node_options(role, DEMO, **common, device_index=index % torch.cuda.device_count())
        transport = {} if len(roles) == 1 else {"transport": way}
        fields = {**vars(options), "model": ModelOptions(str(DEMO), dtype=dtype), **transport}  # type: ignore[arg-type]
        nodes.append(Node(type(options)(**fields)))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with client_of(nodes) as client:
        texts = {n: random_prompt(n, seed=n, vocab_size=2048) for n in LENGTHS}
        prefill = nodes[1].info if len(nodes) > 1 else None
        results = {
            n: client.submit(str(n), p, sampling, decode=nodes[0].info, prefill=prefill) for n, p in texts.items()
        }
        client.wait()
        for length, prompt in texts.items():
            assert results[length].failed is None, results[length].failed
            check_against_reference(DEMO, prompt, results[length].output(), getattr(torch, dtype))
        if len(nodes) > 1:
            assert nodes[0].process.logic.handoffs.sink.counters.commits == len(LENGTHS)


@pytest.mark.parametrize("what", ["a CUDA graph", "a fused operation"])
def test_a_launch_failure_while_serving(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Of graphs every fourth replay can't be launched; of norms every fourth, without graphs."""
    node = Node(node_options("unified", DEMO, device="cuda", num_blocks=256, cuda_graphs=what == "a CUDA graph"))
    owner, name = (DecodeGraphs, "run") if what == "a CUDA graph" else (fused, "rms_norm_triton")
    work, calls = getattr(owner, name), itertools.count()

    def launch(*arguments: object) -> object:
        if next(calls) % 4 == 3:
            raise RuntimeError("CUDA error: too many resources requested for launch")
        return work(*arguments)

    monkeypatch.setattr(owner, name, launch)
    before = sum(selection.fallback_counts().values())
    prompt, sampling = (
        random_prompt(64, seed=3, vocab_size=2048),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    )
    with client_of([node]) as client:
        result = client.submit("r", prompt, sampling, decode=node.info)
        client.wait(result)
        assert result.failed is None, result.failed
        dtype = node.process.loaded.dtype
        check_against_reference(DEMO, prompt, result.output(), dtype)
    assert sum(selection.fallback_counts().values()) > before


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13])
def test_a_replayed_graph_gives_the_logits_of_its_kernels_run_one_by_one(num_rows: int) -> None:
    """Over rows of different lengths, twice, the second time one token further."""
    config = load_model_config(DEMO)
    device = torch.device("cuda", 0)
    model = load_model(DEMO, config, ModelOptions(str(DEMO)), device, torch.bfloat16)
    pool = torch.zeros(64, config.num_kv_heads, config.num_layers, 2, 16, config.head_dim, device=device).bfloat16()
    runner = ModelRunner(model, pool, SchedulerOptions(16, 2048), 16, 256, ())
    prompts = [random_prompt(3 + 5 * row, seed=row, vocab_size=2048) for row in range(num_rows)]
    tables = [tuple(range(row * 4, row * 4 + 4 + (row > 10))) for row in range(num_rows)]
    sampling = SamplingParams(temperature=0.0)
    runner.execute(
        SchedulerOutput(
            0,
            tuple(ScheduledRow(row, 0, len(prompt)) for row, prompt in enumerate(prompts)),
            tuple(SampleRow(row, row, len(prompt), 0, 0) for row, prompt in enumerate(prompts)),
            tuple(
                NewSlot(row, np.array(prompt, np.int32), len(prompt), tables[row], sampling, 0)
                for row, prompt in enumerate(prompts)
            ),
        )
    ).result()
    graphs = DecodeGraphs(DecodeBatch(model, runner.state, 16, 256))
    graphs.capture()
    for further in range(2):
        rows = [ScheduledRow(row, len(prompt) + further, 1) for row, prompt in enumerate(prompts)]
        replayed = graphs.run(rows).clone()
        size = next(size for size in graphs.sizes if size >= num_rows)
        with torch.inference_mode():
            eager = graphs.batch.forward(size)[:num_rows]
        assert torch.equal(replayed, eager)
        graphs.batch.store(replayed.argmax(-1))
