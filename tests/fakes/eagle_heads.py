"""EAGLE-3 heads in the published format: of random weights for the demo model, and one that must be right, with the
model that it is right about."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import tandem.deploy
from tiny_models import VOCAB

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
FEATURE_LAYERS = (1, 2, 4)  # of the demo model's five, which are too few for the usual ones
DRAFT_VOCAB = 512
TINY_HEAD = {  # of a head for tiny models of all families
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": VOCAB, "draft_vocab_size": VOCAB // 4,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}  # fmt: skip


def random_head(folder: Path, seed: int = 0, **changes: object) -> Path:
    """For the demo model, with every fourth of its tokens."""
    config = json.loads((DEMO / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS)},
    }
    config |= changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    size, mlp, draft = config["hidden_size"], config["intermediate_size"], int(config["draft_vocab_size"])
    query, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc.weight": (size, 3 * size),
        "midlayer.self_attn.q_proj.weight": (query, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, query),
        "midlayer.mlp.gate_proj.weight": (mlp, size),
        "midlayer.mlp.up_proj.weight": (mlp, size),
        "midlayer.mlp.down_proj.weight": (size, mlp),
        "lm_head.weight": (draft, size),
    }
    tensors = {name: torch.randn(shape, generator=generator) * 2 / shape[1] ** 0.5 for name, shape in shapes.items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 0.5 + torch.rand(size, generator=generator)
    step = config["vocab_size"] // draft
    tensors["d2t"] = torch.arange(draft) * (step - 1) + 1  # token of draft token w: w * step + 1
    tensors["t2d"] = torch.arange(config["vocab_size"]) % step == 1
    save_file(tensors, folder / "model.safetensors")
    return folder


SIZE = 64  # tokens, and elements: each token's embedding is an element
NUM_LAYERS = 8
WALKING = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": SIZE,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 0,
}


# The same as Qwen3, with two layers that see everything and six that slide.
WALKING_APART = WALKING | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "use_sliding_window": True,
    "sliding_window": 32,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
}


def next_tokens() -> torch.Tensor:
    """What follows each token: a walk through all of them."""
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(1))
    following = torch.empty(SIZE, dtype=torch.int64)
    following[order] = order.roll(-1)
    return following


def walking_model(folder: Path, apart: bool = False) -> Path:
    """A model whose layers add nothing, so that what follows is said by the newest token alone. `apart`: some of them
    slide."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(WALKING_APART if apart else WALKING))
    tensors = {"model.embed_tokens.weight": torch.eye(SIZE), "lm_head.weight": _walk(), "model.norm.weight": _ones()}
    for layer in range(NUM_LAYERS):
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in _layer(SIZE).items()}
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"].zero_()
        for name in ("q_norm", "k_norm") if apart else ():
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def knowing_head(folder: Path) -> Path:
    """The head that knows `walking_model`: its MLP goes one token on from the feature, its own head one more. It reads
    no keys, so it is right whenever it is given the right feature."""
    folder.mkdir(parents=True, exist_ok=True)
    config = WALKING | {"num_hidden_layers": 1, "draft_vocab_size": SIZE, "architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "config.json").write_text(json.dumps(config))
    layer = _layer(2 * SIZE)
    layer["self_attn.o_proj.weight"].zero_()
    # silu(8 * 4) * 8 of the one element that isn't 0, which the norm makes 8.
    layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"] = 4 * torch.eye(SIZE), torch.eye(SIZE)
    layer["mlp.down_proj.weight"] = (_walk() - torch.eye(SIZE)) / (32 * 8)
    tensors = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    tensors["midlayer.hidden_norm.weight"] = _ones()
    tensors["fc.weight"] = torch.cat([torch.eye(SIZE) / 3] * 3, dim=1)
    shuffled = torch.randperm(SIZE, generator=torch.Generator().manual_seed(2))
    tensors["lm_head.weight"], tensors["norm.weight"] = _walk()[shuffled].clone(), _ones()
    tensors["d2t"] = shuffled - torch.arange(SIZE)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _walk() -> torch.Tensor:
    """[SIZE, SIZE]: takes each token's element to that of the next."""
    matrix = torch.zeros(SIZE, SIZE)
    matrix[next_tokens(), torch.arange(SIZE)] = 1.0
    return matrix


def _ones() -> torch.Tensor:
    return torch.ones(SIZE)


def _layer(inputs: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": (64, inputs), "k": (32, inputs), "v": (32, inputs), "o": (SIZE, 64)}
    layer = {f"self_attn.{name}_proj.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("gate", "up", "down"):
        layer[f"mlp.{name}_proj.weight"] = torch.randn(SIZE, SIZE, generator=generator)
    return layer | {"input_layernorm.weight": _ones(), "post_attention_layernorm.weight": _ones()}
