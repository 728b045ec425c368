"""An MLP that is a mixture of experts, and what its parameters are called in checkpoints (docs/mixtures_of_experts.md).

T tokens, X experts, E hidden size, F width of an expert.
"""

from __future__ import annotations

import torch
from torch import nn

from tandem.engine.contracts.model_config import MixtureConfig
from tandem.kernels.experts.mixture import mixture
from tandem.kernels.experts.plans import Routing
from tandem.kernels.experts.routing import route
from tandem.kernels.products.matmul import linear

# Where a checkpoint has a layer's mixture, and its experts' gate, up and down.
PLAIN = ("mlp", ("gate_proj", "up_proj", "down_proj"))
MIXTRAL = ("block_sparse_moe", ("w1", "w3", "w2"))


class StackedExperts(nn.Module):
    """The matrices of all experts. In a group those of this rank: a share of every expert's width."""

    def __init__(self, hidden_size: int, config: MixtureConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, hidden_size, config.width))


class ExpertScores(nn.Module):
    """What makes a score for every expert of a token."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))


class MixtureOfExperts(nn.Module):
    """A layer's mixture: each token goes to its best experts, by the softmax of the router's scores."""

    def __init__(self, hidden_size: int, config: MixtureConfig) -> None:
        super().__init__()
        self.gate = ExpertScores(hidden_size, config.num_experts)
        self.experts = StackedExperts(hidden_size, config)
        self.routing = Routing(config.top_k, renormalises=config.renormalises)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        ids_Tk, weights_Tk = route(linear(x_TE, self.gate.weight), self.routing)
        return mixture(x_TE, ids_Tk, weights_Tk, self.experts.gate_up_proj, self.experts.down_proj)


def mixture_parts(name: str, parameter: torch.Tensor, architecture: str) -> dict[str, torch.Tensor]:
    """Name in the checkpoint -> the part of the parameter `name` that it fills; none: it is of no mixture."""
    layer, found, own = name.partition(".mlp.")
    if not found or (own != "gate.weight" and not own.startswith("experts.")):
        return {}
    block, (gate, up, down) = MIXTRAL if architecture == "mixtral" else PLAIN
    block = f"model.{layer}.{block}"
    if own == "gate.weight":
        return {f"{block}.gate.weight": parameter}
    width = parameter.shape[1] // 2
    parts = {gate: slice(0, width), up: slice(width, None)} if own == "experts.gate_up_proj" else {down: slice(None)}
    return {
        f"{block}.experts.{expert}.{part}.weight": parameter[expert, rows]
        for expert in range(len(parameter))
        for part, rows in parts.items()
    }
