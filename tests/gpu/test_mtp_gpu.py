"""A layer that guesses, on a GPU: its steps and the notes of the model's as graphs, of latents and of whole heads,
by modules of our own and by transformers'."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_heads import SIZE, next_tokens
from mtp_heads import FAMILIES, knowing_mtp, random_mtp

from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.scheduling.times.step_times import StepTimes
from tiny_models import random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
ASKED = {"greedy": GREEDY, "drawn": SamplingParams(max_tokens=60, temperature=0.5, seed=3, ignore_eos=True)}
GUESSING = json.dumps({"method": "mtp", "num_speculative_tokens": 3})


def serve(
    model: Path,
    config: str,
    prompt: list[int],
    asked: dict[str, SamplingParams],
    dtype: str = "float32",
    **changes: object,
) -> tuple[list[list[int]], dict]:
    """Outputs, and what became of guesses; in float32 two tokens are hardly ever equal but for the last bits. Nothing
    is known of what steps take, so that all that is likely is guessed."""
    options = node_options(
        "unified", model, device="cuda", block_size=64, max_num_seqs=4, chunk=64, speculative_config=config, **changes
    )
    node = Node(replace(options, model=ModelOptions(str(model), dtype=dtype)))
    with client_of([node]) as client:
        scheduler = node.process.logic.scheduler
        scheduler.state.step_times = StepTimes()
        results = [client.submit(name, prompt, sampling, decode=node.info) for name, sampling in asked.items()]
        client.wait()
        assert [result.failed for result in results] == [None] * len(results)
        return [result.output() for result in results], scheduler.spec_counters


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_random_weights_changes_no_output(family: str, tmp_path: Path) -> None:
    model, prompt = random_mtp(tmp_path, family).served, random_prompt(150, seed=1)
    plain, _ = serve(model, "", prompt, ASKED)
    guessed, counters = serve(model, GUESSING, prompt, ASKED)
    print(counters)
    assert guessed == plain
    assert counters["spec_draft_tokens"] > 10


@pytest.mark.parametrize(
    ("family", "graphs", "dtype"),
    [
        ("deepseek_v3", True, "bfloat16"),
        ("deepseek_v3", False, "float32"),
        ("mimo", True, "bfloat16"),
        ("glm4_moe", True, "bfloat16"),
    ],
)
def test_a_head_that_knows_the_model_is_right(family: str, graphs: bool, dtype: str, tmp_path: Path) -> None:
    """Its features come through chunks, graphs and drafts, as on a CPU; in 16 bits through fused steps of few rows."""
    prompt = [7 * place % SIZE for place in range(90)]
    model, following = knowing_mtp(tmp_path, family).served, next_tokens()
    [made], counters = serve(model, GUESSING, prompt, {"greedy": GREEDY}, dtype, cuda_graphs=graphs)
    print(counters)
    assert made == [int(following[token]) for token in [prompt[-1], *made[:-1]]]
    assert counters["spec_accepted_tokens"] >= 0.8 * counters["spec_draft_tokens"] > 20
