"""Products of very few rows with experts in e2m1 (MXFP4). As in few.py each program reads some outputs' weights
straight to registers. Tensor cores would be fed by few programs of many weights, each of which would wait for its own
decoding.

T tokens, k experts of each, P = T k pairs, X experts, K inputs, WORDS = K / 8 words of a row, GROUPS = K / 32. A tile
has TILE_N outputs and TILE_W words of each. Words of one group, four in a row, are one thread's, which sums their
products up before it multiplies them by the group's power of two. Sums in fp32, of a token's experts in the order of
its choice.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import INTERPRETED, begin
from tandem.kernels.triton_kernels.experts.grouped import gated
from tandem.kernels.triton_kernels.experts.stored import eight_e2m1

NUMBERS: tl.constexpr = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)


@triton.jit
def _halves(pairs):
    """Two numbers in bf16 each of int32 -> (the first, the second) in fp32."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _inputs_of(x, words, WORDS: tl.constexpr):
    """What the eight numbers of a row's words stand before: fp32 [TILE_W] each, in their order. 0 past the row."""
    there = words < WORDS
    if x.dtype.element_ty == tl.bfloat16:  # neighbours go together: 16 bytes for a group's words
        pairs = x.to(tl.pointer_type(tl.int32)) + words // 4 * 16 + words % 4
        a, e = _halves(tl.load(pairs, mask=there, other=0))
        b, f = _halves(tl.load(pairs + 4, mask=there, other=0))
        c, g = _halves(tl.load(pairs + 8, mask=there, other=0))
        d, h = _halves(tl.load(pairs + 12, mask=there, other=0))
    else:
        first = x + words // 4 * 32 + words % 4 * 2
        a = tl.load(first, mask=there, other=0.0).to(tl.float32)
        b = tl.load(first + 8, mask=there, other=0.0).to(tl.float32)
        c = tl.load(first + 16, mask=there, other=0.0).to(tl.float32)
        d = tl.load(first + 24, mask=there, other=0.0).to(tl.float32)
        e = tl.load(first + 1, mask=there, other=0.0).to(tl.float32)
        f = tl.load(first + 9, mask=there, other=0.0).to(tl.float32)
        g = tl.load(first + 17, mask=there, other=0.0).to(tl.float32)
        h = tl.load(first + 25, mask=there, other=0.0).to(tl.float32)
    return a, b, c, d, e, f, g, h


@triton.jit
def _group_sums(words, exponents, a, b, c, d, e, f, g, h, TILE_N: tl.constexpr, TILE_W: tl.constexpr):
    """fp32 [TILE_N, TILE_W / 4]: the products of each group. `words` int32 [TILE_N, TILE_W], `exponents` uint8 of the
    groups, `a` to `h` as `_inputs_of` gives them."""
    one = tl.full([TILE_N, TILE_W], 127, tl.int32)
    i, j, k, m, n, o, p, q = eight_e2m1(words, one, NUMBERS)
    sums = i.to(tl.float32) * a[None, :] + j.to(tl.float32) * b[None, :]
    sums += k.to(tl.float32) * c[None, :] + m.to(tl.float32) * d[None, :]
    sums += n.to(tl.float32) * e[None, :] + o.to(tl.float32) * f[None, :]
    sums += p.to(tl.float32) * g[None, :] + q.to(tl.float32) * h[None, :]
    factors = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.sum(sums.reshape(TILE_N, TILE_W // 4, 4), 2) * factors


@triton.jit
def _load_words(places, words, WORDS: tl.constexpr):
    return tl.load(places + words[None, :], mask=(words < WORDS)[None, :], other=0, cache_modifier=".cg")


@triton.jit
def _load_exponents(places, groups, GROUPS: tl.constexpr):
    return tl.load(places + groups[None, :], mask=(groups < GROUPS)[None, :], other=0)


@triton.jit(do_not_specialize=["x_row", "w_row", "w_expert", "top_k", "alpha", "limit"])
def few_e2m1_gate_up_kernel(
    x,  # [T, K], strides (16 * x_row, 1)
    weight,  # int32 [X, 2 * SIZE, WORDS], strides (4 * w_expert, 4 * w_row, 1): gate's outputs, then up's
    scales,  # uint8 [X, 2 * SIZE, GROUPS] contiguous
    bias,  # [X, 2 * SIZE] contiguous, where HAS_BIAS
    ids,  # int32 [P]; below 0: an expert that isn't here, whose row of y is left as it is
    y,  # [P, SIZE] contiguous
    x_row,
    w_row,
    w_expert,
    top_k,
    alpha,  # of CLAMPED
    limit,
    SIZE: tl.constexpr,  # TILE_N divides it
    WORDS: tl.constexpr,  # a multiple of 4
    TILE_N: tl.constexpr,
    TILE_W: tl.constexpr,
    STEPS: tl.constexpr,  # ceil(WORDS / TILE_W)
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (SIZE / TILE_N, P)."""
    pair = tl.program_id(1)
    outputs = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    words, groups = tl.arange(0, TILE_W), tl.arange(0, TILE_W // 4)
    begin(PDL)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    gates = weight + expert * (w_expert * 4) + outputs.to(tl.int64)[:, None] * (w_row * 4)
    ups = gates + SIZE * (w_row * 4)
    gate_marks = scales + (expert * (2 * SIZE) + outputs)[:, None] * (WORDS // 4)
    up_marks = gate_marks + SIZE * (WORDS // 4)
    row = x + (pair // top_k).to(tl.int64) * (x_row * 16)
    next_gate, next_up = _load_words(gates, words, WORDS), _load_words(ups, words, WORDS)
    gate_sums = tl.zeros([TILE_N, TILE_W // 4], tl.float32)
    up_sums = tl.zeros([TILE_N, TILE_W // 4], tl.float32)
    for step in tl.static_range(STEPS):
        gate, upper = next_gate, next_up
        if step + 1 < STEPS:
            following = (step + 1) * TILE_W + words
            next_gate, next_up = _load_words(gates, following, WORDS), _load_words(ups, following, WORDS)
        here = step * (TILE_W // 4) + groups
        gate_exponents = _load_exponents(gate_marks, here, WORDS // 4)
        up_exponents = _load_exponents(up_marks, here, WORDS // 4)
        a, b, c, d, e, f, g, h = _inputs_of(row, step * TILE_W + words, WORDS)
        gate_sums += _group_sums(gate, gate_exponents, a, b, c, d, e, f, g, h, TILE_N, TILE_W)
        up_sums += _group_sums(upper, up_exponents, a, b, c, d, e, f, g, h, TILE_N, TILE_W)
    total, factor = tl.sum(gate_sums, 1), tl.sum(up_sums, 1)
    if HAS_BIAS:
        biases = bias + expert * (2 * SIZE) + outputs
        total += tl.load(biases).to(tl.float32)
        factor += tl.load(biases + SIZE).to(tl.float32)
    activated = gated(total, factor, alpha, limit, CLAMPED)
    tl.store(y + pair * SIZE + outputs, activated.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["w_row", "w_expert"])
def few_e2m1_down_kernel(
    x,  # [T, TOP_K, K] contiguous
    weight,  # int32 [X, SIZE, WORDS], strides (4 * w_expert, 4 * w_row, 1)
    scales,  # uint8 [X, SIZE, GROUPS] contiguous
    bias,  # [X, SIZE] contiguous, where HAS_BIAS
    ids,  # int32 [T, TOP_K]; below 0: an expert that isn't here adds nothing
    counts,  # fp32 [T, TOP_K]: what each expert's product is multiplied by
    y,  # [T, SIZE] contiguous
    w_row,
    w_expert,
    SIZE: tl.constexpr,  # TILE_N divides it
    WORDS: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_W: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (SIZE / TILE_N, T)."""
    token = tl.program_id(1)
    outputs = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    words, groups = tl.arange(0, TILE_W), tl.arange(0, TILE_W // 4)
    rows = outputs.to(tl.int64)[:, None] * (w_row * 4)
    begin(PDL)
    next_expert = tl.load(ids + token * TOP_K).to(tl.int64)
    following = _load_words(weight + tl.maximum(next_expert, 0) * (w_expert * 4) + rows, words, WORDS)
    total = tl.zeros([TILE_N], tl.float32)
    sums = tl.zeros([TILE_N, TILE_W // 4], tl.float32)
    for unit in tl.static_range(TOP_K * STEPS):
        current, expert = following, next_expert
        if unit + 1 < TOP_K * STEPS:
            next_expert = tl.load(ids + token * TOP_K + (unit + 1) // STEPS).to(tl.int64)
            matrix = weight + tl.maximum(next_expert, 0) * (w_expert * 4) + rows
            following = _load_words(matrix, (unit + 1) % STEPS * TILE_W + words, WORDS)
        pair, known = token * TOP_K + unit // STEPS, tl.maximum(expert, 0)
        marks = scales + (known * SIZE + outputs)[:, None] * (WORDS // 4)
        exponents = _load_exponents(marks, unit % STEPS * (TILE_W // 4) + groups, WORDS // 4)
        row = x + pair.to(tl.int64) * (WORDS * 8)
        a, b, c, d, e, f, g, h = _inputs_of(row, unit % STEPS * TILE_W + words, WORDS)
        count = tl.where(expert >= 0, tl.load(counts + pair), 0.0)
        product = _group_sums(current, exponents, a, b, c, d, e, f, g, h, TILE_N, TILE_W)
        sums += tl.where(expert >= 0, product, 0.0) * count  # rows of x of experts elsewhere hold anything
        if HAS_BIAS and unit % STEPS == 0:
            total += tl.load(bias + known * SIZE + outputs).to(tl.float32) * count
    total += tl.sum(sums, 1)
    tl.store(y + token * SIZE + outputs, total.to(y.dtype.element_ty))
