"""y = x @ weight^T for few rows over quantised weights: each weight is read once and becomes 16 bit in the registers.

M rows, N outputs, K inputs, G = K / GROUP groups of inputs that share a scale. As in matmul_stream.py the weight tile
is the wide operand of the tensor cores. Sums are taken in fp32, and scales multiply sums, never weights, so what is
computed is what the numbers stored say. Where there are fewer tiles than multiprocessors K is split: who arrives last
adds what the others left, in the order of K.
One row (TILE_M 1) is multiplied without tensor cores, in fp32.
With ROUNDED activations are e4m3, too (quantise_rows.py), so weights of 8 bits go to the tensor cores as they lie.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import INTERPRETED, begin, dot

SILU_GROUP: tl.constexpr = tl.constexpr(8)  # gate and up rows alternate in groups of 8
# What `eight_numbers` does of a word and of two negated zero points: a number's bits become the mantissa of `power`.
_EIGHT = """{{ .reg .b32 a, b, c, d, m, o;
            mov.b32 m, {power};
            mov.b32 o, 0x3f803f80;
            shr.b32 b, $8, 4;
            shr.b32 c, $8, 8;
            shr.b32 d, $8, 12;
            lop3.b32 a, $8, 0x000f000f, m, 0xea;
            lop3.b32 b, b, 0x000f000f, m, 0xea;
            lop3.b32 c, c, 0x000f000f, m, 0xea;
            lop3.b32 d, d, 0x000f000f, m, 0xea;
            {subtract} a, a, {one}$9;
            {subtract} b, b, {one}$9;
            {subtract} c, c, {one}$9;
            {subtract} d, d, {one}$9;
            mov.b32 {{$0, $4}}, a;
            mov.b32 {{$1, $5}}, b;
            mov.b32 {{$2, $6}}, c;
            mov.b32 {{$3, $7}}, d; }}"""
EIGHT_BF16: tl.constexpr = tl.constexpr(_EIGHT.format(power="0x43004300", subtract="fma.rn.bf16x2", one="o, "))
EIGHT_FP16: tl.constexpr = tl.constexpr(_EIGHT.format(power="0x64006400", subtract="sub.rn.f16x2", one=""))


@triton.jit
def widened(stored, DTYPE: tl.constexpr):
    """e4m3 in DTYPE. By way of fp16, one instruction for two; from there to bf16 the bits are moved, since that
    conversion runs at a quarter of the rate: what is too small by the difference of the exponents' biases then, 2^112,
    is multiplied. Exact: three bits of mantissa, and no number that fp16 holds as a subnormal one."""
    if INTERPRETED or tl.bfloat16 != DTYPE:
        return stored.to(DTYPE)
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, m, z;
            shr.b32 m, $1, 3;
            and.b32 m, m, 0x0fff0fff;
            and.b32 s, $1, 0x80008000;
            or.b32 m, m, s;
            mov.b32 s, 0x77807780;
            mov.b32 z, 0x80008000;
            fma.rn.bf16x2 $0, m, s, z; }""",
            "=r,r", [stored.to(tl.float16)], tl.bfloat16, True, 2,
        )  # fmt: skip


@triton.jit
def eight_numbers(words, zero, DTYPE: tl.constexpr):
    """int32 [...] of eight numbers of 4 bits, and int32 zero points -> eight [...] in DTYPE, number 4 p + j in bits
    16 p + 4 j: what is stored less its zero point. A half of a word ends up as the mantissa of 2^7 in bf16 (2^10 in
    fp16), so a pair takes one instruction to cut out and one to subtract 2^7 and the zero point. Exact."""
    if INTERPRETED:
        return (
            (words & 15).to(DTYPE) - zero, (words >> 4 & 15).to(DTYPE) - zero,
            (words >> 8 & 15).to(DTYPE) - zero, (words >> 12 & 15).to(DTYPE) - zero,
            (words >> 16 & 15).to(DTYPE) - zero, (words >> 20 & 15).to(DTYPE) - zero,
            (words >> 24 & 15).to(DTYPE) - zero, (words >> 28 & 15).to(DTYPE) - zero,
        )  # fmt: skip
    elif tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            EIGHT_BF16,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, (zero + 0xC300) * 0x10001],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            True, 1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            EIGHT_FP16,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, (zero + 0x6400) * 0x10001],
            (tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            True, 1,
        )  # fmt: skip


@triton.jit
def load_weights(values, zero, rows, step, DTYPE: tl.constexpr, BITS: tl.constexpr, TILE_K: tl.constexpr):
    """[rows, TILE_K] in DTYPE. Of 4 bits what is stored less its zero point [rows]: word 4 b + t of a row holds inputs
    32 b + 16 s + 8 h + 2 t + p, number 4 p + 2 s + h of its eight, as the tensor cores' lanes want them
    (kernels/products/quantised_weight.py packs them)."""
    if BITS == 8:
        columns = step * TILE_K + tl.arange(0, TILE_K)
        return widened(tl.load(values + rows[:, None] + columns[None, :]), DTYPE)
    else:
        columns = step * (TILE_K // 8) + tl.arange(0, TILE_K // 8)
        words = tl.load(values + rows[:, None] + columns[None, :])
        return int4_tile(words, zero, DTYPE, rows.shape[0], TILE_K)


@triton.jit
def int4_tile(words, zero, DTYPE: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """[TILE_N, TILE_K] in DTYPE of int32 [TILE_N, TILE_K / 8], less the zero points [TILE_N]."""
    a, b, c, d, e, f, g, h = eight_numbers(words, zero.to(tl.int32)[:, None], DTYPE)
    return in_order(a, b, c, d, e, f, g, h, TILE_N, TILE_K)


@triton.jit
def in_order(a, b, c, d, e, f, g, h, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """[TILE_N, TILE_K] of the eight numbers of words."""
    low = tl.join(tl.join(a, b), tl.join(c, d))
    by_lane = tl.join(low, tl.join(tl.join(e, f), tl.join(g, h)))  # [rows, 4 b + t, h, s, p]
    by_lane = by_lane.reshape(TILE_N, TILE_K // 32, 4, 2, 2, 2)
    return by_lane.permute(0, 1, 4, 3, 2, 5).reshape(TILE_N, TILE_K)


@triton.jit
def prefetch(values, rows, first_byte, num_bytes):
    """Has the first bytes of each row's share on their way to the cache while the preceding kernel still runs."""
    places = (values + rows + first_byte).to(tl.int64)
    sizes = tl.full(places.shape, 0, tl.int32) + num_bytes
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [places, sizes], tl.int32, False, 1
    )


@triton.jit
def finish(
    acc, scales, x_scales, bias, y, outputs, rows, num_rows, first_y, y_row,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """Scales and bias, then SiLU times up, in fp32; rounded once and stored."""
    if GROUP == 0:
        acc *= tl.load(scales + outputs).to(tl.float32)[:, None]
    if ROUNDED:
        acc *= tl.load(x_scales + tl.minimum(rows, num_rows - 1))[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + outputs).to(tl.float32)[:, None]
    if SILU:
        pairs = acc.reshape(TILE_N // (2 * SILU_GROUP), 2, SILU_GROUP, TILE_M).permute(0, 2, 3, 1)
        gate, up = tl.split(pairs)
        acc = (gate / (1.0 + tl.exp(-gate)) * up).reshape(TILE_N // 2, TILE_M)
        places = first_y + tl.arange(0, TILE_N // 2)
    else:
        places = first_y + tl.arange(0, TILE_N)
    inside = (rows < num_rows)[None, :]
    tl.store(y + rows.to(tl.int64)[None, :] * y_row + places[:, None], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "steps", "lanes", "x_row", "w_row", "y_row", "s_row"])
def matmul_quantised_kernel(
    x,  # [M, K], strides (x_row, 1); e4m3 with ROUNDED
    x_scales,  # fp32 [M], with ROUNDED only
    values,  # e4m3 [N, K] or int32 [N, K / 8], strides (w_row, 1)
    scales,  # any float [G, N], or [1, N] where GROUP is 0; strides (s_row, 1)
    zeros,  # as scales: what is stored for 0; of 4 bits only
    bias,  # [N], any float
    y,  # [M, N], or [M, N / 2] with SILU, strides (y_row, 1)
    sums,  # fp32 [grid, TILE_N, TILE_M], for SPLITS > 1
    arrivals,  # int32 [tiles], zero between launches
    num_rows,
    steps,  # K / TILE_K
    lanes,  # tiles along M
    x_row,  # in 16 elements, so that the compiler knows them aligned
    w_row,  # in 16 bytes
    y_row,
    s_row,  # in 8 elements
    TILE_N: tl.constexpr,  # it divides N
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,  # GROUP is a multiple of it
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all
    BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,  # bytes of a row
    ROUNDED: tl.constexpr,  # activations are e4m3, too
    PDL: tl.constexpr,
):
    """Grid (tiles along N * SPLITS * lanes)."""
    lane = tl.program_id(0) % lanes
    split = tl.program_id(0) // lanes % SPLITS
    tile = tl.program_id(0) // lanes // SPLITS
    outputs = tile * TILE_N + tl.arange(0, TILE_N)
    w_rows = outputs.to(tl.int64) * (w_row * (16 if BITS == 8 else 4))
    rows = lane * TILE_M + tl.arange(0, TILE_M)
    inside = (rows < num_rows)[None, :]
    inputs = x + rows.to(tl.int64)[None, :] * (x_row * 16) + tl.arange(0, TILE_K)[:, None]
    first, last = split * steps // SPLITS, (split + 1) * steps // SPLITS
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    # Of each step's group, and loaded a step ahead; one row's own, or zeros that aren't read.
    marks = outputs + (first // (GROUP // TILE_K) * (s_row * 8) if GROUP > 0 else 0)
    next_scale = tl.load(scales + marks) if GROUP > 0 else outputs
    next_zero = tl.load(zeros + marks) if BITS == 4 else outputs
    if PDL and PREFETCH > 0:
        STEP_BYTES: tl.constexpr = TILE_K * BITS // 8
        prefetch(values, w_rows, first * STEP_BYTES, tl.minimum((last - first) * STEP_BYTES, PREFETCH))
    begin(PDL)
    DTYPE: tl.constexpr = tl.float32 if TILE_M == 1 else x.dtype.element_ty
    wide = tl.zeros([TILE_N, TILE_K], tl.float32)  # of one row
    for step in tl.range(first, last, num_stages=STAGES):
        scale, zero = next_scale, next_zero
        if GROUP > 0:
            marks = tl.minimum(step + 1, last - 1) // (GROUP // TILE_K) * (s_row * 8) + outputs
            next_scale = tl.load(scales + marks)
            if BITS == 4:
                next_zero = tl.load(zeros + marks)
        if TILE_M == 1:
            values_K = tl.load(x + step * TILE_K + tl.arange(0, TILE_K)).to(tl.float32)
            weights = load_weights(values, zero, w_rows, step, DTYPE, BITS, TILE_K) * values_K[None, :]
            wide += weights * scale.to(tl.float32)[:, None] if GROUP > 0 else weights
        else:
            values_KM = tl.load(inputs + step * TILE_K, mask=inside, other=0.0)
            if ROUNDED:
                weights = tl.load(values + w_rows[:, None] + (step * TILE_K + tl.arange(0, TILE_K))[None, :])
            else:
                weights = load_weights(values, zero, w_rows, step, DTYPE, BITS, TILE_K)
            if GROUP > 0 or INTERPRETED:
                product = dot(weights, values_KM)
                acc += product * scale.to(tl.float32)[:, None] if GROUP > 0 else product
            else:  # the tensor cores keep few bits of sums over e4m3, so those of a step are added up in fp32
                acc = tl.dot(weights, values_KM, acc, max_num_imprecise_acc=TILE_K if ROUNDED else None)
    if TILE_M == 1:
        acc = tl.sum(wide, 1)[:, None]
    first_y = tile * (TILE_N // 2 if SILU else TILE_N)
    if SPLITS > 1:
        places = tl.arange(0, TILE_N)[:, None] * TILE_M + tl.arange(0, TILE_M)[None, :]
        own = tile * lanes + lane
        tl.store(sums + (own * SPLITS + split).to(tl.int64) * (TILE_N * TILE_M) + places, acc)
        tl.debug_barrier()  # every thread's part is stored before the program says so
        if tl.atomic_add(arrivals + own, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(arrivals + own, 0)  # ready for the next launch
            acc = tl.zeros([TILE_N, TILE_M], tl.float32)
            for other in tl.static_range(SPLITS):  # so that all are on their way at once
                left = sums + (own * SPLITS + other).to(tl.int64) * (TILE_N * TILE_M) + places
                acc += tl.load(left, cache_modifier=".cg")
            finish(
                acc, scales, x_scales, bias, y, outputs, rows, num_rows, first_y, y_row,
                TILE_N, TILE_M, GROUP, HAS_BIAS, SILU, ROUNDED,
            )  # fmt: skip
    else:
        finish(
            acc, scales, x_scales, bias, y, outputs, rows, num_rows, first_y, y_row,
            TILE_N, TILE_M, GROUP, HAS_BIAS, SILU, ROUNDED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["w_row", "s_row", "y_row"])
def dequantise_kernel(
    values, scales, zeros,  # as above
    y,  # [N, K], strides (y_row * 16, 1)
    w_row, s_row, y_row,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N / TILE_N, K / TILE_K): the weight in y's type, rounded once."""
    outputs = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    step = tl.program_id(1)
    places = outputs + (step // (GROUP // TILE_K) * (s_row * 8) if GROUP > 0 else 0)
    begin(PDL)
    zero = tl.load(zeros + places) if BITS == 4 else outputs
    w_rows = outputs.to(tl.int64) * (w_row * (16 if BITS == 8 else 4))
    weights = load_weights(values, zero, w_rows, step, y.dtype.element_ty, BITS, TILE_K).to(tl.float32)
    columns = step * TILE_K + tl.arange(0, TILE_K)
    into = y + outputs.to(tl.int64)[:, None] * (y_row * 16) + columns[None, :]
    tl.store(into, (weights * tl.load(scales + places).to(tl.float32)[:, None]).to(y.dtype.element_ty))
