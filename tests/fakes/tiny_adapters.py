"""Random adapters in PEFT's format for tiny models, and what transformers generates with them merged."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tiny_models import Greedy, reference_greedy

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONV1D = ("c_attn", "c_proj", "c_fc")  # of GPT-2, whose weights are [inputs, outputs]


def tiny_adapter(
    folder: Path,
    base: Path,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    scale: float = 1.0,
    **fields: object,
) -> Path:
    """Writes an adapter of `base` into `folder`; `fields` go into its configuration. Its products are about as large as
    the base's, so that tokens differ."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            outputs, inputs = weight.t().shape if module.endswith(CONV1D) else weight.shape
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            tensors[f"{key}.lora_B.weight"] = scale * torch.randn(outputs, rank, generator=generator) / rank
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base), **fields}))
    return folder


def merged(folder: Path, base: Path, adapter: Path) -> Path:
    """The base with the adapter's products added to its weights, as PEFT's merge_and_unload makes it."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, added = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in added if name.endswith("lora_A.weight")]:
        a, b = added[name], added[name.replace("lora_A", "lora_B")]
        rank = math.sqrt(len(a)) if config.get("use_rslora") else len(a)
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        product = config["lora_alpha"] / rank * b @ a
        weights[f"{module}.weight"] += product.t() if module.endswith(CONV1D) else product
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def merged_greedy(folder: Path, base: Path, adapter: Path, prompt: Sequence[int], num_tokens: int) -> Greedy:
    """What transformers generates; `folder` is made where it is missing."""
    if not folder.exists():
        merged(folder, base, adapter)
    return reference_greedy(folder, list(prompt), num_tokens)
