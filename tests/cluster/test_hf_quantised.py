"""Quantised checkpoints of models that run by transformers' modules: their tokens are those of the numbers stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from quantised_checkpoints import FORMATS, quantised_folders
from safetensors.torch import load_file, save_file
from split_pair import GREEDY, run_both_ways
from tiny_adapters import merged, tiny_adapter
from tiny_hf_models import tiny_hf_model

from tandem.engine.adapters.adapter_files import read_adapter
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.models.choice import check_shares, load_chosen, load_config
from tandem.engine.models.hf.loading.quantised import QuantisedLinear
from tandem.engine.models.hf.model import HFModel
from tandem.engine.models.identity import model_identity
from tandem.engine.parallel.sharding import Shard
from tiny_models import check_greedy

CPU = torch.device("cpu")
LENGTHS = (17, 90)
TOWER = ("model.vision_tower", "vision_tower")


def load(folder: Path, **options: str) -> HFModel:
    asked = ModelOptions(str(folder), **options)  # type: ignore[arg-type]
    model = load_chosen(folder, load_config(folder, asked), asked, CPU, torch.float32)
    assert isinstance(model, HFModel)
    return model


def quantised_layers(model: HFModel) -> dict[str, QuantisedLinear]:
    return {name: each for name, each in model.decoder.named_modules() if isinstance(each, QuantisedLinear)}


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("gemma2", "fp8_blocks"), ("gemma3", "compressed_channel"), ("phi3", "awq"), ("olmo2", "gptq"),
        ("starcoder2", "packed_with_zeros"), ("granite", "fp8_tensor"),
    ],
)  # fmt: skip
def test_greedy_tokens_are_those_of_the_dequantised_weights(family: str, form: str, tmp_path: Path) -> None:
    """On one node and split. Phi-3's layers are merged in the checkpoint, StarCoder2's have biases, Gemma-3's lie
    within a model that sees pictures, whose tower stays as it is."""
    folder, twin = quantised_folders(tiny_hf_model(family), tmp_path, form, TOWER)
    layers = quantised_layers(load(folder))
    assert len(layers) == len([each for each in load(twin).decoder.modules() if isinstance(each, torch.nn.Linear)])
    for prompt, output in run_both_ways(folder, LENGTHS):
        check_greedy(twin, prompt, output, GREEDY.max_tokens)


def test_adapters_go_with_quantised_layers(tmp_path: Path) -> None:
    folder, twin = quantised_folders(tiny_hf_model("gemma2"), tmp_path, "fp8_blocks")
    adapter = tiny_adapter(
        tmp_path / "adapter", twin, targets=("q_proj", "v_proj", "gate_proj", "down_proj"), scale=0.7
    )
    with_it = merged(tmp_path / "merged", twin, adapter)
    made = run_both_ways(folder, LENGTHS, AdapterRef(str(adapter), read_adapter(str(adapter)).digest))
    for expected, (prompt, output) in zip([with_it] * 4 + [twin] * 4, made, strict=True):
        check_greedy(expected, prompt, output, GREEDY.max_tokens)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_are_made_smaller_at_load(load_format: str) -> None:
    folder = tiny_hf_model("gemma2")
    made, plain = load(folder, load_format=load_format, quantization="fp8"), load(folder, load_format=load_format)
    layers = quantised_layers(made)
    assert len(layers) == 4 * 7
    for name, layer in layers.items():
        weight = plain.decoder.get_submodule(name).weight
        assert layer.quantised.num_bytes < 0.4 * weight.nbytes  # which are of 32 bits here
        error = (layer.quantised.dequantised(torch.float32) - weight).abs()
        assert bool((error <= weight.abs().amax(1, keepdim=True) * 2**-4).all())
    configs = [load_config(folder, ModelOptions(str(folder), quantization=each)) for each in ("auto", "fp8")]
    plainly, smaller = (model_identity(folder, config, 64, "float32") for config in configs)
    assert plainly != smaller, "their KV differs"


def test_what_is_left_out_stays_as_it_is(tmp_path: Path) -> None:
    kept = ("model.layers.1.mlp",)
    folder, twin = quantised_folders(tiny_hf_model("olmo2"), tmp_path, "compressed_channel", kept)
    layers, plain = quantised_layers(load(folder)), load(twin)
    assert {name for name in layers if name.startswith("layers.1.")} == {
        f"layers.1.self_attn.{each}_proj" for each in "qkvo"
    }
    for name, layer in layers.items():
        expected = plain.decoder.get_submodule(name).weight
        assert torch.equal(layer.quantised.dequantised(torch.float32), expected)


@pytest.mark.parametrize(
    ("form", "tensor", "change", "why"),
    [
        ("compressed_channel", "weight_scale", None, "weight_scale"),
        ("awq", "qzeros", None, "no shard holds model.layers.0.mlp.down_proj.qzeros"),
        ("awq", "scales", lambda scales: scales[:1].contiguous(), "config and weights don't belong together"),
        ("gptq", "g_idx", lambda order: order.flip(0), "made with desc_act false"),
    ],
)
def test_broken_checkpoints_are_refused_by_name(form: str, tensor: str, change, why: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, _ = quantised_folders(tiny_hf_model("olmo2"), tmp_path, form)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(f".{tensor}")]:
        found = weights.pop(name)
        if change is not None:
            weights[name] = change(found)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=why):
        load(folder)


def test_what_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = quantised_folders(tiny_hf_model("gemma3"), tmp_path / "tower", "compressed_channel")
    with pytest.raises(CheckpointError, match="fc1 is quantised, and no linear layer of the decoder"):
        load(folder)
    mixture = tiny_hf_model("glm4_moe")
    with pytest.raises(ConfigError, match="quantised mixtures of experts that run by transformers' modules"):
        load(mixture, quantization="fp8")
    folder, _ = quantised_folders(tiny_hf_model("olmo2"), tmp_path, "awq")
    with pytest.raises(
        ConfigError, match="--tensor-parallel-size 2: quantised models that run by transformers' modules"
    ):
        check_shares(folder, ModelOptions(str(folder)), Shard(0, 2))
    with pytest.raises(ConfigError, match="--compile doesn't go with quantised weights"):
        load(folder).compile_forward()
    with pytest.raises(ConfigError, match="--quantization fp8: the checkpoint is of awq"):
        load(folder, quantization="fp8")
    with pytest.raises(ConfigError, match="gpt2: none of its layers can be quantised"):
        load(tiny_hf_model("gpt2"), quantization="fp8")
    odd = tmp_path / "odd"
    odd.mkdir()
    raw = json.loads((tiny_hf_model("olmo2") / "config.json").read_text())
    raw |= {"intermediate_size": 72, "quantization_config": FORMATS["awq"][0]}
    (odd / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="down_proj can't be quantised so: 72 inputs are no whole groups of 32"):
        load(odd, load_format="dummy")
    says_so = tmp_path / "plain"
    shutil.copytree(tiny_hf_model("olmo2"), says_so)
    path = says_so / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="says that weights are quantised, and none is"):
        load(says_so)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(CheckpointError, match="quant_method 'hqq' are not supported"):
        load(folder)
