"""Products of very few rows in bf16 with experts in e4m3 on Hopper, in Gluon: without tensor cores.

T tokens, k experts of each, P = T k pairs, X experts, N outputs, K inputs. As in few_4bit.py a warp has whole outputs,
of which a lane reads 16 bytes at a time, and there are two launches: gate and up of each pair, gated; then down over
the inputs of a token's experts as if they were those of one. Sums in fp32, times a scale and what the expert counts.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

AT_ONCE: gl.constexpr = gl.constexpr(512)  # inputs of a warp, 16 a lane


@gluon.jit
def load_part(
    weight, outputs, expert, block, is_there, w_row, w_expert, layout: gl.constexpr,
):  # fmt: skip
    """Loads of a lane's expert the 16 inputs from 16 * `block` on, of all outputs: e4m3 [outputs, 32, 16]."""
    rows = gl.convert_layout(outputs, gl.SliceLayout(1, gl.SliceLayout(2, layout))).to(gl.int64) * (w_row * 16)
    lanes_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    starts = gl.convert_layout(expert.to(gl.int64) * (w_expert * 16) + block * 16, lanes_layout)
    mask = gl.expand_dims(gl.convert_layout(is_there, lanes_layout)[None, :], 2)
    item = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    places = gl.expand_dims(rows[:, None] + starts[None, :], 2) + gl.expand_dims(item[None, :], 1)
    return gl.load(weight + places, mask=mask & (places >= 0), other=0.0, cache_modifier=".cg")


@gluon.jit
def add_part(
    total, stored, x, scales, outputs, expert, block, place, is_there, num_outputs, factor,
    K: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """total [outputs, 32] + what lanes stored times 16 inputs from x + 16 * `place` on, scaled, times `factor` [32]."""
    layout: gl.constexpr = stored.type.layout
    x_layout: gl.constexpr = gl.SliceLayout(0, layout)
    item = gl.arange(0, 16, layout=gl.SliceLayout(0, x_layout))[None, :]
    places = gl.convert_layout(place, gl.SliceLayout(1, x_layout))[:, None] * 16 + item
    here = gl.convert_layout(is_there, gl.SliceLayout(1, x_layout))[:, None] & (item >= 0)
    values = gl.load(x + places, mask=here, other=0.0).to(gl.float32)
    groups = expert.to(gl.int64) * (K // GROUP) + block * 16 // GROUP
    marks = groups[None, :] * num_outputs + outputs[:, None]
    scale = gl.load(scales + marks, mask=is_there[None, :] & (marks >= 0), other=0.0).to(gl.float32)
    sums = gl.sum(stored.to(gl.float32) * gl.expand_dims(values, 0), 2)
    return total + gl.convert_layout(sums, total.type.layout) * (scale * factor[None, :])


@gluon.jit(do_not_specialize=["x_row", "w_row", "w_expert", "up", "top_k"])
def few_8bit_gate_up_kernel(
    x,  # bf16 [T, K], strides (16 * x_row, 1)
    weight,  # e4m3 [X, 2 * up, K], strides (16 * w_expert, 16 * w_row, 1): gate's outputs, then up's
    scales,  # fp32 [X, G, 2 * up] contiguous
    ids,  # int32 [P]; below 0: an expert that isn't here, whose row of y is left as it is
    y,  # bf16 [P, up] contiguous
    x_row,
    w_row,
    w_expert,
    up,
    top_k,
    K: gl.constexpr,  # a multiple of 16
    OUTPUTS: gl.constexpr,  # rows of a warp, half of them gates and half their ups
    AHEAD: gl.constexpr,  # steps of 512 inputs whose weights are asked for before they are needed
    GROUP: gl.constexpr,  # inputs that share a scale, a multiple of 16
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (2 * up / OUTPUTS / num_warps, P). The next kernel starts once this one has waited, so experts are known to
    it from the beginning."""
    TILE_N: gl.constexpr = OUTPUTS * num_warps
    STEPS: gl.constexpr = (K + AT_ONCE - 1) // AT_ONCE
    HALF: gl.constexpr = OUTPUTS // 2
    layout: gl.constexpr = gl.BlockedLayout([OUTPUTS, 1, 16], [1, 32, 1], [num_warps, 1, 1], [2, 1, 0])
    sums_layout: gl.constexpr = gl.SliceLayout(2, layout)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = gl.program_id(1)
    chosen = gl.load(ids + pair)
    if chosen < 0:
        return
    index = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, sums_layout))
    gates = gl.program_id(0) * (TILE_N // 2) + index // OUTPUTS * HALF + index % HALF
    outputs = gates + index % OUTPUTS // HALF * up
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, sums_layout))
    expert = chosen + 0 * lane
    ahead = ()
    for step in gl.static_range(AHEAD):
        block = step * 32 + lane
        following = load_part(weight, outputs, expert, block, block * 16 < K, w_row, w_expert, layout)
        ahead = ahead + (following,)  # noqa: RUF005 (no star in a kernel)
    row = x + (pair // top_k) * (x_row * 16)
    total = gl.zeros([TILE_N, 32], gl.float32, sums_layout)
    for step in gl.static_range(STEPS):
        stored = ahead[0]
        ahead = ahead[1:]
        if step + AHEAD < STEPS:
            later = (step + AHEAD) * 32 + lane
            following = load_part(weight, outputs, expert, later, later * 16 < K, w_row, w_expert, layout)
            ahead = ahead + (following,)  # noqa: RUF005
        block = step * 32 + lane
        total = add_part(
            total, stored, row, scales, outputs, expert, block, block, block * 16 < K, 2 * up,
            gl.full_like(lane, 1, dtype=gl.float32), K, GROUP,
        )  # fmt: skip
    sums = gl.sum(total, 1)
    gate, upper = sums.reshape([num_warps, 2, HALF]).permute(0, 2, 1).split()
    result = (gate / (1.0 + gl.exp(-gate)) * upper).reshape([TILE_N // 2])
    n = gl.program_id(0) * (TILE_N // 2) + gl.arange(0, TILE_N // 2, layout=result.type.layout)
    gl.store(y + pair * up + n, result.to(y.dtype.element_ty))


@gluon.jit(do_not_specialize=["w_row", "w_expert", "num_outputs"])
def few_8bit_down_kernel(
    x,  # bf16 [T, TOP_K, K] contiguous
    weight,  # e4m3 [X, N, K], strides (16 * w_expert, 16 * w_row, 1)
    scales,  # fp32 [X, G, N] contiguous
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
    GROUP: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (N / OUTPUTS / num_warps, T)."""
    TILE_N: gl.constexpr = OUTPUTS * num_warps
    OF_EXPERT: gl.constexpr = K // 16  # blocks
    BLOCKS: gl.constexpr = TOP_K * OF_EXPERT
    STEPS: gl.constexpr = (BLOCKS + 31) // 32
    layout: gl.constexpr = gl.BlockedLayout([OUTPUTS, 1, 16], [1, 32, 1], [num_warps, 1, 1], [2, 1, 0])
    sums_layout: gl.constexpr = gl.SliceLayout(2, layout)
    if PDL:
        gdc_launch_dependents()
    token = gl.program_id(1)
    own_ids, own_counts = ids + token * TOP_K, counts + token * TOP_K
    outputs = gl.program_id(0) * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, sums_layout))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, sums_layout))
    ahead = ()
    for step in gl.static_range(AHEAD):
        block = step * 32 + lane
        expert = gl.load(own_ids + block // OF_EXPERT, mask=block < BLOCKS, other=-1)
        following = load_part(
            weight, outputs, gl.maximum(expert, 0), block % OF_EXPERT, expert >= 0, w_row, w_expert, layout
        )
        ahead = ahead + (following,)  # noqa: RUF005 (no star in a kernel)
    if PDL:
        gdc_wait()
    row = x + token * (TOP_K * K)
    total = gl.zeros([TILE_N, 32], gl.float32, sums_layout)
    for step in gl.static_range(STEPS):
        stored = ahead[0]
        ahead = ahead[1:]
        if step + AHEAD < STEPS:
            later = (step + AHEAD) * 32 + lane
            later_expert = gl.load(own_ids + later // OF_EXPERT, mask=later < BLOCKS, other=-1)
            following = load_part(
                weight, outputs, gl.maximum(later_expert, 0), later % OF_EXPERT, later_expert >= 0, w_row, w_expert,
                layout,
            )  # fmt: skip
            ahead = ahead + (following,)  # noqa: RUF005
        block = step * 32 + lane
        expert = gl.load(own_ids + block // OF_EXPERT, mask=block < BLOCKS, other=-1)
        count = gl.load(own_counts + block // OF_EXPERT, mask=expert >= 0, other=0.0)
        total = add_part(
            total, stored, row, scales, outputs, gl.maximum(expert, 0), block % OF_EXPERT, block, expert >= 0,
            num_outputs, count, K, GROUP,
        )  # fmt: skip
    gl.store(y + token * num_outputs + outputs, gl.sum(total, 1).to(y.dtype.element_ty))
