"""What few_4bit.py adds up: blocks of 32 activations as integers of 16 bits in shared memory, times those of weights of
4 bits in the registers of a lane. In Gluon."""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem.kernels.triton_kernels.products.matmul_rows_int4 import in_fours, in_integers, in_lanes, times

# Of a word of e2m1: a byte each of its numbers, twice as large and 64 more, which is 0 to 127: those above 0 are looked
# up by their code, those below by the code with the other sign, since a selector with the sign gives 0 for such bytes.
# Sums are those of numbers twice as large, with 64 for each activation more; bytes of activations are those of what
# numbers 0 to 3, and 4 to 7, of a word are multiplied with.
_OF_WORD = """xor.b32 m, ${word}, 0x88888888;
        prmt.b32 p, q, r, ${word};
        prmt.b32 n, s, t, m;
        or.b32 p, p, n;
        dp4a.u32.s32 a, p, ${first_upper}, {a};
        dp4a.u32.s32 b, p, ${first_lower}, {b};
        shr.b32 n, ${word}, 16;
        shr.b32 m, m, 16;
        prmt.b32 p, q, r, n;
        prmt.b32 n, s, t, m;
        or.b32 p, p, n;
        dp4a.u32.s32 a, p, ${second_upper}, a;
        dp4a.u32.s32 b, p, ${second_lower}, b;
        """
TIMES_E2M1: gl.constexpr = gl.constexpr(
    """{ .reg .b32 a, b, m, n, p, q, r, s, t;
        mov.b32 q, 0x43424140;
        mov.b32 r, 0x4c484644;
        mov.b32 s, 0x3d3e3f40;
        mov.b32 t, 0x34383a3c;
        """
    + "".join(
        _OF_WORD.format(
            word=1 + i, first_upper=5 + i, second_upper=9 + i, first_lower=13 + i, second_lower=17 + i,
            a="a" if i else "0", b="b" if i else "0",
        )
        for i in range(4)
    )
    + "mad.lo.s32 $0, a, 256, b; }"
)  # fmt: skip


@gluon.jit
def in_pairs(a, b):
    """The first halves of a and b as one, and the second ones."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
        "=&r,=&r,r,r", [a, b], (gl.int32, gl.int32), True, 1,
    )  # fmt: skip


@gluon.jit
def block_integers(places, mask, E2M1: gl.constexpr):
    """Activations of blocks of 32 at int32 `places` [B, 4], of 2 numbers, in the order in which words have theirs."""
    a, b = gl.load(places, mask=mask, other=0), gl.load(places + 4, mask=mask, other=0)
    c, d = gl.load(places + 8, mask=mask, other=0), gl.load(places + 12, mask=mask, other=0)
    if E2M1:
        firsts, seconds = in_pairs(a, c)
        more_firsts, more_seconds = in_pairs(b, d)
        return in_integers(firsts, seconds, more_firsts, more_seconds)
    else:
        return in_integers(a, b, c, d)


@gluon.jit
def room_for(ROOM: gl.constexpr):
    """Shared memory for `ROOM` blocks of integers: four kinds of bytes, what 1 counts, and sums. Apart, so that no
    store waits for another."""
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        gl.allocate_shared_memory(gl.int32, [ROOM, 4], lines), gl.allocate_shared_memory(gl.int32, [ROOM, 4], lines),
        gl.allocate_shared_memory(gl.int32, [ROOM, 4], lines), gl.allocate_shared_memory(gl.int32, [ROOM, 4], lines),
        gl.allocate_shared_memory(gl.float32, [ROOM], line), gl.allocate_shared_memory(gl.float32, [ROOM], line),
    )  # fmt: skip


@gluon.jit
def fill(room, x, ids, counts, ROOM: gl.constexpr, BLOCKS: gl.constexpr, OF_EXPERT: gl.constexpr, E2M1: gl.constexpr,
         num_warps: gl.constexpr):  # fmt: skip
    """Puts BLOCKS blocks from x on into shared memory, a thread one at a time, and 0 behind them. OF_EXPERT: blocks
    that are multiplied by the count of their expert, of which those elsewhere aren't read; 0: all are as they are."""
    even_uppers, odd_uppers, even_lowers, odd_lowers, units, plains = room
    AT_ONCE: gl.constexpr = min(32 * num_warps, ROOM)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [num_warps, 1], [1, 0])
    own = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
    item = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    for turn in gl.static_range(ROOM // AT_ONCE):
        block = turn * AT_ONCE + own
        is_there = block < BLOCKS
        if OF_EXPERT > 0:
            expert = gl.load(ids + block // OF_EXPERT, mask=is_there, other=-1)
            is_there = is_there & (expert >= 0)
            count = gl.load(counts + block // OF_EXPERT, mask=is_there, other=0.0)
        even_upper, odd_upper, even_lower, odd_lower, unit, plain = block_integers(
            x + block[:, None] * 16 + item, is_there[:, None] & (item >= 0), E2M1
        )
        if OF_EXPERT > 0:
            unit, plain = unit * count, plain * count
        even_uppers.slice(turn * AT_ONCE, AT_ONCE).store(even_upper)
        odd_uppers.slice(turn * AT_ONCE, AT_ONCE).store(odd_upper)
        even_lowers.slice(turn * AT_ONCE, AT_ONCE).store(even_lower)
        odd_lowers.slice(turn * AT_ONCE, AT_ONCE).store(odd_lower)
        units.slice(turn * AT_ONCE, AT_ONCE).store(unit)
        plains.slice(turn * AT_ONCE, AT_ONCE).store(plain)


@gluon.jit
def load_blocks(
    weight, scales, zeros, outputs, expert, block, is_there, w_row, w_expert, num_outputs, layout: gl.constexpr,
    K: gl.constexpr, E2M1: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What lanes have: of a block each of their experts' inputs int32 [outputs, 32, 4], scales and zero points."""
    rows_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    lanes_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    rows = gl.convert_layout(outputs, rows_layout).to(gl.int64) * (w_row * 4)
    starts = gl.convert_layout(expert.to(gl.int64) * (w_expert * 4) + block * 4, lanes_layout)
    mask = gl.expand_dims(gl.convert_layout(is_there, lanes_layout)[None, :], 2)
    item = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    places = gl.expand_dims(rows[:, None] + starts[None, :], 2) + gl.expand_dims(item[None, :], 1)
    numbers = gl.load(weight + places, mask=mask & (places >= 0), other=0, cache_modifier=".cg")
    if E2M1:
        marks = (expert.to(gl.int64) * num_outputs)[None, :] + outputs[:, None]
        marks = marks * (K // 32) + block[None, :]
    else:
        groups = expert.to(gl.int64) * (K // GROUP) + block * 32 // GROUP
        marks = groups[None, :] * num_outputs + outputs[:, None]
    scale = gl.load(scales + marks, mask=is_there[None, :] & (marks >= 0), other=0)
    zero = scale if E2M1 else gl.load(zeros + marks, mask=is_there[None, :] & (marks >= 0), other=0)
    return numbers, scale, zero


@gluon.jit
def add_blocks(total, numbers, scale, zero, room, x_layout: gl.constexpr, first: gl.constexpr, E2M1: gl.constexpr):
    """total [outputs, 32] + products of 32 blocks from `first` on: a lane has one of each output."""
    even_uppers, odd_uppers, even_lowers, odd_lowers, units, plains = room
    own: gl.constexpr = total.type.layout
    of_lanes: gl.constexpr = gl.SliceLayout(0, own)
    words = in_fours(numbers, own)
    even_upper = in_lanes(even_uppers.slice(first, 32).load(x_layout), own)
    odd_upper = in_lanes(odd_uppers.slice(first, 32).load(x_layout), own)
    even_lower = in_lanes(even_lowers.slice(first, 32).load(x_layout), own)
    odd_lower = in_lanes(odd_lowers.slice(first, 32).load(x_layout), own)
    unit = units.slice(first, 32).load(of_lanes)[None, :]
    plain = plains.slice(first, 32).load(of_lanes)[None, :]
    if E2M1:
        sums = times(words, even_upper, odd_upper, even_lower, odd_lower, TIMES_E2M1).to(gl.float32)
        power = (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
        return total + (sums * unit - 64.0 * plain) * (0.5 * power)
    else:
        sums = times(words, even_upper, odd_upper, even_lower, odd_lower).to(gl.float32)
        return total + (sums * unit - zero.to(gl.float32) * plain) * scale.to(gl.float32)
