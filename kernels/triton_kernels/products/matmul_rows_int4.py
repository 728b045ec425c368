"""y = x @ weight^T for one row in bf16 over weights of 4 bits in groups on Hopper, in Gluon: without tensor cores.

A warp has whole outputs, so their sums meet once, in it alone, and its lanes read their weights in contiguous pieces,
16 bytes a lane, the first before the kernel in front has ended. What bounds it beside memory are instructions, some 1.5
a weight. So a program turns its activations into integers of 16 bits, 32 at a time as parts of the largest of them, and
all of its warps read them from shared memory: an instruction multiplies four numbers by the upper or the lower bytes of
four activations. That is off by 1/65,024 of the largest at most, far below what bf16 keeps.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST: gl.constexpr = gl.constexpr(0x0DA24260)  # 1e-30 as bits
SILU_GROUP: gl.constexpr = gl.constexpr(8)  # gate and up rows alternate in groups of 8


# Of each word: even numbers times upper and lower bytes into a and b, odd ones, which count 16, into c and d.
_OF_WORD = """and.b32 n, ${word}, 0x0f0f0f0f;
        dp4a.s32.s32 a, n, ${even_upper}, {a};
        dp4a.s32.s32 b, n, ${even_lower}, {b};
        and.b32 n, ${word}, 0xf0f0f0f0;
        dp4a.u32.s32 c, n, ${odd_upper}, {c};
        dp4a.u32.s32 d, n, ${odd_lower}, {d};
        """
_OF_WORDS = "".join(
    _OF_WORD.format(
        word=1 + i, even_upper=5 + i, odd_upper=9 + i, even_lower=13 + i, odd_lower=17 + i,
        **{total: total if i else "0" for total in "abcd"},
    )
    for i in range(4)
)  # fmt: skip
TIMES: gl.constexpr = gl.constexpr(
    "{ .reg .b32 n, a, b, c, d;\n        "
    + _OF_WORDS
    + """mad.lo.s32 a, a, 256, b;
        mad.lo.s32 c, c, 256, d;
        shr.s32 c, c, 4;
        add.s32 $0, a, c; }"""
)


@gluon.jit
def largest(a, b, c, d):
    """The largest magnitudes of pairs in bf16, as bits of fp32; NaN is largest."""
    pairs = gl.inline_asm_elementwise(
        """{ .reg .b32 p, q;
        and.b32 p, $1, 0x7fff7fff;
        and.b32 q, $2, 0x7fff7fff;
        max.NaN.bf16x2 p, p, q;
        and.b32 q, $3, 0x7fff7fff;
        max.NaN.bf16x2 p, p, q;
        and.b32 q, $4, 0x7fff7fff;
        max.NaN.bf16x2 $0, p, q; }""",
        "=r,r,r,r,r", [a, b, c, d], gl.int32, True, 1,
    )  # fmt: skip
    return gl.maximum(pairs << 16, pairs & -65536)


@gluon.jit
def in_bytes(a, b, factor):
    """Pairs a and b in bf16 times `factor` as integers of 16 bits: their upper bytes, which count 256, and their lower
    ones, both signed, in the order of a's first, b's first, a's second, b's second."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 p, q, r, s, g;
        .reg .f32 f, m;
        mov.f32 m, 0f4B400000;
        shl.b32 p, $2, 16;
        shl.b32 q, $3, 16;
        and.b32 r, $2, 0xffff0000;
        and.b32 s, $3, 0xffff0000;
        mov.b32 f, p; fma.rn.f32 f, f, $4, m; mov.b32 p, f;
        mov.b32 f, q; fma.rn.f32 f, f, $4, m; mov.b32 q, f;
        mov.b32 f, r; fma.rn.f32 f, f, $4, m; mov.b32 r, f;
        mov.b32 f, s; fma.rn.f32 f, f, $4, m; mov.b32 s, f;
        prmt.b32 g, p, q, 0x0040;
        prmt.b32 $1, r, s, 0x0040;
        prmt.b32 $1, g, $1, 0x5410;
        add.s32 p, p, 128;
        add.s32 q, q, 128;
        add.s32 r, r, 128;
        add.s32 s, s, 128;
        prmt.b32 p, p, q, 0x0051;
        prmt.b32 r, r, s, 0x0051;
        prmt.b32 $0, p, r, 0x5410; }""",
        "=&r,=&r,r,r,f", [a, b, factor], (gl.int32, gl.int32), True, 1,
    )  # fmt: skip


@gluon.jit
def in_fours(numbers, layout: gl.constexpr):
    """[..., 4], of which a thread has all four, as its parts [...] in a layout of the same threads."""
    even, odd = numbers.reshape(numbers.shape[:-1] + [2, 2]).split()  # noqa: RUF005 (no star in a kernel)
    a, c = even.split()
    b, d = odd.split()
    return (
        gl.convert_layout(a, layout), gl.convert_layout(b, layout), gl.convert_layout(c, layout),
        gl.convert_layout(d, layout),
    )  # fmt: skip


@gluon.jit
def in_lanes(numbers, layout: gl.constexpr):
    """[32, 4] as four [1, 32], for all rows of `layout`."""
    a, b, c, d = in_fours(numbers, gl.SliceLayout(0, layout))
    return a[None, :], b[None, :], c[None, :], d[None, :]


@gluon.jit
def times(words, even_upper, odd_upper, even_lower, odd_lower, CODE: gl.constexpr = TIMES):
    """Sums in int32 of the 32 numbers of four words times activations of 16 bits, bytes of which are as `in_integers`
    gives them. All come in fours. A word's odd numbers stay where they are, so what they give is divided by 16. `CODE`:
    instructions for numbers of another kind."""
    w0, w1, w2, w3 = words
    a0, a1, a2, a3 = even_upper
    b0, b1, b2, b3 = odd_upper
    c0, c1, c2, c3 = even_lower
    d0, d1, d2, d3 = odd_lower
    return gl.inline_asm_elementwise(
        CODE,
        "=&r," + "r,r,r,r," * 4 + "r,r,r,r",
        [w0, w1, w2, w3, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3],
        gl.int32, True, 1,
    )  # fmt: skip


@gluon.jit
def in_integers(a, b, c, d):
    """Activations as `times` takes them: the upper bytes of those that words' even and odd numbers are multiplied with,
    then the lower ones; what 1 counts [B] and, in fp32, their sums [B]. Given are pairs [B, 4] of inputs from 0, 8, 16
    and 24 on. Number 4 p + 2 s + h of a word is that of input 16 s + 8 h + 2 t + p of its 32, t the word's place
    (kernels/products/quantised_weight.py)."""
    peak = gl.maximum(gl.max(largest(a, b, c, d), 1), LEAST).to(gl.float32, bitcast=True)
    unit = peak * (1.0 / 32512.0)  # the upper byte of 32,639 is 127
    factor = (1.0 / unit)[:, None]
    even_upper, even_lower = in_bytes(a, c, factor)
    odd_upper, odd_lower = in_bytes(b, d, factor)
    own: gl.constexpr = unit.type.layout
    ones = gl.full_like(unit, 0x11111111, dtype=gl.int32)
    plain = times(
        (ones, ones, ones, ones), in_fours(even_upper, own), in_fours(odd_upper, own), in_fours(even_lower, own),
        in_fours(odd_lower, own),
    )  # fmt: skip
    return even_upper, odd_upper, even_lower, odd_lower, unit, plain.to(gl.float32) * unit


@gluon.jit
def outputs_of(first, index, OUTPUTS: gl.constexpr, SILU: gl.constexpr):
    """The weight's rows of sums `first` + index; with SILU half of a warp's are gates, the others their ups."""
    if SILU:
        HALF: gl.constexpr = OUTPUTS // 2
        pair = first // 2 + index // OUTPUTS * HALF + index % HALF
        rows = pair // SILU_GROUP * (2 * SILU_GROUP) + pair % SILU_GROUP + index % OUTPUTS // HALF * SILU_GROUP
        return gl.max_contiguous(rows, [HALF])
    else:
        return first + index


@gluon.jit
def load_part(
    words, scales, zeros, outputs, group, w_row, s_row,
    part: gl.constexpr, STEPS: gl.constexpr, TILE_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What the lanes have of a tile's numbers, 1,024 inputs at a time, int32 [TILE_N, 32, 4], with their scales and
    zeros [TILE_N, 32]."""
    tile: gl.constexpr = part // STEPS
    step: gl.constexpr = part % STEPS
    numbers = gl.load(words + (tile * TILE_N * 4) * w_row + step * 128, cache_modifier=".cg")
    places = (outputs + tile * TILE_N)[:, None] + ((group + step * 1024) // GROUP * (s_row * 8))[None, :]
    return numbers, gl.load(scales + places), gl.load(zeros + places)


@gluon.jit
def store_sums(y, bias, first, outputs, sums, OUTPUTS: gl.constexpr, HAS_BIAS: gl.constexpr, SILU: gl.constexpr,
               num_warps: gl.constexpr):  # fmt: skip
    """Puts sums [TILE_N] into y, with bias or gated."""
    if SILU:
        gates, ups = sums.reshape([num_warps, 2, OUTPUTS // 2]).permute(0, 2, 1).split()
        gated = (gates / (1.0 + gl.exp(-gates)) * ups).reshape([num_warps * OUTPUTS // 2])
        index = gl.arange(0, num_warps * OUTPUTS // 2, layout=gated.type.layout)
        gl.store(y + first // 2 + index, gated.to(y.dtype.element_ty))
    else:
        if HAS_BIAS:
            sums += gl.load(bias + outputs).to(gl.float32)
        gl.store(y + outputs, sums.to(y.dtype.element_ty))


@gluon.jit(do_not_specialize=["w_row", "s_row"])
def matmul_rows_int4_kernel(
    x,  # int32 [K / 2], of two numbers in bf16 each
    weight,  # int32 [N, K / 8], strides (w_row * 4, 1)
    scales,  # any float [G, N], strides (s_row * 8, 1)
    zeros,  # as scales: what is stored for 0
    bias,  # [N], any float
    y,  # bf16 [N], or [N / 2] with SILU
    w_row,
    s_row,
    OUTPUTS: gl.constexpr,  # that a warp has at once; with SILU half of them gates
    TILES: gl.constexpr,  # of a program, one after the other
    STEPS: gl.constexpr,  # K / 1,024
    AHEAD: gl.constexpr,  # steps whose weights are asked for before they are needed
    GROUP: gl.constexpr,  # inputs that share a scale, a multiple of 32
    ROOM: gl.constexpr,  # 32 activations each, a power of two, of which the program's threads fill as many as x has
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (N / OUTPUTS / num_warps / TILES,); sums in fp32, one rounding."""
    TILE_N: gl.constexpr = OUTPUTS * num_warps
    layout: gl.constexpr = gl.BlockedLayout([OUTPUTS, 1, 4], [1, 32, 1], [num_warps, 1, 1], [2, 1, 0])
    x_layout: gl.constexpr = gl.SliceLayout(0, layout)
    scale_layout: gl.constexpr = gl.BlockedLayout([OUTPUTS, 1], [1, 32], [num_warps, 1], [0, 1])  # as sums lie
    index = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, scale_layout))
    first = gl.program_id(0) * (TILE_N * TILES)
    outputs = outputs_of(first, index, OUTPUTS, SILU)
    rows = gl.convert_layout(outputs, gl.SliceLayout(1, gl.SliceLayout(2, layout))).to(gl.int64) * (w_row * 4)
    lane = gl.arange(0, 32, layout=gl.SliceLayout(1, x_layout))[:, None]
    item = gl.arange(0, 4, layout=gl.SliceLayout(0, x_layout))[None, :]
    words = weight + gl.expand_dims(rows[:, None], 2) + gl.expand_dims(lane * 4 + item, 0)

    of_lanes: gl.constexpr = gl.SliceLayout(0, scale_layout)
    group = gl.arange(0, 32, layout=of_lanes) * 32

    gdc_launch_dependents()
    ahead = ()
    for part in gl.static_range(AHEAD):
        following = load_part(words, scales, zeros, outputs, group, w_row, s_row, part, STEPS, TILE_N, GROUP)
        ahead = ahead + (following,)  # noqa: RUF005 (no star in a kernel)
    gdc_wait()

    # All of x as integers in shared memory, a thread 32 numbers at a time.
    BLOCKS: gl.constexpr = 32 * STEPS
    AT_ONCE: gl.constexpr = 32 * num_warps
    TURNS: gl.constexpr = (BLOCKS + AT_ONCE - 1) // AT_ONCE
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Apart, so that no store waits for another.
    even_uppers = gl.allocate_shared_memory(gl.int32, [ROOM, 4], lines)
    odd_uppers = gl.allocate_shared_memory(gl.int32, [ROOM, 4], lines)
    even_lowers = gl.allocate_shared_memory(gl.int32, [ROOM, 4], lines)
    odd_lowers = gl.allocate_shared_memory(gl.int32, [ROOM, 4], lines)
    units = gl.allocate_shared_memory(gl.float32, [ROOM], line)
    plains = gl.allocate_shared_memory(gl.float32, [ROOM], line)
    own_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [num_warps, 1], [1, 0])
    own_block = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, own_layout))[:, None]
    own_item = gl.arange(0, 4, layout=gl.SliceLayout(0, own_layout))[None, :]
    for turn in gl.static_range(TURNS):
        here = x + (turn * AT_ONCE + own_block) * 16 + own_item
        mask = (turn * AT_ONCE + own_block < BLOCKS) & (own_item >= 0)
        even_upper, odd_upper, even_lower, odd_lower, unit, plain = in_integers(
            gl.load(here, mask=mask, other=0), gl.load(here + 4, mask=mask, other=0),
            gl.load(here + 8, mask=mask, other=0), gl.load(here + 12, mask=mask, other=0),
        )  # fmt: skip
        even_uppers.slice(turn * AT_ONCE, AT_ONCE).store(even_upper)
        odd_uppers.slice(turn * AT_ONCE, AT_ONCE).store(odd_upper)
        even_lowers.slice(turn * AT_ONCE, AT_ONCE).store(even_lower)
        odd_lowers.slice(turn * AT_ONCE, AT_ONCE).store(odd_lower)
        units.slice(turn * AT_ONCE, AT_ONCE).store(unit)
        plains.slice(turn * AT_ONCE, AT_ONCE).store(plain)

    for tile in gl.static_range(TILES):
        total = gl.zeros([TILE_N, 32], gl.float32, scale_layout)
        for step in gl.static_range(STEPS):
            numbers, scale, zero = ahead[0]
            ahead = ahead[1:]
            if tile * STEPS + step + AHEAD < TILES * STEPS:
                following = load_part(
                    words, scales, zeros, outputs, group, w_row, s_row,
                    tile * STEPS + step + AHEAD, STEPS, TILE_N, GROUP,
                )  # fmt: skip
                ahead = ahead + (following,)  # noqa: RUF005
            sums = times(
                in_fours(numbers, scale_layout),
                in_lanes(even_uppers.slice(step * 32, 32).load(x_layout), scale_layout),
                in_lanes(odd_uppers.slice(step * 32, 32).load(x_layout), scale_layout),
                in_lanes(even_lowers.slice(step * 32, 32).load(x_layout), scale_layout),
                in_lanes(odd_lowers.slice(step * 32, 32).load(x_layout), scale_layout),
            ).to(gl.float32)
            unit = units.slice(step * 32, 32).load(of_lanes)[None, :]
            plain = plains.slice(step * 32, 32).load(of_lanes)[None, :]
            total += (sums * unit - zero.to(gl.float32) * plain) * scale.to(gl.float32)
        sums = gl.sum(total, 1)
        store_sums(y, bias, first + tile * TILE_N, outputs + tile * TILE_N, sums, OUTPUTS, HAS_BIAS, SILU, num_warps)
