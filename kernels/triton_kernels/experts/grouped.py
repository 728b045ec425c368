"""Products of rows with the matrices of their experts, by the tensor cores: one launch for all experts.

P pairs of a token and an expert, X experts, K inputs, N outputs. A program has one tile: up to TILE_M pairs of one
expert (sort.py cuts them) and TILE_N outputs. As in matmul_quantised.py weights are the wide operand, so 16 rows of an
expert are as good as 128. Tiles of one expert follow each other, so its weights come from memory once.
Of quantised matrices scales multiply sums, never weights. With ROUNDED x is e4m3 as well, a scale a row, and weights of
e4m3 go to the tensor cores as they lie; else weights become 16 bit in the registers.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import INTERPRETED, begin, dot
from tandem.kernels.triton_kernels.products.matmul_quantised import widened


@triton.jit
def _add_product(
    acc, weights, values, scale, SCALED: tl.constexpr, GROUP: tl.constexpr, ROUNDED: tl.constexpr, TILE_K: tl.constexpr
):
    """acc + weights @ values, with GROUP times the outputs' scale of these inputs."""
    if SCALED and not ROUNDED:
        weights = widened(weights, values.dtype)
    if GROUP > 0:
        return acc + dot(weights, values) * scale[:, None]
    elif INTERPRETED or weights.dtype == tl.float32:
        return acc + dot(weights, values)
    else:  # the tensor cores keep few bits of sums over e4m3, so those of a step are added up in fp32
        return tl.dot(weights, values, acc, max_num_imprecise_acc=TILE_K if ROUNDED else None)


@triton.jit(do_not_specialize=["steps", "tiles_n", "x_row", "w_row", "w_expert", "up", "y_row", "top_k"])
def grouped_kernel(
    x,  # [T, K] of GATED, else [P, K] in the order of `order`; strides (16 * x_row, 1)
    x_scales,  # fp32, one a row of x, where ROUNDED
    weight,  # [X, N, K], strides (16 * w_expert, 16 * w_row, 1)
    scales,  # fp32 [X, G, N] contiguous, where SCALED
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
    TILE_N: tl.constexpr,  # it divides N, of GATED half of N
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    GATED: tl.constexpr,  # y = silu(first half of outputs) * second half
    SCALED: tl.constexpr,  # weights are e4m3
    GROUP: tl.constexpr,  # inputs that share a scale, a multiple of TILE_K; 0: all
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
    matrix = weight + expert * (w_expert * 16)
    weights = matrix + outputs.to(tl.int64)[:, None] * (w_row * 16) + columns[None, :]
    ups = weights + up.to(tl.int64) * (w_row * 16)
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    acc_up = tl.zeros([TILE_N, TILE_M], tl.float32)
    num_outputs = tiles_n * TILE_N * (2 if GATED else 1)
    marks = scales + outputs
    if SCALED:
        marks += expert * ((steps * TILE_K // GROUP if GROUP > 0 else 1) * num_outputs)
    # Of each step's group, and loaded a step ahead; without groups they aren't read here.
    next_scale = tl.load(marks) if GROUP > 0 else outputs
    next_up_scale = tl.load(marks + up) if GROUP > 0 and GATED else outputs
    for step in tl.range(0, steps, num_stages=STAGES):
        scale, up_scale = next_scale, next_up_scale
        if GROUP > 0:
            following = marks + tl.minimum(step + 1, steps - 1) * TILE_K // GROUP * num_outputs
            next_scale = tl.load(following)
            if GATED:
                next_up_scale = tl.load(following + up)
        values_KM = tl.load(inputs + step * TILE_K)
        acc = _add_product(acc, tl.load(weights + step * TILE_K), values_KM, scale, SCALED, GROUP, ROUNDED, TILE_K)
        if GATED:
            uppers = tl.load(ups + step * TILE_K)
            acc_up = _add_product(acc_up, uppers, values_KM, up_scale, SCALED, GROUP, ROUNDED, TILE_K)
    if ROUNDED:
        row_scales = tl.load(x_scales + sources)[None, :]
        acc, acc_up = acc * row_scales, acc_up * row_scales
    if SCALED and GROUP == 0:
        acc *= tl.load(marks)[:, None]
        if GATED:
            acc_up *= tl.load(marks + up)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
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
