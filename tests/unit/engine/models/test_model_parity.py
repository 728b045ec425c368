"""Logits equal transformers' in fp32, for every architecture and rope scaling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_logits import BLOCK, CPU, logits_in_chunks
from tiny_hf_models import tiny_hf_model

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.heads.taps import FeatureTaps
from tandem.engine.models.layers import basic
from tandem.engine.models.loader import load_model
from tandem.kernels.api.attention import bind_kv_cache
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.api.metadata import AttentionMetadataBuilder
from tiny_models import KINDS, random_prompt, reference_greedy, reference_model, tiny_model


def load(folder: Path) -> DecoderModel:
    return load_model(folder, load_model_config(folder), ModelOptions(model=str(folder)), CPU, torch.float32)


# README says: "Llama 2/3/3.x, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE"
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str) -> None:
    folder = tiny_model(kind)
    token_ids = random_prompt(300, seed=3)
    with torch.inference_mode():
        expected = reference_model(folder)(torch.tensor([token_ids])).logits[0]
    model = load(folder)
    for chunks in ([300], [64, 64, 1, 16, 155]):
        actual = logits_in_chunks(model, token_ids, chunks)
        assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("llama", "qwen3"))) for kind in KINDS]
)
def test_tiny_models_are_sharp_enough_for_exactness_tests(kind: str) -> None:
    for length, seed in ((1, 0), (5, 1), (33, 2), (100, 1), (300, 3), (700, 4)):
        greedy = reference_greedy(tiny_model(kind), random_prompt(length, seed), 64)
        assert greedy.num_distinct >= 20
        assert greedy.min_gap >= 1e-3


def add_to_the_stream(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """What prompts' products do on a GPU."""
    torch.addmm(residual, x, weight.t(), out=residual)
    return True


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "deepseek_v2"])
def test_products_may_add_to_the_residual_stream_themselves(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_hf_model(kind) if kind.startswith("deepseek") else tiny_model(kind)
    model, token_ids = load(folder), random_prompt(100, seed=3)
    expected = logits_in_chunks(model, token_ids, [60, 40])
    shapes = []

    def counted(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
        shapes.append(tuple(weight.shape))
        return add_to_the_stream(residual, x, weight)

    monkeypatch.setattr(basic, "linear_onto", counted)
    actual = logits_in_chunks(model, token_ids, [60, 40])
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()
    attended = [layer.self_attn.o_proj.weight.shape for layer in model.layers]
    mixed = [layer.mlp.down_proj.weight.shape for layer in model.layers if hasattr(layer.mlp, "down_proj")]
    assert sorted(shapes) == sorted(2 * [tuple(shape) for shape in attended + mixed])


def test_features_are_whole_where_products_add_to_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    model, token_ids = load(tiny_model("llama")), random_prompt(40, seed=3)
    taken = []
    for adds in (False, True):
        if adds:
            monkeypatch.setattr(basic, "linear_onto", add_to_the_stream)
        taps = FeatureTaps((1, 2, len(model.layers)))
        monkeypatch.setattr(model, "guess_head", SimpleNamespace(taps=taps))
        logits_in_chunks(model, token_ids, [40])
        taken.append(taps.taken())
    torch.testing.assert_close(taken[1], taken[0], rtol=1e-5, atol=1e-5)


def test_logits_equal_transformers_where_only_some_layers_slide(tmp_path: Path) -> None:
    folder = tmp_path / "qwen2"
    shutil.copytree(tiny_model("qwen2"), folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["layer_types"]
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    (folder / "config.json").write_text(json.dumps({**raw, **window}))
    token_ids = random_prompt(100, seed=8)
    with torch.inference_mode():
        expected = reference_model(folder)(torch.tensor([token_ids])).logits[0]
    model = load(folder)
    assert [layer.spec.sliding_window for layer in model.attention_layers.values()] == [None, 20, 20]
    actual = logits_in_chunks(model, token_ids, [60, 1, 39])
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("change", ["position", "slot", "head"])
def test_a_swap_changes_the_logits(change: str) -> None:
    """The comparison above would see one wrong position, KV slot or head."""
    model = load(tiny_model("llama"))
    token_ids = random_prompt(40, seed=5)
    right = logits_in_chunks(model, token_ids, [39, 1])[-1]
    config = model.config
    pool = torch.zeros(3, config.num_kv_heads, config.num_layers, 2, BLOCK, config.head_dim)
    bind_kv_cache(model.attention_layers, pool)
    positions = torch.arange(40)
    table = torch.arange(3, dtype=torch.int32)[None]
    last = torch.tensor([39])
    with torch.inference_mode():
        for new, ids, where in ((39, token_ids[:39], positions[:39]), (1, token_ids[39:], last)):
            if new == 1 and change == "slot":
                pool[0, :, :, 0, [3, 9]] = pool[0, :, :, 0, [9, 3]]  # K alone: with V it would be the same set
            if new == 1 and change == "head":
                pool[:2] = pool[:2].flip(1)
            if new == 1 and change == "position":
                where = torch.tensor([38])
            total = 39 if new == 39 else 40
            slots = torch.arange(total - new, total)
            metadata = AttentionMetadataBuilder().build([new], [total], table, slots, CPU)
            with set_forward_context(ForwardContext(attn_metadata=metadata, no_compile_layers=model.attention_layers)):
                wrong = model.compute_logits(model(torch.tensor(ids), where))[-1]
    assert (wrong - right).abs().max() > 1e-3
