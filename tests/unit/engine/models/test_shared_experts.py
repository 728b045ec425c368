"""Whole experts on ranks beside a share of those that all tokens take: who holds what, what ranks' parts add up to, and
what is refused (tokens: tests/cluster/test_tensor_parallel.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from model_logits import CPU
from quantised_checkpoints import FORMATS, quantised_folders
from tiny_hf_models import tiny_hf_model

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.config_json.mixture_config import MixtureConfig
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.models.choice import check_shares, load_config
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.layers.mlp import MLP
from tandem.engine.models.loader import load_model
from tandem.engine.models.mixture_layer import MixtureOfExperts
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.parallel.sharding import Cut, Shard
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context


def ranks_of(size: int, is_whole: bool = True) -> list[Shard]:
    return [Shard(rank, size, is_whole) for rank in range(size)]


def config_of(folder: Path) -> ModelConfig:
    config = load_config(folder, ModelOptions(str(folder)))
    assert isinstance(config, ModelConfig)
    return config


def load(folder: Path, shard: Shard | None = None, **options: str) -> DecoderModel:
    given = ModelOptions(str(folder), **options)  # type: ignore[arg-type]
    group = None if shard is None else TensorParallel(shard, CPU)
    return load_model(folder, load_config(folder, given), given, CPU, torch.float32, group=group)  # type: ignore[arg-type]


def mixture_of(model: DecoderModel) -> MixtureOfExperts:
    mixture = model.layers[1].mlp
    assert isinstance(mixture, MixtureOfExperts)
    return mixture


def output(model: DecoderModel, x_TE: torch.Tensor) -> torch.Tensor:
    """What a layer's experts add; on a rank its part of it."""
    with torch.inference_mode(), set_forward_context(ForwardContext(attn_metadata=None, no_compile_layers={})):
        out: torch.Tensor = mixture_of(model)(x_TE)
    return out


@pytest.mark.parametrize(
    ("family", "size", "columns", "num_folded"),
    [("deepseek_v2", 2, 32, 1), ("deepseek_v2", 4, 16, 0), ("deepseek_v3", 2, 16, 0), ("deepseek_v2", 1, 64, 2)],
)
def test_ranks_have_whole_experts_and_equal_columns_of_those_shared(
    family: str, size: int, columns: int, num_folded: int
) -> None:
    config = config_of(tiny_hf_model(family))
    own: list[MixtureConfig | None] = [shard.config(config).mixture for shard in ranks_of(size)]
    assert [list(each.own) for each in own if each] == [
        list(range(8 * rank // size, 8 * (rank + 1) // size)) for rank in range(size)
    ]
    assert {(each.width, each.shared_width, each.num_folded) for each in own if each} == {(32, columns, num_folded)}
    layer = "model.layers.1.mlp.shared_experts"
    cuts = [(rank * columns, (rank + 1) * columns) for rank in range(size)]
    assert [shard.cut(f"{layer}.up_proj.weight", config) for shard in ranks_of(size)] == [Cut(0, *cut) for cut in cuts]
    assert [shard.cut(f"{layer}.down_proj.weight", config) for shard in ranks_of(size)] == [
        Cut(1, *cut) for cut in cuts
    ]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_share_as_wide_as_an_expert_lies_behind_the_others(load_format: str) -> None:
    folder = tiny_hf_model("deepseek_v2")
    whole, *parts = (mixture_of(load(folder, shard, load_format=load_format)) for shard in (None, *ranks_of(2)))
    for rank, part in enumerate(parts):
        assert part.shared_experts is None
        for name, matrices in whole.experts.named_parameters():
            held = getattr(part.experts, name)
            assert torch.equal(held[:4], matrices[4 * rank : 4 * rank + 4]), name
            assert torch.equal(held[4:], matrices[8 + rank : 9 + rank]), name


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_narrower_share_stays_an_mlp(load_format: str) -> None:
    folder = tiny_hf_model("deepseek_v3")
    whole, *parts = (mixture_of(load(folder, shard, load_format=load_format)) for shard in (None, *ranks_of(2)))
    down = []
    for part in parts:
        assert isinstance(part.shared_experts, MLP)
        assert len(part.experts.down_proj) == 4
        down.append(part.shared_experts.down_proj.weight)
    assert torch.equal(torch.cat(down, 1), whole.experts.down_proj[8])


@pytest.mark.parametrize(
    ("family", "size", "form"),
    [
        ("deepseek_v2", 2, None),
        ("deepseek_v2", 4, None),
        ("deepseek_v3", 2, None),
        ("deepseek_v2", 2, "fp8_tensor"),
        ("deepseek_v3", 2, "compressed_channel"),
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_parts_of_ranks_add_up(family: str, size: int, form: str | None, is_whole: bool, tmp_path: Path) -> None:
    """Of whole experts, and of shares of all widths."""
    folder = tiny_hf_model(family)
    if form is not None:
        folder, _ = quantised_folders(folder, tmp_path, form)
    check_parts(folder, ranks_of(size, is_whole))


def check_parts(folder: Path, ranks: list[Shard], **options: str) -> list[MixtureOfExperts]:
    x_TE = torch.randn(21, 64, generator=torch.Generator().manual_seed(7))
    whole, *models = (load(folder, shard, **options) for shard in (None, *ranks))
    expected, parts = output(whole, x_TE), [output(model, x_TE) for model in models]
    assert all(part.norm() > 0.05 * expected.norm() for part in parts)
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)
    return [mixture_of(model) for model in models]


def in_groups_of_32(folder: Path, num_shared: int, width: int, quantised: dict[str, Any]) -> Path:
    """A model whose attention is cut in whole groups; `quantised` as its config.json says."""
    left_out = shutil.ignore_patterns("*.safetensors*")
    shutil.copytree(tiny_hf_model("deepseek_v3"), folder, ignore=left_out)
    raw = json.loads((folder / "config.json").read_text())
    sizes = {"v_head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 32, "intermediate_size": 128}
    experts = {"n_shared_experts": num_shared, "moe_intermediate_size": width}
    (folder / "config.json").write_text(json.dumps(raw | sizes | experts | quantised))
    return folder


@pytest.mark.parametrize("num_shared", [2, 3])
@pytest.mark.parametrize("form", ["fp8_blocks", "gptq", None])
def test_groups_are_cut_between(form: str | None, num_shared: int, tmp_path: Path) -> None:
    """Two shared experts of 64 are one on each of two ranks, three are 96 columns: whole groups, no whole experts."""
    quantised = {} if form is None else {"quantization_config": FORMATS[form][0]}
    folder = in_groups_of_32(tmp_path / "model", num_shared, 64, quantised)
    made = {"load_format": "dummy", "quantization": "auto" if form else "fp8"}
    check_shares(folder, ModelOptions(str(folder), quantization="auto"), Shard(0, 2, True))
    for part in check_parts(folder, ranks_of(2), **made):
        assert part.experts.gate_up_proj.shape[0] == (5 if num_shared == 2 else 4)
        assert (part.shared_experts is None) == (num_shared == 2)
        if part.shared_experts is not None:
            assert part.shared_experts.down_proj.quantised is not None
            assert part.shared_experts.down_proj.quantised.shape == (64, 96)


def test_what_ranks_cannot_share_is_refused_by_name(tmp_path: Path) -> None:
    config = config_of(tiny_hf_model("deepseek_v3"))
    assert config.mixture is not None
    odd = msgspec.structs.replace(config, mixture=msgspec.structs.replace(config.mixture, shared_width=33))
    with pytest.raises(ConfigError, match="divide the model's 33 columns of experts that all tokens share; take one"):
        Shard(0, 2, True).config(odd)
    with pytest.raises(ConfigError, match=r"over 16 GPUs: the model has only 8 experts; leave it out"):
        Shard(0, 16, True).config(config)
    for form in ("fp8_blocks", "gptq"):
        folder = in_groups_of_32(tmp_path / form, 1, 32, {"quantization_config": FORMATS[form][0]})
        with pytest.raises(ConfigError, match=r"16 inputs of a quantised .* no whole groups of 32; take fewer"):
            check_shares(folder, ModelOptions(str(folder)), Shard(0, 2, True))
