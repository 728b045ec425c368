"""An MLP that is a mixture of experts, and what its parameters are called in checkpoints (docs/mixtures_of_experts.md).

T tokens, X experts, E hidden size, F width of an expert.
"""

from __future__ import annotations

import torch
from torch import nn

from tandem.engine.contracts.config_json.mixture_config import MixtureConfig
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.weights.quantisation import MXFP4, Quantisation
from tandem.engine.models.layers.basic import Linear
from tandem.engine.models.layers.mlp import MLP
from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.kernels.api.forward_context import slots_of_pass
from tandem.kernels.experts.mixture import Stack, add_mixture, mixture, takes_few
from tandem.kernels.experts.plans import Clamp, Routing
from tandem.kernels.experts.routing import exact_logits, route
from tandem.kernels.experts.stacked import StackedWeight, empty_mxfp4, empty_stacked
from tandem.kernels.experts.tally import Tally
from tandem.kernels.products import few_rows
from tandem.kernels.products.matmul import linear
from tandem.kernels.products.quantised_weight import QuantisedWeight

# Where a checkpoint has a layer's mixture, and its experts' gate, up and down.
PLAIN = ("mlp", ("gate_proj", "up_proj", "down_proj"))
MIXTRAL = ("block_sparse_moe", ("w1", "w3", "w2"))


class StackedExperts(nn.Module):
    """The matrices of all experts, those shared last. In a group those of this rank: a share of every expert's width,
    or whole experts."""

    gate_up_proj: Stack
    down_proj: Stack

    def __init__(self, hidden_size: int, config: MixtureConfig) -> None:
        super().__init__()
        num_experts = len(config.own) + config.num_folded
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * config.width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, config.width))

    def quantise(
        self,
        how: Quantisation,
        module: str,
        architecture: str,
        scale_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Makes room for quantised matrices in place of the parameters, unless the checkpoint leaves them as they are:
        what it says of the first expert counts for all. `module`: the name of this one; `scale_dtype`: of 4 bits.
        Raises ConfigError, and ValueError for sizes that have none."""
        shapes = {name: getattr(self, name).shape for name in ("gate_up_proj", "down_proj")}
        first = [expert_layers(f"{module}.{name}", shape[1], range(1), architecture) for name, shape in shapes.items()]
        if how.leaves_out_all(name for names in first for name in names):
            return
        for name, shape in shapes.items():
            dtype = getattr(self, name).dtype
            delattr(self, name)
            num_experts, num_outputs, num_inputs = shape
            if how.bits == 4 and num_inputs % how.least_inputs:
                raise ValueError(f"{num_inputs} inputs are no whole groups of {how.least_inputs}")
            if how.stored == MXFP4:
                setattr(self, name, empty_mxfp4(num_experts, num_outputs, num_inputs, dtype, device))
                continue
            int4_scales = scale_dtype if how.bits == 4 else None
            setattr(self, name, empty_stacked(num_experts, num_outputs, num_inputs, how.group, device, int4_scales))

    def quantised(self) -> dict[str, StackedWeight]:
        """Own name -> matrices of all experts, where they are quantised and each is a layer of the checkpoint."""
        both = {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}
        return {name: each for name, each in both.items() if isinstance(each, StackedWeight) and not each.is_e2m1}


class ExpertScores(nn.Module):
    """What makes a score for every expert of a token, and what is added to that where experts are compared."""

    def __init__(self, hidden_size: int, config: MixtureConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32)) if config.has_bias else None
        self.e_score_correction_bias = bias
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.has_biases else None


class MixtureOfExperts(nn.Module):
    """A layer's mixture: each token goes to its best experts by the router's scores, and to those shared."""

    def __init__(self, hidden_size: int, config: MixtureConfig) -> None:
        super().__init__()
        self.gate = ExpertScores(hidden_size, config)
        self.experts = StackedExperts(hidden_size, config)
        self.shared_experts = MLP(hidden_size, config.shared_width) if config.shared_width else None
        self.routing = Routing(
            config.top_k, renormalises=config.renormalises, scores=config.scores, groups=config.groups,
            kept_groups=config.kept_groups, by_pairs=config.by_pairs, factor=config.factor,
            held=None if config.exchanged else config.held, shared=config.num_folded,
        )  # fmt: skip
        self._group: ExpertGroup | None = None
        self._has_exact_scores = config.exact_scores
        self._clamp = None if config.clamp is None else Clamp(*config.clamp)
        self._counts_X: torch.Tensor | None = None

    def fold_shared(self) -> None:
        """Puts the shared experts' matrices behind the others', once both are filled. An MLP is the sum of what its
        columns make, so it is cut into experts as wide as the others; a rank's columns that make no whole number of
        them stay an MLP. Raises ConfigError where they are stored unlike the others."""
        own, stacks, count = self.shared_experts, self.experts, self.routing.shared
        if own is None or not count:
            return
        width = own.down_proj.in_features // count
        for number in range(count):
            place, start = number - count, number * width
            for half, offset in ((0, start), (width, count * width + start)):
                rows = part_of(own.gate_up_proj, slice(offset, offset + width), None)
                fill_part(stacks.gate_up_proj, place, slice(half, half + width), rows)
            columns = part_of(own.down_proj, None, slice(start, start + width))
            fill_part(stacks.down_proj, place, slice(own.down_proj.out_features), columns)
        self.shared_experts = None

    def exchange_in(self, group: ExpertGroup) -> None:
        """Has tokens go to the nodes of a group that have their experts, from now on."""
        self._group = group

    def count_in(self, counts_X: torch.Tensor) -> None:
        """Has it be counted, int32, how many tokens each of all experts is chosen by, from now on."""
        self._counts_X = counts_X

    def _chosen(self, logits_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots_T = None if self._counts_X is None else slots_of_pass(len(logits_TX))
        tally = None if self._counts_X is None or slots_T is None else Tally(self._counts_X, slots_T)
        return route(logits_TX, self.routing, self.gate.e_score_correction_bias, tally)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        if self._has_exact_scores:
            logits_TX = exact_logits(x_TE, self.gate.weight)
        else:
            logits_TX = linear(x_TE, self.gate.weight, self.gate.bias)
        ids_Tk, weights_Tk = self._chosen(logits_TX)
        if self._group is None:
            out_TE = self._own_mixture(x_TE, ids_Tk, weights_Tk)
        else:
            out_TE = self._group.mixture(x_TE, ids_Tk, weights_Tk, slots_of_pass(len(x_TE)), self._own_mixture)
        return out_TE if self.shared_experts is None else out_TE.add_(self.shared_experts(x_TE))

    def _own_mixture(self, x_TE: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
        experts, num_experts = self.experts, len(self.gate.weight) + self.routing.shared
        matrices = experts.gate_up_proj, experts.down_proj
        return mixture(x_TE, ids_Tk, weights_Tk, *matrices, self._clamp, num_experts)

    def forward_few_rows(self, residual_RE: torch.Tensor, gain_E: torch.Tensor, eps: float) -> None:
        """residual += mixture of the normalised residual, in four launches."""
        dtype = torch.float32 if self._has_exact_scores else None
        ids_Rk, weights_Rk = self._chosen(few_rows.norm_linear(residual_RE, gain_E, eps, self.gate.weight, dtype=dtype))
        experts = self.experts
        add_mixture(residual_RE, (gain_E, eps), ids_Rk, weights_Rk, experts.gate_up_proj, experts.down_proj)

    def few_rows_products(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of `forward_few_rows`'s product that isn't over experts; none if it can't be called."""
        stacks = self.experts.gate_up_proj, self.experts.down_proj
        if (
            self._group is not None
            or self.shared_experts is not None
            or self._clamp is not None
            or not takes_few(self.gate.weight[:1], self.routing.num_ids, *stacks)
        ):
            return ()
        num_experts, hidden_size = self.gate.weight.shape
        return ((num_experts, hidden_size),)


def part_of(layer: Linear, rows: slice | None, columns: slice | None) -> torch.Tensor | QuantisedWeight:
    """Some outputs or inputs of a layer's weight. Raises ConfigError for inputs that cut groups apart."""
    if layer.quantised is None:
        return layer.weight[rows or slice(None), columns or slice(None)]
    try:
        whole = layer.quantised if rows is None else layer.quantised.rows(rows.start, rows.stop)
        return whole if columns is None else whole.columns(columns.start, columns.stop)
    except ValueError as error:
        raise ConfigError(f"shared experts can't be cut like the others: {error}; use a checkpoint in bf16") from None


def fill_part(stack: Stack, place: int, rows: slice, part: torch.Tensor | QuantisedWeight) -> None:
    """Some outputs of an expert, counted from the end, become `part`. Raises ConfigError where one is quantised and the
    other isn't."""
    if isinstance(stack, torch.Tensor) and isinstance(part, torch.Tensor):
        stack[place, rows].copy_(part)
    elif isinstance(stack, StackedWeight) and isinstance(part, QuantisedWeight):
        stack.rows(place, rows.start or 0, rows.stop).copy_(part)
    else:
        raise ConfigError("shared experts are quantised, others not, or the other way; use a checkpoint in bf16")


def expert_layers(name: str, num_rows: int, own: range, architecture: str) -> dict[str, tuple[int, int, int]]:
    """Name of an expert's product in the checkpoint -> (which of `own`, first row, last row + 1) of it in the matrices
    `name`, of so many rows an expert."""
    layer, _, matrix = name.partition(".mlp.experts.")
    block, (gate, up, down) = MIXTRAL if architecture == "mixtral" else PLAIN
    half, is_both = num_rows // 2, matrix == "gate_up_proj"
    runs = {gate: (0, half), up: (half, num_rows)} if is_both else {down: (0, num_rows)}
    return {
        f"model.{layer}.{block}.experts.{expert}.{part}": (place, *run)
        for place, expert in enumerate(own)
        for part, run in runs.items()
    }


def mixture_parts(name: str, parameter: torch.Tensor, architecture: str, own: range) -> dict[str, torch.Tensor]:
    """Name in the checkpoint -> the part of the parameter `name` that it fills; none: it is of no mixture. `own`: the
    experts that the parameter holds."""
    layer, found, part_of = name.partition(".mlp.")
    if architecture == "gpt_oss" and part_of in ("gate.weight", "gate.bias"):
        return {f"model.{layer}.mlp.router.{part_of.removeprefix('gate.')}": parameter}
    if found and part_of == "gate.weight":
        block, _ = MIXTRAL if architecture == "mixtral" else PLAIN
        return {f"model.{layer}.{block}.gate.weight": parameter}
    if not found or not part_of.startswith("experts."):
        return {}
    assert len(own) <= len(parameter), f"{name} has {len(parameter)} experts, not {own}"  # those shared come last
    layers = expert_layers(name, parameter.shape[1], own, architecture)
    return {f"{part}.weight": parameter[place, start:stop] for part, (place, start, stop) in layers.items()}
