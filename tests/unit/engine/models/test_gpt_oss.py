"""GPT-OSS by layers of our own: the logits that transformers makes of what a checkpoint says, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_logits import logits_in_chunks
from quantised_checkpoints import mxfp4_folders
from safetensors.torch import load_file, save_file
from tiny_hf_models import FAMILIES, tiny_hf_model

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.contracts.model_config import is_native, load_model_config
from tandem.engine.models.choice import check_shares, dtype_of_weights, load_config
from tandem.engine.models.loader import load_model
from tandem.engine.parallel.sharding import Shard

LENGTH = 70  # tokens of a prompt, beyond windows and trained lengths
TOLERANCE = 1e-4  # of the largest logit
# As OpenAI's checkpoints have it.
YARN = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 16}
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "yarn": {"rope_parameters": {**YARN, "rope_theta": 150000.0}},
    "no rope": {"rope_parameters": None},
    "layer types": {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
    "no windows": {"layer_types": ["full_attention"] * 4},
    "no biases": {"attention_bias": False},
    "gate": {"swiglu_limit": 1.0, "swiglu_alpha": 1.1},
    "one expert": {"num_experts_per_tok": 1},
    "tied": {"tie_word_embeddings": True},
    "other heads": {"head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 3},
}


def made(folder: Path, changes: dict[str, Any]) -> Any:
    """transformers' model of random weights, biases and sinks among them, in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gpt_oss", **{**FAMILIES["gpt_oss"], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        scale = 1.6 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.5
        parameter.data = scale * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    made(tmp_path / "plain", CASES[case])
    folder, twin = mxfp4_folders(tmp_path / "plain", tmp_path)
    from transformers import AutoModelForCausalLM

    assert is_native(folder)
    model = load_model(folder, load_model_config(folder), ModelOptions(str(folder)), torch.device("cpu"), torch.float32)
    tokens = torch.randint(0, 512, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    actual = logits_in_chunks(model, tokens, (LENGTH - 20, 19, 1))
    theirs = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert float((actual - expected).abs().max() / expected.abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"quantization_config": None}, "experts are in MXFP4: serve it with --model-impl transformers"),
        ({"model_type": "mixtral", "architectures": None, "layer_types": None}, "of gpt_oss alone"),
        ({"sliding_window": None}, "sliding_window is not set"),
        ({"layer_types": ["full_attention"]}, "layer_types must say"),
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder, _ = mxfp4_folders(tiny_hf_model("gpt_oss"), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=why):
        load_model_config(folder)


def test_who_serves_which_checkpoint(tmp_path: Path) -> None:
    """Experts in 16 bits by transformers' modules, in MXFP4 by ours alone."""
    plain = tiny_hf_model("gpt_oss")
    folder, _ = mxfp4_folders(plain, tmp_path)
    assert not is_native(plain)
    assert load_config(plain, ModelOptions(str(plain))).layers[0].has_sinks
    with pytest.raises(CheckpointError, match="quantised weights are not supported for models with experts in MXFP4"):
        load_config(folder, ModelOptions(str(folder), model_impl="transformers"))


@pytest.mark.parametrize("kind", ["mxfp4", "plain"])
def test_the_type_is_that_of_the_weights_where_none_is_named(kind: str, tmp_path: Path) -> None:
    """As in OpenAI's own config.json."""
    plain = tiny_hf_model("gpt_oss")
    folder = plain if kind == "plain" else mxfp4_folders(plain, tmp_path)[0]
    own = tmp_path / "own"
    own.mkdir()
    weights = load_file(folder / "model.safetensors")
    halved = {name: each.bfloat16() if each.is_floating_point() else each for name, each in weights.items()}
    save_file(halved, own / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    for named, expected in ({}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"), ({"dtype": "float32"}, "float32"):
        unnamed = {name: value for name, value in raw.items() if name not in ("dtype", "torch_dtype")}
        (own / "config.json").write_text(json.dumps(unnamed | named))
        options = ModelOptions(str(own))
        assert dtype_of_weights(own, load_config(own, options), options) == expected


def test_shares_of_whole_groups(tmp_path: Path) -> None:
    folder, _ = mxfp4_folders(tiny_hf_model("gpt_oss"), tmp_path)
    options = ModelOptions(str(folder))
    assert check_shares(folder, options, Shard(0, 2)) == check_shares(folder, options, Shard(1, 4, True)) == 2
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 96}))
    with pytest.raises(ConfigError, match="no whole groups of 32"):
        check_shares(folder, options, Shard(0, 2))
