"""Weights arrive whole and where they belong, or the folder is refused before anything is copied."""

from __future__ import annotations

import json
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.loader import load_model
from tiny_models import tiny_model

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
Weights = dict[str, torch.Tensor]


def copy_of(kind: str, tmp_path: Path) -> Path:
    folder = tmp_path / kind
    shutil.copytree(tiny_model(kind), folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> DecoderModel:
    return load_model(folder, load_model_config(folder), ModelOptions(model=str(folder), **options), CPU, dtype)


def rewrite(folder: Path, change: Callable[[Weights], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_converts_to_every_other(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    folder = copy_of("qwen3", tmp_path)
    rewrite(folder, lambda weights: weights.update({name: one.to(stored) for name, one in weights.items()}))
    weights = load_file(folder / "model.safetensors")
    model = load(folder, wanted)
    attention = model.layers[1].self_attn
    merged = torch.cat([weights[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(attention.qkv_proj.weight, merged.to(wanted))
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"].to(wanted))


def test_a_tied_model_keeps_one_matrix_and_accepts_only_a_copy_of_it(tmp_path: Path) -> None:
    folder = copy_of("qwen2", tmp_path)
    rewrite(folder, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    model = load(folder)
    assert model.lm_head.weight is model.embed_tokens.weight
    rewrite(folder, lambda weights: weights["lm_head.weight"].mul_(2))
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to false"):
        load(folder)
    edit_config(folder, tie_word_embeddings=False)
    untied = load(folder)
    assert torch.equal(untied.lm_head.weight, 2 * untied.embed_tokens.weight)


def test_frequency_buffers_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    rewrite(folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(folder)


def take(name: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        del weights[name]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (take("model.layers.2.mlp.up_proj.weight"), r"no shard holds model\.layers\.2\.mlp\.up_proj\.weight"),
        (take("lm_head.weight"), r"lm_head\.weight; set tie_word_embeddings"),
        (lambda weights: weights.update(extra=torch.zeros(1)), r"model\.safetensors holds extra"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(3)}), r"model\.norm\.weight has shape \[3\]"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            r"model\.norm\.weight is I8",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: Callable[[Weights], None], message: str) -> None:
    folder = copy_of("llama", tmp_path)
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 64}, r"has shape .*config\.json asks for"),
        ({"num_hidden_layers": 4}, r"no shard holds model\.layers\.3"),
        ({"num_hidden_layers": 2}, r"holds model\.layers\.2"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    folder = copy_of("llama", tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_a_file_cut_anywhere_is_called_truncated(tmp_path: Path, keep: float) -> None:
    folder = copy_of("llama", tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(folder)


def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    path = folder / "model.safetensors"
    for content in (struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 7) + b'{"a":1}'):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load(folder)
    path.write_bytes(tiny_model("llama").joinpath("model.safetensors").read_bytes() + b"tail")
    with pytest.raises(CheckpointError, match="longer than its header says"):
        load(folder)


def test_a_broken_last_shard_is_found_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine.models.loader.safe_open", lambda *_, **__: pytest.fail("a shard was opened"))
    folder = copy_of("llama_sharded", tmp_path)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    last = shards[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{last.name} is truncated"):
        load(folder)
    last.unlink()
    with pytest.raises(CheckpointError, match=rf"{last.name} is missing \({INDEX} names it\)"):
        load(folder)
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"{INDEX} does not exist"):
        load(folder)


def test_an_index_that_lies_is_named(tmp_path: Path) -> None:
    folder = copy_of("llama_sharded", tmp_path)
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.other.weight"] = shard
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"says that model-.*holds tensor 'model\.other\.weight'"):
        load(folder)
    for broken in ("{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}'):
        (folder / INDEX).write_text(broken)
        with pytest.raises(CheckpointError, match=INDEX):
            load(folder)


def test_a_folder_without_safetensors_says_what_to_do(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist, nor does .*fetch the weights"):
        load(folder)
    (folder / "consolidated.00.pth").touch()
    with pytest.raises(CheckpointError, match="fetch those for transformers"):
        load(folder)
    (folder / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(CheckpointError, match="in pickle format, which is never read: convert them"):
        load(folder)


def test_the_command_that_is_named_converts_a_pickled_model(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    before = load(folder).state_dict()
    tensors = list(load_file(folder / "model.safetensors").items())
    torch.save(dict(tensors[::2]), folder / "pytorch_model-00001-of-00002.bin")
    torch.save(dict(tensors[1::2]), folder / "pytorch_model-00002-of-00002.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    subprocess.run([sys.executable, *shlex.split(str(refused.value).splitlines()[-1])[1:]], check=True, timeout=120)
    after = load(folder).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_dummy_weights_need_no_file_and_are_the_same_each_time(tmp_path: Path) -> None:
    folder = copy_of("qwen3", tmp_path)
    (folder / "model.safetensors").unlink()
    one, two = (load(folder, load_format="dummy").state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    weight = one["layers.1.mlp.down_proj.weight"]
    assert weight.mean().abs() < 0.01
    assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.05)
    assert not torch.equal(weight, one["layers.2.mlp.down_proj.weight"])
    half = load(folder, torch.bfloat16, load_format="dummy").state_dict()
    assert torch.equal(half["layers.1.mlp.down_proj.weight"], weight.to(torch.bfloat16))
