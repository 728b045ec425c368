"""Quantised checkpoints compute what their numbers say, shared out or not, take less memory, and are told apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_logits import CPU, logits_in_chunks
from quantised_checkpoints import FORMATS, quantised_folders
from safetensors.torch import load_file, save_file

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.models.choice import check_shares, load_config
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.identity import model_identity
from tandem.engine.models.layers.basic import Linear
from tandem.engine.models.loader import load_model
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.parallel.sharding import Shard
from tandem.kernels.products.quantised_weight import FP8
from tiny_models import random_prompt, reference_model, tiny_model

PROMPT = random_prompt(100, seed=3)


def load(folder: Path, shard: Shard | None = None, dtype: torch.dtype = torch.float32, **options: str) -> DecoderModel:
    group = None if shard is None else TensorParallel(shard, CPU)
    given = ModelOptions(str(folder), **options)  # type: ignore[arg-type]
    config = load_config(folder, given)
    return load_model(folder, config, given, CPU, dtype, group=group)  # type: ignore[arg-type]


def num_bytes(model: DecoderModel) -> int:
    layers = [module for module in model.layers.modules() if isinstance(module, Linear)]
    return sum(each.weight.nbytes if each.quantised is None else each.quantised.num_bytes for each in layers)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("qwen3", form) for form in FORMATS),
        *(
            ("qwen3_moe", "fp8_blocks"),
            ("mixtral", "compressed_channel"),
            ("mixtral_64", "awq"),
            ("mixtral_64", "gptq"),
        ),
    ],
)
def test_logits_are_those_of_the_dequantised_weights(kind: str, form: str, tmp_path: Path) -> None:
    folder, twin = quantised_folders(tiny_model(kind), tmp_path, form)
    with torch.inference_mode():
        expected = reference_model(twin)(torch.tensor([PROMPT])).logits[0]
    actual = logits_in_chunks(load(folder), PROMPT, [64, 1, 35])
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()
    assert torch.equal(actual.argmax(1), expected.argmax(1))


@pytest.mark.parametrize(("form", "size"), [("fp8_blocks", 2), ("compressed_channel", 4), ("awq", 2), ("gptq", 2)])
def test_ranks_have_their_parts_of_weights_and_scales(form: str, size: int, tmp_path: Path) -> None:
    folder, twin = quantised_folders(tiny_model("llama_one_kv_head"), tmp_path, form)
    for rank in range(size):
        own, plain = load(folder, Shard(rank, size)), load(twin, Shard(rank, size))
        for name, module in own.layers.named_modules():
            if isinstance(module, Linear):
                assert module.quantised is not None
                assert torch.equal(module.quantised.dequantised(torch.float32), plain.layers.get_submodule(name).weight)


@pytest.mark.parametrize(("kind", "form"), [("qwen3_moe", "fp8_tensor"), ("mixtral_64", "packed_with_zeros")])
def test_ranks_have_their_parts_of_experts(kind: str, form: str, tmp_path: Path) -> None:
    folder, twin = quantised_folders(tiny_model(kind), tmp_path, form)
    for rank in range(2):
        own, plain = (
            load(folder, Shard(rank, 2)).layers[0].mlp.experts,
            load(twin, Shard(rank, 2)).layers[0].mlp.experts,
        )
        for name, weight in own.quantised().items():
            for expert in range(6):
                assert torch.equal(weight.dequantised(expert, torch.float32), getattr(plain, name)[expert])


def test_weights_made_smaller_at_load_are_within_the_formats_bound_and_in_half_the_memory() -> None:
    folder = tiny_model("llama")
    made, plain = load(folder, quantization="fp8"), load(folder, dtype=torch.bfloat16)
    assert num_bytes(made) < 0.55 * num_bytes(plain)
    for ours, theirs in zip(made.layers, load(folder).layers, strict=True):
        weight = theirs.mlp.down_proj.weight
        error = (ours.mlp.down_proj.quantised.dequantised(torch.float32) - weight).abs()
        # e4m3 has 3 bits behind the first: half of the last of them, or of the least number that a row's scale leaves.
        least = weight.abs().amax(1, keepdim=True) / 448 * 2**-10
        assert bool((error <= weight.abs() * 2**-4 + least).all())
    exact = logits_in_chunks(load(folder), PROMPT, [100])
    error = (logits_in_chunks(made, PROMPT, [100]) - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.25  # of a model of random weights, which loses more than a real one


def test_experts_made_smaller_at_load_are_within_the_formats_bound() -> None:
    folder = tiny_model("qwen3_moe")
    made, plain = load(folder, quantization="fp8"), load(folder)
    for ours, theirs in ((made.layers[i].mlp.experts, plain.layers[i].mlp.experts) for i in (0, 2)):
        assert ours.gate_up_proj.num_bytes < 0.3 * theirs.gate_up_proj.nbytes  # which are of 32 bits here
        for name, stack in ours.quantised().items():
            for expert, weight in enumerate(getattr(theirs, name)):
                least = weight.abs().amax(1, keepdim=True) / 448 * 2**-10
                error = (stack.dequantised(expert, torch.float32) - weight).abs()
                assert bool((error <= weight.abs() * 2**-4 + least).all())
    exact = logits_in_chunks(plain, PROMPT, [100])
    error = (logits_in_chunks(made, PROMPT, [100]) - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.6, error  # a token that goes to another expert by a rounding is another token


def test_ranks_that_would_cut_groups_apart_are_refused(tmp_path: Path) -> None:
    folder, _ = quantised_folders(tiny_model("llama"), tmp_path, "awq")
    assert check_shares(folder, ModelOptions(str(folder)), Shard(0, 2)) == 2
    with pytest.raises(ConfigError, match="16 inputs of a quantised layer on each rank are no whole groups of 32"):
        check_shares(folder, ModelOptions(str(folder)), Shard(0, 4))
    folder, _ = quantised_folders(tiny_model("qwen3_moe"), tmp_path, "fp8_blocks")
    with pytest.raises(ConfigError, match="24 inputs of a quantised layer on each rank are no whole groups of 32"):
        check_shares(folder, ModelOptions(str(folder)), Shard(0, 2))


def test_experts_that_are_no_whole_groups_of_four_bits_are_refused(tmp_path: Path) -> None:
    raw = json.loads((tiny_model("mixtral") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": FORMATS["awq"][0]}))
    with pytest.raises(ConfigError, match="experts can't be quantised so: 48 inputs are no whole groups of 32"):
        load(tmp_path)


def test_made_up_experts_do_not_depend_on_the_number_of_ranks() -> None:
    folder, more = tiny_model("mixtral"), {"load_format": "dummy", "quantization": "fp8"}
    whole, part = (load(folder, shard, **more).layers[2].mlp.experts for shard in (None, Shard(1, 2)))
    down, half = (each.down_proj.dequantised(3, torch.float32) for each in (whole, part))
    assert torch.equal(half, down[:, 24:])
    plain = load(folder, load_format="dummy").layers[2].mlp.experts.down_proj[3]
    assert bool(((down - plain).abs() <= plain.abs().amax(1, keepdim=True) * 2**-4).all())


@pytest.mark.parametrize("form", ["made", "awq"])
def test_made_up_weights_do_not_depend_on_the_number_of_ranks(form: str, tmp_path: Path) -> None:
    folder, quantization = tiny_model("llama"), "fp8"
    if form != "made":
        (folder, _), quantization = quantised_folders(folder, tmp_path, form), "auto"
    whole, part = (load(folder, shard, load_format="dummy", quantization=quantization) for shard in (None, Shard(1, 2)))
    down, half = (model.layers[2].mlp.down_proj.quantised.dequantised(torch.float32) for model in (whole, part))
    assert torch.equal(half, down[:, 64:])


def test_identities_tell_weights_made_smaller_from_those_they_are_made_of() -> None:
    folder = tiny_model("llama")
    configs = [load_config(folder, ModelOptions(str(folder), quantization=each)) for each in ("auto", "fp8")]
    plain, made = (model_identity(folder, config, 64, "float32") for config in configs)
    assert plain != made


def test_an_option_that_the_checkpoint_contradicts_is_refused(tmp_path: Path) -> None:
    folder, _ = quantised_folders(tiny_model("llama"), tmp_path, "awq")
    assert load_config(folder, ModelOptions(str(folder), quantization="awq")).quantisation.method == "awq"
    with pytest.raises(ConfigError, match="--quantization fp8: the checkpoint is of awq"):
        load_config(folder, ModelOptions(str(folder), quantization="fp8"))
    with pytest.raises(ConfigError, match="--quantization gptq: the checkpoint is not quantised"):
        load_config(tiny_model("llama"), ModelOptions("m", quantization="gptq"))


@pytest.mark.parametrize(
    ("form", "tensor", "change", "why"),
    [
        ("gptq", "g_idx", lambda order: order.flip(0), "made with desc_act false"),
        ("fp8_channel", "weight_scale", None, "no shard holds model.layers.0.self_attn.q_proj.weight_scale"),
        ("awq", "qzeros", None, "no shard holds"),
        ("awq", "scales", lambda scales: scales.flip(0)[:1].contiguous(), "config.json asks for"),
        ("packed", "weight_packed", lambda words: words.short(), "only I32 are supported"),
    ],
)
def test_broken_checkpoints_are_refused_by_name(form: str, tensor: str, change, why: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, _ = quantised_folders(tiny_model("llama"), tmp_path, form.replace("fp8_channel", "compressed_channel"))
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(f".{tensor}")]:
        found = weights.pop(name)
        if change is not None:
            weights[name] = change(found)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=why):
        load(folder)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' are not supported; use a checkpoint in bf16"),
        ({"quant_method": "gptq", "bits": 8}, "gptq with bits 8"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "gptq with desc_act True"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 24}, "awq with group_size 24"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "fp8 with weight_block_size 128"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors with config_groups None"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["k_proj"]}, "are quantised, some not"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict, why: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    with pytest.raises((CheckpointError, ConfigError), match=why):
        load(folder)


def test_modules_that_are_left_out_stay_as_they_are(tmp_path: Path) -> None:
    folder, _ = quantised_folders(tiny_model("llama"), tmp_path, "fp8_blocks")
    plain = load_file(tiny_model("llama") / "model.safetensors")
    weights = load_file(folder / "model.safetensors")
    left_out = "model.layers.1.mlp.down_proj"
    del weights[f"{left_out}.weight_scale_inv"]
    weights[f"{left_out}.weight"] = plain[f"{left_out}.weight"]
    save_file(weights, folder / "model.safetensors")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"]["modules_to_not_convert"] = [left_out, "lm_head"]
    path.write_text(json.dumps(raw))
    model = load(folder)
    assert torch.equal(model.layers[1].mlp.down_proj.weight, plain[f"{left_out}.weight"])
    assert model.layers[0].mlp.down_proj.quantised.values.dtype == FP8
