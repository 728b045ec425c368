"""The routers of DeepSeek's and GLM's mixtures, whose choice among groups of experts is one launch of ours on a GPU.

T tokens, X experts, k of them a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tandem.kernels.experts.plans import Routing
from tandem.kernels.experts.routing import route

BY_SIGMOID = ("DeepseekV3TopkRouter", "Glm4MoeTopkRouter")
BY_SOFTMAX = ("DeepseekV2TopkRouter",)


def is_known(module: Any) -> bool:
    """Whether it is one of the classes whose choice `GroupedRouter` makes."""
    return type(module).__name__ in (*BY_SIGMOID, *BY_SOFTMAX)


class GroupedRouter:
    """What a known router computes: fp32 scores of all experts, and the choice among them."""

    def __init__(self, module: Any) -> None:
        self._module = module
        by_sigmoid = type(module).__name__ in BY_SIGMOID
        in_groups = by_sigmoid or module.topk_method == "group_limited_greedy"
        self._routing = Routing(
            module.top_k,
            renormalises=by_sigmoid and module.norm_topk_prob,
            scores="sigmoid" if by_sigmoid else "softmax",
            groups=module.num_group if in_groups else 1,
            kept_groups=module.topk_group if in_groups else 1,
            by_pairs=by_sigmoid,
            factor=module.routed_scaling_factor,
        )

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (logits [T, X], weights fp32 [T, k], ids int32 [T, k]), as the module's own forward."""
        module = self._module
        logits_TX = functional.linear(hidden_states.view(-1, module.hidden_dim).float(), module.weight.float())
        bias_X = module.e_score_correction_bias if self._routing.scores == "sigmoid" else None
        ids_Tk, weights_Tk = route(logits_TX, self._routing, bias_X)
        return logits_TX, weights_Tk, ids_Tk
