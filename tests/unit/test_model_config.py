"""Folders that are no model are refused quickly, by an error that names the file and the remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tandem.engine.config import ModelOptions
from tandem.engine.errors import CheckpointError
from tandem.engine.identity import CACHE_NAME, model_identity
from tandem.engine.loader import load_model
from tandem.engine.model_config import load_model_config, resolve_model
from tiny_models import tiny_model


def copy_of(kind: str, tmp_path: Path) -> Path:
    folder = tmp_path / kind
    shutil.copytree(tiny_model(kind), folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(folder: Path) -> None:
    load_model(folder, load_model_config(folder), ModelOptions(model=str(folder)), torch.device("cpu"), torch.float32)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model_config(tmp_path)


def test_a_path_that_is_not_there_is_refused() -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model("/nowhere/model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"num_key_value_heads": 3}, "can't share"),
        ({"dtype": "int8"}, "dtype int8"),
    ],
)
def test_what_is_not_computed_exactly_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    folder = copy_of("llama", tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(folder)


def test_broken_json_and_missing_keys_name_the_file(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    del raw["hidden_size"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"config\.json.*hidden_size"):
        load_model_config(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_config(folder)


def test_old_and_new_rope_keys_mean_the_same(tmp_path: Path) -> None:
    folder = copy_of("llama3_rope", tmp_path)
    new = load_model_config(folder).rope
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edit_config(folder, rope_parameters=None, rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    assert load_model_config(folder).rope == new
    assert new.rope_type == "llama3"


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = copy_of("llama_sharded", tmp_path)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(folder)


def test_torn_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)
    weights.write_bytes(whole)
    edit_config(folder, intermediate_size=64)
    with pytest.raises(CheckpointError, match="has shape"):
        load(folder)
    edit_config(folder, intermediate_size=128, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"no shard holds model\.layers\.3"):
        load(folder)
    edit_config(folder, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.2"):
        load(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load(folder)


def test_identity_follows_every_byte_and_is_cached(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    config = load_model_config(folder)
    first = model_identity(folder, config, 64, "float32")
    assert (folder / CACHE_NAME).exists()
    assert model_identity(folder, config, 64, "float32") == first
    assert model_identity(folder, config, 32, "float32") != first
    assert model_identity(folder, config, 64, "bfloat16").config != first.config
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_identity(folder, config, 64, "float32").weights != first.weights
    (folder / "tokenizer.json").write_text("{}")
    assert model_identity(folder, config, 64, "float32").tokenizer != first.tokenizer


def test_dummy_weights_need_no_file_and_are_the_same_each_time(tmp_path: Path) -> None:
    folder = copy_of("qwen3", tmp_path)
    (folder / "model.safetensors").unlink()
    config = load_model_config(folder)
    options = ModelOptions(model=str(folder), load_format="dummy")
    one, two = (load_model(folder, config, options, torch.device("cpu"), torch.float32) for _ in range(2))
    assert torch.equal(one.layers[1].mlp.down_proj.weight, two.layers[1].mlp.down_proj.weight)
    assert one.layers[1].mlp.down_proj.weight.std() > 0.01
