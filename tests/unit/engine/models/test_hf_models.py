"""What becomes of folders that run by transformers' modules, before they serve (tests/cluster/test_hf_models.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import tiny_adapter
from tiny_encoder_models import tiny_encoder_model
from tiny_hf_models import REFUSED, tiny_hf_model

from tandem.engine.adapters.adapter_files import read_adapter
from tandem.engine.adapters.layout import AdapterLayout
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import AdapterError, CheckpointError, ConfigError
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.models.choice import load_chosen, load_config
from tandem.engine.models.hf import experts
from tandem.engine.models.hf.config import HFConfig
from tandem.engine.models.hf.model import HFModel
from tandem.engine.models.hf.towers import TowerEncoder
from tandem.engine.models.hf.trials.routes import Routes
from tandem.engine.models.identity import model_identity
from tiny_models import tiny_model


def config_of(folder: Path, **options: str) -> HFConfig:
    config = load_config(folder, ModelOptions(str(folder), **options))  # type: ignore[arg-type]
    assert isinstance(config, HFConfig)
    return config


def model_of(folder: Path, config: HFConfig, dtype: torch.dtype = torch.float32, **options: str) -> HFModel:
    asked = ModelOptions(str(folder), **options)  # type: ignore[arg-type]
    model = load_chosen(folder, config, asked, torch.device("cpu"), dtype)
    assert isinstance(model, HFModel)
    return model


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """A family's folder with other fields in its config.json."""

    def copy(family: str, **fields: object) -> Path:
        folder = tmp_path / family
        shutil.copytree(tiny_hf_model(family), folder)
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, **fields}))
        return folder

    return copy


@pytest.mark.parametrize("family", REFUSED)
def test_what_has_attention_or_state_of_its_own_is_refused(family: str) -> None:
    with pytest.raises(CheckpointError, match=f"{family} can't be served"):
        config_of(tiny_hf_model(family))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model_type": "no_such_model"}, "transformers can't read it"),
        ({"model_type": "bert"}, "no class of it that generates|not causal|layers"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' are not supported"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "is not run"),
        ({"is_encoder_decoder": True}, "no class of it that generates"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
    ],
)
def test_a_folder_that_cannot_be_served_says_why(fields: dict, why: str, copied: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=why):
        config_of(copied("gpt2", **fields))


@pytest.mark.parametrize(
    ("left_out", "family"),
    [("window", "cohere2"), ("soft_cap", "gemma2"), ("chunk", "llama4_text"), ("has_sinks", "gpt_oss")],
)
def test_the_trial_finds_what_attention_leaves_out(left_out: str, family: str) -> None:
    """No family is served over attention that misses an option of it."""
    folder = tiny_hf_model(family)
    config = config_of(folder)
    nothing = False if left_out == "has_sinks" else None
    poorer = tuple(layer._replace(**{left_out: nothing}) for layer in config.layers)
    assert poorer != config.layers
    with pytest.raises(CheckpointError, match="differ from those of its own attention"):
        model_of(folder, msgspec.structs.replace(config, layers=poorer))


def test_tokens_that_go_to_other_experts_by_a_rounding_are_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each pass chooses anew, at random."""
    folder, really = tiny_hf_model("gpt_oss"), experts.routed

    def undecided(module: Any, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.rand(len(ids_Tk), module.num_experts).topk(ids_Tk.shape[1]).indices
        return really(module, ids, weights_Tk)

    monkeypatch.setattr(experts, "routed", undecided)
    model_of(folder, config_of(folder))
    monkeypatch.setattr(Routes, "repeating", lambda self, places: nullcontext())
    with pytest.raises(CheckpointError, match="differ from those of its own attention"):
        model_of(folder, config_of(folder))


def test_nothing_is_kept_of_the_items_of_a_pass() -> None:
    """Of the trial's, or of one that was encoded: the head would make positions of it."""
    folder = tiny_hf_model("qwen2_5_vl")
    model = model_of(folder, config_of(folder))
    assert isinstance(model.media_encoder, TowerEncoder)

    def kept() -> list[object]:
        return [vars(module)["rope_deltas"] for module in model.head.modules() if "rope_deltas" in vars(module)]

    assert kept() == [None]
    arrays = model.media_encoder.tower.example(model.head.config)
    model.media_encoder.encode(MediaItem.of(0, arrays["input_ids"].shape[1], "image", arrays))
    assert kept() == [None]


def test_weights_must_be_those_of_the_config(copied: Callable[..., Path]) -> None:
    folder = copied("gpt2")
    weights = load_file(folder / "model.safetensors")
    some = next(name for name in weights if name.endswith("attn.c_attn.weight"))
    for changed, why in (
        ({name: each for name, each in weights.items() if name != some}, "no shard holds"),
        ({**weights, "transformer.h.0.more.weight": weights[some].clone()}, "does not have"),
        ({**weights, some: weights[some][:, :-1].contiguous()}, f"{some} has another shape"),
    ):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=why):
            model_of(folder, config_of(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        model_of(folder, config_of(folder))


def test_embeddings_that_follow_the_length_of_a_batch_end_where_they_would_change(copied: Callable[..., Path]) -> None:
    """Else one request's tokens would depend on its neighbours'."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    folder = copied("olmo2", rope_parameters={**rope, "original_max_position_embeddings": 512})
    config = config_of(folder)
    assert config.max_model_len == 512
    model_of(folder, config)
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    folder = copied("phi3", rope_parameters=rope, original_max_position_embeddings=256)
    config = config_of(folder)
    assert config.max_model_len == 256
    model_of(folder, config)


def test_made_up_weights_and_a_native_architecture() -> None:
    """--load-format dummy needs no weights; --model-impl transformers takes what we have modules for, too."""
    folder = tiny_model("qwen2")
    config = config_of(folder, model_impl="transformers")
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (3, 2, 16)
    model = model_of(folder, config, torch.bfloat16, load_format="dummy")
    assert model.project(torch.zeros(2, 64, dtype=torch.bfloat16)).shape == (2, config.vocab_size)


def test_identity_is_of_all_of_the_config(copied: Callable[..., Path]) -> None:
    """Two nodes may exchange KV only if every field is the same."""
    first = tiny_hf_model("granite")
    other = copied("granite", attention_multiplier=0.31)
    ours, theirs = (model_identity(folder, config_of(folder), 16, "float32") for folder in (first, other))
    assert ours.weights == theirs.weights
    assert ours.config != theirs.config


def test_experts_and_encoders_take_no_adapters(tmp_path: Path) -> None:
    folder, expert = tiny_hf_model("glm4_moe"), "model.layers.1.mlp.experts.0.up_proj"
    sites = model_of(folder, config_of(folder)).adapter_sites()
    assert len(sites) == 4 * 4 + 4 * 3, "q, k, v and o of each layer, and a plain or shared MLP"
    assert not any(".experts." in site.name for site in sites)
    adapter = tiny_adapter(tmp_path / "adapter", folder, targets=("q_proj",))
    tensors = {f"base_model.model.{expert}.lora_{name}.weight": torch.zeros(4, 4) for name in "AB"}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=rf"no {expert} that takes adapters \(experts"):
        read_adapter(str(adapter)).check(AdapterLayout.of(sites, 8))
    translator = tiny_encoder_model("marian")
    with pytest.raises(ConfigError, match="has an encoder, and takes no adapters"):
        model_of(translator, config_of(translator)).adapter_sites()
