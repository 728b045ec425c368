"""y = x @ weight^T for few rows over quantised weights: each weight is read once and becomes 16 bit in the registers.

M rows, N outputs, K inputs, G = K / GROUP groups of inputs that share a scale. As in matmul_stream.py the weight tile
is the wide operand of the tensor cores. Sums are taken in fp32, and scales multiply sums, never weights, so what is
computed is what the numbers stored say. Where there are fewer tiles than multiprocessors K is split: who arrives last
adds what the others left, in the order of K.
One row (TILE_M 1) is multiplied without tensor cores, in fp32.
With PARTS activations are e4m3, too (quantise_rows.py), so weights of 8 bits go to the tensor cores as they lie: each
activation is one number, or the sum of two, high + low / 16, which is all that bf16 holds.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import INTERPRETED, begin, dot

SILU_GROUP: tl.constexpr = tl.constexpr(8)  # gate and up rows alternate in groups of 8
UNIT: tl.constexpr = tl.constexpr(2.0**-9)  # what numbers of 4 bits are counted in
LOW: tl.constexpr = tl.constexpr(1 / 16)  # what the second part of an activation counts


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
def load_weights(values, zero, rows, step, DTYPE: tl.constexpr, BITS: tl.constexpr, TILE_K: tl.constexpr):
    """[rows, TILE_K] in DTYPE. Of 4 bits what is stored less its zero point [rows], both times UNIT: byte
    16 b + 4 t + 2 s + h of a row holds inputs 32 b + 16 s + 8 h + 2 t + p, the lower half that of p = 0, as the tensor
    cores' lanes want them (kernels/products/quantised_weight.py packs them)."""
    if BITS == 8:
        columns = step * TILE_K + tl.arange(0, TILE_K)
        return widened(tl.load(values + rows[:, None] + columns[None, :]), DTYPE)
    else:
        TILE_N: tl.constexpr = rows.shape[0]
        columns = step * (TILE_K // 2) + tl.arange(0, TILE_K // 2)
        pairs = tl.load(values + rows[:, None] + columns[None, :])
        if INTERPRETED:
            low, high = pairs & 15, pairs >> 4
        else:  # four at a time
            low = tl.inline_asm_elementwise("and.b32 $0, $1, 0x0f0f0f0f;", "=r,r", [pairs], tl.uint8, True, 4)
            high = tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0f0f0f0f; }", "=r,r", [pairs], tl.uint8, True, 4
            )
        by_lane = tl.join(low, high).reshape(TILE_N, TILE_K // 32, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5)
        stored = by_lane.reshape(TILE_N, TILE_K)
        if INTERPRETED:  # noqa: SIM108 (it is decided when the kernel is compiled)
            numbers = stored.to(DTYPE) * UNIT
        else:  # e4m3's numbers below 2^-5 are its bits times 2^-9, and conversions are what the compiler makes in place
            numbers = widened(stored.to(tl.float8e4nv, bitcast=True), DTYPE)
        return numbers - (zero.to(tl.float32) * UNIT).to(DTYPE)[:, None]


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
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Scales and bias, then SiLU times up, in fp32; rounded once and stored."""
    if GROUP == 0:
        acc *= scale_of(scales + outputs, BITS)[:, None]
    if PARTS > 0:
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


@triton.jit
def scale_of(places, BITS: tl.constexpr):
    scale = tl.load(places).to(tl.float32)
    return scale / UNIT if BITS == 4 else scale


@triton.jit(do_not_specialize=["num_rows", "steps", "splits", "lanes", "x_row", "w_row", "y_row", "s_row"])
def matmul_quantised_kernel(
    x,  # [M, K], strides (x_row, 1); with PARTS e4m3 [PARTS, M, K], contiguous
    x_scales,  # fp32 [M], with PARTS only
    values,  # e4m3 [N, K] or uint8 [N, K / 2], strides (w_row, 1)
    scales,  # any float [G, N], or [1, N] where GROUP is 0; strides (s_row, 1)
    zeros,  # as scales: what is stored for 0; of 4 bits only
    bias,  # [N], any float
    y,  # [M, N], or [M, N / 2] with SILU, strides (y_row, 1)
    sums,  # fp32 [grid, TILE_N, TILE_M], for splits > 1
    arrivals,  # int32 [tiles], zero between launches
    num_rows,
    steps,  # K / TILE_K
    splits,
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
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,  # bytes of a row
    PARTS: tl.constexpr,  # GROUP is 0 or a multiple of TILE_K, 128
    PDL: tl.constexpr,
):
    """Grid (tiles along N * splits * lanes)."""
    lane = tl.program_id(0) % lanes
    split = tl.program_id(0) // lanes % splits
    tile = tl.program_id(0) // lanes // splits
    outputs = tile * TILE_N + tl.arange(0, TILE_N)
    w_rows = outputs.to(tl.int64) * (w_row * 16)
    rows = lane * TILE_M + tl.arange(0, TILE_M)
    inputs = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[None, :] * (x_row * 16) + tl.arange(0, TILE_K)[:, None]
    first, last = split * steps // splits, (split + 1) * steps // splits
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    acc_low = tl.zeros([TILE_N, TILE_M], tl.float32)
    low_inputs = inputs + num_rows.to(tl.int64) * (x_row * 16)
    zero = tl.load(zeros + outputs) if BITS == 4 else outputs
    if PDL and PREFETCH > 0:
        STEP_BYTES: tl.constexpr = TILE_K * BITS // 8
        prefetch(values, w_rows, first * STEP_BYTES, tl.minimum((last - first) * STEP_BYTES, PREFETCH))
    begin(PDL)
    DTYPE: tl.constexpr = tl.float32 if TILE_M == 1 else x.dtype.element_ty
    wide = tl.zeros([TILE_N, TILE_K], tl.float32)  # of one row
    for step in tl.range(first, last, num_stages=STAGES):
        scale = tl.full([TILE_N], 1.0, tl.float32)
        if GROUP > 0:
            places = step // (GROUP // TILE_K) * (s_row * 8) + outputs
            scale = scale_of(scales + places, BITS)
            if BITS == 4:
                zero = tl.load(zeros + places)
        if TILE_M == 1:
            values_K = tl.load(x + step * TILE_K + tl.arange(0, TILE_K)).to(tl.float32)
            weights = load_weights(values, zero, w_rows, step, DTYPE, BITS, TILE_K)
            wide += weights * scale[:, None] * values_K[None, :] if GROUP > 0 else weights * values_K[None, :]
        elif PARTS > 0:
            weights = tl.load(values + w_rows[:, None] + (step * TILE_K + tl.arange(0, TILE_K))[None, :])
            values_KM = tl.load(inputs + step * TILE_K)
            if GROUP > 0 or INTERPRETED:
                product = dot(weights, values_KM)
                if PARTS == 2:
                    product += dot(weights, tl.load(low_inputs + step * TILE_K)) * LOW
                acc += product * scale[:, None]
            else:  # the tensor cores keep few bits of sums over e4m3, so those of a tile are added up in fp32
                acc = tl.dot(weights, values_KM, acc, max_num_imprecise_acc=TILE_K)
                if PARTS == 2:
                    low_KM = tl.load(low_inputs + step * TILE_K)
                    acc_low = tl.dot(weights, low_KM, acc_low, max_num_imprecise_acc=TILE_K)
        else:
            values_KM = tl.load(inputs + step * TILE_K)
            weights = load_weights(values, zero, w_rows, step, DTYPE, BITS, TILE_K)
            if GROUP > 0 or INTERPRETED:
                acc += dot(weights, values_KM) * scale[:, None]
            else:
                acc = tl.dot(weights, values_KM, acc)
    if TILE_M == 1:
        acc = tl.sum(wide, 1)[:, None]
    if PARTS == 2:
        acc += acc_low * LOW
    first_y = tile * (TILE_N // 2 if SILU else TILE_N)
    if IS_SPLIT:
        places = tl.arange(0, TILE_N)[:, None] * TILE_M + tl.arange(0, TILE_M)[None, :]
        own = tile * lanes + lane
        tl.store(sums + (own * splits + split).to(tl.int64) * (TILE_N * TILE_M) + places, acc)
        tl.debug_barrier()  # every thread's part is stored before the program says so
        if tl.atomic_add(arrivals + own, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(arrivals + own, 0)  # ready for the next launch
            acc = tl.zeros([TILE_N, TILE_M], tl.float32)
            for other in range(splits):
                left = sums + (own * splits + other).to(tl.int64) * (TILE_N * TILE_M) + places
                acc += tl.load(left, cache_modifier=".cg")
            finish(
                acc, scales, x_scales, bias, y, outputs, rows, num_rows, first_y, y_row,
                TILE_N, TILE_M, GROUP, BITS, HAS_BIAS, SILU, PARTS,
            )  # fmt: skip
    else:
        finish(
            acc, scales, x_scales, bias, y, outputs, rows, num_rows, first_y, y_row,
            TILE_N, TILE_M, GROUP, BITS, HAS_BIAS, SILU, PARTS,
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
    w_rows = outputs.to(tl.int64) * (w_row * 16)
    weights = load_weights(values, zero, w_rows, step, y.dtype.element_ty, BITS, TILE_K).to(tl.float32)
    columns = step * TILE_K + tl.arange(0, TILE_K)
    into = y + outputs.to(tl.int64)[:, None] * (y_row * 16) + columns[None, :]
    tl.store(into, (weights * scale_of(scales + places, BITS)[:, None]).to(y.dtype.element_ty))
