"""The demo model as another kind of model: the same weights, which so say other things."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tandem.deploy.options import DEMO_MODEL

# Qwen2 is Llama with biases, here zeros, and the one of our own decoders whose layers may slide each for itself.
CHANGES: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 100,
    "max_window_layers": 0,
    "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "full", "sliding", "sliding")],
}


NUM_EXPERTS, TOP_K = 5, 2


def make_changed_model(folder: Path, change: str) -> Path:
    """Writes it there: some layers "slide", or each has "experts"."""
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(DEMO_MODEL / "model.safetensors")
    if change == "slide":
        config |= CHANGES
        _add_biases(weights)
    else:
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        config |= {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
        _make_experts(weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def _add_biases(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name.replace("weight", "bias")] = torch.zeros(len(weights[name]), dtype=weights[name].dtype)


def _make_experts(weights: dict[str, torch.Tensor]) -> None:
    """Each layer's MLP becomes experts that differ a little."""
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in weights if ".mlp." in name]:
        layer, _, matrix = name.partition(".mlp.")
        part = {"gate_proj.weight": "w1", "down_proj.weight": "w2", "up_proj.weight": "w3"}[matrix]
        whole = weights.pop(name)
        for expert in range(NUM_EXPERTS):
            noise = 0.2 * torch.randn(whole.shape, generator=generator).to(whole.dtype)
            weights[f"{layer}.block_sparse_moe.experts.{expert}.{part}.weight"] = whole * (1 + noise)
        if part == "w1":
            gate = torch.randn(NUM_EXPERTS, whole.shape[1], generator=generator).to(whole.dtype)
            weights[f"{layer}.block_sparse_moe.gate.weight"] = gate
