"""Which experts each token goes to, and what each counts, from the router's logits."""

from __future__ import annotations

import torch
from torch.nn import functional

from tandem.kernels.experts.plans import Routing
from tandem.kernels.experts.tally import Tally
from tandem.kernels.products.fused_ops import is_fused
from tandem.kernels.reference import experts as twins


def route(
    logits_TX: torch.Tensor, routing: Routing, bias_X: torch.Tensor | None = None, tally: Tally | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [T, k] and weights fp32 [T, k], the best expert first; of equals that of the lowest id; those that are
    shared come last. `bias_X`: added to scores where experts are compared, not where they count. Of experts that aren't
    here the id is NOT_HERE. Where there is a `tally`, each choice is counted."""
    if not is_fused(logits_TX) or not _is_served(logits_TX, routing):
        return twins.route(logits_TX, routing, bias_X, tally)
    from tandem.kernels.triton_kernels.experts.route import route_triton

    return route_triton(
        logits_TX, routing.top_k, sigmoid=routing.scores == "sigmoid", renormalise=routing.renormalises,
        bias_X=bias_X, groups=(routing.groups, routing.kept_groups), by_pairs=routing.by_pairs, factor=routing.factor,
        held=routing.held or (0, logits_TX.shape[1]), shared=routing.shared, tally=tally,
    )  # fmt: skip


def exact_logits(x_TE: torch.Tensor, weight_XE: torch.Tensor) -> torch.Tensor:
    """A router's logits [T, X] in fp32, which 16 bits would round before experts are compared."""
    if x_TE.is_cuda and x_TE.element_size() == 2:
        return torch.mm(x_TE, weight_XE.t(), out_dtype=torch.float32)
    return functional.linear(x_TE.float(), weight_XE.float())


def _is_served(logits_TX: torch.Tensor, routing: Routing) -> bool:
    """Whether the kernel serves these logits. In it groups are rows of a matrix: their number and size must be powers
    of two."""
    num_experts = logits_TX.shape[1]
    whole = num_experts & (num_experts - 1) == 0 and routing.groups & (routing.groups - 1) == 0
    return logits_TX.stride(1) == 1 and (routing.groups == 1 or whole)
