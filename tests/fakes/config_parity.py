"""One config.json judged twice: by transformers and by this engine, over tiny models of the same random weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from model_logits import CPU, logits_in_chunks

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.model_config import ModelConfig, load_model_config
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.loader import targets_of
from tandem.engine.models.mixture_layer import mixture_parts

LENGTH = 48  # tokens of the prompt: longer than the windows and trained lengths that the cases name
TOLERANCE = 1e-4  # of the largest logit
MISSING = object()  # as a value: take the field out

_COMMON: dict[str, Any] = {
    "dtype": "float32",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_QWEN = {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1}
BASES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False, **_COMMON},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 5, **_COMMON},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_QWEN, **_COMMON},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, **_QWEN, **_COMMON},
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BASES["mixtral"] = {"architectures": ["MixtralForCausalLM"], "sliding_window": 5, **_EXPERTS, **_COMMON}
BASES["qwen3_moe"] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 5,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    **_EXPERTS,
    **_COMMON,
}
_LATENTS: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
del _LATENTS["head_dim"]
# Tests of others' fields go through BASES.
LATENT_BASES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy", **_LATENTS},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "n_group": 2, "topk_group": 1, **_LATENTS},
}
for _name, _base in {**BASES, **LATENT_BASES}.items():
    _base["model_type"] = _name


@dataclass(frozen=True)
class Verdict:
    """`refusal`: why this engine refuses the file. Otherwise `error` says why transformers does, or `distance` how
    far the logits are apart, as a share of the largest."""

    refusal: str = ""
    error: str = ""
    distance: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether the file was accepted and transformers computes something else, or refuses it."""
        return not self.refusal and (bool(self.error) or self.differs)

    @property
    def differs(self) -> bool:
        """Whether both computed something, and not the same; NaN is never the same."""
        return not self.refusal and not self.error and not self.distance < TOLERANCE


def changed(kind: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    base = {**BASES, **LATENT_BASES}[kind]
    return {name: value for name, value in {**base, **changes}.items() if value is not MISSING}


def judge(raw: Mapping[str, Any], folder: Path) -> Verdict:
    """Any error but CheckpointError from this engine is the test's to see."""
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        config = load_model_config(folder)
    except CheckpointError as error:
        return Verdict(refusal=str(error))
    tokens = torch.randint(0, config.vocab_size, (min(LENGTH, config.max_model_len),), generator=_seeded(2)).tolist()
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    try:
        theirs = _their_model(folder)
        expected = _their_logits(theirs, tokens)
    except Exception as error:  # whatever it raises: it does not compute this file
        return Verdict(error=f"{type(error).__name__}: {error}")
    ours = DecoderModel(config, torch.float32, CPU)
    targets, weights = targets_of(ours, config), _as_stored(theirs, config)
    if {name: part.shape for name, part in targets.items()} != {name: one.shape for name, one in weights.items()}:
        return Verdict(error="transformers' model has other parameters")
    for name, target in targets.items():
        target.copy_(weights[name].detach())
    ours.finish_loading()
    actual = logits_in_chunks(ours.eval(), tokens, _steps(tokens))
    # Once in one step and once in two: transformers alone may take those for different models.
    distances = [float((actual - logits).abs().max() / logits.abs().max()) for logits in expected]
    return Verdict(distance=max(distances, key=lambda distance: (distance != distance, distance)))


def _as_stored(theirs: torch.nn.Module, config: ModelConfig) -> dict[str, torch.Tensor]:
    """transformers' parameters by their names in checkpoints, which have experts one by one."""
    weights: dict[str, torch.Tensor] = {}
    biases = ((name, each) for name, each in theirs.named_buffers() if name.endswith("e_score_correction_bias"))
    for name, parameter in (*theirs.named_parameters(), *biases):
        own = name.removeprefix("model.")
        experts = config.mixture.own if config.mixture is not None else range(0)
        weights |= mixture_parts(own, parameter, config.architecture, experts) or {name: parameter}
    return weights


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _steps(tokens: list[int]) -> tuple[int, int]:
    """Two steps; the tokens of the second one find the others in the cache."""
    second = len(tokens) // 4
    return len(tokens) - second, second


def _their_model(folder: Path) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if getattr(model.config, "_experts_implementation", None):
        model.config._experts_implementation = "eager"  # its grouped products take few sizes
    generator = _seeded(4)
    for parameter in model.parameters():
        scale = 1.6 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.3
        parameter.data = scale * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
    model.tie_weights()
    return model


def _their_logits(model: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """fp32 [T, V] each: of the whole prompt at once, and in two steps with a cache."""
    tokens, (split, _) = torch.tensor([token_ids]), _steps(token_ids)
    with torch.inference_mode():
        whole = model(tokens, return_dict=True).logits[0]
        first = model(tokens[:, :split], use_cache=True, return_dict=True)
        second = model(tokens[:, split:], past_key_values=first.past_key_values, use_cache=True, return_dict=True)
    return [whole, torch.cat((first.logits[0], second.logits[0]))]
