"""Filtered sampling without sorting: limits of each row's kept tokens, the best noisy score of each part, of each row.

R rows, V vocabulary. The limits are found by narrowing an interval of logits around the boundary: each pass over a row
counts (top_k) or weighs (top_p) what lies above three inner points. Noise is computed in fp32 first; what can still win
is computed again in float64, so that tokens are those of the float64 definition.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import LOG2_E, begin, overlap

GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
HALF: tl.constexpr = tl.constexpr(1 << 51)
LARGEST: tl.constexpr = tl.constexpr((1 << 52) - 1)
NOISE_ERROR: tl.constexpr = tl.constexpr(1e-4)  # bounds the error of _rough_noise with room to spare
ROUNDING: tl.constexpr = tl.constexpr(1e-6)  # relative, of fp32 sums
MAX_SPLITS = 64
LIMITS_BLOCK, LIMITS_WARPS = 8192, 32
PARTS_BLOCK, PARTS_WARPS = 1024, 4


@triton.jit
def _mix(z):
    """SplitMix64's finaliser on uint64."""
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def _row_key(seed, sample_index, output_index):
    key = _mix(seed.to(tl.uint64, bitcast=True) + GAMMA)
    key = _mix(key + (sample_index + 1).to(tl.uint64, bitcast=True) * GAMMA)
    return _mix(key + (output_index + 1).to(tl.uint64, bitcast=True) * GAMMA)


@triton.jit
def _bits(key, token_ids):
    """52 random bits of each token."""
    return _mix(key + (token_ids.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * GAMMA) >> 12


@triton.jit
def _noise(key, token_ids):
    """Standard Gumbel noise, float64: the definition."""
    uniform = (_bits(key, token_ids).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _rough_noise(key, token_ids):
    """The same in fp32 within NOISE_ERROR: near 1 the distance to 1 is what counts, and log1p is a short series."""
    bits = _bits(key, token_ids)
    is_high = bits >= HALF
    near = (tl.where(is_high, LARGEST - bits, bits).to(tl.int64, bitcast=True).to(tl.float32) + 0.5) * 2.220446e-16
    series = near * (1.0 + near * (0.5 + near * (0.33333333 + near * 0.25)))
    minus_log = tl.where(is_high & (near < 0.0625), series, -tl.log(tl.where(is_high, 1.0 - near, near)))
    return -tl.log(minus_log)


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
    while inner_least < inner_most:
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


@triton.jit(do_not_specialize=["size"])
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
            threshold = tl.div_rn(peak, temperature) + tl.log(min_p)
    tl.store(cuts + 2 * row, cut)
    tl.store(cuts + 2 * row + 1, threshold)
    tl.store(last_ids + row, last)


@triton.jit
def _kept(values, scaled, columns, cut, threshold, last):
    return ((values > cut) | ((values == cut) & (columns <= last))) & (scaled >= threshold)


@triton.jit(do_not_specialize=["num_splits", "size"])
def sampling_parts_kernel(
    logits,  # [R, V], strides (row_stride, 1)
    temperatures,  # fp32 [R]; 0: the most likely token
    seeds,  # int64 [R]
    sample_indices,  # int64 [R]
    output_indices,  # int64 [R]
    cuts,  # fp32 [R, 2]
    last_ids,  # int32 [R]
    scores,  # float64 [R, MAX_SPLITS]
    places,  # int32 [R, MAX_SPLITS]
    row_stride,
    size,
    num_splits,
    FILTERED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, num_splits): the largest score of one part of a row, the first of equals."""
    begin(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    per_split = tl.cdiv(tl.cdiv(size, BLOCK), num_splits) * BLOCK
    first = split * per_split
    end = tl.minimum(first + per_split, size)
    own = logits + row * row_stride
    temperature = tl.load(temperatures + row)
    is_random = temperature > 0.0
    divisor = tl.where(is_random, temperature, 1.0)
    key = _row_key(tl.load(seeds + row), tl.load(sample_indices + row), tl.load(output_indices + row))
    cut, threshold, last = float("-inf"), float("-inf"), size
    if FILTERED:
        cut, threshold, last = tl.load(cuts + 2 * row), tl.load(cuts + 2 * row + 1), tl.load(last_ids + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    second = tl.full([BLOCK], float("-inf"), tl.float32)
    where = first + tl.arange(0, BLOCK)
    for start in range(first, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(own + columns, mask=columns < end, other=float("-inf")).to(tl.float32)
        score = tl.div_rn(values, divisor)
        if is_random:
            noisy = score + _rough_noise(key, columns)
            score = tl.where(_kept(values, score, columns, cut, threshold, last), noisy, float("-inf"))
        better = score > best
        second = tl.where(better, best, tl.maximum(second, score))
        best = tl.where(better, score, best)
        where = tl.where(better, columns, where)
    exact = best.to(tl.float64)
    if is_random:
        values = tl.load(own + where, mask=where < size, other=float("-inf")).to(tl.float32)
        noisy = tl.div_rn(values, divisor).to(tl.float64) + _noise(key, where)
        exact = tl.where(best > float("-inf"), noisy, float("-inf"))
        top = tl.max(exact, 0)
        if tl.max(second, 0).to(tl.float64) + NOISE_ERROR + ROUNDING * tl.abs(top) >= top:
            for start in range(first, end, BLOCK):  # too close for fp32 to tell
                columns = start + tl.arange(0, BLOCK)
                values = tl.load(own + columns, mask=columns < end, other=float("-inf")).to(tl.float32)
                scaled = tl.div_rn(values, divisor)
                noisy = scaled.to(tl.float64) + _noise(key, columns)
                noisy = tl.where(_kept(values, scaled, columns, cut, threshold, last), noisy, float("-inf"))
                better = (noisy > exact) | ((noisy == exact) & (columns < where))
                exact = tl.where(better, noisy, exact)
                where = tl.where(better, columns, where)
    top = tl.max(exact, 0)
    tl.store(scores + row * MAX_SPLITS + split, top)
    tl.store(places + row * MAX_SPLITS + split, tl.min(tl.where(exact == top, where, size - 1), 0))


@triton.jit(do_not_specialize=["num_splits", "size"])
def sampling_whole_kernel(
    scores,  # float64 [R, MAX_SPLITS]
    places,  # int32 [R, MAX_SPLITS]
    tokens,  # int64 [R]
    size,
    num_splits,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, MAX_SPLITS)
    mask = splits < num_splits
    values = tl.load(scores + row * MAX_SPLITS + splits, mask=mask, other=float("-inf"))
    where = tl.load(places + row * MAX_SPLITS + splits, mask=mask, other=size - 1)
    chosen = tl.min(tl.where(values == tl.max(values, 0), where, size - 1), 0)
    tl.store(tokens + row, tl.maximum(tl.minimum(chosen, size - 1), 0).to(tl.int64))


def sample_triton(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    seed_R: torch.Tensor,
    sample_index_R: torch.Tensor,
    output_index_R: torch.Tensor,
    tokens_R: torch.Tensor,
    filtered: bool,
) -> None:
    """See kernels/sampling.py. Without `filtered` the row limits are not looked for, whatever the rows ask."""
    num_rows, size = logits_RV.shape
    device = logits_RV.device
    num_splits = max(1, min(MAX_SPLITS, 1024 // num_rows, triton.cdiv(size, PARTS_BLOCK)))
    scores = torch.empty((num_rows, MAX_SPLITS), dtype=torch.float64, device=device)
    places = torch.empty((num_rows, MAX_SPLITS), dtype=torch.int32, device=device)
    cuts = torch.empty((num_rows, 2), dtype=torch.float32, device=device)
    last_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
    if filtered:
        sampling_limits_kernel[(num_rows,)](
            logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, cuts, last_ids, logits_RV.stride(0), size,
            BLOCK=LIMITS_BLOCK, num_warps=LIMITS_WARPS, **overlap(device),
        )  # fmt: skip
    sampling_parts_kernel[(num_rows, num_splits)](
        logits_RV, temperature_R, seed_R, sample_index_R, output_index_R, cuts, last_ids, scores, places,
        logits_RV.stride(0), size, num_splits, FILTERED=filtered, MAX_SPLITS=MAX_SPLITS, BLOCK=PARTS_BLOCK,
        num_warps=PARTS_WARPS, **overlap(device),
    )  # fmt: skip
    sampling_whole_kernel[(num_rows,)](
        scores, places, tokens_R, size, num_splits, MAX_SPLITS=MAX_SPLITS, num_warps=2, **overlap(device)
    )
