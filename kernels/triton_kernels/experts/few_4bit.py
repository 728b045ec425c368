"""Products of one or two rows in bf16 with experts of 4 bits on Hopper, in Gluon: integers or e2m1 (MXFP4), without
tensor cores.

T tokens, k experts of each, P = T k pairs, X experts, N outputs, K inputs, in blocks of 32, which a lane has at once.
As in matmul_rows_int4.py a warp has whole outputs, and activations become integers of 16 bits, a block at a time, that
all warps of a program read from shared memory. Two launches: gate and up of each pair, gated; then down over the inputs
of a token's experts as if they were those of one, weighted before they are multiplied.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.triton_kernels.experts.few_4bit_blocks import add_blocks, fill, load_blocks, room_for


@gluon.jit(do_not_specialize=["x_row", "w_row", "w_expert", "up", "top_k", "alpha", "limit"])
def few_4bit_gate_up_kernel(
    x,  # int32 [T, K / 2], of two numbers in bf16 each, strides (8 * x_row, 1)
    weight,  # int32 [X, 2 * up, K / 8], strides (4 * w_expert, 4 * w_row, 1): gate's outputs, then up's
    scales,  # any float [X, G, 2 * up] contiguous; of e2m1 uint8 [X, 2 * up, K / 32] contiguous
    zeros,  # as scales: what is stored for 0; not of e2m1
    bias,  # [X, 2 * up] contiguous, where HAS_BIAS
    ids,  # int32 [P]; below 0: an expert that isn't here, whose row of y is left as it is
    y,  # bf16 [P, up] contiguous
    x_row,
    w_row,
    w_expert,
    up,
    top_k,
    alpha,  # of CLAMPED
    limit,
    K: gl.constexpr,
    OUTPUTS: gl.constexpr,  # rows of a warp, half of them gates and half their ups
    AHEAD: gl.constexpr,  # steps of 1,024 inputs whose weights are asked for before they are needed
    ROOM: gl.constexpr,  # blocks of x, a power of two
    E2M1: gl.constexpr,
    GROUP: gl.constexpr,  # inputs that share a scale, a multiple of 32
    HAS_BIAS: gl.constexpr,
    CLAMPED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (2 * up / OUTPUTS / num_warps, P). The next kernel starts once this one has waited, so experts are known to
    it from the beginning."""
    TILE_N: gl.constexpr = OUTPUTS * num_warps
    BLOCKS: gl.constexpr = K // 32
    STEPS: gl.constexpr = (BLOCKS + 31) // 32
    HALF: gl.constexpr = OUTPUTS // 2
    layout: gl.constexpr = gl.BlockedLayout([OUTPUTS, 1, 4], [1, 32, 1], [num_warps, 1, 1], [2, 1, 0])
    sums_layout: gl.constexpr = gl.BlockedLayout([OUTPUTS, 1], [1, 32], [num_warps, 1], [0, 1])
    room = room_for(ROOM)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = gl.program_id(1)
    expert = gl.load(ids + pair)
    if expert < 0:
        return
    index = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, sums_layout))
    gates = gl.program_id(0) * (TILE_N // 2) + index // OUTPUTS * HALF + index % HALF
    outputs = gates + index % OUTPUTS // HALF * up
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, sums_layout))
    ahead = ()
    for step in gl.static_range(AHEAD):
        block = step * 32 + lane
        following = load_blocks(
            weight, scales, zeros, outputs, expert + 0 * lane, block, block < BLOCKS, w_row, w_expert, 2 * up, layout,
            K, E2M1, GROUP,
        )  # fmt: skip
        ahead = ahead + (following,)  # noqa: RUF005 (no star in a kernel)
    fill(room, x + (pair // top_k) * (x_row * 8), ids, ids, ROOM, BLOCKS, 0, E2M1, num_warps)
    total = gl.zeros([TILE_N, 32], gl.float32, sums_layout)
    for step in gl.static_range(STEPS):
        numbers, scale, zero = ahead[0]
        ahead = ahead[1:]
        if step + AHEAD < STEPS:
            block = (step + AHEAD) * 32 + lane
            following = load_blocks(
                weight, scales, zeros, outputs, expert + 0 * lane, block, block < BLOCKS, w_row, w_expert, 2 * up,
                layout, K, E2M1, GROUP,
            )  # fmt: skip
            ahead = ahead + (following,)  # noqa: RUF005
        total = add_blocks(total, numbers, scale, zero, room, gl.SliceLayout(0, layout), step * 32, E2M1)
    sums = gl.sum(total, 1)
    if HAS_BIAS:
        sums += gl.load(bias + expert * (2 * up) + outputs).to(gl.float32)
    gate, upper = sums.reshape([num_warps, 2, HALF]).permute(0, 2, 1).split()
    if CLAMPED:
        gate = gl.minimum(gate, limit)
        upper = gl.minimum(gl.maximum(upper, -limit), limit) + 1.0
        gate = gate / (1.0 + gl.exp(-alpha * gate))
    else:
        gate = gate / (1.0 + gl.exp(-gate))
    result = (gate * upper).reshape([TILE_N // 2])
    n = gl.program_id(0) * (TILE_N // 2) + gl.arange(0, TILE_N // 2, layout=result.type.layout)
    gl.store(y + pair * up + n, result.to(y.dtype.element_ty))


@gluon.jit(do_not_specialize=["w_row", "w_expert", "num_outputs"])
def few_4bit_down_kernel(
    x,  # int32 [T, TOP_K, K / 2] contiguous, of two numbers in bf16 each
    weight,  # int32 [X, N, K / 8], strides (4 * w_expert, 4 * w_row, 1)
    scales,  # any float [X, G, N] contiguous; of e2m1 uint8 [X, N, K / 32] contiguous
    zeros,  # as scales: what is stored for 0; not of e2m1
    bias,  # [X, N] contiguous, where HAS_BIAS
    ids,  # int32 [T, TOP_K]; below 0: an expert that isn't here adds nothing
    counts,  # fp32 [T, TOP_K]: what each expert's product is multiplied by
    y,  # bf16 [T, N] contiguous
    w_row,
    w_expert,
    num_outputs,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    OUTPUTS: gl.constexpr,  # of a warp
    AHEAD: gl.constexpr,
    ROOM: gl.constexpr,  # blocks of all experts, a power of two
    E2M1: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (N / OUTPUTS / num_warps, T). Sums in fp32, one rounding."""
    TILE_N: gl.constexpr = OUTPUTS * num_warps
    OF_EXPERT: gl.constexpr = K // 32  # blocks
    BLOCKS: gl.constexpr = TOP_K * OF_EXPERT
    STEPS: gl.constexpr = (BLOCKS + 31) // 32
    layout: gl.constexpr = gl.BlockedLayout([OUTPUTS, 1, 4], [1, 32, 1], [num_warps, 1, 1], [2, 1, 0])
    sums_layout: gl.constexpr = gl.BlockedLayout([OUTPUTS, 1], [1, 32], [num_warps, 1], [0, 1])
    room = room_for(ROOM)
    if PDL:
        gdc_launch_dependents()
    token = gl.program_id(1)
    outputs = gl.program_id(0) * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, sums_layout))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, sums_layout))
    ahead = ()
    for step in gl.static_range(AHEAD):
        block = step * 32 + lane
        expert = gl.load(ids + token * TOP_K + block // OF_EXPERT, mask=block < BLOCKS, other=-1)
        following = load_blocks(
            weight, scales, zeros, outputs, gl.maximum(expert, 0), block % OF_EXPERT, expert >= 0, w_row, w_expert,
            num_outputs, layout, K, E2M1, GROUP,
        )  # fmt: skip
        ahead = ahead + (following,)  # noqa: RUF005 (no star in a kernel)
    if PDL:
        gdc_wait()
    own_ids, own_counts = ids + token * TOP_K, counts + token * TOP_K
    fill(room, x + token * (TOP_K * K // 2), own_ids, own_counts, ROOM, BLOCKS, OF_EXPERT, E2M1, num_warps)
    total = gl.zeros([TILE_N, 32], gl.float32, sums_layout)
    for step in gl.static_range(STEPS):
        numbers, scale, zero = ahead[0]
        ahead = ahead[1:]
        if step + AHEAD < STEPS:
            block = (step + AHEAD) * 32 + lane
            expert = gl.load(own_ids + block // OF_EXPERT, mask=block < BLOCKS, other=-1)
            following = load_blocks(
                weight, scales, zeros, outputs, gl.maximum(expert, 0), block % OF_EXPERT, expert >= 0, w_row, w_expert,
                num_outputs, layout, K, E2M1, GROUP,
            )  # fmt: skip
            ahead = ahead + (following,)  # noqa: RUF005
        total = add_blocks(total, numbers, scale, zero, room, gl.SliceLayout(0, layout), step * 32, E2M1)
    sums = gl.sum(total, 1)
    if HAS_BIAS:
        for place in gl.static_range(TOP_K):
            expert = gl.load(own_ids + place)
            own_bias = gl.load(bias + gl.maximum(expert, 0) * num_outputs + outputs).to(gl.float32)
            sums += gl.where(expert >= 0, own_bias * gl.load(own_counts + place), 0.0)
    gl.store(y + token * num_outputs + outputs, sums.to(y.dtype.element_ty))
