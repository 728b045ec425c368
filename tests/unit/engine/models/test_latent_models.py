"""Models of our own that keep latents: what is kept, quantised, adapted, passed over and refused (greedy tokens:
tests/cluster/test_hf_models.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_logits import CPU, logits_in_chunks
from quantised_checkpoints import quantised_folders
from safetensors.torch import load_file, save_file
from tiny_hf_models import tiny_hf_model

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.device.kv_pool import make_layout
from tandem.engine.models.choice import load_config
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.hf.config import HFConfig
from tandem.engine.models.identity import model_identity
from tandem.engine.models.loader import load_model
from tiny_models import random_prompt, reference_model

PROMPT = random_prompt(70, seed=3)
FAMILIES = ("deepseek_v2", "deepseek_v3")


def load(folder: Path, **options: str) -> DecoderModel:
    given = ModelOptions(str(folder), **options)  # type: ignore[arg-type]
    return load_model(folder, load_config(folder, given), given, CPU, torch.float32)  # type: ignore[arg-type]


def logits(model: DecoderModel) -> torch.Tensor:
    return logits_in_chunks(model, PROMPT, [40, 1, 29])


@pytest.mark.parametrize(("family", "form"), [("deepseek_v2", "fp8_blocks"), ("deepseek_v3", "fp8_wide_blocks")])
def test_logits_are_those_of_the_dequantised_weights(family: str, form: str, tmp_path: Path) -> None:
    """DeepSeek-V2 has two shared experts, whose MLP is cut in two, V3 a low rank for queries."""
    folder, twin = quantised_folders(tiny_hf_model(family), tmp_path, form)
    with torch.inference_mode():
        expected = reference_model(twin)(torch.tensor([PROMPT])).logits[0]
    model = load(folder)
    assert model.layers[1].self_attn.first.quantised is not None
    assert not isinstance(model.layers[1].mlp.experts.gate_up_proj, torch.Tensor)
    assert (logits(model) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_weights_made_smaller_at_load_leave_what_expands_latents_as_it_is() -> None:
    made, plain = (load(tiny_hf_model("deepseek_v3"), quantization=each) for each in ("fp8", "auto"))
    ours, theirs = (model.layers[2].self_attn for model in (made, plain))
    assert ours.o_proj.quantised is not None
    assert torch.equal(ours.kv_b_proj.weight, theirs.kv_b_proj.weight)
    error = (logits(made) - logits(plain)).norm() / logits(plain).norm()
    assert 1e-3 < error < 1, error  # a token that goes to another expert by a rounding is another token


def test_made_up_weights_serve() -> None:
    made = logits(load(tiny_hf_model("deepseek_v2"), load_format="dummy"))
    assert made.isfinite().all()
    assert made.std() > 0.1


def test_layers_behind_the_last_are_passed_over(tmp_path: Path) -> None:
    """DeepSeek-V3's checkpoints have one, which guesses tokens. Of any other tensor it is said that it is too much."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_hf_model("deepseek_v3"), folder)
    weights = load_file(folder / "model.safetensors")
    more = {"model.layers.4.eh_proj.weight": torch.zeros(4, 8)}
    save_file({**weights, **more}, folder / "model.safetensors")
    assert torch.equal(logits(load(folder)), logits(load(tiny_hf_model("deepseek_v3"))))
    save_file({**weights, "model.layers.5.eh_proj.weight": torch.zeros(4, 8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds model.layers.5.eh_proj.weight, which a model of this config"):
        load(folder)


def test_latents_are_a_layout_and_an_identity_of_their_own() -> None:
    folder = tiny_hf_model("deepseek_v3")
    config, whole_heads = (
        load_config(folder, ModelOptions(str(folder), model_impl=impl)) for impl in ("auto", "transformers")
    )
    assert isinstance(whole_heads, HFConfig)
    group = make_layout(config, 16, torch.bfloat16).group
    assert (group.kind, group.num_kv_heads, group.num_planes, group.head_dim) == ("latent", 1, 1, 24)
    assert group.payload_bytes(16) == 16 * 4 * 24 * 2
    assert make_layout(whole_heads, 16, torch.bfloat16).group.num_kv_heads == 4
    identities = {model_identity(folder, each, 16, "float32") for each in (config, whole_heads)}
    assert len(identities) == 2
    with pytest.raises(ConfigError, match="latents are kept in 16 bits"):
        make_layout(config, 16, torch.float8_e4m3fn)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_for_products_of_tokens(family: str) -> None:
    """What expands latents is none; experts take none, those shared among them."""
    model = load(tiny_hf_model(family))
    sites = {site.name: [part.module for part in site.parts] for site in model.adapter_sites()}
    for name in sites:
        model.get_submodule(name)
    first = "q_a_proj" if family == "deepseek_v3" else "q_proj"
    product = "q_a_kv_a_proj" if family == "deepseek_v3" else "q_kv_a_proj"
    layer = "model.layers.1.self_attn"
    assert sites[f"layers.1.self_attn.{product}"] == [f"{layer}.{first}", f"{layer}.kv_a_proj_with_mqa"]
    assert not any("kv_b_proj" in name or "experts" in name for name in sites)
    assert "layers.0.mlp.down_proj" in sites


def test_shared_experts_stored_unlike_the_others_are_refused(tmp_path: Path) -> None:
    folder, _ = quantised_folders(tiny_hf_model("deepseek_v3"), tmp_path, "fp8_blocks")
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if ".shared_experts." in name]:
        found = weights.pop(name)
        if name.endswith(".weight"):
            weights[name] = found.float()
    save_file(weights, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["modules_to_not_convert"] = ["re:.*shared_experts"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="shared experts are quantised, others not, or the other way"):
        load(folder)


def test_compiled_passes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"doesn't go with latents.*--model-impl transformers"):
        load(tiny_hf_model("deepseek_v2")).compile_forward()
