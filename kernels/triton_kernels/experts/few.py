"""Products of very few rows with the matrices of their experts: only those chosen are read, straight to registers.

T tokens, k experts of each, X experts, K inputs, G groups of inputs that share a scale, of quantised matrices. No
tensor cores, no sort: with so few rows hardly two choose the same expert. Two launches: gate and up of each pair,
gated; then down, summed over a token's experts in the order of its choice, in fp32 and rounded once. As in
matmul_rows.py the norm before can be done in the first (its scale is one number a row, so it is applied to the sums),
and the addition to the residual stream in the second.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin
from tandem.kernels.triton_kernels.experts.stored import load_scales, scaled


@triton.jit(do_not_specialize=["x_row", "w_row", "w_expert", "up", "top_k", "eps"])
def few_gate_up_kernel(
    x,  # [T, K], strides (16 * x_row, 1)
    weight,  # [X, N, K], strides (16 * w_expert, 16 * w_row, 1)
    scales,  # fp32 [X, G, N] contiguous, where SCALED
    ids,  # int32 [P]; below 0: an expert that isn't here, whose row of y is left as it is
    gain,  # [K], NORM: x is divided by its root mean square and multiplied with this
    y,  # [P, SIZE] contiguous
    x_row,
    w_row,
    w_expert,
    up,  # rows of a matrix before up's first
    top_k,
    eps,
    SIZE: tl.constexpr,  # outputs; TILE_N divides it
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STEPS: tl.constexpr,  # K / TILE_K
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all
    PDL: tl.constexpr,
):
    """Grid (SIZE / TILE_N, P)."""
    pair = tl.program_id(1)
    outputs = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    columns = tl.arange(0, TILE_K)
    offsets = outputs.to(tl.int64)[:, None] * (w_row * 16) + columns[None, :]
    begin(PDL)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    gates = weight + expert * (w_expert * 16) + offsets
    ups = gates + up.to(tl.int64) * (w_row * 16)
    inputs = x + (pair // top_k).to(tl.int64) * (x_row * 16) + columns
    next_gate, next_up = tl.load(gates, cache_modifier=".cg"), tl.load(ups, cache_modifier=".cg")
    # A matrix has gate's rows and up's: 2 * SIZE scales a group.
    gate_scales = scales + expert * ((STEPS * TILE_K // GROUP if GROUP > 0 else 1) * 2 * SIZE) + outputs
    gate_sums = tl.zeros([TILE_N, TILE_K], tl.float32)
    up_sums = tl.zeros([TILE_N, TILE_K], tl.float32)
    squares = tl.zeros([TILE_K], tl.float32)
    for step in tl.static_range(STEPS):
        gate, upper = next_gate, next_up
        if step + 1 < STEPS:
            next_gate = tl.load(gates + (step + 1) * TILE_K, cache_modifier=".cg")
            next_up = tl.load(ups + (step + 1) * TILE_K, cache_modifier=".cg")
        values = tl.load(inputs + step * TILE_K).to(tl.float32)
        if NORM:
            squares += values * values
            values *= tl.load(gain + step * TILE_K + columns).to(tl.float32)
        if SCALED:
            at = step * TILE_K
            gate = scaled(gate, load_scales(gate_scales, at, 2 * SIZE, TILE_K, GROUP), TILE_N, TILE_K, GROUP)
            upper = scaled(upper, load_scales(gate_scales + up, at, 2 * SIZE, TILE_K, GROUP), TILE_N, TILE_K, GROUP)
        gate_sums += gate.to(tl.float32) * values[None, :]
        up_sums += upper.to(tl.float32) * values[None, :]
    total, factor = tl.sum(gate_sums, 1), tl.sum(up_sums, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / (TILE_K * STEPS) + eps)
        total, factor = total * scale, factor * scale
    activated = total / (1.0 + tl.exp(-total)) * factor
    tl.store(y + pair * SIZE + outputs, activated.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["w_row", "w_expert"])
def few_down_kernel(
    x,  # [T, TOP_K, K] contiguous
    weight,  # [X, SIZE, K], strides (16 * w_expert, 16 * w_row, 1)
    scales,  # fp32 [X, G, SIZE] contiguous, where SCALED
    ids,  # int32 [T, TOP_K]; below 0: an expert that isn't here adds nothing
    counts,  # fp32 [T, TOP_K]: what each expert's product is multiplied by
    y,  # [T, SIZE] contiguous
    w_row,
    w_expert,
    SIZE: tl.constexpr,  # TILE_N divides it
    TOP_K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STEPS: tl.constexpr,  # K / TILE_K
    ADD: tl.constexpr,  # y += instead of y =
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (SIZE / TILE_N, T)."""
    token = tl.program_id(1)
    outputs = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    columns = tl.arange(0, TILE_K)
    offsets = outputs.to(tl.int64)[:, None] * (w_row * 16) + columns[None, :]
    begin(PDL)
    next_expert = tl.load(ids + token * TOP_K).to(tl.int64)
    first = weight + next_expert * (w_expert * 16) + offsets
    following = tl.load(first, mask=next_expert >= 0, other=0.0, cache_modifier=".cg")
    sums = tl.zeros([TILE_N, TILE_K], tl.float32)
    for unit in tl.static_range(TOP_K * STEPS):
        current, expert = following, next_expert
        if unit + 1 < TOP_K * STEPS:
            next_expert = tl.load(ids + token * TOP_K + (unit + 1) // STEPS).to(tl.int64)
            matrix = weight + next_expert * (w_expert * 16) + offsets + (unit + 1) % STEPS * TILE_K
            following = tl.load(matrix, mask=next_expert >= 0, other=0.0, cache_modifier=".cg")
        pair = token * TOP_K + unit // STEPS
        if SCALED:
            groups = STEPS * TILE_K // GROUP if GROUP > 0 else 1
            marks = scales + tl.maximum(expert, 0) * (groups * SIZE) + outputs
            factors = load_scales(marks, unit % STEPS * TILE_K, SIZE, TILE_K, GROUP)
            current = scaled(current, factors, TILE_N, TILE_K, GROUP)
        inputs = x + pair * (STEPS * TILE_K) + unit % STEPS * TILE_K + columns
        values = tl.load(inputs, mask=expert >= 0, other=0.0).to(tl.float32)
        sums += current.to(tl.float32) * (values * tl.load(counts + pair))[None, :]
    total = tl.sum(sums, 1)
    if ADD:
        total += tl.load(y + token * SIZE + outputs).to(tl.float32)
    tl.store(y + token * SIZE + outputs, total.to(y.dtype.element_ty))
