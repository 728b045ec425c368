"""An adapter's folder: what it says is what PEFT means by it, and what isn't computed exactly is refused by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import tiny_adapter

from tandem.engine.adapters.adapter_files import read_adapter
from tandem.engine.adapters.host_adapter import AdapterLoader
from tandem.engine.adapters.layout import AdapterLayout
from tandem.engine.contracts.errors import AdapterError
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.models.adapter_sites import decoder_sites
from tandem.engine.parallel.sharding import Shard
from tiny_models import tiny_model

KEY = "base_model.model.model.layers.1.mlp.down_proj.lora_"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_adapter(tmp_path_factory.mktemp("adapters") / "good", tiny_model("llama"), rank=3)


def loader(shard: Shard | None = None, max_rank: int = 8) -> AdapterLoader:
    config = load_model_config(tiny_model("llama"))
    layout = AdapterLayout.of(decoder_sites(config, shard or Shard(0, 1)), max_rank)
    return AdapterLoader(layout, torch.float32, pinned=False)


def changed(good: Path, folder: Path, **fields: object) -> Path:
    shutil.copytree(good, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa"),
        ({"r": 0}, "configuration"),
        ({"r": "eight"}, "configuration"),
        ({"lora_alpha": None}, "configuration"),
    ],
)
def test_other_kinds_are_refused(good: Path, tmp_path: Path, fields: dict, words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        read_adapter(str(changed(good, tmp_path / "odd", **fields)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({KEY + "A.weight": torch.zeros(3, 127)}, "of another model"),
        ({KEY + "B.weight": torch.zeros(64, 2)}, "of another model"),
        ({KEY + "A.weight": torch.zeros(3)}, "of another model"),
        ({KEY + "A.weight": torch.zeros(0, 128), KEY + "B.weight": torch.zeros(64, 0)}, "of another model"),
        ({KEY + "A.weight": torch.zeros(9, 128), KEY + "B.weight": torch.zeros(64, 9)}, "rank 9"),
        ({KEY + "A.weight": torch.full((3, 128), torch.nan)}, "not finite"),
        ({KEY + "A.weight": torch.zeros(3, 128, dtype=torch.int32)}, "I32"),
        (
            {KEY.replace("layers.1", "layers.7") + end: torch.zeros(3, 3) for end in ("A.weight", "B.weight")},
            "layers.7",
        ),
        ({KEY.replace("down", "side") + "A.weight": torch.zeros(3, 3)}, "but one of"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 64)}, "lm_head"),
        ({"base_model.model.model.layers.1.mlp.down_proj.lora_magnitude_vector": torch.zeros(3)}, "magnitude"),
    ],
)
def test_matrices_that_are_not_the_models_are_refused(good: Path, tmp_path: Path, change: dict, words: str) -> None:
    folder = changed(good, tmp_path / "odd")
    save_file({**load_file(folder / "adapter_model.safetensors"), **change}, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=words):
        loader().load(str(folder))


def test_files_that_are_none_are_refused(good: Path, tmp_path: Path) -> None:
    empty, broken, huge = (changed(good, tmp_path / name) for name in ("empty", "broken", "huge"))
    (empty / "adapter_config.json").unlink()
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 40)
    (huge / "adapter_config.json").write_bytes(b" " * (2 << 20))
    for path, words in ((empty, "can't be read"), (broken, "truncated or no"), (huge, "larger"), ("a\0b", "a")):
        with pytest.raises(AdapterError, match=words):
            read_adapter(str(path))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_nobody_waits_at_a_pipe(good: Path, tmp_path: Path, name: str) -> None:
    folder = changed(good, tmp_path / "pipe")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(AdapterError, match="no regular file"):
        read_adapter(str(folder))


def test_the_digest_is_of_all_that_decides_the_output(good: Path, tmp_path: Path) -> None:
    same, scaled, moved = (changed(good, tmp_path / name) for name in ("same", "scaled", "moved"))
    (scaled / "adapter_config.json").write_text((scaled / "adapter_config.json").read_text().replace("3", "4"))
    tensors = load_file(moved / "adapter_model.safetensors")
    tensors[KEY + "A.weight"][0, 0] += 1
    save_file(tensors, moved / "adapter_model.safetensors")
    (same / "README.md").write_text("says nothing of the weights")
    digests = [read_adapter(str(folder)).digest for folder in (same, changed(same, tmp_path / "copy"), scaled, moved)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    with pytest.raises(AdapterError, match="another adapter"):
        loader().load(str(scaled), digests[0])


@pytest.mark.parametrize(("use_rslora", "scaling"), [(False, 6 / 3), (True, 6 / 3**0.5)])
def test_scaling_is_in_b(good: Path, tmp_path: Path, use_rslora: bool, scaling: float) -> None:
    folder = changed(good, tmp_path / "scaled", lora_alpha=6, use_rslora=use_rslora)
    whole, adapter = loader(), loader().load(str(folder))
    stored = load_file(folder / "adapter_model.safetensors")
    (place,) = [p for p in whole.layout.projections if p.site.name == "layers.1.mlp.down_proj"]
    b = adapter.words[place.b_start : place.end].view(64, whole.layout.rank)
    torch.testing.assert_close(b[:, :3], stored[KEY + "B.weight"] * scaling)
    assert not b[:, 3:].any()


def test_the_parts_of_ranks_are_the_whole(good: Path) -> None:
    """Outputs are shared out where a product's are, inputs where it is part of a sum."""
    whole, halves = loader(), [loader(Shard(rank, 2)) for rank in range(2)]
    all_words = whole.load(str(good)).words
    parts = [half.load(str(good)).words for half in halves]
    for projection, *own in zip(whole.layout.projections, *(half.layout.projections for half in halves), strict=True):
        a, b = matrices(all_words, projection, whole.layout.rank)
        split = [matrices(words, each, whole.layout.rank) for words, each in zip(parts, own, strict=True)]
        if projection.site.name.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat([part for part, _ in split], 1), a)
            assert all(torch.equal(part, b) for _, part in split)
        else:
            assert all(torch.equal(part, a) for part, _ in split)
            sizes = own[0].part_sizes
            pieces = zip(*(part.split(sizes) for _, part in split), strict=True)
            assert torch.equal(torch.cat([torch.cat(piece) for piece in pieces]), b)


def matrices(words: torch.Tensor, projection, rank: int):  # type: ignore[no-untyped-def]
    a = words[projection.a_start : projection.b_start].view(-1, projection.num_inputs)
    return a, words[projection.b_start : projection.end].view(-1, rank)
