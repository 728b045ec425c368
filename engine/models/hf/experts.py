"""What a mixture's experts compute: one function for every architecture that lets its own be replaced.

On a GPU our kernels serve wherever experts are stored as they read them (docs/mixtures_of_experts.md). Others take
grouped products, transformers' own choice, which read only experts that tokens chose. But where torch has no kernel for
them (below compute capability 9.0, or for other elements than bf16) it brings the groups' sizes to the host, which a
CUDA graph can't hold: there a decode step's tokens go through all experts, whose weights mostly have to be read anyway.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from tandem.engine.models.hf.attention import NAME
from tandem.engine.models.hf.trials.routes import routed
from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.kernels.api.forward_context import slots_of_pass
from tandem.kernels.experts import mixture
from tandem.kernels.experts.plans import NOT_HERE

SILU = (SiLUActivation, torch.nn.SiLU)
REPLACED = "grouped_mm"  # transformers' choice for architectures that let it choose
DENSE_TOKENS = 256  # so many go through all experts even in a step that is not captured; a guess


class OwnExperts(NamedTuple):
    """The experts of a rank that holds whole ones: `first` up to `end` of so many."""

    first: int
    end: int
    num_experts: int

    def ids(self, ids: torch.Tensor, elsewhere: int) -> torch.Tensor:
        """The same ids, counted from the first here; `elsewhere` for others'."""
        return torch.where((ids >= self.first) & (ids < self.end), ids - self.first, elsewhere)


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden [T, E]; each token's experts and their weights [T, k] -> [T, E]. `module` holds all experts' matrices, or
    those of `tandem_experts` alone: what other nodes have is made by those of
    `tandem_group`, if there is one, and left out otherwise."""
    top_k_index, top_k_weights = routed(module, top_k_index, top_k_weights)
    own: OwnExperts | None = getattr(module, "tandem_experts", None)
    group: ExpertGroup | None = getattr(module, "tandem_group", None)
    if group is None or own is None:
        ids_Tk = top_k_index if own is None else own.ids(top_k_index, NOT_HERE)
        return _own_mixture(module, hidden_states, ids_Tk, top_k_weights)
    ids_Tk = top_k_index.int().contiguous()
    if not group.is_open:  # all nodes try the model, and come here first in the same layer
        group.open(hidden_states.shape[1], ids_Tk.shape[1], own.num_experts, hidden_states.dtype)
    weights_Tk, slots_T = top_k_weights.float().contiguous(), slots_of_pass(len(ids_Tk))
    return group.mixture(hidden_states, ids_Tk, weights_Tk, slots_T, partial(_own_mixture, module))


def _own_mixture(
    module: Any, hidden_states: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor
) -> torch.Tensor:
    """[T, E]: what the experts that are here make. `ids_Tk` from 0, and NOT_HERE where some are elsewhere."""
    own: OwnExperts | None = getattr(module, "tandem_experts", None)
    of_all = None if own is None else own.num_experts
    if hidden_states.is_cuda and _is_plain(module):
        matrices = module.gate_up_proj, module.down_proj
        if mixture.serves(hidden_states, ids_Tk, *matrices):
            return mixture.mixture(hidden_states, ids_Tk.int(), weights_Tk.float(), *matrices, num_experts=of_all)
    top_k_index, top_k_weights = ids_Tk.long(), weights_Tk
    if own is not None:
        is_elsewhere = top_k_index == NOT_HERE
        top_k_index = top_k_index.masked_fill(is_elsewhere, module.num_experts)  # what transformers takes for those
        top_k_weights = top_k_weights.masked_fill(is_elsewhere, 0.0)
    asks_host = hidden_states.is_cuda and not _groups_on_device(hidden_states.device, hidden_states.dtype)
    if asks_host and (len(hidden_states) <= DENSE_TOKENS or torch.cuda.is_current_stream_capturing()):
        return all_experts(module, hidden_states, top_k_index, top_k_weights)
    output: torch.Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return output


def _is_plain(module: Any) -> bool:
    """Whether an expert is down(silu(gate) * up), stored as our kernels read it."""
    differs = not module.has_gate or not module.is_concatenated or module.is_transposed or module.has_bias
    if differs or getattr(module, "has_post_expert_norm", False) or not isinstance(module.act_fn, SILU):
        return False
    return type(module)._apply_gate is moe._default_apply_gate


def all_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The same by way of every expert for every token: no shape depends on values. Ids beyond the experts weigh 0."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    bias = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias) if module.has_bias else None
    weight_XT = hidden_states.new_zeros(len(first), len(hidden_states), dtype=top_k_weights.dtype)
    weight_XT.scatter_add_(0, top_k_index.clamp(max=len(first) - 1).t(), top_k_weights.t())
    inner = _product(module, hidden_states.expand(len(first), -1, -1), first, bias)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer_XTE = _product(module, inner, module.down_proj, module.down_proj_bias if module.has_bias else None)
    if getattr(module, "has_post_expert_norm", False):
        outer_XTE = module.post_expert_norm(outer_XTE)
    return (outer_XTE * weight_XT[..., None]).sum(0).to(hidden_states.dtype)


def _product(module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[experts, T, inputs] -> [experts, T, outputs]."""
    product = torch.bmm(x, weight if module.is_transposed else weight.transpose(1, 2))
    return product if bias is None else product + bias[:, None]


@cache
def _groups_on_device(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped products never ask the host (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
