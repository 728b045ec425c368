"""The experts of models of transformers: what graphs hold on every GPU computes what grouped products do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_hf_models import tiny_hf_model

from tandem.engine.models.hf import experts, routers
from tandem.engine.models.hf.attention import NAME
from tandem.engine.models.hf.config import read_config
from tandem.engine.models.hf.layers import build_empty
from tandem.engine.models.hf.loader import _loaded
from tandem.engine.models.hf.trials.routes import Routes, routed


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
    module: Any = next(module for module in causal.modules() if routers.is_known(module))
    module.norm_topk_prob, module.routed_scaling_factor = True, 2.5
    module.num_group, module.topk_group = 2, 1
    module.e_score_correction_bias.uniform_()
    hidden_TE = torch.randn(9, causal.config.hidden_size)
    _, weights, ids = type(module).forward(module, hidden_TE)
    _, our_weights, our_ids = routers.GroupedRouter(module)(hidden_TE)
    their_order, our_order = ids.argsort(1), our_ids.argsort(1)
    assert torch.equal(ids.gather(1, their_order), our_ids.long().gather(1, our_order))
    torch.testing.assert_close(our_weights.gather(1, our_order), weights.gather(1, their_order))


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
