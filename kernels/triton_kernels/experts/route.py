"""Which experts a token goes to, and what each counts: one launch over the router's logits.

T tokens, X experts, k of them a token. Whatever the logits are, NaN included, what comes out are ids of experts.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.experts.tally import Tally
from tandem.kernels.triton_kernels.common import begin, next_power_of_2, overlap


@triton.jit
def _first_of_largest(values, columns, PADDED: tl.constexpr):
    """The place of the largest value, the first of equals; PADDED where nothing compares (NaN)."""
    return tl.min(tl.where(values == tl.max(values, 0), columns, PADDED), 0)


@triton.jit
def _in_best_groups(choice, GROUPS: tl.constexpr, KEPT: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    """`choice` [GROUPS * SIZE] with -inf outside of the KEPT best groups, by their largest value or, PAIRS, by the sum
    of their two largest."""
    by_group = choice.reshape(GROUPS, SIZE)
    places = tl.arange(0, SIZE)[None, :]
    largest = tl.max(by_group, 1)
    score = largest
    if PAIRS:
        first = tl.min(tl.where(by_group == largest[:, None], places, SIZE), 1)
        score += tl.max(tl.where(places == first[:, None], float("-inf"), by_group), 1)
    groups = tl.arange(0, GROUPS)
    kept = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(KEPT):
        best = _first_of_largest(score, groups, GROUPS)
        kept = tl.where(groups == best, 1, kept)
        score = tl.where(groups == best, float("-inf"), score)
    return tl.where(kept[:, None] > 0, by_group, float("-inf")).reshape(GROUPS * SIZE)


@triton.jit(
    do_not_specialize=["logits_row", "factor", "first", "end"], do_not_specialize_on_alignment=["tally", "slots"]
)
def route_kernel(
    logits,  # [T, X], strides (logits_row, 1)
    bias,  # fp32 [X]: added to scores when experts are chosen, not when they count
    ids,  # int32 [T, TOP_K + SHARED]: experts from `first` to `end`, counted from the first; -1: another
    weights,  # fp32 [T, TOP_K + SHARED]
    tally,  # COUNTS: int32 [X], to which each token that has a slot adds its choice
    slots,  # COUNTS: int64 [T]
    logits_row,
    factor,
    first,
    end,
    NUM_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,  # else softmax
    HAS_BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,  # 1: not by groups
    KEPT_GROUPS: tl.constexpr,
    BY_PAIRS: tl.constexpr,
    COUNTS: tl.constexpr,
    SHARED: tl.constexpr,  # experts behind all others here that go with every choice
    PDL: tl.constexpr,
):
    """Grid (T,)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    there = columns < NUM_EXPERTS
    values = tl.load(logits + row * logits_row + columns, mask=there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        powers = tl.exp(values - tl.max(values, 0))
        scores = powers / tl.sum(powers, 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + columns, mask=there, other=0.0)
    choice = tl.where(there, choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, GROUPS, KEPT_GROUPS, NUM_EXPERTS // GROUPS, BY_PAIRS)
    places = tl.arange(0, TOP_K_PAD)
    chosen = tl.zeros([TOP_K_PAD], tl.int32)
    counts = tl.zeros([TOP_K_PAD], tl.float32)
    for place in tl.static_range(TOP_K):
        expert = tl.minimum(_first_of_largest(choice, columns, PADDED), NUM_EXPERTS - 1)
        chosen = tl.where(places == place, expert, chosen)
        counts = tl.where(places == place, tl.sum(tl.where(columns == expert, scores, 0.0), 0), counts)
        choice = tl.where(columns == expert, float("-inf"), choice)
    if RENORMALISE:
        counts = counts / (tl.sum(counts, 0) + 1e-20)
    if COUNTS:
        counted = (places < TOP_K) & (tl.load(slots + row) >= 0)
        tl.atomic_add(tally + chosen, 1, mask=counted, sem="relaxed")
    chosen = tl.where((chosen >= first) & (chosen < end), chosen - first, -1)
    counts *= factor
    if SHARED > 0:
        chosen = tl.where(places >= TOP_K, end - first + places - TOP_K, chosen)
        counts = tl.where(places >= TOP_K, 1.0, counts)
    stored = places < TOP_K + SHARED
    tl.store(ids + row * (TOP_K + SHARED) + places, chosen, mask=stored)
    tl.store(weights + row * (TOP_K + SHARED) + places, counts, mask=stored)


def route_triton(
    logits_TX: torch.Tensor,
    top_k: int,
    *,
    sigmoid: bool,
    renormalise: bool,
    bias_X: torch.Tensor | None,
    groups: tuple[int, int],
    by_pairs: bool,
    factor: float,
    held: tuple[int, int],
    shared: int = 0,
    tally: Tally | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [T, k + shared], weights fp32 of as many. `groups`: (how many, how many are kept); their number and
    size are powers of two. `held`: the first expert that is here, and the one after the last."""
    num_tokens, num_experts = logits_TX.shape
    num_ids = top_k + shared
    ids = torch.empty((num_tokens, num_ids), dtype=torch.int32, device=logits_TX.device)
    weights = torch.empty((num_tokens, num_ids), dtype=torch.float32, device=logits_TX.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits_TX, logits_TX if bias_X is None else bias_X, ids, weights, *(tally or (ids, ids)),
            logits_TX.stride(0), factor, *held,
            NUM_EXPERTS=num_experts, PADDED=next_power_of_2(num_experts),
            TOP_K=top_k, TOP_K_PAD=next_power_of_2(num_ids),
            SIGMOID=sigmoid, HAS_BIAS=bias_X is not None, RENORMALISE=renormalise,
            GROUPS=groups[0], KEPT_GROUPS=groups[1], BY_PAIRS=by_pairs, COUNTS=tally is not None, SHARED=shared,
            num_warps=1, **overlap(logits_TX.device),
        )  # fmt: skip
    return ids, weights
