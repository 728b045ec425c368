"""Tokens guessed ahead on a GPU: rows of decode graphs, whose output is that of steps without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import tandem.deploy
from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
GUESSING = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
CODE = """def read_lines(path, encoding):
    with open(path, encoding=encoding) as file:
        return file.readlines()

"""
ASKED = {
    "greedy": SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=200, temperature=0.5, seed=3, ignore_eos=True),
    "penalised": SamplingParams(max_tokens=60, temperature=0.0, frequency_penalty=0.05, ignore_eos=True),
}


def serve(speculative_config: str) -> tuple[dict[str, list[int]], dict[str, int], dict[str, float]]:
    """Outputs and steps of each request, one after another, and what became of guesses. In float32, where two tokens
    are hardly ever equal but for the last bits."""
    options = node_options("unified", DEMO, device="cuda", block_size=64, speculative_config=speculative_config)
    node = Node(type(options)(**{**vars(options), "model": ModelOptions(str(DEMO), dtype="float32")}))
    prompt = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(CODE * 4).ids
    outputs, steps = {}, {}
    with client_of([node]) as client:
        scheduler = node.process.logic.scheduler
        for name, sampling in ASKED.items():
            before = scheduler.num_steps
            result = client.submit(name, prompt, sampling, decode=node.info)
            client.wait(result)
            assert result.failed is None, result.failed
            outputs[name], steps[name] = result.output(), scheduler.num_steps - before
        return outputs, steps, scheduler.spec_counters


def test_outputs_are_those_without_guesses() -> None:
    plain, plain_steps, _ = serve("")
    guessed, steps, counters = serve(GUESSING)
    print(f"steps without: {plain_steps}, with: {steps}, {counters}")
    assert guessed == plain
    assert steps["greedy"] <= plain_steps["greedy"] / 1.5
