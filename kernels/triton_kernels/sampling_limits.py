"""Which tokens top_k, top_p and min_p leave of each row, found without sorting: limits that the sampling kernel reads.

R rows, V vocabulary. The limits are found by narrowing an interval of logits around the boundary: each pass over a row
counts (top_k) or weighs (top_p) what lies above three inner points.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import LOG2_E, begin, overlap

LIMITS_BLOCK, LIMITS_WARPS = 4096, 32
MAX_PASSES: tl.constexpr = tl.constexpr(160)  # quarters of all of fp32's range; ends the search of an infinite logit


@triton.jit
def _finite_range(logits, size, BLOCK: tl.constexpr):
    """(least finite logit, largest logit) of a row."""
    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        least = tl.where(values > float("-inf"), tl.minimum(least, values), least)
        most = tl.maximum(most, values)
    return tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _boundary(logits, size, floor, least, peak, scale, target, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """(v, amount above v): v is the smallest logit >= floor such that the amount above it is below `target` (float64).

    Amount: number of logits, or if WEIGHTED the sum of exp2((logit - peak) * scale). The interval (lower, upper]
    always holds v; it is cut in four until all logits inside are equal.
    """
    lower, base, upper = tl.full([], float("-inf"), tl.float32), least, peak
    above = tl.full([], 0.0, tl.float64)
    inner_least, inner_most = least, peak
    passes = 0
    while (inner_least < inner_most) & (passes < MAX_PASSES):
        passes += 1
        step = upper * 0.25 - base * 0.25
        cut_1, cut_2, cut_3 = base + step, base + 2.0 * step, base + 3.0 * step
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
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
        inner_least, inner_most = tl.min(lowest, 0), tl.max(highest, 0)
        if inner_least < inner_most:
            above_1 = tl.sum(sum_1.to(tl.float64), 0)
            above_2 = tl.sum(sum_2.to(tl.float64), 0)
            above_3 = tl.sum(sum_3.to(tl.float64), 0)
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
def _weight_above(logits, size, cut, peak, scale, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        total += tl.where(values > cut, tl.exp2((values - peak) * scale), 0.0)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def _nth_equal(logits, size, value, count, BLOCK: tl.constexpr):
    """Id of the `count`-th logit that equals `value`; size if there are fewer."""
    seen = tl.full([], 0, tl.int32)
    last = tl.full([], 0, tl.int32) + size
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        equal = (values == value).to(tl.int32)
        num_equal = tl.sum(equal, 0)
        if (seen < count) & (seen + num_equal >= count):
            rank = tl.cumsum(equal, 0) + seen
            last = tl.min(tl.where((rank == count) & (equal == 1), columns, size), 0)
        seen += num_equal
    return last


@triton.jit(
    do_not_specialize=["size"],
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps"],  # parts of one buffer
)
def sampling_limits_kernel(
    logits,  # [R, V], strides (row_stride, 1)
    temperatures,  # fp32 [R]
    top_ks,  # int64 [R]
    top_ps,  # fp32 [R]
    min_ps,  # fp32 [R]
    cuts,  # fp32 [R, 2]: lowest kept logit, lowest kept logit / temperature
    last_ids,  # int32 [R]: largest kept id of those at the lowest kept logit
    row_stride,
    size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,). Rows without filters and greedy rows keep everything."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
    cut = tl.full([], float("-inf"), tl.float32)
    last, threshold = tl.full([], 0, tl.int32) + size, cut
    by_rank = (top_k > 0) & (top_k < size)
    if (temperature > 0.0) & (by_rank | (top_p < 1.0) | (min_p > 0.0)):
        own = logits + row * row_stride
        scale = LOG2_E / temperature
        least, peak = _finite_range(own, size, BLOCK)
        kept = tl.full([], 0.0, tl.float64) + size  # how many of those at the cut
        if by_rank:
            cut, above = _boundary(own, size, float("-inf"), least, peak, scale, top_k.to(tl.float64), False, BLOCK)
            kept = top_k.to(tl.float64) - above
        if top_p < 1.0:
            weight = tl.exp2((cut - peak) * scale).to(tl.float64)
            total = _weight_above(own, size, cut, peak, scale, BLOCK)
            if by_rank:
                total += kept * weight
            target = tl.maximum(top_p.to(tl.float64) * total, 1e-300)
            start = tl.maximum(cut, least)
            lowest, weight_above = _boundary(own, size, cut, start, peak, scale, target, True, BLOCK)
            needed = tl.ceil((target - weight_above) / tl.exp2((lowest - peak) * scale).to(tl.float64))
            kept = tl.where(lowest == cut, tl.minimum(kept, needed), needed)
            cut = lowest
        if kept < size:
            last = _nth_equal(own, size, cut, tl.maximum(kept, 1.0).to(tl.int32), BLOCK)
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
    sampling_limits_kernel[(len(logits_RV),)](
        logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, cuts_R2, last_ids_R, logits_RV.stride(0),
        logits_RV.shape[1], BLOCK=LIMITS_BLOCK, num_warps=LIMITS_WARPS, **overlap(logits_RV.device),
    )  # fmt: skip
