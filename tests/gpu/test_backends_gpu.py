"""Nodes whose attention is by an optional package, where that is installed: the first token that differs from fp32 on
CPU must be a near tie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from near_ties import check_against_reference

import tandem.deploy
from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.kernels.api.selection import load_backend
from tiny_models import random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
LENGTHS = (1, 17, 64, 333, 700)


@pytest.mark.parametrize("roles", [("unified",), ("decode", "prefill")], ids=["one node", "split"])
@pytest.mark.parametrize("name", ["flash_attn", "flashinfer", "xformers"])
def test_a_node_serves_by_the_package(name: str, roles: tuple[str, ...]) -> None:
    """Each prompt twice: from its start, and over a cached prefix."""
    if missing := load_backend(name).unavailable_reason():
        pytest.skip(missing)
    nodes = []
    for role in roles:
        options = node_options(role, DEMO, device="cuda", num_blocks=256, attention_backend=name, transport="local")
        fields = {**vars(options), "model": ModelOptions(str(DEMO), dtype="bfloat16")}
        nodes.append(Node(type(options)(**fields)))
    for node in nodes:
        for layer in node.process.loaded.model.attention_layers.values():
            assert layer.first_backend() is load_backend(name)
    sampling = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    with client_of(nodes) as client:
        prefill = nodes[1].info if len(nodes) > 1 else None
        for round_ in range(2):
            prompts = {n: random_prompt(n, seed=n, vocab_size=2048) for n in LENGTHS}
            results = {
                n: client.submit(f"{round_}-{n}", p, sampling, decode=nodes[0].info, prefill=prefill)
                for n, p in prompts.items()
            }
            client.wait()
            for length, prompt in prompts.items():
                assert results[length].failed is None, results[length].failed
                check_against_reference(DEMO, prompt, results[length].output(), torch.bfloat16)
