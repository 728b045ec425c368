"""A decoder of transformers shared out over the ranks of a node, by the plan that its configuration carries.

`base_model_tp_plan` names modules and says how each is cut (docs/tensor_parallelism.md#models-of-transformers). Rows of
a weight make columns of its output: "colwise" leaves each rank its own, heads in attention; "rowwise" cuts the inputs
to match, and the ranks' outputs are summed. Embedding, norms and routers stay whole. Whatever a plan leaves open shows
in a pass of an empty model on the meta device, before a rank starts, or in the trial (trial.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.models.hf.attention import NAME, OwnHeads
from tandem.engine.models.hf.experts import OwnExperts
from tandem.engine.models.hf.layers import LayerNeeds, build_empty, decoder_of, run_empty
from tandem.engine.models.hf.towers import TOWERS
from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.engine.parallel.sharding import Cut, Shard
from tandem.kernels.experts.plans import experts_of_rank

GATHERED = "colwise_gather_output"
CUT_ROWS = ("colwise", "packed_colwise", GATHERED)
CUT_INPUTS = ("rowwise", "rowwise_split_input")
WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")
OF_KV_HEADS = ("k_proj", "v_proj")


class Exchange(Protocol):
    """What ranks do together with activations. Each is a collective."""

    def sum(self, x_NE: torch.Tensor) -> torch.Tensor: ...

    def gather_logits(self, logits_NV: torch.Tensor) -> torch.Tensor: ...


class _Imagined(NamedTuple):
    """The exchange of a rank that is tried alone, on the meta device."""

    size: int

    def sum(self, x_NE: torch.Tensor) -> torch.Tensor:
        return x_NE

    def gather_logits(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return logits_NV.repeat(1, self.size)


def own_needs(needs: tuple[LayerNeeds, ...], shard: Shard) -> tuple[LayerNeeds, ...]:
    """What the layers of this rank need."""
    own = []
    for layer in needs:
        queries = OwnHeads.of(shard, layer.num_heads, layer.num_kv_heads).queries
        slopes = None if layer.alibi_slopes is None else layer.alibi_slopes[queries]
        kv_heads = len(shard.kv_heads(layer.num_kv_heads))
        own.append(layer._replace(num_heads=layer.num_heads // shard.size, num_kv_heads=kv_heads, alibi_slopes=slopes))
    return tuple(own)


def check_plan(config: PreTrainedConfig, needs: tuple[LayerNeeds, ...], shard: Shard) -> None:
    """Raises ConfigError, which names the model, unless its plan shares it out over ranks like this one."""
    size = shard.size
    what = f"--tensor-parallel-size {size}: {config.model_type}, which runs by transformers' modules,"
    if config.model_type in TOWERS:
        raise ConfigError(f"{what} reads images or sound, which it does on one GPU alone")
    for layer in needs:
        kv_heads = layer.num_kv_heads
        if layer.num_heads % size or (kv_heads % size and size % kv_heads):
            raise ConfigError(f"{what} has {layer.num_heads} heads over {kv_heads} KV heads: no equal shares")
    model = build_empty(config)
    try:
        share_out(model, needs, shard, _Imagined(size))
    except ValueError as error:
        raise ConfigError(f"{what} can't be shared out: {error}") from error
    try:
        calls, _ = run_empty(model)
    except ValueError:
        calls = []
    own = own_needs(needs, shard)
    if [call[1:3] for call in calls] != [(layer.num_heads, layer.num_kv_heads) for layer in own]:
        raise ConfigError(f"{what} can't be shared out: its plan does not cut attention by heads")


def share_out(causal: PreTrainedModel, needs: tuple[LayerNeeds, ...], shard: Shard, exchange: Exchange) -> None:
    """Leaves `causal` this rank's part, in place. Raises ValueError where there is no plan, or none we can follow."""
    _, decoder = decoder_of(causal)
    plan: dict[str, str] = getattr(decoder.config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ValueError("transformers has no plan for it (base_model_tp_plan)")
    unknown = sorted({*plan.values()} - {*CUT_ROWS, *CUT_INPUTS, *WHOLE, "moe_tp_experts"})
    if unknown:
        raise ValueError(f"its plan asks for {', '.join(unknown)}, which we don't have")
    num_mixtures = 0
    for name, module in list(decoder.named_modules()):
        if hasattr(module, "layer_idx") and int(module.layer_idx) < len(needs):
            come_whole = any(plan.get(_pattern(f"{name}.{child}")) == GATHERED for child, _ in module.named_children())
            _share_heads(module, needs[int(module.layer_idx)], shard, come_whole)
        style = plan.get(_pattern(name))
        if style == "moe_tp_experts":
            module.register_forward_hook(partial(_sum_output, exchange))
            if shard.expert_parallel:
                num_mixtures += 1
                _keep_own_experts(module, shard.rank, shard.size)
                continue
        elif style in (*CUT_ROWS, *CUT_INPUTS) and isinstance(module, nn.Linear):
            kv_heads = needs[0].num_kv_heads if name.endswith(OF_KV_HEADS) and style == "colwise" else None
            _cut_linear(module, style, shard, exchange, kv_heads)
        for own_name, parameter in list(module.named_parameters(recurse=False)):
            style = plan.get(_pattern(f"{name}.{own_name}"))
            if style in (*CUT_ROWS, *CUT_INPUTS):
                _replace(module, own_name, _cut_experts(parameter, style, shard))
    if shard.expert_parallel and not num_mixtures:
        raise ValueError("it has no experts that its plan names: leave --enable-expert-parallel out")
    _cut_head(causal, shard)


def share_experts_out(causal: PreTrainedModel, group: ExpertGroup) -> None:
    """Leaves the mixtures of `causal` this node's experts, in place, and has tokens go to the nodes that have theirs.
    Raises ConfigError where there are none that can."""
    _, decoder = decoder_of(causal)
    mixtures: list[Any] = [each for each in decoder.modules() if _is_mixture(each)]
    what = f"--data-parallel-size {group.size} with --enable-expert-parallel: {causal.config.model_type}"
    if not mixtures:
        raise ConfigError(f"{what} has no experts that can be shared out: leave --enable-expert-parallel out")
    for mixture in mixtures:
        try:
            _keep_own_experts(mixture, group.rank, group.size)
        except ValueError as error:
            raise ConfigError(f"{what}: {error}") from error
        mixture.tandem_group = group


def _is_mixture(module: Any) -> bool:
    config = getattr(module, "config", None)
    return (
        hasattr(module, "num_experts")
        and getattr(config, "_experts_implementation", None) == NAME
        and hasattr(module, "down_proj")
    )


def _keep_own_experts(module: Any, rank: int, num_ranks: int) -> None:
    """Leaves a mixture of `num_experts` those that are this rank's, whole."""
    num_experts = module.num_experts
    if num_experts < num_ranks or module.config._experts_implementation != NAME:
        raise ValueError(f"{num_experts} experts can't be spread: leave --enable-expert-parallel out")
    first, end = experts_of_rank(rank, num_ranks, num_experts)
    for name, parameter in list(module.named_parameters(recurse=False)):
        _replace(module, name, _taken(parameter, Cut(0, first, end)))
    module.tandem_experts = OwnExperts(first, end, num_experts)
    module.num_experts, module._is_expert_parallel = end - first, True


def _share_heads(module: Any, layer: LayerNeeds, shard: Shard, come_whole: bool) -> None:
    module.tandem_heads = OwnHeads.of(shard, layer.num_heads, layer.num_kv_heads)
    if hasattr(module, "num_key_value_groups") and not come_whole:  # read by its own attention, in the trial
        module.num_key_value_groups = layer.num_heads // shard.size // len(shard.kv_heads(layer.num_kv_heads))


def _cut_linear(linear: Any, style: str, shard: Shard, exchange: Exchange, kv_heads: int | None) -> None:
    """`kv_heads`: the output is so many heads, of which neighbouring ranks may hold the same. `tandem_cut` says to
    adapters what this rank has of the weight."""
    if style in CUT_INPUTS:
        whole = linear.in_features
        linear.tandem_cut = _cut(linear.weight, 1, shard)
        _replace(linear, "weight", _taken(linear.weight, linear.tandem_cut))
        if linear.bias is not None and shard.rank:
            _replace(linear, "bias", torch.zeros_like(linear.bias))  # added once
        linear.register_forward_pre_hook(partial(_own_inputs, shard, whole))
        linear.register_forward_hook(partial(_sum_output, exchange))
        return
    if style == "packed_colwise":
        raise ValueError("its plan packs several matrices in one")
    linear.tandem_cut = _cut(linear.weight, 0, shard, kv_heads)
    for name, tensor in list(linear.named_parameters(recurse=False)):
        _replace(linear, name, _taken(tensor, linear.tandem_cut))
    if style == GATHERED:
        linear.register_forward_hook(partial(_gather_output, exchange))


def _cut_experts(weight: torch.Tensor, style: str, shard: Shard) -> torch.Tensor:
    """Takes this rank's part of all experts' [experts, outputs, inputs]; "packed": of gate and of up below it."""
    if style in CUT_INPUTS:
        return _run(weight, weight.dim() - 1, shard)
    axis = max(weight.dim() - 2, 0)
    if style != "packed_colwise":
        return _run(weight, axis, shard)
    return torch.cat([_run(half, axis, shard) for half in weight.chunk(2, axis)], axis)


def _cut_head(causal: PreTrainedModel, shard: Shard) -> None:
    """Each rank makes logits of its run of the vocabulary; an embedding that is the same matrix stays whole."""
    head: Any = causal.get_output_embeddings()
    for name, tensor in list(head.named_parameters(recurse=False)):
        _replace(head, name, _run(tensor, 0, shard))


def _run(tensor: torch.Tensor, axis: int, shard: Shard) -> torch.Tensor:
    return _taken(tensor, _cut(tensor, axis, shard))


def _taken(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    return cut.of(tensor.detach()).clone()


def _cut(tensor: torch.Tensor, axis: int, shard: Shard, kv_heads: int | None = None) -> Cut:
    """The rank's run along an axis; with `kv_heads` that is so many heads, of which neighbours may have the same."""
    length = tensor.shape[axis]
    if kv_heads is not None:
        width, own = length // kv_heads, shard.kv_heads(kv_heads)
        return Cut(axis, own.start * width, own.stop * width)
    if length % shard.size:
        raise ValueError(f"{length} columns are no equal shares")
    return Cut(axis, shard.rank * length // shard.size, (shard.rank + 1) * length // shard.size)


def _replace(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(tensor, requires_grad=False))


def _pattern(name: str) -> str:
    """A module's name as plans write it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _own_inputs(shard: Shard, whole: int, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    x = inputs[0]
    if x.shape[-1] != whole:
        return None
    own = whole // shard.size
    return (x[..., shard.rank * own : (shard.rank + 1) * own],)


def _sum_output(exchange: Exchange, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return exchange.sum(output.reshape(-1, output.shape[-1])).view(output.shape)


def _gather_output(exchange: Exchange, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    gathered = exchange.gather_logits(output.reshape(-1, output.shape[-1]))
    return gathered.view(*output.shape[:-1], gathered.shape[-1])
