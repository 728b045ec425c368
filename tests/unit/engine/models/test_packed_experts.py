"""GPT-OSS's experts in MXFP4: read as they are stored, and what is broken is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_checkpoints import mxfp4_folders
from safetensors.torch import load_file, save_file
from tiny_hf_models import tiny_hf_model

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.models.choice import load_chosen, load_config
from tandem.engine.models.loader import load_model
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.parallel.sharding import Shard
from tandem.kernels.experts.plans import NOT_HERE, Clamp
from tandem.kernels.experts.stacked import StackedWeight, e2m1, stacked_mxfp4
from tandem.kernels.reference import experts as twins

CPU = torch.device("cpu")
FIRST = "model.layers.0.mlp.experts"


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: str) -> Any:
    given = ModelOptions(str(folder), **options)  # type: ignore[arg-type]
    return load_chosen(folder, load_config(folder, given), given, CPU, dtype)


def test_experts_stay_in_four_bits_and_stand_for_what_is_stored(tmp_path: Path) -> None:
    folder, twin = mxfp4_folders(tiny_hf_model("gpt_oss"), tmp_path)
    model, plain = load(folder, torch.bfloat16), load_file(twin / "model.safetensors")
    experts = model.layers[0].mlp.experts
    gate_up, down = experts.gate_up_proj, experts.down_proj
    assert not list(experts.parameters())
    assert down.num_bytes == down.values.numel() * 17 // 16
    both = plain[f"{FIRST}.gate_up_proj"][3].t()
    assert torch.equal(gate_up.dequantised(3, torch.float32), torch.cat((both[::2], both[1::2])))
    bias = plain[f"{FIRST}.gate_up_proj_bias"][3].bfloat16()
    assert torch.equal(gate_up.bias[3], torch.cat((bias[::2], bias[1::2])))
    assert torch.equal(down.dequantised(3, torch.float32), plain[f"{FIRST}.down_proj"][3].t())
    with pytest.raises(ConfigError, match="--compile doesn't go with experts"):
        model.compile_forward()


def test_made_up_experts_are_stored_likewise(tmp_path: Path) -> None:
    folder, _ = mxfp4_folders(tiny_hf_model("gpt_oss"), tmp_path)
    experts = load(folder, load_format="dummy").layers[1].mlp.experts
    for stack in (experts.gate_up_proj, experts.down_proj):
        assert len(stack.dequantised(0, torch.float32).unique()) == 15  # 0 has two signs


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_ranks_have_their_shares(load_format: str, tmp_path: Path) -> None:
    """A run of every expert's columns, or a run of experts; a bias behind a sum is rank 0's."""
    folder, _ = mxfp4_folders(tiny_hf_model("gpt_oss"), tmp_path)

    def experts_of(shard: Shard) -> tuple[StackedWeight, StackedWeight]:
        group = None if shard.is_whole else TensorParallel(shard, CPU)
        options = ModelOptions(str(folder), load_format=load_format)  # type: ignore[arg-type]
        model = load_model(folder, load_model_config(folder), options, CPU, torch.float32, group=group)
        experts: Any = model.layers[0].mlp.experts  # type: ignore[union-attr]
        return experts.gate_up_proj, experts.down_proj

    def numbers(stack: StackedWeight) -> torch.Tensor:
        return torch.stack([stack.dequantised(expert, torch.float32) for expert in range(stack.shape[0])])

    gate_up, down = experts_of(Shard())
    gate, up = numbers(gate_up).chunk(2, 1)
    half = gate.shape[1] // 2
    for rank, run in enumerate((slice(half), slice(half, None))):
        own_gate_up, own_down = experts_of(Shard(rank, 2))
        assert torch.equal(numbers(own_gate_up), torch.cat((gate[:, run], up[:, run]), 1))
        assert torch.equal(numbers(own_down), numbers(down)[:, :, run])
        assert torch.equal(own_down.bias, torch.zeros_like(down.bias) if rank else down.bias)
        own_gate_up, own_down = experts_of(Shard(rank, 2, True))
        experts = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(numbers(own_gate_up), numbers(gate_up)[experts])
        assert torch.equal(own_down.bias, down.bias[experts])


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("down_proj_scales", None, "no shard holds model.layers.0.mlp.experts.down_proj_scales; fetch the model"),
        (
            "down_proj_blocks",
            lambda blocks: blocks[:1],
            r"down_proj_blocks has shape \[1, 64, 4, 16\], config.json asks for \[4, 64, 4, 16\]",
        ),
        (
            "gate_up_proj_scales",
            lambda scales: scales.fill_(131),
            "a scale is 2\\^4, and only such up to 2 are supported",
        ),
        (
            "down_proj_more",
            lambda _: torch.ones(1),
            "holds model.layers.0.mlp.experts.down_proj_more, which",
        ),
    ],
)
def test_broken_checkpoints_are_refused_by_name(
    name: str, change: Callable[[Any], torch.Tensor] | None, why: str, tmp_path: Path
) -> None:
    folder, _ = mxfp4_folders(tiny_hf_model("gpt_oss"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    found = weights.pop(f"{FIRST}.{name}", None)
    if change is not None:
        weights[f"{FIRST}.{name}"] = change(found).contiguous()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=why):
        load(folder)


def test_codes_stand_for_what_the_format_says() -> None:
    numbers = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    expected = torch.tensor((*numbers, *(-number for number in numbers)))
    assert torch.equal(e2m1(torch.arange(16, dtype=torch.uint8)), expected)


def test_what_graphs_hold_where_no_kernel_serves_makes_the_same() -> None:
    codes = [torch.randint(0, 16, (3, *shape), dtype=torch.uint8) for shape in ((64, 64), (64, 32))]
    gate_up, down = (
        stacked_mxfp4(each, torch.full_like(each[:, :, ::32], 123), torch.randn(each.shape[:2])) for each in codes
    )
    ids = torch.tensor([[0, 1], [NOT_HERE, 2], [1, NOT_HERE]], dtype=torch.int32)
    x, weights, clamp = torch.randn(3, 64), torch.rand(3, 2), Clamp(1.702, 7.0)
    expected = twins.mixture(x, ids, weights, gate_up, down, clamp=clamp)
    torch.testing.assert_close(twins.by_every_expert(x, ids, weights, gate_up, down, clamp), expected)
