"""Summaries of groups of neighbouring logits, by the whole GPU: what spares the search for limits most of a row.

R rows, V vocabulary, G groups.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import LOG2_E, begin, cdiv, overlap

GROUP = 32  # logits; a guess
GROUPS_AT_ONCE, GROUPS_WARPS = 64, 4  # guesses
FLOOR_PASSES: tl.constexpr = tl.constexpr(4)


@triton.jit
def wants_limits(temperature, top_k, top_p, min_p, size):
    return (temperature > 0.0) & (((top_k > 0) & (top_k < size)) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit(
    do_not_specialize=["num_groups"],  # a model has one vocabulary: its size tells how rows can be read
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps"],  # parts of one buffer
)
def sampling_groups_kernel(
    logits,  # [R, V], strides (row_stride, 1)
    temperatures,  # fp32 [R]
    top_ks,  # int64 [R]
    top_ps,  # fp32 [R]
    min_ps,  # fp32 [R]
    peaks,  # fp32 [R, G]: each group's largest logit
    masses,  # fp32 [R, G]: sum of exp2((logit - peak) * scale)
    row_stride,
    size,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, ceil(G / GROUPS)). Rows without filters are left out."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    wanted = wants_limits(temperature, tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row), size)
    if wanted:
        groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        values = tl.load(logits + row * row_stride + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        values = tl.where(values == values, values, float("-inf"))
        peak = tl.max(values, 1)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        mass = tl.sum(tl.exp2((values - base[:, None]) * (LOG2_E / temperature)), 1)
        tl.store(peaks + row * num_groups + groups, peak, mask=groups < num_groups)
        tl.store(masses + row * num_groups + groups, mass, mask=groups < num_groups)


@triton.jit
def row_summary(peaks, masses, num_groups, scale, BLOCK: tl.constexpr):
    """(least finite peak of a group, largest logit, sum of exp2((logit - largest) * scale) as float64) of a row."""
    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, num_groups, BLOCK):
        groups = start + tl.arange(0, BLOCK)
        peak = tl.load(peaks + groups, mask=groups < num_groups, other=float("-inf"))
        least = tl.where(peak > float("-inf"), tl.minimum(least, peak), least)
        most = tl.maximum(most, peak)
    largest = tl.max(most, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_groups, BLOCK):
        groups = start + tl.arange(0, BLOCK)
        peak = tl.load(peaks + groups, mask=groups < num_groups, other=float("-inf"))
        mass = tl.load(masses + groups, mask=groups < num_groups, other=0.0)
        total += tl.where(peak > float("-inf"), mass * tl.exp2((peak - largest) * scale), 0.0)
    return tl.min(least, 0), largest, tl.sum(total.to(tl.float64), 0)


@triton.jit
def _surely_above(peak, mass, cut, largest, scale, WEIGHTED: tl.constexpr, GROUP: tl.constexpr):
    """A lower bound of what each group has above `cut`: what is not above weighs at most exp2 of the cut each."""
    if WEIGHTED:
        at_cut = tl.exp2((cut - largest) * scale)
        best = tl.exp2((peak - largest) * scale)
        amount = tl.maximum(best, best * mass - (GROUP - 1) * at_cut)
    else:
        amount = tl.zeros_like(peak) + 1.0
    return tl.where(peak > cut, amount, 0.0)


@triton.jit
def safe_floor(
    peaks, masses, num_groups, least, largest, scale, target, WEIGHTED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A value above which at least `target` (float64) of the row surely lies, a high one; -inf if none was found."""
    lower, base, upper = tl.full([], float("-inf"), tl.float32), least, largest
    for _ in range(FLOOR_PASSES):
        step = upper * 0.25 - base * 0.25
        cut_1, cut_2, cut_3 = base + step, base + 2.0 * step, base + 3.0 * step
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_groups, BLOCK):
            groups = start + tl.arange(0, BLOCK)
            peak = tl.load(peaks + groups, mask=groups < num_groups, other=float("-inf"))
            mass = tl.load(masses + groups, mask=groups < num_groups, other=0.0)
            sum_1 += _surely_above(peak, mass, cut_1, largest, scale, WEIGHTED, GROUP)
            sum_2 += _surely_above(peak, mass, cut_2, largest, scale, WEIGHTED, GROUP)
            sum_3 += _surely_above(peak, mass, cut_3, largest, scale, WEIGHTED, GROUP)
        if tl.sum(sum_3.to(tl.float64), 0) >= target:
            lower, base = cut_3, cut_3
        elif tl.sum(sum_2.to(tl.float64), 0) >= target:
            lower, base, upper = cut_2, cut_2, cut_3
        elif tl.sum(sum_1.to(tl.float64), 0) >= target:
            lower, base, upper = cut_1, cut_1, cut_2
        else:
            upper = cut_1
    return lower


@triton.jit
def list_groups(peaks, listed, num_groups, floor, BLOCK: tl.constexpr):
    """Writes the groups with a logit above `floor` to `listed`, in order -> how many."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, num_groups, BLOCK):
        groups = start + tl.arange(0, BLOCK)
        reaches = tl.load(peaks + groups, mask=groups < num_groups, other=float("-inf")) > floor
        place = count + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(listed + place, groups, mask=reaches)
        count += tl.sum(reaches.to(tl.int32), 0)
    tl.debug_barrier()  # what one thread wrote others read
    return count


def summarize_groups(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(peaks, masses), both fp32 [R, G]; undefined in rows without filters."""
    (num_rows, size), device = logits_RV.shape, logits_RV.device
    num_groups = cdiv(size, GROUP)
    peaks, masses = (torch.empty((num_rows, num_groups), dtype=torch.float32, device=device) for _ in range(2))
    sampling_groups_kernel[(num_rows, cdiv(num_groups, GROUPS_AT_ONCE))](
        logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, peaks, masses, logits_RV.stride(0), size, num_groups,
        GROUP=GROUP, GROUPS=GROUPS_AT_ONCE, num_warps=GROUPS_WARPS, **overlap(device),
    )  # fmt: skip
    return peaks, masses
