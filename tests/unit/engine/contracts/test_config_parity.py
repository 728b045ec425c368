"""A config.json that is accepted makes the logits that transformers makes of it, or it is refused by name.

Every field of every architecture is changed, left out, set to null and to wrong types, alone and in random company.
Never is a file accepted and something else computed.
"""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from config_parity import BASES, LATENT_BASES, MISSING, changed, judge

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.contracts.rope_config import ROPE_TYPES

Changes = Mapping[str, Any]
WRONG_TYPES: tuple[Any, ...] = ("7", "", 0, -1, 2.5, True, [], ["x"], {}, {"a": 1})
# transformers refuses wrong types of these too, although they change nothing; nor does it take 0 for 0.0.
NOT_READ = ("pad_token_id", "attention_dropout", "pretraining_tp", "use_cache", "output_hidden_states")
VALUES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (64, 97, 1 << 60),
    "hidden_size": (40, 36, 34, 32.0),
    "intermediate_size": (64, 33),
    "num_hidden_layers": (1, 3, 10**9),
    "num_attention_heads": (2, 8, 6, 3),
    "num_key_value_heads": (1, 4, 3, 8),
    "head_dim": (16, 6, 7, 4),
    "hidden_act": ("swish", "gelu", "relu", "SiLU"),
    "max_position_embeddings": (16, 4096, 64.0),
    "rms_norm_eps": (1e-3, 0.0, float("nan"), "1e-5"),
    "tie_word_embeddings": ("false",),
    "attention_bias": ("false",),
    "mlp_bias": ("false",),
    "sliding_window": (2, 7, 4096, 5.0),
    "use_sliding_window": ("false",),
    "max_window_layers": (1, 2, 100),
    "layer_types": (
        ["full_attention"] * 2,
        ["sliding_attention"] * 2,
        ["sliding_attention", "full_attention"],
        ["full_attention"],
        ["attention", "attention"],
        ["chunked_attention", "full_attention"],
    ),
    "dtype": ("bfloat16", "float16", "float64", "torch.float32", "int8"),
    "torch_dtype": ("bfloat16", "int8"),
    "model_type": ("llama", "mistral", "qwen2", "qwen3", "gemma", "Llama", "qwen3_moe", "qwen3_next"),
    "architectures": (
        ["LlamaForCausalLM"],
        ["MistralForCausalLM", "Qwen2ForCausalLM"],
        ["LlamaForCausalLM", "Qwen3ForCausalLM"],
        ["Qwen3ForSequenceClassification"],
        "LlamaForCausalLM",
        [7],
    ),
    "rope_theta": (500.0, 1000000, "10000", -5.0),
    "rope_parameters": ({"rope_theta": 500.0}, {"rope_type": "default"}, "yarn", {"full_attention": {"factor": 2.0}}),
    "rope_scaling": ({"rope_theta": 500.0}, {"type": "linear", "factor": 2.0}, "yarn", {"type": "default"}),
    "partial_rotary_factor": (0.5, 1.0, 1),
    "original_max_position_embeddings": (16, 64, 16.5),
    "bos_token_id": (500, [1, 2]),
    "eos_token_id": ([1, 2], 500, ["1"]),
    "pad_token_id": (0, 95),
    "quantization_config": ({"quant_method": "mxfp4"},),
    "is_causal": (False,),
    "attention_dropout": (0.5,),
    "pretraining_tp": (2,),
    "per_layer_config": ({"0": {"head_dim": 16}},),
    "text_config": ({"hidden_size": 64},),
    "use_cache": (False,),
    "output_hidden_states": (True,),
    "num_experts": (2, 8, 1),
    "num_local_experts": (2, 8),
    "num_experts_per_tok": (1, 4, 5),
    "moe_intermediate_size": (16, 32),
    "norm_topk_prob": (False, "false"),
    "decoder_sparse_step": (2, 3),
    "mlp_only_layers": ([0], [1, 7], ["x"]),
}
OF_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
OF_BIASES = ("attention_bias", "mlp_bias")
OF_MIXTURES = tuple(VALUES)[tuple(VALUES).index("num_experts") :]
# What other architectures know and these don't, and what only makes training or output differ.
FOREIGN = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "rotary_dim",
    "rotary_pct",
    "rope_interleaved",
    "use_qk_norm",
    "qkv_bias",
    "use_bias",
    "scale_depth",
    "mup_width",
    "n_head",
    "num_heads",
    "n_embd",
    "layer_norm_epsilon",
    "no_rope_layers",
    "num_experts",
    "output_attentions",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "kv_sharing_modes",
    "use_bidirectional_attention",
    "is_encoder_decoder",
    "is_decoder",
    "chunk_size_feed_forward",
    "default_theta",
    "rope_type",
)
SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 2.0},
    "longrope": {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    "proportional": {"rope_theta": 10000.0},
    "su": {"factor": 2.0},
}
ROPE_VALUES: dict[str, tuple[Any, ...]] = {
    "factor": (1.0, 4, 0.5, "4", 0, -2.0, None, MISSING, True),
    "rope_theta": (500.0, 100, 1.0, None, "10000", 0),
    "original_max_position_embeddings": (16, 32, 64, 1000, None, MISSING, 0, "16", 16.0),
    "low_freq_factor": (2.0, 4.0, None, MISSING, "1"),
    "high_freq_factor": (2, 1.0, 0.5, None, MISSING),
    "beta_fast": (16, 1.0, 0, None, "32", -1),
    "beta_slow": (2, 40.0, 0, None, -1),
    "attention_factor": (0.5, 2, 0.0, -1.0, None, "1", True),
    "mscale": (0.7, 1, 0, None, "1"),
    "mscale_all_dim": (1.3, 0, None),
    "truncate": (False, True, None, 0, "no"),
    "partial_rotary_factor": (1.0, 0.5, None, "1"),
    "rope_type": (None, "", "YARN", 5, MISSING),
    "type": ("linear", "default", None),
    "mrope_section": ([1, 1, 2],),
    "unknown": (1,),
}


def wrong(kind: str, cases: Iterable[Changes], folder: Path) -> tuple[list[str], int]:
    """(what was accepted and computed otherwise, how many were accepted)"""
    found, num_accepted, seen = [], 0, set()
    for changes in cases:
        raw = changed(kind, changes)
        if (text := repr(sorted(raw.items()))) in seen:
            continue
        seen.add(text)
        verdict = judge(raw, folder)
        num_accepted += not verdict.refusal
        if verdict.is_wrong:
            found.append(f"{kind} with {dict(changes)}: {verdict.error or verdict.distance}")
    return found, num_accepted


OF_LATENTS: dict[str, tuple[Any, ...]] = {
    "kv_lora_rank": (16,),
    "q_lora_rank": (8, MISSING),
    "qk_nope_head_dim": (8,),
    "qk_rope_head_dim": (6, 5),
    "v_head_dim": (8,),
    "n_routed_experts": (4, 6),
    "n_shared_experts": (1, 3, 0),
    "num_experts_per_tok": (1, 3, 9, MISSING),
    "moe_intermediate_size": (8,),
    "first_k_dense_replace": (0, 2, 7, MISSING),
    "topk_method": ("group_limited_greedy", "noaux_tc", "none"),
    "n_group": (4, 3, None, MISSING),
    "topk_group": (2, None, MISSING),
    "routed_scaling_factor": (2.0,),
    "norm_topk_prob": (True, False),
    "rope_interleave": (False, True),
    "attention_bias": (True,),
    "mlp_bias": (True,),
    "scoring_func": ("sigmoid", "softmax"),
    "moe_layer_freq": (2, 1),
    "num_key_value_heads": (2, MISSING),
    "head_dim": (8, 4),
    "num_experts": (4,),
    "num_local_experts": (4,),
    "rms_norm_eps": (1e-3,),
    "tie_word_embeddings": (True,),
    "sliding_window": (5,),
    "hidden_act": ("gelu",),
    "num_attention_heads": (2, 3),
    "rope_parameters": (
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
         "mscale": 0.7, "mscale_all_dim": 0.9},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1.3},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LATENT_BASES)
def test_fields_of_latents_changed_alone(kind: str, tmp_path: Path) -> None:
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    cases = [{}, groups, {**groups, "first_k_dense_replace": 0, "q_lora_rank": 8}]
    cases += [{name: value} for name, values in OF_LATENTS.items() for value in values]
    found, num_accepted = wrong(kind, cases, tmp_path)
    assert not found
    assert num_accepted > 20


def values_of(name: str, wrong_types: Iterable[Any]) -> list[Any]:
    if name in NOT_READ:
        return [MISSING, *VALUES[name]]
    ill = (value for value in wrong_types if (name, value) != ("rms_norm_eps", 0))
    return [MISSING, None, *ill, *VALUES[name]]


def rope_cases() -> list[Changes]:
    """Each type with each of its fields changed, in each of the places where it may stand."""
    fields = [(kind, name, value) for kind in SCALED for name, more in ROPE_VALUES.items() for value in more]
    cases: list[Changes] = []
    for index, (kind, name, value) in enumerate(fields):
        if kind not in ROPE_TYPES and index % 10:
            continue  # refused by its type alone
        given = {"rope_theta": 10000.0, "rope_type": kind, **SCALED[kind], name: value}
        given = {key: one for key, one in given.items() if one is not MISSING}
        old = {"type" if key == "rope_type" and name != "type" else key: one for key, one in given.items()}
        cases += (
            [{"rope_parameters": given}],
            [{"rope_scaling": old}],
            [{"rope_scaling": old, "rope_theta": 500.0, "original_max_position_embeddings": 20}],
            [{"rope_parameters": {**given, "rope_theta": 10000.0}, "rope_scaling": old, "rope_theta": 100}],
        )[index % 4]
    return cases


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_fields_of_mixtures_changed_alone(kind: str, tmp_path: Path) -> None:
    """Others are read as those of models without experts are: changed in the slow tests."""
    names = ("num_key_value_heads", "head_dim", "sliding_window", "use_sliding_window", "layer_types", *OF_MIXTURES)
    cases = [{}, *({name: value} for name in names for value in values_of(name, ()))]
    found, num_accepted = wrong(kind, cases, tmp_path)
    assert not found
    assert num_accepted > 20


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_fields_that_they_read_in_their_own_way(kind: str, tmp_path: Path) -> None:
    """Others are read as Llama's are: changed in the slow tests, with every wrong type."""
    names = ("num_key_value_heads", "head_dim", "architectures", *OF_WINDOWS, *OF_BIASES)
    cases = [{}, *({name: value} for name in names for value in values_of(name, ()))]
    found, num_accepted = wrong(kind, cases, tmp_path)
    assert not found
    assert num_accepted > 20


def test_every_field_changed_alone(tmp_path: Path) -> None:
    names = list(VALUES)
    ill = {name: WRONG_TYPES[index % len(WRONG_TYPES)] for index, name in enumerate(names)}
    cases = [{}, *({name: value} for name in names for value in values_of(name, (ill[name],)))]
    found, num_accepted = wrong("llama", cases, tmp_path)
    assert not found
    assert num_accepted > 60


def test_rotary_embeddings_said_in_every_way(tmp_path: Path) -> None:
    """A third of the cases, in which each place and each field is: the slow test has all."""
    found, num_accepted = wrong("llama", rope_cases()[::3], tmp_path)
    assert not found
    assert num_accepted > 40


def test_where_both_rope_fields_stand_the_older_holds(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    assert not judge(changed("llama", {"rope_scaling": yarn}), tmp_path).refusal
    both = {"rope_scaling": yarn, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    refused = judge(changed("llama", both), tmp_path).refusal
    assert re.search(r"rope_theta 500\.0 would no longer hold but 10000\.0; put rope_theta into rope_scaling", refused)
    assert not judge(changed("llama", {**both, "rope_scaling": {**yarn, "rope_theta": 500.0}}), tmp_path).refusal


def foreign_cases() -> list[Changes]:
    """Half a count is refused by some versions of transformers and not looked at by others."""
    counts = ("num_", "chunk_size_")
    return [{name: value} for name in FOREIGN for value in (0.5, 2) if value == 2 or not name.startswith(counts)]


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_fields_of_other_models(kind: str, tmp_path: Path) -> None:
    found, num_accepted = wrong(kind, foreign_cases(), tmp_path)
    assert not found
    assert num_accepted > 30


def test_fields_that_transformers_asks_any_config_for(tmp_path: Path) -> None:
    """Those that its shared parts read by name: a new one is noticed here. What it refuses is no difference."""
    from transformers import cache_utils, configuration_utils, masking_utils, modeling_rope_utils, modeling_utils

    modules = (cache_utils, configuration_utils, masking_utils, modeling_rope_utils, modeling_utils)
    source = "".join(inspect.getsource(module) for module in modules)
    names = set(re.findall(r"(?:get|has)attr\(\w*config, \"(\w+)\"", source)) - set(VALUES) - set(FOREIGN)
    assert "fusion_config" in names
    cases = [{name: value} for name in sorted(names) for value in (True, 2, {"a": 1})]
    assert not [changes for changes in cases if judge(changed("mistral", changes), tmp_path).differs]


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_every_field_with_every_wrong_type(kind: str, tmp_path: Path) -> None:
    found, _ = wrong(kind, ({name: value} for name in VALUES for value in values_of(name, WRONG_TYPES)), tmp_path)
    found += wrong(kind, rope_cases(), tmp_path)[0]
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("seed", range(5))
def test_random_company_of_odd_fields(kind: str, seed: int, tmp_path: Path) -> None:
    """Two to five fields at once, drawn more from the values that are accepted alone."""
    draw = random.Random(f"{kind}{seed}")
    alone = [{name: value} for name in VALUES for value in values_of(name, ())] + rope_cases()
    alone += foreign_cases()
    fine = [one for one in alone if not refused(kind, one, tmp_path)]
    cases: list[Changes] = []
    for _ in range(400):
        parts = [draw.choice(fine if draw.random() < 0.9 else alone) for _ in range(draw.randint(2, 5))]
        cases.append({name: value for part in parts for name, value in part.items()})
    found, num_accepted = wrong(kind, cases, tmp_path)
    assert not found
    assert num_accepted > 100


def refused(kind: str, changes: Changes, folder: Path) -> bool:
    (folder / "config.json").write_text(json.dumps(changed(kind, changes)))
    try:
        load_model_config(folder)
    except CheckpointError:
        return True
    return False
