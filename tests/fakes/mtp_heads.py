"""Tiny checkpoints with a layer that guesses (multi-token prediction), named as those of DeepSeek-V3, GLM-4.5 and MiMo
are: of random weights, and ones that know their model."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from eagle_heads import SIZE, next_tokens
from safetensors.torch import load_file, save_file
from tiny_hf_models import tiny_hf_model

from tiny_models import tiny_model

FAMILIES = ("deepseek_v3", "mimo", "glm4_moe")  # the last runs by transformers' modules
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class MtpCheckpoint:
    """`served` is what a node gets. transformers reads `plain`, the same model without a head, and `deeper`, in which
    the head's layer is the model's last."""

    family: str
    served: Path
    plain: Path
    deeper: Path

    @property
    def num_layers(self) -> int:
        return int(json.loads((self.served / "config.json").read_text())["num_hidden_layers"])

    @property
    def prefix(self) -> str:
        """Of the names of the head's tensors."""
        return "model.mtp_layers.0." if self.family == "mimo" else f"model.layers.{self.num_layers}."

    def tensors(self) -> Tensors:
        return load_file(self.served / "model.safetensors")

    def rewrite(self, tensors: dict[str, torch.Tensor | None]) -> None:
        """Changes tensors of what is served; None leaves one out."""
        kept = {name: tensor for name, tensor in {**self.tensors(), **tensors}.items() if tensor is not None}
        save_file(kept, self.served / "model.safetensors")

    def configure(self, **changes: Any) -> None:
        path = self.served / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def random_mtp(root: Path, family: str, seed: int = 0, *, has_own_matrices: bool = False) -> MtpCheckpoint:
    """A tiny model with a head of random weights. Published heads have the model's embedding and output matrix once
    more, or leave them out; `has_own_matrices`: others."""
    config, weights = _plain_model(family)
    generator = torch.Generator().manual_seed(seed)
    last, number = f"model.layers.{config['num_hidden_layers'] - 1}.", config["num_hidden_layers"]
    layer = {
        name.removeprefix(last): _drawn(each, generator) for name, each in weights.items() if name.startswith(last)
    }
    size = config["hidden_size"]
    head = {
        "enorm": _drawn(torch.empty(size), generator),
        "hnorm": _drawn(torch.empty(size), generator),
        "norm": _drawn(torch.empty(size), generator),
        "eh_proj": _drawn(torch.empty(size, 2 * size), generator),
    }
    matrices = {"embed_tokens": weights["model.embed_tokens.weight"], "shared_head.head": weights["lm_head.weight"]}
    if has_own_matrices:
        matrices = {name: torch.randn(matrix.shape, generator=generator) for name, matrix in matrices.items()}
    checkpoint = _written(root, family, config, weights, head, layer, matrices)
    deeper = {**weights, **{f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}}
    _write(checkpoint.deeper, _readable(config) | {"num_hidden_layers": number + 1}, deeper)
    return checkpoint


def knowing_mtp(root: Path, family: str) -> MtpCheckpoint:
    """A model that walks through its tokens (eagle_heads.py), and the head that knows it: it goes one token on from the
    feature, and its output matrix one more. It reads neither tokens nor keys, so it is right whenever it is given the
    right feature."""
    config, weights = _plain_model(family)
    config |= {"vocab_size": SIZE, "hidden_size": SIZE}
    walk = torch.zeros(SIZE, SIZE)
    walk[next_tokens(), torch.arange(SIZE)] = 1.0
    weights |= {
        "model.embed_tokens.weight": torch.eye(SIZE),
        "lm_head.weight": walk,
        "model.norm.weight": torch.ones(SIZE),
    }
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    layer = {name.removeprefix(last): tensor.clone() for name, tensor in weights.items() if name.startswith(last)}
    feature_first = family == "mimo"
    parts = (walk, torch.zeros(SIZE, SIZE)) if feature_first else (torch.zeros(SIZE, SIZE), walk)
    head = {name: torch.ones(SIZE) for name in ("enorm", "hnorm", "norm")} | {"eh_proj": torch.cat(parts, 1)}
    return _written(root, family, config, weights, head, layer, {})


def _plain_model(family: str) -> tuple[dict[str, Any], Tensors]:
    folder = tiny_model("qwen2") if family == "mimo" else tiny_hf_model(family)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    if family == "mimo":  # Qwen2 with an output matrix of its own
        generator = torch.Generator().manual_seed(5)
        weights["lm_head.weight"] = torch.randn(weights["model.embed_tokens.weight"].shape, generator=generator)
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "tie_word_embeddings": False}
        config |= {"attention_bias": True, "layer_types": None}
    return config | {"num_nextn_predict_layers": 1}, weights


def _readable(config: dict[str, Any]) -> dict[str, Any]:
    """For transformers, which has no MiMo."""
    is_mimo = config["model_type"] == "mimo"
    return config | ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]} if is_mimo else {})


def _drawn(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.dim() == 1:
        return 1 + 0.2 * torch.randn(like.shape, generator=generator)
    return 1.6 / like.shape[-1] ** 0.5 * torch.randn(like.shape, generator=generator)


def _written(
    root: Path,
    family: str,
    config: dict[str, Any],
    weights: Tensors,
    head: Tensors,
    layer: Tensors,
    matrices: Tensors,
) -> MtpCheckpoint:
    checkpoint = MtpCheckpoint(family, root / "served", root / "plain", root / "deeper")
    _write(checkpoint.plain, _readable(config), weights)
    _write(checkpoint.served, config, weights)
    names = {"norm": "shared_head.norm"}
    if family == "mimo":
        names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "norm": "final_layernorm"}
        names |= {"eh_proj": "input_proj"}
        matrices = {}
    own = {f"{names.get(name, name)}.weight": tensor for name, tensor in head.items()}
    own |= layer | {f"{name}.weight": tensor for name, tensor in matrices.items()}
    checkpoint.rewrite({f"{checkpoint.prefix}{name}": tensor.clone() for name, tensor in own.items()})
    return checkpoint


def _write(folder: Path, config: dict[str, Any], weights: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    for path in tiny_model("llama").glob("tokenizer*"):
        shutil.copy(path, folder)
