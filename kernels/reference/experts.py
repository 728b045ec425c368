"""Eager twins of the kernels for mixtures of experts, written for reading.

T tokens, X experts, k of them a token, E hidden size, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tandem.kernels.experts.plans import NOT_HERE, Clamp, Routing
from tandem.kernels.experts.stacked import StackedWeight, expert_matrix
from tandem.kernels.experts.tally import Tally


def route(
    logits_TX: torch.Tensor, routing: Routing, bias_X: torch.Tensor | None = None, tally: Tally | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [T, k] and weights fp32 [T, k]: the best experts of each token, the best first, then those shared;
    NOT_HERE for others than those held."""
    logits = logits_TX.float()
    scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
    choice = scores if bias_X is None else scores + bias_X
    if routing.groups > 1:
        by_group = choice.unflatten(1, (routing.groups, -1))
        best = by_group.topk(2, -1).values.sum(-1) if routing.by_pairs else by_group.amax(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(routing.kept_groups, -1).indices, 1.0)
        choice = by_group.masked_fill(kept[:, :, None] == 0, float("-inf")).flatten(1)
    ids = choice.topk(routing.top_k, -1).indices
    weights = scores.gather(1, ids)
    if routing.renormalises:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if tally is not None:
        chosen = ids[tally.slots_T >= 0].flatten()
        tally.counts_X.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
    first, end = routing.held or (0, logits.shape[1])
    ids = torch.where((ids >= first) & (ids < end), ids - first, NOT_HERE)
    weights = weights * routing.factor
    if routing.shared:
        others = torch.arange(end - first, end - first + routing.shared, device=ids.device)
        ids = torch.cat((ids, others.expand(len(ids), -1)), dim=1)
        weights = torch.cat((weights, weights.new_ones(len(ids), routing.shared)), dim=1)
    return ids.int(), weights


def mixture(
    x_TE: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up_XGE: torch.Tensor | StackedWeight,
    down_XEF: torch.Tensor | StackedWeight,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """[T, E]: down(silu(gate) * up) of each token's experts, weighted and added up in the order of its choice; experts
    that aren't here add nothing. Asks the host which experts were chosen, but where a graph is captured. `rounded`:
    what products make of their rows first."""
    if x_TE.is_cuda and torch.cuda.is_current_stream_capturing():
        return by_every_expert(x_TE, ids_Tk, weights_Tk, gate_up_XGE, down_XEF, clamp)
    products_TkE = x_TE.new_zeros(*ids_Tk.shape, down_XEF.shape[1], dtype=torch.float32)
    for expert in ids_Tk[ids_Tk != NOT_HERE].unique().tolist():
        token, place = torch.where(ids_Tk == expert)
        gate, up = _product(rounded(x_TE[token]), gate_up_XGE, expert).chunk(2, dim=-1)
        product = _product(rounded(gated(gate, up, clamp)), down_XEF, expert)
        products_TkE[token, place] = product.float() * weights_Tk[token, place, None].float()
    return products_TkE.sum(1).to(x_TE.dtype)


def by_every_expert(
    x_TE: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up_XGE: torch.Tensor | StackedWeight,
    down_XEF: torch.Tensor | StackedWeight,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """`mixture` with every token going through every expert, for graphs, which can't ask the host."""
    num_experts = down_XEF.shape[0]
    counts_TX = x_TE.new_zeros(len(x_TE), num_experts + 1, dtype=torch.float32)  # the last are not here
    counts_TX.scatter_add_(1, torch.where(ids_Tk == NOT_HERE, num_experts, ids_Tk).long(), weights_Tk.float())
    total_TE = x_TE.new_zeros(x_TE.shape, dtype=torch.float32)
    for expert in range(num_experts):
        gate, up = _product(x_TE, gate_up_XGE, expert).chunk(2, dim=-1)
        product_TE = _product(gated(gate, up, clamp), down_XEF, expert)
        total_TE += product_TE.float() * counts_TX[:, expert, None]
    return total_TE.to(x_TE.dtype)


def _product(x_PK: torch.Tensor, weight: torch.Tensor | StackedWeight, expert: int) -> torch.Tensor:
    bias = weight.bias if isinstance(weight, StackedWeight) else None
    matrix = expert_matrix(weight, expert, x_PK.dtype)
    return functional.linear(x_PK, matrix, None if bias is None else bias[expert].to(x_PK.dtype))


def gated(gate: torch.Tensor, up: torch.Tensor, clamp: Clamp | None) -> torch.Tensor:
    if clamp is None:
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(clamp.alpha * gate) * (up + 1)
