"""Layers of both kinds on CUDA, decode steps in graphs with a block table for each: the first token that differs from
fp32 on a CPU must be a near tie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from near_ties import check_against_reference
from quantised_checkpoints import quantised_folders
from tier_nodes import always_loading, until_saved
from tiny_hf_models import tiny_hf_model

from in_process_cluster import Node, client_of, cuda_pair, node_options
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (1, 17, 90, 300, 700)
NUM_TOKENS = 48
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("kind", ["qwen2_hybrid", "gemma3_text", "gpt_oss", "gpt_oss mxfp4", "cohere2"])
def test_greedy_against_fp32(kind: str, tmp_path: Path) -> None:
    """Of short rows, which one kernel takes with their stores, and long ones; split and alone, at once. A mixture in 32
    bits: in 16 a rounding sends tokens to other experts."""
    plain, _, form = kind.partition(" ")
    folder = twin = tiny_model(kind) if kind == "qwen2_hybrid" else tiny_hf_model(plain)
    if form:
        folder, twin = quantised_folders(folder, tmp_path, form)
    dtype = "float32" if plain == "gpt_oss" else "bfloat16"
    nodes = decode, prefill = cuda_pair(folder, dtype, chunk=64)
    assert decode.process.pool.windows.num_each > 0
    assert decode.process.loaded.replays_graphs
    with client_of(nodes) as client:
        results = {}
        for length in LENGTHS:
            prompt = random_prompt(length, seed=length)
            split = client.submit(f"s{length}", prompt, SAMPLING, decode=decode.info, prefill=prefill.info)
            alone = client.submit(f"a{length}", prompt, SAMPLING, decode=decode.info)
            results[length] = (prompt, split, alone)
        client.wait()
        for prompt, *both in results.values():
            for result in both:
                assert result.failed is None, result.failed
                check_against_reference(twin, prompt, result.output(), getattr(torch, dtype))


def test_prompts_come_back_from_host_memory() -> None:
    folder, prompts = tiny_model("qwen2_hybrid"), [random_prompt(400, seed=seed) for seed in range(4)]
    options = node_options("unified", folder, device="cuda", num_blocks=40, chunk=48, host_tier_bytes=16 << 20)
    node = always_loading(Node(options))
    with client_of([node]) as client:
        for turn, index in enumerate((0, 1, 2, 3, 0, 1)):
            result = client.submit(f"r{turn}", prompts[index], SAMPLING, decode=node.info)
            client.wait()
            until_saved(node)
            assert result.failed is None, result.failed
            check_against_reference(folder, prompts[index], result.output(), torch.float32)
        assert node.process.tiers is not None
        assert node.process.tiers.manager.counts()["tier_host_hits"] > 0
