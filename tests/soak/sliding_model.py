"""The demo model as one of which some layers slide: the same weights, which so say other things."""

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


def make_sliding_model(folder: Path) -> Path:
    """Writes it there."""
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **CHANGES}))
    weights = load_file(DEMO_MODEL / "model.safetensors")
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name.replace("weight", "bias")] = torch.zeros(len(weights[name]), dtype=weights[name].dtype)
    save_file(weights, folder / "model.safetensors")
    return folder
