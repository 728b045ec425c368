"""Products of pairs with experts of 4 bits, where an expert has few of them, in Gluon: weights go from memory straight
to the registers of the warp that multiplies them.

P pairs of a token and an expert, X experts, K inputs, N outputs. A program has one tile of up to TILE_M pairs of one
expert (sort.py cuts them), as programs of grouped.py have, but products of m16n8k16: TILE_M of 8 wastes little where
experts have few pairs, and no warp waits for another but for x. Of 16 outputs of a warp 8 are gates and 8 their ups, so
what is gated lies in one lane.

The order of inputs is free in a product. A lane reads four words in a row (kernels/products/quantised_weight.py packs
them: word 4 t + i of 128 inputs has those from 32 t + 2 i on), and multiplies the pairs j of words i and i + 1 with
inputs that lie beside each other in x, too, so both come in pieces of 16 bytes and nothing is moved between registers.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc, var-annotated"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.triton_kernels.experts.streamed_numbers import e2m1, integers


@gluon.jit
def load_step(
    words, item, scales, zeros, lane, step, next_group,
    K: gl.constexpr, E2M1: gl.constexpr, GROUP: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """A step's words, scales and zero points. CUT: what lies past K is 0, and scales are."""
    if CUT:
        numbers = gl.load(words + step * 16, mask=step * 16 + item < K // 8, other=0, cache_modifier=".cg")
    else:
        numbers = gl.load(words + step * 16, cache_modifier=".cg")
    if E2M1 and CUT:
        scale = gl.load(scales + step * 4, mask=step * 4 + lane < K // 32, other=0)
        zero = scale
    elif E2M1:
        scale = gl.load(scales + step * 4)
        zero = scale
    else:
        mark = gl.minimum(step, K // 128 - 1) * 128 // GROUP * next_group
        zero = gl.load(zeros + mark)
        scale = gl.load(scales + mark)
        if CUT:
            scale = gl.where(step * 128 < K, scale, 0.0)
    return numbers, scale, zero


@gluon.jit
def add_step(total, words, scale, zero, x_tile, x_layout: gl.constexpr, E2M1: gl.constexpr):
    """total + a step's weights [ROWS, 128] times its rows of x, which lie as [4, TILE_M, 4, 8]."""
    ROWS: gl.constexpr = total.shape[0]
    TILE_M: gl.constexpr = total.shape[1]
    layout: gl.constexpr = total.type.layout
    w_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    values = x_tile.load(x_layout).reshape([2, 2, TILE_M, 4, 2, 2, 2]).permute(0, 1, 4, 5, 3, 6, 2)
    values = gl.convert_layout(
        values.reshape([128, TILE_M]), gl.DotOperandLayout(operand_index=1, parent=layout, k_width=2)
    )
    if E2M1:
        return mma_v2(e2m1(words, scale, w_layout, ROWS), values, total)
    else:
        numbers = integers(words, zero, x_tile.dtype, w_layout, ROWS)
        product = mma_v2(numbers, values, gl.zeros([ROWS, TILE_M], gl.float32, layout))
        factor: gl.constexpr = 4.0 if x_tile.dtype == gl.bfloat16 else 1.0
        return total + product * (scale.to(gl.float32) * factor)[:, None]


@gluon.jit
def copy_rows(x_ring, rows, places, item, is_row, turn, K: gl.constexpr, AHEAD: gl.constexpr, CUT: gl.constexpr):
    """Starts to copy what a turn of steps multiplies with. CUT: past K something finite is copied once more."""
    first = turn * (AHEAD * 128) + places
    if CUT:
        first = gl.minimum(first, K - 8)
    offsets = gl.max_contiguous(gl.multiple_of(first + item, [1, 1, 1, 8]), [1, 1, 1, 8])
    async_copy.async_copy_global_to_shared(x_ring.index(turn % 2), rows + offsets, mask=is_row)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["tiles_n", "x_row", "w_row", "w_expert", "up", "y_row", "top_k", "alpha", "limit"])
def streamed_kernel(
    x,  # bf16 or fp16 [T, K] of GATED, else [P, K] in the order of `order`; strides (16 * x_row, 1)
    weight,  # int32 [X, N, K / 8], strides (4 * w_expert, 4 * w_row, 1)
    scales,  # any float [X, G, N] contiguous; of e2m1 uint8 [X, N, K / 32] contiguous
    zeros,  # as scales: what is stored for 0; not of e2m1
    bias,  # [X, N] contiguous, where HAS_BIAS
    order,  # int32 [P]: pairs, expert by expert
    tiles,  # int32 [grid's tiles along M, 4]: expert, first place in `order`, number of pairs, 0
    counts,  # fp32 [P]: what each pair's product is multiplied by; not of GATED
    y,  # GATED: [P, N / 2] in the order of `order`, else [P, N] by pair; strides (16 * y_row, 1)
    tiles_n,  # programs along N, or half of N
    x_row,
    w_row,
    w_expert,
    up,  # GATED: rows of a matrix before up's first
    y_row,
    top_k,  # pairs of a token
    alpha,  # of CLAMPED
    limit,
    K: gl.constexpr,
    TILE_M: gl.constexpr,  # 8 or 16
    REPEATS: gl.constexpr,  # times 16 outputs of a warp, 1 or 2
    AHEAD: gl.constexpr,  # steps of 128 inputs whose weights are on their way, a power of two
    GATED: gl.constexpr,  # y = silu(first half of outputs) * second half
    E2M1: gl.constexpr,
    GROUP: gl.constexpr,  # inputs that share a scale, a multiple of 128; not of e2m1
    HAS_BIAS: gl.constexpr,
    CLAMPED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,  # 4 or 8
):
    """Grid (tiles along M * tiles_n,). Sums in fp32, in an order of inputs that no plan changes."""
    ROWS: gl.constexpr = 16 * num_warps * REPEATS
    OUTPUTS: gl.constexpr = ROWS // 2 if GATED else ROWS
    TURNS: gl.constexpr = (K + 128 * AHEAD - 1) // (128 * AHEAD)
    CUT: gl.constexpr = TURNS * AHEAD * 128 != K
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 8])
    MORE_WARPS: gl.constexpr = [[64, 0, 0]] if num_warps == 8 else []
    SAME: gl.constexpr = [[0, 0, 0, 0]] if num_warps == 8 else []
    MORE_ROWS: gl.constexpr = [[16 * num_warps, 0, 0]] if REPEATS == 2 else []
    MORE_PAIRS: gl.constexpr = [[0, 8, 0, 0]] if TILE_M == 16 else []
    words_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]] + MORE_ROWS,  # noqa: RUF005 (no star in a kernel)
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]] + MORE_WARPS, [], [ROWS, 4, 4],  # noqa: RUF005
    )  # fmt: skip
    x_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [1, 0, 0, 0], [2, 0, 0, 0]] + MORE_PAIRS,  # noqa: RUF005
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0]] + SAME, [], [4, TILE_M, 4, 8],  # noqa: RUF005
    )  # fmt: skip
    x_ring = gl.allocate_shared_memory(
        x.dtype.element_ty, [2, 4 * AHEAD, TILE_M, 4, 8], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = gl.program_id(0) // tiles_n
    expert = gl.load(tiles + tile * 4).to(gl.int64)
    first = gl.load(tiles + tile * 4 + 1)
    num_rows = gl.load(tiles + tile * 4 + 2)
    if num_rows == 0:
        return
    first_n = gl.program_id(0) % tiles_n * OUTPUTS
    num_outputs = tiles_n * OUTPUTS * (2 if GATED else 1)

    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, words_layout)))
    sum_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    if GATED:
        of_words = first_n + row // 16 * 8 + row % 8 + row % 16 // 8 * up
        of_sums = first_n + sum_row // 16 * 8 + sum_row % 8 + sum_row % 16 // 8 * up
    else:
        of_words, of_sums = first_n + row, first_n + sum_row
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, words_layout)))[None, :]
    i = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, words_layout)))[None, :], 1)
    item = gl.expand_dims(lane * 4, 2) + i
    words = weight + expert * (w_expert * 4) + gl.expand_dims((of_words.to(gl.int64) * (w_row * 4))[:, None], 2) + item
    if E2M1:
        marks = scales + ((expert * num_outputs + of_words) * (K // 32))[:, None] + lane
        zero_marks = marks
    else:
        marks = scales + expert * (K // GROUP * num_outputs) + of_sums
        zero_marks = zeros + expert * (K // GROUP * num_outputs) + of_sums
    ahead = ()
    for step in gl.static_range(AHEAD):
        following = load_step(words, item, marks, zero_marks, lane, step, num_outputs, K, E2M1, GROUP, CUT)
        ahead = ahead + (following,)  # noqa: RUF005

    copy_layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [4, 2, 4, 1], [1, num_warps, 1, 1], [3, 2, 0, 1])
    part, pair, t, e = copied_places(copy_layout, AHEAD, TILE_M)
    places = part // 4 * 128 + t * 32 + part % 4 * 8
    own = first + gl.minimum(pair, num_rows - 1)
    source = gl.load(order + own) // top_k if GATED else own
    rows = x + source.to(gl.int64) * (x_row * 16)
    is_row = (pair < num_rows) & (places + e >= 0)  # the product of what is not copied is not stored
    copy_rows(x_ring, rows, places, e, is_row, 0, K, AHEAD, CUT)

    total = gl.zeros([ROWS, TILE_M], gl.float32, layout)
    for turn in range(TURNS):
        async_copy.wait_group(0)  # barriers are the compiler's: it knows who reads the ring and who writes
        if turn + 1 < TURNS:
            copy_rows(x_ring, rows, places, e, is_row, turn + 1, K, AHEAD, CUT)
        later = ()
        for step in gl.static_range(AHEAD):
            numbers, scale, zero = ahead[step]
            x_tile = x_ring.index(turn % 2).slice(step * 4, 4, dim=0)
            total = add_step(total, numbers, scale, zero, x_tile, x_layout, E2M1)
            next_step = (turn + 1) * AHEAD + step
            following = load_step(words, item, marks, zero_marks, lane, next_step, num_outputs, K, E2M1, GROUP, True)
            later = later + (following,)  # noqa: RUF005
        ahead = later

    if HAS_BIAS:
        total += gl.load(bias + expert * num_outputs + of_sums).to(gl.float32)[:, None]
    if GATED:
        gate, upper = total.reshape([ROWS // 16, 2, 8, TILE_M]).permute(0, 2, 3, 1).split()
        if CLAMPED:
            gate = gl.minimum(gate, limit)
            upper = gl.minimum(gl.maximum(upper, -limit), limit) + 1.0
            gate = gate / (1.0 + gl.exp(-alpha * gate))
        else:
            gate = gate / (1.0 + gl.exp(-gate))
        result = (gate * upper).reshape([OUTPUTS, TILE_M])
    else:
        result = total
    column = gl.arange(0, TILE_M, layout=gl.SliceLayout(0, result.type.layout))
    target = first + gl.minimum(column, num_rows - 1)
    if not GATED:
        target = gl.load(order + target)
        result = result * gl.load(counts + target)[None, :]
    n = first_n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, result.type.layout))
    into = y + target.to(gl.int64)[None, :] * (y_row * 16) + n[:, None]
    gl.store(into, result.to(y.dtype.element_ty), mask=(column < num_rows)[None, :] & (n >= 0)[:, None])


@gluon.jit
def copied_places(layout: gl.constexpr, AHEAD: gl.constexpr, TILE_M: gl.constexpr):
    """What of a turn's x the threads copy: step and eighth of a lane's inputs, pair, lane, input of the eighth."""
    last: gl.constexpr = gl.SliceLayout(3, layout)
    part = gl.arange(0, 4 * AHEAD, layout=gl.SliceLayout(1, gl.SliceLayout(2, last)))
    pair = gl.arange(0, TILE_M, layout=gl.SliceLayout(0, gl.SliceLayout(2, last)))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, last)))
    e = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    return (
        gl.expand_dims(gl.expand_dims(part[:, None], 2), 3), gl.expand_dims(gl.expand_dims(pair[None, :], 2), 3),
        gl.expand_dims(gl.expand_dims(t[None, :], 1), 3), gl.expand_dims(gl.expand_dims(e[None, :], 1), 2),
    )  # fmt: skip
