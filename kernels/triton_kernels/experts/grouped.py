"""Products of rows with the matrices of their experts, by the tensor cores: one launch for all experts.

P pairs of a token and an expert, X experts, K inputs, N outputs. A program has one tile: up to TILE_M pairs of one
expert (sort.py cuts them) and TILE_N outputs. As in matmul_quantised.py weights are the wide operand, so 16 rows of an
expert are as good as 128. Tiles of one expert follow each other, so its weights come from memory once.
Of quantised matrices scales multiply sums, never weights. With ROUNDED x is e4m3 as well, a scale a row, and weights of
e4m3 go to the tensor cores as they lie; else weights become 16 bit in the registers. Weights of e2m1 do with their
scales, which are powers of two: in bf16 that is exact.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import INTERPRETED, begin, dot
from tandem.kernels.triton_kernels.experts.stored import e2m1_tile
from tandem.kernels.triton_kernels.products.matmul_quantised import int4_tile, widened


@triton.jit
def _add_product(
    acc, stored, values, scale, zero, BITS: tl.constexpr, E2M1: tl.constexpr, GROUP: tl.constexpr,
    ROUNDED: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """acc + weights @ values, with GROUP times the outputs' scale of these inputs. Of e2m1 `scale` has exponents."""
    if E2M1:
        weights = e2m1_tile(stored, scale, values.dtype, TILE_N, TILE_K)
    elif BITS == 4:
        weights = int4_tile(stored, zero, values.dtype, TILE_N, TILE_K)
    elif BITS == 8 and not ROUNDED:
        weights = widened(stored, values.dtype)
    else:
        weights = stored
    if GROUP > 0:
        return acc + dot(weights, values) * scale.to(tl.float32)[:, None]
    elif INTERPRETED or weights.dtype == tl.float32:
        return acc + dot(weights, values)
    else:  # the tensor cores keep few bits of sums over e4m3, so those of a step are added up in fp32
        return tl.dot(weights, values, acc, max_num_imprecise_acc=TILE_K if ROUNDED else None)


@triton.jit
def _load_scale(marks, ahead, CUT: tl.constexpr, TILE_K: tl.constexpr):
    """What lies at `marks + ahead`. CUT: exponents of e2m1, of inputs past K finite ones: their weights are 0, and 0
    times what isn't finite is no number."""
    if CUT > 0:
        there = tl.arange(0, TILE_K // 32)[None, :] < CUT // 32 - ahead
        return tl.load(marks + ahead, mask=there, other=0)
    else:
        return tl.load(marks + ahead)


@triton.jit
def gated(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """silu(gate) * up; CLAMPED as GPT-OSS has it (arXiv 2508.10925): both cut off at the limit, up raised by 1."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return gate / (1.0 + tl.exp(-alpha * gate)) * up
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(
    do_not_specialize=["steps", "tiles_n", "x_row", "w_row", "w_expert", "up", "y_row", "top_k", "alpha", "limit"]
)
def grouped_kernel(
    x,  # [T, K] of GATED, else [P, K] in the order of `order`; strides (16 * x_row, 1)
    x_scales,  # fp32, one a row of x, where ROUNDED
    weight,  # [X, N, K], strides (16 * w_expert, 16 * w_row, 1); of 4 bits int32 [X, N, K / 8], 4 * in place of 16 *
    scales,  # any float [X, G, N] contiguous, of quantised weights; of e2m1 uint8 [X, N, K / 32] contiguous
    zeros,  # as scales: what is stored for 0; of 4 bits but e2m1
    bias,  # [X, N] contiguous, where HAS_BIAS
    order,  # int32 [P]: pairs, expert by expert
    tiles,  # int32 [grid's tiles along M, 4]: expert, first place in `order`, number of pairs, 0
    counts,  # fp32 [P]: what each pair's product is multiplied by; not of GATED
    y,  # GATED: [P, N / 2] in the order of `order`, else [P, N] by pair; strides (16 * y_row, 1)
    steps,  # K / TILE_K
    tiles_n,  # tiles along N, or half of N
    x_row,
    w_row,
    w_expert,
    up,  # GATED: rows of a matrix before up's first
    y_row,
    top_k,  # pairs of a token
    alpha,  # of CLAMPED
    limit,
    TILE_N: tl.constexpr,  # it divides N, of GATED half of N
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    GATED: tl.constexpr,  # y = silu(first half of outputs) * second half
    BITS: tl.constexpr,  # of weights: 8 (e4m3), 4, 0: they are as x
    E2M1: tl.constexpr,  # of 4 bits: not integers with a scale and a zero point
    GROUP: tl.constexpr,  # inputs that share a scale, a multiple of TILE_K; 0: all, or E2M1
    CUT: tl.constexpr,  # of E2M1: K, where TILE_K doesn't divide it; else 0
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ROUNDED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles along M * tiles_n,). Sums in fp32, in the order of K whatever the tile."""
    tile = tl.program_id(0) // tiles_n
    outputs = tl.program_id(0) % tiles_n * TILE_N + tl.arange(0, TILE_N)
    columns = tl.arange(0, TILE_K)
    begin(PDL)
    num_rows = tl.load(tiles + tile * 4 + 2)
    if num_rows == 0:
        return
    expert = tl.load(tiles + tile * 4).to(tl.int64)
    first = tl.load(tiles + tile * 4 + 1)
    rows = tl.arange(0, TILE_M)
    places = first + tl.minimum(rows, num_rows - 1)
    pairs = tl.load(order + places)
    sources = pairs // top_k if GATED else places
    inputs = x + sources.to(tl.int64)[None, :] * (x_row * 16) + columns[:, None]
    UNIT: tl.constexpr = 4 if BITS == 4 else 16  # elements in 16 bytes, or those of 16 bits in 32
    WIDTH: tl.constexpr = TILE_K // 8 if BITS == 4 else TILE_K  # of a tile, as it is stored
    matrix = weight + expert * (w_expert * UNIT)
    weights = matrix + outputs.to(tl.int64)[:, None] * (w_row * UNIT) + tl.arange(0, WIDTH)[None, :]
    ups = weights + up.to(tl.int64) * (w_row * UNIT)
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    acc_up = tl.zeros([TILE_N, TILE_M], tl.float32)
    num_outputs = tiles_n * TILE_N * (2 if GATED else 1)
    if E2M1:
        groups = CUT // 32 if CUT > 0 else steps * (TILE_K // 32)
        marks = scales + (expert * num_outputs + outputs)[:, None] * groups + tl.arange(0, TILE_K // 32)[None, :]
        up_marks = marks + up * groups
    else:
        first_mark = outputs + expert * ((steps * TILE_K // GROUP if GROUP > 0 else 1) * num_outputs)
        marks = scales + first_mark
        up_marks = marks + up
    # Of each step's inputs, and loaded a step ahead; what isn't needed isn't read.
    next_scale = _load_scale(marks, 0, CUT, TILE_K) if GROUP > 0 or E2M1 else outputs
    next_up_scale = _load_scale(up_marks, 0, CUT, TILE_K) if (GROUP > 0 or E2M1) and GATED else outputs
    next_zero = tl.load(zeros + first_mark) if BITS == 4 and not E2M1 else outputs
    next_up_zero = tl.load(zeros + first_mark + up) if BITS == 4 and not E2M1 and GATED else outputs
    for step in tl.range(0, steps, num_stages=STAGES):
        scale, up_scale, zero, up_zero = next_scale, next_up_scale, next_zero, next_up_zero
        if GROUP > 0 or E2M1:
            following = tl.minimum(step + 1, steps - 1)
            ahead = following * (TILE_K // 32) if E2M1 else following * TILE_K // GROUP * num_outputs
            next_scale = _load_scale(marks, ahead, CUT, TILE_K)
            if GATED:
                next_up_scale = _load_scale(up_marks, ahead, CUT, TILE_K)
            if BITS == 4 and not E2M1:
                next_zero = tl.load(zeros + first_mark + ahead)
                if GATED:
                    next_up_zero = tl.load(zeros + first_mark + up + ahead)
        if CUT > 0:
            inside = step * TILE_K + columns < CUT
            whole = step * WIDTH + tl.arange(0, WIDTH) < CUT // 8
            values_KM = tl.load(inputs + step * TILE_K, mask=inside[:, None], other=0.0)
            gates = tl.load(weights + step * WIDTH, mask=whole[None, :], other=0)
        else:
            values_KM = tl.load(inputs + step * TILE_K)
            gates = tl.load(weights + step * WIDTH)
        acc = _add_product(acc, gates, values_KM, scale, zero, BITS, E2M1, GROUP, ROUNDED, TILE_N, TILE_K)
        if GATED:
            uppers = (
                tl.load(ups + step * WIDTH, mask=whole[None, :], other=0) if CUT > 0 else tl.load(ups + step * WIDTH)
            )
            acc_up = _add_product(
                acc_up, uppers, values_KM, up_scale, up_zero, BITS, E2M1, GROUP, ROUNDED, TILE_N, TILE_K
            )
    if ROUNDED:
        row_scales = tl.load(x_scales + sources)[None, :]
        acc, acc_up = acc * row_scales, acc_up * row_scales
    if BITS == 8 and GROUP == 0:
        acc *= tl.load(marks).to(tl.float32)[:, None]
        if GATED:
            acc_up *= tl.load(up_marks).to(tl.float32)[:, None]
    if HAS_BIAS:
        biases = bias + expert * num_outputs + outputs
        acc += tl.load(biases).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(biases + up).to(tl.float32)[:, None]
    if GATED:
        acc = gated(acc, acc_up, alpha, limit, CLAMPED)
        targets = places
    else:
        acc *= tl.load(counts + pairs)[None, :]
        targets = pairs
    into = y + targets.to(tl.int64)[None, :] * (y_row * 16) + outputs[:, None]
    tl.store(into, acc.to(y.dtype.element_ty), mask=(rows < num_rows)[None, :])


@triton.jit
def add_up_kernel(
    products,  # [T, TOP_K, N] contiguous
    ids,  # int32 [T, TOP_K]; below 0: an expert that isn't here made no product
    y,  # [T, N] contiguous
    SIZE: tl.constexpr,  # N
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, ceil(N / BLOCK)): each token's products added up in fp32, in the order of its choice."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        at = products + (token * TOP_K + place) * SIZE + columns
        here = tl.load(ids + token * TOP_K + place) >= 0
        total += tl.load(at, mask=within & here, other=0.0).to(tl.float32)
    tl.store(y + token * SIZE + columns, total.to(y.dtype.element_ty), mask=within)
