"""An EAGLE-3 head on a GPU: its steps and the notes of the model's as graphs, with the output of a node without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from eagle_heads import DEMO, SIZE, knowing_head, random_head, walking_model

from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.scheduling.times.step_times import StepTimes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ASKED = {
    "greedy": SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=120, temperature=0.5, seed=3, ignore_eos=True),
}


def serve(
    model: Path,
    head: Path | None,
    prompt: list[int],
    model_impl: str = "auto",
    dtype: str = "float32",
    **changes: object,
) -> tuple[list[list[int]], dict]:
    """Outputs, and what became of guesses. In float32, where two tokens are hardly ever equal but for the last bits.
    Nothing is known of what steps take, so that all that is likely is guessed."""
    config = "" if head is None else json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 4})
    options = node_options("unified", model, device="cuda", block_size=64, speculative_config=config, **changes)
    read = ModelOptions(str(model), dtype=dtype, model_impl=model_impl)
    node = Node(type(options)(**{**vars(options), "model": read}))
    with client_of([node]) as client:
        scheduler = node.process.logic.scheduler
        scheduler.state.step_times = StepTimes()
        results = [client.submit(name, prompt, sampling, decode=node.info) for name, sampling in ASKED.items()]
        client.wait()
        assert all(result.failed is None for result in results)
        return [result.output() for result in results], scheduler.spec_counters


@pytest.mark.parametrize("graphs", [True, False])
def test_a_wrong_head_changes_no_output(graphs: bool, tmp_path: Path) -> None:
    prompt = [17 * place % 2000 + 10 for place in range(200)]
    plain, _ = serve(DEMO, None, prompt)
    guessed, counters = serve(DEMO, random_head(tmp_path), prompt, cuda_graphs=graphs)
    print(counters)
    assert guessed == plain
    assert counters["spec_draft_tokens"] > 10


@pytest.mark.parametrize(("graphs", "apart"), [(True, False), (False, False), (True, True)])
def test_a_head_that_knows_the_model_is_right(graphs: bool, apart: bool, tmp_path: Path) -> None:
    """Its features come through chunks, graphs and drafts, as on a CPU. `apart`: of a model of which some layers slide,
    beside window blocks."""
    prompt = [7 * place % SIZE for place in range(90)]
    model, head = walking_model(tmp_path / "model", apart), knowing_head(tmp_path / "head")
    plain, _ = serve(model, None, prompt)
    guessed, counters = serve(model, head, prompt, cuda_graphs=graphs)
    print(counters)
    assert guessed == plain
    # A few of those that are drawn aren't the likeliest ones; the head's distribution is the model's but for the scale.
    assert counters["spec_accepted_tokens"] > 0.7 * counters["spec_draft_tokens"] > 50


@pytest.mark.parametrize("graphs", [True, False])
def test_a_head_that_knows_the_model_is_right_over_kv_of_fp8(graphs: bool, tmp_path: Path) -> None:
    prompt, fp8 = [7 * place % SIZE for place in range(90)], {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}
    model, head = walking_model(tmp_path / "model"), knowing_head(tmp_path / "head")
    plain, _ = serve(model, None, prompt, **fp8)
    guessed, counters = serve(model, head, prompt, cuda_graphs=graphs, **fp8)
    print(counters)
    assert guessed[0] == plain[0]  # a drawn token may lie where two sums of 16 bits differ
    assert counters["spec_accepted_tokens"] > 0.7 * counters["spec_draft_tokens"] > 50


@pytest.mark.parametrize("graphs", [True, False])
def test_a_head_beside_transformers_modules_is_as_right(graphs: bool, tmp_path: Path) -> None:
    """Its features come from hooks on the modules, in prompts as in graphs."""
    prompt = [7 * place % SIZE for place in range(90)]
    model, head = walking_model(tmp_path / "model"), knowing_head(tmp_path / "head")
    plain, _ = serve(model, None, prompt, "transformers")
    guessed, counters = serve(model, head, prompt, "transformers", cuda_graphs=graphs)
    print(counters)
    assert guessed == plain
    assert counters["spec_accepted_tokens"] > 0.7 * counters["spec_draft_tokens"] > 50
