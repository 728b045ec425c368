"""Which part of a model each rank holds: shares tile the whole, and what can't be shared out is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.config_json.mixture_config import MixtureConfig
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.model_config import ModelConfig, load_model_config
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.loader import load_model
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.parallel.sharding import Cut, Shard
from tiny_models import tiny_model

CPU = torch.device("cpu")


def config_of(kind: str = "llama") -> ModelConfig:
    return load_model_config(tiny_model(kind))


def mixture_of(config: ModelConfig) -> MixtureConfig:
    assert config.mixture is not None
    return config.mixture


def load(folder: Path, shard: Shard | None = None, load_format: str = "auto") -> DecoderModel:
    group = None if shard is None else TensorParallel(shard, CPU)
    options = ModelOptions(str(folder), load_format=load_format)  # type: ignore[arg-type]
    return load_model(folder, load_model_config(folder), options, CPU, torch.float32, group=group)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("projection", ["q_proj", "o_proj", "gate_proj", "down_proj", "lm_head"])
def test_ranks_shares_of_a_matrix_tile_it(projection: str, size: int) -> None:
    config = config_of()
    length = {"q_proj": 64, "o_proj": 64, "gate_proj": 128, "down_proj": 128, "lm_head": 512}[projection]
    cuts = [Shard(rank, size).cut(f"model.layers.0.x.{projection}.weight", config) for rank in range(size)]
    assert all(cut is not None and cut.dim == (1 if projection in ("o_proj", "down_proj") else 0) for cut in cuts)
    bounds = [(cut.start, cut.stop) for cut in cuts if cut is not None]
    assert bounds == [(rank * length // size, (rank + 1) * length // size) for rank in range(size)]


def test_kv_heads_are_cut_or_repeated_beside_the_queries_that_use_them() -> None:
    config = msgspec.structs.replace(config_of(), num_heads=8, num_kv_heads=2, head_dim=16)
    name = "model.layers.1.self_attn.k_proj.bias"
    assert [Shard(rank, 2).cut(name, config) for rank in range(2)] == [Cut(0, 0, 16), Cut(0, 16, 32)]
    repeated = [Cut(0, 0, 16), Cut(0, 0, 16), Cut(0, 16, 32), Cut(0, 16, 32)]
    assert [Shard(rank, 4).cut(name, config) for rank in range(4)] == repeated
    for size in (2, 4, 8):
        own = Shard(0, size).config(config)
        assert own.num_heads == 8 // size
        assert own.num_kv_heads == 1


@pytest.mark.parametrize(
    ("changes", "size", "what"),
    [
        ({"num_heads": 6, "num_kv_heads": 6}, 4, "6 query heads"),
        ({"intermediate_size": 126}, 4, "126 MLP columns"),
        ({"vocab_size": 511}, 2, "511 vocabulary entries"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "3 KV heads"),
    ],
)
def test_unequal_shares_are_refused_by_name(changes: dict[str, int], size: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Shard(0, size).config(msgspec.structs.replace(config_of(), **changes))


def test_each_rank_reads_its_part_and_rank_0_the_biases_of_sums() -> None:
    folder = tiny_model("llama_one_kv_head")
    whole = load(folder).layers[1]
    parts = [load(folder, Shard(rank, 2)).layers[1] for rank in range(2)]
    q, k, v = whole.self_attn.qkv_proj.weight.split((64, 16, 16))
    for rank, part in enumerate(parts):
        assert torch.equal(part.self_attn.qkv_proj.weight, torch.cat((q[rank * 32 : rank * 32 + 32], k, v)))
    o_proj = torch.cat([part.self_attn.o_proj.weight for part in parts], dim=1)
    assert torch.equal(o_proj, whole.self_attn.o_proj.weight)
    assert torch.equal(parts[0].mlp.down_proj.bias, whole.mlp.down_proj.bias)
    assert bool((parts[1].mlp.down_proj.bias == 0).all())
    assert bool((parts[1].self_attn.o_proj.bias == 0).all())


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_ranks_share_the_vocabulary_whether_tied_or_not(kind: str) -> None:
    folder = tiny_model(kind)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    parts = [load(folder, Shard(rank, 4)).project(hidden) for rank in range(4)]
    assert [part.shape[1] for part in parts] == [128] * 4
    torch.testing.assert_close(torch.cat(parts, dim=1), load(folder).project(hidden))


def test_made_up_weights_do_not_depend_on_the_number_of_ranks() -> None:
    folder = tiny_model("qwen2")
    whole = load(folder, load_format="dummy").layers[2]
    part = load(folder, Shard(1, 2), load_format="dummy").layers[2]
    assert torch.equal(part.mlp.down_proj.weight, whole.mlp.down_proj.weight[:, 64:])
    q, k, v = whole.self_attn.qkv_proj.weight.split((64, 32, 32))
    assert torch.equal(part.self_attn.qkv_proj.weight, torch.cat((q[32:], k[16:], v[16:])))


def test_whole_experts_are_shared_out_in_runs() -> None:
    """In runs that differ by one where they must; of widths that are no equal shares, too."""
    config = msgspec.structs.replace(config_of("mixtral"), num_heads=8, num_kv_heads=4)
    config = msgspec.structs.replace(config, mixture=msgspec.structs.replace(mixture_of(config), width=50))
    own = [mixture_of(Shard(rank, 4, True).config(config)) for rank in range(4)]
    assert [list(each.own) for each in own] == [[0], [1, 2], [3], [4, 5]]
    assert {(each.num_experts, each.width) for each in own} == {(6, 50)}
    with pytest.raises(ConfigError, match=r"50 columns of an expert \(--enable-expert-parallel shares out whole"):
        Shard(0, 4).config(config)


@pytest.mark.parametrize(("kind", "size", "what"), [("llama", 2, "no experts"), ("mixtral", 8, "only 6 experts")])
def test_experts_that_there_are_not_are_refused(kind: str, size: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"--enable-expert-parallel over {size} GPUs: the model has {what}; leave it"):
        Shard(0, size, True).config(config_of(kind))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_each_rank_reads_its_experts_whole(load_format: str) -> None:
    """Beside its share of the layer that has a plain MLP."""
    folder = tiny_model("qwen3_moe")
    whole, *parts = (load(folder, shard, load_format) for shard in (None, Shard(0, 2, True), Shard(1, 2, True)))
    for rank, part in enumerate(parts):
        assert torch.equal(part.layers[0].mlp.gate.weight, whole.layers[0].mlp.gate.weight)
        for name, matrices in whole.layers[0].mlp.experts.named_parameters():
            assert torch.equal(getattr(part.layers[0].mlp.experts, name), matrices[3 * rank : 3 * rank + 3]), name
    down = torch.cat([part.layers[1].mlp.down_proj.weight for part in parts], 1)
    assert torch.equal(down, whole.layers[1].mlp.down_proj.weight)
