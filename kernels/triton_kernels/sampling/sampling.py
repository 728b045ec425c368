"""Sampling in a pass over the logits: the best noisy score of each part of a row, then of each row.

R rows, V vocabulary. Noise is computed in fp32 first; what can still win is computed again in float64, so that tokens
are those of the float64 definition.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, cdiv, overlap
from tandem.kernels.triton_kernels.sampling.sampling_limits import find_limits

GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
HALF: tl.constexpr = tl.constexpr(1 << 51)
LARGEST: tl.constexpr = tl.constexpr((1 << 52) - 1)
NOISE_ERROR: tl.constexpr = tl.constexpr(1e-4)  # bounds the error of _rough_noise with room to spare
ROUNDING: tl.constexpr = tl.constexpr(1e-6)  # relative, of fp32 sums
MAX_SPLITS = 64  # a guess; what it reaches: docs/measurements.md#copies-norms-and-sampling
PARTS_BLOCK, PARTS_WARPS = 512, 4  # guesses


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
def _kept(values, scaled, columns, cut, threshold, last):
    return ((values > cut) | ((values == cut) & (columns <= last))) & (scaled >= threshold)


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["temperatures", "seeds", "sample_indices", "output_indices"],  # of one buffer
)
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
            if FILTERED:
                score = tl.where(_kept(values, score, columns, cut, threshold, last), score, float("-inf"))
                if tl.max(score, 0) > float("-inf"):  # most parts keep nothing
                    score += _rough_noise(key, columns)
            else:
                score += _rough_noise(key, columns)
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
    """Does what kernels/sampling/sampling.py says. Without `filtered` the rows' limits are not looked for, whatever the
    rows ask."""
    num_rows, size = logits_RV.shape
    device = logits_RV.device
    num_splits = max(1, min(MAX_SPLITS, 1024 // num_rows, cdiv(size, PARTS_BLOCK)))
    scores = torch.empty((num_rows, MAX_SPLITS), dtype=torch.float64, device=device)
    places = torch.empty((num_rows, MAX_SPLITS), dtype=torch.int32, device=device)
    cuts = torch.empty((num_rows, 2), dtype=torch.float32, device=device)
    last_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
    if filtered:
        find_limits(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, cuts, last_ids)
    sampling_parts_kernel[(num_rows, num_splits)](
        logits_RV, temperature_R, seed_R, sample_index_R, output_index_R, cuts, last_ids, scores, places,
        logits_RV.stride(0), size, num_splits, FILTERED=filtered, MAX_SPLITS=MAX_SPLITS, BLOCK=PARTS_BLOCK,
        num_warps=PARTS_WARPS, **overlap(device),
    )  # fmt: skip
    sampling_whole_kernel[(num_rows,)](
        scores, places, tokens_R, size, num_splits, MAX_SPLITS=MAX_SPLITS, num_warps=2, **overlap(device)
    )
