"""Which tokens top_k, top_p and min_p leave of each row, found without sorting: limits that the sampling kernel reads.

R rows, V vocabulary, G groups of neighbouring logits. A program a row: from its groups' summaries (sampling_groups.py)
it takes a floor that the boundary surely lies above, and lists the groups that reach beyond it, usually few. In those
it narrows an interval of logits around the boundary: each pass counts (top_k) or weighs (top_p) what lies above three
inner points.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import LOG2_E, begin, cdiv, overlap
from tandem.kernels.triton_kernels.sampling.sampling_groups import (
    GROUP,
    list_groups,
    row_summary,
    safe_floor,
    summarize_groups,
    wants_limits,
)

LIMITS_BLOCK, LIMITS_WARPS = 2048, 8  # groups; guesses
LISTED_AT_ONCE = 64  # groups, logit by logit; a guess
ROUNDING: tl.constexpr = tl.constexpr(1e-5)  # beyond the relative error of fp32 sums
MAX_PASSES: tl.constexpr = tl.constexpr(160)  # quarters of all of fp32's range; ends the search of an infinite logit


@triton.jit
def _listed_logits(logits, listed, num_listed, start, size, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """(columns, logits fp32) [GROUPS, GROUP] of listed groups from `start` on; past their end size and -inf."""
    places = start + tl.arange(0, GROUPS)
    groups = tl.load(listed + places, mask=places < num_listed, other=0)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (places < num_listed)[:, None] & (columns < size)
    values = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(inside, columns, size), tl.where(values == values, values, float("-inf"))


@triton.jit
def _boundary(
    logits, listed, num_listed, size, floor, lower, base, peak, scale, target, WEIGHTED: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """(v, amount above v): v is the smallest logit >= floor such that the amount above it is below `target` (float64).

    Amount: number of logits, or if WEIGHTED the sum of exp2((logit - peak) * scale). The interval (lower, upper]
    always holds v, and nothing of it that counts is below `base`; it is cut in four until all logits inside are equal.
    """
    upper = peak
    above = tl.full([], 0.0, tl.float64)
    inner_least, inner_most = base, peak
    passes = 0
    while (inner_least < inner_most) & (passes < MAX_PASSES):
        passes += 1
        step = upper * 0.25 - base * 0.25
        cut_1, cut_2, cut_3 = base + step, base + 2.0 * step, base + 3.0 * step
        sum_1 = tl.zeros([GROUPS, GROUP], tl.float32)
        sum_2 = tl.zeros([GROUPS, GROUP], tl.float32)
        sum_3 = tl.zeros([GROUPS, GROUP], tl.float32)
        lowest = tl.full([GROUPS, GROUP], float("inf"), tl.float32)
        highest = tl.full([GROUPS, GROUP], float("-inf"), tl.float32)
        for start in range(0, num_listed, GROUPS):
            _, values = _listed_logits(logits, listed, num_listed, start, size, GROUP, GROUPS)
            counts = values >= floor
            inside = counts & (values > lower) & (values <= upper)
            lowest = tl.where(inside, tl.minimum(lowest, values), lowest)
            highest = tl.where(inside, tl.maximum(highest, values), highest)
            weights = counts.to(tl.float32)
            if WEIGHTED:
                weights = weights * tl.exp2((values - peak) * scale)
            sum_1 += tl.where(values > cut_1, weights, 0.0)
            sum_2 += tl.where(values > cut_2, weights, 0.0)
            sum_3 += tl.where(values > cut_3, weights, 0.0)
        inner_least, inner_most = tl.min(tl.min(lowest, 1), 0), tl.max(tl.max(highest, 1), 0)
        if inner_least < inner_most:
            above_1 = tl.sum(tl.sum(sum_1.to(tl.float64), 1), 0)
            above_2 = tl.sum(tl.sum(sum_2.to(tl.float64), 1), 0)
            above_3 = tl.sum(tl.sum(sum_3.to(tl.float64), 1), 0)
            if above_1 < target:
                upper, above = cut_1, above_1
            elif above_2 < target:
                lower, base, upper, above = cut_1, cut_1, cut_2, above_2
            elif above_3 < target:
                lower, base, upper, above = cut_2, cut_2, cut_3, above_3
            else:
                lower, base = cut_3, cut_3
    return inner_most, above


@triton.jit
def _least(logits, listed, num_listed, size, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The least finite logit of listed groups."""
    least = tl.full([GROUPS, GROUP], float("inf"), tl.float32)
    for start in range(0, num_listed, GROUPS):
        _, values = _listed_logits(logits, listed, num_listed, start, size, GROUP, GROUPS)
        least = tl.where(values > float("-inf"), tl.minimum(least, values), least)
    return tl.min(tl.min(least, 1), 0)


@triton.jit
def _weight_kept(logits, listed, num_listed, size, cut, kept, peak, scale, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The weight, float64, of the logits above `cut` and of up to `kept` of those equal to it."""
    total = tl.zeros([GROUPS, GROUP], tl.float32)
    equal = tl.zeros([GROUPS, GROUP], tl.int32)
    for start in range(0, num_listed, GROUPS):
        _, values = _listed_logits(logits, listed, num_listed, start, size, GROUP, GROUPS)
        total += tl.where(values > cut, tl.exp2((values - peak) * scale), 0.0)
        equal += (values == cut).to(tl.int32)
    num_kept = tl.minimum(kept, tl.sum(tl.sum(equal, 1), 0).to(tl.float64))
    return tl.sum(tl.sum(total.to(tl.float64), 1), 0) + num_kept * tl.exp2((cut - peak) * scale).to(tl.float64)


@triton.jit
def _nth_equal(logits, listed, num_listed, size, value, count, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Id of the `count`-th logit that equals `value`; size if there are fewer."""
    seen = tl.full([], 0, tl.int32)
    last = tl.full([], 0, tl.int32) + size
    for start in range(0, num_listed, GROUPS):
        columns, values = _listed_logits(logits, listed, num_listed, start, size, GROUP, GROUPS)
        equal = (values == value).to(tl.int32)
        num_equal = tl.sum(tl.sum(equal, 1), 0)
        if (seen < count) & (seen + num_equal >= count):
            in_order = tl.reshape(equal, [GROUPS * GROUP])
            reached = (tl.cumsum(in_order, 0) + seen == count) & (in_order == 1)
            last = tl.min(tl.where(reached, tl.reshape(columns, [GROUPS * GROUP]), size), 0)
        seen += num_equal
    return last


@triton.jit(
    do_not_specialize=["num_groups"],  # a model has one vocabulary: its size tells how rows can be read
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps"],
)
def sampling_limits_kernel(
    logits,  # [R, V], strides (row_stride, 1)
    temperatures,  # fp32 [R]
    top_ks,  # int64 [R]
    top_ps,  # fp32 [R]
    min_ps,  # fp32 [R]
    peaks,  # fp32 [R, G]
    masses,  # fp32 [R, G]
    listed,  # int32 [R, G], written and read here
    cuts,  # fp32 [R, 2]: lowest kept logit, lowest kept logit / temperature
    last_ids,  # int32 [R]: largest kept id of those at the lowest kept logit
    row_stride,
    size,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,). Rows without filters and greedy rows keep everything."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
    nothing = tl.full([], float("-inf"), tl.float32)
    cut, threshold = nothing, nothing
    last = tl.full([], 0, tl.int32) + size
    if wants_limits(temperature, top_k, top_p, min_p, size):
        own, mine = logits + row * row_stride, listed + row * num_groups
        own_peaks, own_masses = peaks + row * num_groups, masses + row * num_groups
        scale = LOG2_E / temperature
        least_peak, peak, total = row_summary(own_peaks, own_masses, num_groups, scale, BLOCK)
        by_rank = (top_k > 0) & (top_k < size)
        wanted, floor = top_k.to(tl.float64), nothing
        target = tl.maximum(top_p.to(tl.float64) * total, 1e-300)
        if by_rank:
            floor = safe_floor(own_peaks, own_masses, num_groups, least_peak, peak, scale, wanted, False, GROUP, BLOCK)
        elif top_p < 1.0:
            enough = target + total * ROUNDING
            floor = safe_floor(own_peaks, own_masses, num_groups, least_peak, peak, scale, enough, True, GROUP, BLOCK)
        kept = tl.full([], 0.0, tl.float64) + size  # how many of those at the cut
        if by_rank | (top_p < 1.0):
            count = list_groups(own_peaks, mine, num_groups, floor, BLOCK)
            base = floor
            if floor == float("-inf"):
                base = _least(own, mine, count, size, GROUP, GROUPS)
            if by_rank:
                cut, above = _boundary(
                    own, mine, count, size, nothing, floor, base, peak, scale, wanted, False, GROUP, GROUPS
                )
                kept = wanted - above
            if top_p < 1.0:
                if by_rank:
                    total = _weight_kept(own, mine, count, size, cut, kept, peak, scale, GROUP, GROUPS)
                    target = tl.maximum(top_p.to(tl.float64) * total, 1e-300)
                    floor, base = nothing, cut
                lowest, weight_above = _boundary(
                    own, mine, count, size, cut, floor, base, peak, scale, target, True, GROUP, GROUPS
                )
                needed = tl.ceil((target - weight_above) / tl.exp2((lowest - peak) * scale).to(tl.float64))
                kept = tl.where(lowest == cut, tl.minimum(kept, needed), needed)
                cut = lowest
            if kept < size:
                last = _nth_equal(own, mine, count, size, cut, tl.maximum(kept, 1.0).to(tl.int32), GROUP, GROUPS)
        if min_p > 0.0:
            threshold = tl.div_rn(peak, temperature) + tl.log(min_p.to(tl.float64)).to(tl.float32)
    tl.store(cuts + 2 * row, cut)
    tl.store(cuts + 2 * row + 1, threshold)
    tl.store(last_ids + row, last)


def find_limits(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    cuts_R2: torch.Tensor,
    last_ids_R: torch.Tensor,
) -> None:
    """Writes `cuts_R2` fp32 and `last_ids_R` int32, as `sampling_limits_kernel` says."""
    (num_rows, size), device = logits_RV.shape, logits_RV.device
    num_groups = cdiv(size, GROUP)
    settings = (temperature_R, top_k_R, top_p_R, min_p_R)
    peaks, masses = summarize_groups(logits_RV, *settings)
    listed = torch.empty((num_rows, num_groups), dtype=torch.int32, device=device)
    sampling_limits_kernel[(num_rows,)](
        logits_RV, *settings, peaks, masses, listed, cuts_R2, last_ids_R, logits_RV.stride(0), size, num_groups,
        GROUP=GROUP, GROUPS=LISTED_AT_ONCE, BLOCK=LIMITS_BLOCK, num_warps=LIMITS_WARPS, **overlap(device),
    )  # fmt: skip
