"""y = x @ weight^T for few rows over quantised weights: each weight is read once and becomes 16 bit in the registers.

M rows, N outputs, K inputs, G = K / GROUP groups of inputs that share a scale. As in matmul_stream.py the weight tile
is the wide operand of the tensor cores. Activations stay as they are; sums are taken in fp32, and scales multiply sums,
never weights, so what is computed is what the numbers stored say. Where there are fewer tiles than multiprocessors K is
split: who arrives last adds what the others left, in the order of K.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import INTERPRETED, begin, dot

SILU_GROUP: tl.constexpr = tl.constexpr(8)  # gate and up rows alternate in groups of 8


@triton.jit
def load_weights(values, zero, rows, step, DTYPE: tl.constexpr, BITS: tl.constexpr, TILE_K: tl.constexpr):
    """[rows, TILE_K] in DTYPE: what is stored, less its zero point [rows]. Of 4 bits, word 4 b + t of a row holds
    inputs 32 b + 16 s + 8 h + 2 t + p, the lowest bits those of s = h = p = 0, then p, h, s: as the tensor cores' lanes
    want them (kernels/products/quantised_weight.py packs them)."""
    if BITS == 8:
        columns = step * TILE_K + tl.arange(0, TILE_K)
        return tl.load(values + rows[:, None] + columns[None, :]).to(DTYPE)
    else:
        TILE_N: tl.constexpr = rows.shape[0]
        columns = step * (TILE_K // 8) + tl.arange(0, TILE_K // 8)
        words = tl.load(values + rows[:, None] + columns[None, :])
        shifted = words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]
        if INTERPRETED:
            numbers = ((shifted & 15) - zero.to(tl.int32)[:, None, None]).to(DTYPE)
        else:  # 128 + number in bf16 is the number's bits below those of 128
            biased = (shifted & 15 | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
            numbers = (biased - (zero + 128).to(tl.bfloat16)[:, None, None]).to(DTYPE)
        by_lane = numbers.reshape(TILE_N, TILE_K // 32, 4, 2, 2, 2)
        return by_lane.permute(0, 1, 3, 4, 2, 5).reshape(TILE_N, TILE_K)


@triton.jit
def finish(
    acc, scales, bias, y, outputs, rows, num_rows, size_n, first_y, size_y, y_row,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Scale and bias, then SiLU times up, in fp32; rounded once and stored."""
    if GROUP == 0:
        acc *= tl.load(scales + outputs, mask=outputs < size_n, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=outputs < size_n, other=0.0).to(tl.float32)[:, None]
    if SILU:
        pairs = acc.reshape(TILE_N // (2 * SILU_GROUP), 2, SILU_GROUP, TILE_M).permute(0, 2, 3, 1)
        gate, up = tl.split(pairs)
        acc = (gate / (1.0 + tl.exp(-gate)) * up).reshape(TILE_N // 2, TILE_M)
        places = first_y + tl.arange(0, TILE_N // 2)
    else:
        places = first_y + tl.arange(0, TILE_N)
    inside = (places < size_y)[:, None] & (rows < num_rows)[None, :]
    tl.store(y + rows.to(tl.int64)[None, :] * y_row + places[:, None], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["num_rows", "size_n", "size_y", "steps", "splits", "lanes", "x_row", "w_row", "y_row", "s_row"]
)
def matmul_quantised_kernel(
    x,  # [M, K], strides (x_row, 1)
    values,  # e4m3 [N, K] or int32 [N, K / 8], strides (w_row, 1)
    scales,  # any float [G, N], or [1, N] where GROUP is 0; strides (s_row, 1)
    zeros,  # as scales: what is stored for 0; of 4 bits only
    bias,  # [N], any float
    y,  # [M, size_y], strides (y_row, 1): size_y is N, or N / 2 with SILU
    sums,  # fp32 [grid, TILE_N, TILE_M], for splits > 1
    arrivals,  # int32 [tiles], zero between launches
    num_rows,
    size_n,
    size_y,
    steps,  # K / TILE_K
    splits,
    lanes,  # tiles along M
    x_row,  # in 16 elements, so that the compiler knows them aligned
    w_row,  # in 16 bytes
    y_row,
    s_row,  # in 8 elements
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,  # GROUP is a multiple of it
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all
    BITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles along N * splits * lanes)."""
    lane = tl.program_id(0) % lanes
    split = tl.program_id(0) // lanes % splits
    tile = tl.program_id(0) // lanes // splits
    outputs = tile * TILE_N + tl.arange(0, TILE_N)
    w_rows = tl.minimum(outputs, size_n - 1).to(tl.int64) * (w_row * (16 if BITS == 8 else 4))
    rows = lane * TILE_M + tl.arange(0, TILE_M)
    inputs = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[None, :] * (x_row * 16) + tl.arange(0, TILE_K)[:, None]
    first, last = split * steps // splits, (split + 1) * steps // splits
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    zero = tl.load(zeros + outputs, mask=outputs < size_n, other=0.0) if BITS == 4 else outputs
    begin(PDL)
    for step in tl.range(first, last, num_stages=STAGES):
        values_KM = tl.load(inputs + step * TILE_K)
        if GROUP == 0:
            acc += dot(load_weights(values, zero, w_rows, step, x.dtype.element_ty, BITS, TILE_K), values_KM)
        else:
            places = step // (GROUP // TILE_K) * (s_row * 8) + outputs
            scale = tl.load(scales + places, mask=outputs < size_n, other=0.0).to(tl.float32)
            if BITS == 4:
                zero = tl.load(zeros + places, mask=outputs < size_n, other=0.0)
            acc += (
                dot(load_weights(values, zero, w_rows, step, x.dtype.element_ty, BITS, TILE_K), values_KM)
                * scale[:, None]
            )
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
                acc, scales, bias, y, outputs, rows, num_rows, size_n, first_y, size_y, y_row,
                TILE_N, TILE_M, GROUP, HAS_BIAS, SILU,
            )  # fmt: skip
    else:
        finish(
            acc, scales, bias, y, outputs, rows, num_rows, size_n, first_y, size_y, y_row,
            TILE_N, TILE_M, GROUP, HAS_BIAS, SILU,
        )  # fmt: skip
