"""What a config.json says of layers' mixtures of experts. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET

from tandem.engine.contracts.config_json.fields import (
    DeepseekV2Fields,
    DeepseekV3Fields,
    ExpertFields,
    Fields,
    GptOssFields,
    MixtralFields,
    Qwen3MoeFields,
)


class MixtureConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layers' MLPs that are mixtures of experts: `width` columns each, of which a token takes the best `top_k`, and
    `shared_width` columns more that all tokens take, of experts that they share. How they are chosen:
    kernels/experts/plans.py, Routing; `has_bias`: checkpoints have one for it, and `exact_scores`: scores are made in
    fp32. `has_biases`: so have what makes scores and the experts' products. `clamp`: alpha and limit of GPT-OSS's gate
    in place of SiLU (the same file's Clamp)."""

    num_experts: int
    top_k: int
    width: int
    renormalises: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    by_pairs: bool = False
    factor: float = 1.0
    has_bias: bool = False
    exact_scores: bool = False
    has_biases: bool = False
    clamp: tuple[float, float] | None = None
    shared_width: int = 0
    dense_layers: tuple[int, ...] = ()  # these have an MLP of `intermediate_size` instead
    held: tuple[int, int] | None = None  # the first expert of this rank, and the one after its last; None: all are its
    exchanged: bool = False  # tokens go to the processes that have their experts, each of which has others' tokens, too

    @property
    def own(self) -> range:
        """The experts whose weights are here."""
        return range(*(self.held or (0, self.num_experts)))

    @property
    def num_folded(self) -> int:
        """How many experts as wide as the others the shared columns make, to lie behind them; 0: no whole number, there
        are none, or others' tokens come to those beside them."""
        return 0 if self.exchanged or self.shared_width % self.width else self.shared_width // self.width


def mixture_of(fields: Fields) -> MixtureConfig | None:
    """The mixture that these fields describe; None: all layers are dense. Raises ValueError for numbers that contradict
    each other."""
    if isinstance(fields, DeepseekV2Fields | DeepseekV3Fields):
        return _deepseek_mixture(fields)
    return _mixture(fields) if isinstance(fields, ExpertFields) else None


def _deepseek_mixture(fields: DeepseekV2Fields | DeepseekV3Fields) -> MixtureConfig | None:
    """None: all layers are dense. Raises ValueError."""
    num_experts, is_v3 = fields.n_routed_experts, isinstance(fields, DeepseekV3Fields)
    methods = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    if fields.topk_method not in methods:
        raise ValueError(f"topk_method {fields.topk_method!r} is not supported; supported: {', '.join(methods)}")
    if not is_v3 and fields.norm_topk_prob:
        raise ValueError("norm_topk_prob is not supported for deepseek_v2: take it out")
    in_groups = fields.topk_method != "greedy"
    groups, kept = (fields.n_group or 0, fields.topk_group or 0) if in_groups else (1, 1)
    if not 0 < kept <= groups or num_experts % groups or (is_v3 and num_experts // groups < 2):
        raise ValueError(f"n_group {groups} and topk_group {kept} don't cut {num_experts} experts into groups")
    if fields.num_experts_per_tok > num_experts // groups * kept:
        raise ValueError(f"num_experts_per_tok {fields.num_experts_per_tok} is more than topk_group's experts")
    dense = min(fields.first_k_dense_replace, fields.num_hidden_layers)
    if dense == fields.num_hidden_layers:
        return None
    return MixtureConfig(
        num_experts=num_experts,
        top_k=fields.num_experts_per_tok,
        width=fields.moe_intermediate_size,
        renormalises=is_v3 and bool(fields.norm_topk_prob),
        scores="sigmoid" if is_v3 else "softmax",
        groups=groups,
        kept_groups=kept,
        by_pairs=is_v3,
        factor=fields.routed_scaling_factor,
        has_bias=is_v3,
        exact_scores=True,
        shared_width=fields.n_shared_experts * fields.moe_intermediate_size,
        dense_layers=tuple(range(dense)),
    )


def _mixture(fields: ExpertFields) -> MixtureConfig:
    named = {count for count in (fields.num_experts, fields.num_local_experts) if count is not UNSET}
    if len(named) > 1:
        raise ValueError("num_experts and num_local_experts differ; take one of them out")
    num_experts = named.pop() if named else 8 if isinstance(fields, MixtralFields) else 128
    assert isinstance(num_experts, int)
    if fields.num_experts_per_tok > num_experts:
        raise ValueError(f"num_experts_per_tok {fields.num_experts_per_tok} is more than the {num_experts} experts")
    if not isinstance(fields, Qwen3MoeFields):
        plain = MixtureConfig(num_experts=num_experts, top_k=fields.num_experts_per_tok, width=fields.intermediate_size)
        if not isinstance(fields, GptOssFields):
            return plain
        return msgspec.structs.replace(plain, has_biases=True, clamp=(fields.swiglu_alpha, fields.swiglu_limit))
    step, dense = fields.decoder_sparse_step, set(fields.mlp_only_layers or ())
    return MixtureConfig(
        num_experts=num_experts,
        top_k=fields.num_experts_per_tok,
        width=fields.moe_intermediate_size,
        renormalises=fields.norm_topk_prob,
        dense_layers=tuple(i for i in range(fields.num_hidden_layers) if i in dense or (i + 1) % step),
    )
