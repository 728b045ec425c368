"""Models that run by transformers' modules, and mixtures of experts and models with latents that run by ours: greedy
tokens equal transformers', on one node and split over two."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from split_pair import GREEDY, changed, run_both_ways
from tier_nodes import always_loading, until_saved
from tiny_adapters import merged, tiny_adapter
from tiny_hf_models import FAMILIES, tiny_hf_model
from waiting import wait_until

from in_process_cluster import BLOCK, Client, Node, Result, node_options
from tandem.engine.adapters.adapter_files import read_adapter
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.wire.parts import AdapterRef
from tiny_models import check_greedy, random_prompt, tiny_model

LENGTHS = (1, 17, 90, 130)


# Of those that run by transformers' modules, each with what no other of these has: learned positions, ALiBi, parallel
# blocks, fused weights and a window, capped logits, a model within a model, sinks and experts, chunks, latents.
QUICK = ("gpt2", "bloom", "falcon", "phi3", "gemma2", "gemma3", "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3")
OURS = ("mixtral", "qwen3_moe")  # these run by modules of our own
# What an adapter of each is for; "all-linear" of PEFT would say as much.
ADAPTED = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "project_in", "project_out"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gemma2": ("q_proj", "v_proj", "gate_proj", "down_proj"),
    "falcon": ("query_key_value", "dense"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek_v3": ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"),
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in FAMILIES if each not in OURS],
)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    folder = tiny_hf_model(family)
    for prompt, output in run_both_ways(folder, LENGTHS):
        check_greedy(folder, prompt, output, GREEDY.max_tokens)


def test_what_transformers_passes_over_changes_no_token(tmp_path: Path) -> None:
    """DeepSeek-V3's class names the layer behind its 61st, which guesses tokens (MTP), and no other."""
    plain, folder = tiny_hf_model("deepseek_v3"), tmp_path / "model"
    shutil.copytree(plain, folder)
    weights = load_file(folder / "model.safetensors")
    own = {name: each for name, each in weights.items() if ".layers.3." in name}
    more = {name.replace(".layers.3.", ".layers.61."): each.clone() for name, each in own.items()}
    more |= {"model.layers.61.eh_proj.weight": torch.ones(32, 64), "model.layers.61.enorm.weight": torch.ones(32)}
    save_file({**weights, **more}, folder / "model.safetensors", {"format": "pt"})
    prompt = random_prompt(90, seed=5)
    outputs = []
    for each in (plain, folder):
        model = ModelOptions(str(each), model_impl="transformers")
        node = Node(replace(node_options("unified", each), model=model))
        outputs.append(answered(node, prompt).output())
        node.stop()
    assert outputs[0] == outputs[1]
    check_greedy(plain, prompt, outputs[0], 4)
    save_file(
        {**weights, "model.layers.5.enorm.weight": torch.ones(32)}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=r"hold model.layers.5.enorm.weight, which a model of this config.json"):
        Node(replace(node_options("unified", folder), model=model))


@pytest.mark.parametrize("kind", [pytest.param(OURS[0], marks=pytest.mark.slow), OURS[1]])
def test_greedy_tokens_of_mixtures_of_experts(kind: str) -> None:
    """Of Qwen3-MoE's layers one has a plain MLP."""
    for prompt, output in run_both_ways(tiny_model(kind), LENGTHS):
        check_greedy(tiny_model(kind), prompt, output, GREEDY.max_tokens)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each != "gpt2")) for each in FAMILIES]
)
def test_lower_tiers_and_fp8_hold_its_kv(family: str) -> None:
    """Prompts that a small pool has forgotten come back from host memory, and what fp8 costs is measured."""
    folder, prompts = tiny_hf_model(family), [random_prompt(length, seed=length) for length in (113, 121, 130)]
    node = always_loading(Node(node_options("unified", folder, num_blocks=12)))
    results = []
    for prompt in prompts * 2:
        results.append(answered(node, prompt))
        check_greedy(folder, prompt, results[-1].output(), 4)
        until_saved(node)
    reused, whole = [result.num_reused_tokens for result in results], [len(prompt) // BLOCK for prompt in prompts]
    assert reused == [0, 0, 0, *(num * BLOCK for num in whole)], "some was computed again"
    # Pools of layers of both kinds may still hold a leading block.
    assert node.process.tiers.manager.counts()["tier_host_hits"] >= sum(whole[:2]) - 1
    node.stop()
    if family.startswith("deepseek"):
        return  # latents are kept in 16 bits or more
    node = Node(node_options("unified", folder, num_blocks=12, kv_cache_dtype="fp8_e4m3", kv_quality_sample_rate=1.0))
    answered(node, prompts[0])
    quality = node.process.quality
    assert quality is not None
    wait_until(lambda: quality.counters()["kv_quality_samples"] >= 3, "steps to be measured")
    counters = quality.counters()
    assert 1e-4 < counters["kv_quality_error"] / counters["kv_quality_samples"] < 0.5
    node.stop()


def answered(node: Node, prompt: list[int]) -> Result:
    client = Client(node.info)
    result = client.submit(secrets.token_hex(8), prompt, changed(GREEDY, max_tokens=4), decode=node.info)
    client.wait(result)
    client.close()
    assert result.failed is None, result.failed
    return result


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each != "gpt2")) for each in ADAPTED]
)
def test_adapters_make_the_tokens_of_merged_weights(family: str, tmp_path: Path) -> None:
    """Beside them, and of the same prompts, requests without."""
    base = tiny_hf_model(family)
    adapter = tiny_adapter(tmp_path / "adapter", base, targets=ADAPTED[family], scale=0.7)
    with_it = merged(tmp_path / "merged", base, adapter)
    made = run_both_ways(base, (17, 90), AdapterRef(str(adapter), read_adapter(str(adapter)).digest))
    folders = [with_it] * 4 + [base] * 4
    for folder, (prompt, output) in zip(folders, made, strict=True):
        check_greedy(folder, prompt, output, GREEDY.max_tokens)
