"""Routers of mixtures whose choice of experts is one launch of ours on a GPU: GLM's among groups, GPT-OSS's.

T tokens, X experts, k of them a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tandem.kernels.experts.plans import Routing
from tandem.kernels.experts.routing import route


class GroupedRouter:
    """What a known router computes: fp32 scores of all experts, and the choice among them."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._routing = Routing(
            module.top_k,
            renormalises=module.norm_topk_prob,
            scores="sigmoid",
            groups=module.num_group,
            kept_groups=module.topk_group,
            by_pairs=True,
            factor=module.routed_scaling_factor,
        )

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (logits [T, X], weights fp32 [T, k], ids int32 [T, k]), as the module's own forward."""
        module = self._module
        logits_TX = functional.linear(hidden_states.view(-1, module.hidden_dim).float(), module.weight.float())
        ids_Tk, weights_Tk = route(logits_TX, self._routing, module.e_score_correction_bias)
        return logits_TX, weights_Tk, ids_Tk


class SoftmaxRouter:
    """The same of GPT-OSS: scores with a bias, of which the best ones' softmax are weights."""

    def __init__(self, module: Any) -> None:
        self._module, self._routing = module, Routing(module.top_k)

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what `GroupedRouter` does, logits in hidden states' type."""
        module = self._module
        logits_TX = functional.linear(hidden_states, module.weight, module.bias)
        ids_Tk, weights_Tk = route(logits_TX, self._routing)
        return logits_TX, weights_Tk, ids_Tk


# transformers' class -> what computes the same.
KNOWN: dict[str, type[GroupedRouter] | type[SoftmaxRouter]] = {
    "Glm4MoeTopkRouter": GroupedRouter,
    "GptOssTopKRouter": SoftmaxRouter,
}


def own_router(module: Any) -> GroupedRouter | SoftmaxRouter | None:
    """What takes the place of a router's forward; None: it is no router that is known."""
    made = KNOWN.get(type(module).__name__)
    return None if made is None else made(module)
