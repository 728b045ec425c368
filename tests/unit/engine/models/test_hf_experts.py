"""The experts of models of transformers: what graphs hold on every GPU computes what grouped products do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_hf_models import tiny_hf_model

from tandem.engine.models.hf import experts, norms, rotations, routers
from tandem.engine.models.hf.attention import NAME
from tandem.engine.models.hf.config import read_config
from tandem.engine.models.hf.layers import build_empty
from tandem.engine.models.hf.loading.loader import _loaded
from tandem.engine.models.hf.trials.routes import Routes, routed
from tandem.kernels.products import fused_ops


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_all_experts_for_every_token_make_the_same(family: str) -> None:
    causal = _loaded(tiny_hf_model(family), torch.float32)
    module: Any = next(module for name, module in causal.named_modules() if name.endswith(".experts"))
    hidden_TE = torch.randn(7, causal.config.hidden_size)
    index_Tk = torch.stack([torch.randperm(len(module.down_proj))[:2] for _ in range(7)])
    weights_Tk = torch.rand(7, 2)
    grouped = experts.experts_forward(module, hidden_TE, index_Tk, weights_Tk)
    dense = experts.all_experts(module, hidden_TE, index_Tk, weights_Tk)
    torch.testing.assert_close(dense, grouped, rtol=1e-5, atol=1e-5)
    assert grouped.abs().max() > 0.01
    assert experts._is_plain(module) == (family != "gpt_oss"), "on a GPU our kernels take those without biases"


def test_every_architecture_that_can_takes_ours() -> None:
    """Llama 4's own go through all experts, too."""
    for family, name in (("qwen3_moe", NAME), ("gpt_oss", NAME), ("llama4_text", "eager")):
        config: Any = build_empty(read_config(tiny_hf_model(family))).config
        assert config._experts_implementation == name


def test_known_routers_choose_as_their_own_code() -> None:
    causal = _loaded(tiny_hf_model("glm4_moe"), torch.float32)
    module: Any = next(module for module in causal.modules() if type(module).__name__ == "Glm4MoeTopkRouter")
    module.norm_topk_prob, module.routed_scaling_factor = True, 2.5
    module.num_group, module.topk_group = 2, 1
    module.e_score_correction_bias.uniform_()
    hidden_TE = torch.randn(9, causal.config.hidden_size)
    _, weights, ids = type(module).forward(module, hidden_TE)
    _, our_weights, our_ids = routers.GroupedRouter(module)(hidden_TE)
    their_order, our_order = ids.argsort(1), our_ids.argsort(1)
    assert torch.equal(ids.gather(1, their_order), our_ids.long().gather(1, our_order))
    torch.testing.assert_close(our_weights.gather(1, our_order), weights.gather(1, their_order))
    causal = _loaded(tiny_hf_model("gpt_oss"), torch.float32)
    module = next(module for module in causal.modules() if type(module).__name__ == "GptOssTopKRouter")
    module.bias.data.uniform_(-1, 1)
    hidden_TE = torch.randn(9, causal.config.hidden_size)
    logits, weights, ids = type(module).forward(module, hidden_TE)
    our_logits, our_weights, our_ids = routers.SoftmaxRouter(module)(hidden_TE)
    torch.testing.assert_close(our_logits, logits)
    assert torch.equal(our_ids.long(), ids)
    torch.testing.assert_close(our_weights, weights)


@pytest.mark.parametrize(("family", "least"), [("gpt_oss", 5), ("gemma2", 9), ("olmo2", 9), ("gpt2", 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_found_and_ours_are_the_same(family: str, least: int, dtype: torch.dtype) -> None:
    """Gemma's gain is one more than its weight."""
    causal: Any = _loaded(tiny_hf_model(family), dtype)
    assert norms.fuse_norms(causal, torch.device("cpu"), dtype) >= least
    fused = [module for module in causal.modules() if isinstance(module.forward, norms.FusedNorm)]
    assert len(fused) >= least
    for module in fused:
        x = torch.randn(2, 3, len(module.weight), dtype=dtype)
        ours = norms.normed(x, module.forward._gain_E, module.forward._eps)
        assert (ours.shape, ours.dtype) == (x.shape, dtype)
        torch.testing.assert_close(ours, module.forward._own_forward(x))
        assert torch.equal(module(x), module.forward._own_forward(x)), "where our kernels don't serve"


def test_a_norm_that_does_more_keeps_its_own_code() -> None:
    class OddRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, (16,), self.weight, self.eps).clamp(max=1.0)

    with torch.inference_mode():
        assert norms.fuse_norms(OddRMSNorm(), torch.device("cpu"), torch.float32) == 0


def test_tokens_of_a_trial_go_where_they_went_before() -> None:
    routes, module = Routes(), object()
    ids, weights = torch.arange(10).view(5, 2), torch.rand(5, 2)
    with routes.noting():
        first = ids[:3], weights[:3]
        assert routed(module, *first) == first
        routed(module, ids[3:], weights[3:])
    others = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2, dtype=torch.float64)
    with routes.repeating(torch.tensor([4, 1])):
        again, their_weights = routed(module, *others)
        assert routed(object(), *others) == others
    assert again.tolist() == [[8, 9], [2, 3]]
    assert again.dtype == torch.int32
    torch.testing.assert_close(their_weights, weights[[4, 1]].double())
    assert routed(module, *others) == others


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "olmo2"])
def test_rotations_are_ours_in_one_models_modules_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here our kernels serve by their twins. The modules' own code, which others use, stays as it is."""
    monkeypatch.setattr(rotations, "is_fused", lambda tensor: True)
    called = []
    monkeypatch.setattr(
        rotations, "rotate_halves", lambda *given: called.append(len(given)) or fused_ops.rotate_halves(*given)
    )
    causal, other = (_loaded(tiny_hf_model(family), torch.float32).eval() for _ in range(2))
    for each in (causal, other):
        each.config._attn_implementation = "eager"
    assert rotations.fuse_rotations(causal) == causal.config.num_hidden_layers
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(causal(ids).logits, other(ids).logits, rtol=1e-4, atol=1e-4)
    assert called, "ours were not asked"


def test_a_rotation_of_another_kind_keeps_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotations, "is_fused", lambda tensor: True)

    def by_neighbours(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> rotations.Rotated:
        return tuple(torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin + x * cos for x in (q, k))  # type: ignore[return-value]

    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    cos, sin = torch.randn(2, 1, 5, 16)
    made = rotations.FusedRotation(by_neighbours)(q, k, cos, sin)
    assert all(map(torch.equal, made, by_neighbours(q, k, cos, sin)))
