"""Causal prefill attention on Hopper, in Gluon: one warp loads tiles, two warpgroups multiply and weigh them.

The algorithm is FlashAttention-3's (Shah et al., 2024): scores of the next tile are computed while the weights of the
one before meet its values. N rows, T new tokens, H query heads over K KV heads, D head size, S slots a block.

A program does QUERY_TILE queries of one head of one row. It sees its keys in tiles of KEY_TILE in this order: the new
tokens on the diagonal, the last tile of the prefix if it isn't full, then everything that needs no mask, backwards.
Tiles arrive through the tensor memory accelerator in boxes of BOX rows and 64 columns, the width of its swizzle. Each
descriptor has the token dimension twice, as (x, y) with y below BOX: a box that starts at y = BOX - n holds n rows and
then zeros (loads) or nothing (stores), so that no value of another row, or of an unused slot, ever meets a weight.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name changed after 3.6
COLUMNS: gl.constexpr = gl.constexpr(64)  # 128 bytes of 16-bit elements
QUERY_TILE: gl.constexpr = gl.constexpr(128)
KEY_TILE: gl.constexpr = gl.constexpr(128)
HALF: gl.constexpr = gl.constexpr(64)  # queries of one warpgroup
LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def place_of(step, query_tile, first_new, partial, prefix_tiles):
    """The step-th tile a program sees: (whether it lies in the prefix, its index there or among the new tokens)."""
    later = step - 1 - partial
    num_new = query_tile - first_new
    is_tail = (step == 1) & (partial == 1)
    in_prefix = is_tail | (later >= num_new)
    index = gl.where(in_prefix, prefix_tiles - 1 - later + num_new, query_tile - 1 - later)
    return in_prefix, gl.where(step == 0, query_tile, gl.where(is_tail, prefix_tiles, index))


@gluon.jit
def load_tile(desc, chunks, barrier, slot, unit, start, count, BOX: gl.constexpr, PANELS: gl.constexpr):
    """KEY_TILE rows from `start` of one head's tokens, zeros after the first `count`."""
    PARTS: gl.constexpr = KEY_TILE // BOX
    for part in gl.static_range(PARTS):
        rows = gl.minimum(gl.maximum(count - part * BOX, 0), BOX)
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                desc, [unit, start + part * BOX + rows, BOX - rows, panel * COLUMNS], barrier,
                chunks.index((slot * PANELS + panel) * PARTS + part),
            )  # fmt: skip


@gluon.jit
def load_blocks(
    desc, chunks, barrier, slot, table, block_units, unit, start, count, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
    PANELS: gl.constexpr,
):  # fmt: skip
    """KEY_TILE slots from position `start` of a row's prefix, zeros after the first `count`."""
    PARTS: gl.constexpr = KEY_TILE // BOX
    for part in gl.static_range(PARTS):
        rows = gl.minimum(gl.maximum(count - part * BOX, 0), BOX)
        position = start + part * BOX
        block = gl.load(table + position // BLOCK_SIZE, mask=rows > 0, other=0)
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                desc, [block * block_units + unit, position % BLOCK_SIZE + rows, BOX - rows, panel * COLUMNS], barrier,
                chunks.index((slot * PANELS + panel) * PARTS + part),
            )  # fmt: skip


@gluon.jit
def load_all(
    q_desc, k_desc, v_desc, cache_desc, q_chunks, k_new, v_new, k_old, v_old, q_ready, k_ready, k_empty, v_ready,
    v_empty, table, block_units, head_units, value_units, head, kv_head, first_token, query_len, num_earlier,
    query_tile, first_new, partial, prefix_tiles, steps,
    BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, HAS_CACHE: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    TILE_BYTES: gl.constexpr = KEY_TILE * PANELS * COLUMNS * 2
    mbarrier.expect(q_ready, TILE_BYTES)
    for part in gl.static_range(2):
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                q_desc, [head, first_token + query_tile * QUERY_TILE + part * HALF, panel * COLUMNS], q_ready,
                q_chunks.index(part * PANELS + panel),
            )  # fmt: skip
    for step in range(steps):
        slot = step % STAGES
        phase = (step // STAGES - 1) & 1
        in_prefix, index = place_of(step, query_tile, first_new, partial, prefix_tiles)
        start = index * KEY_TILE
        mbarrier.wait(k_empty.index(slot), phase, pred=step >= STAGES)
        mbarrier.expect(k_ready.index(slot), TILE_BYTES)
        if HAS_CACHE and in_prefix:
            unit = kv_head * head_units
            load_blocks(cache_desc, k_old, k_ready.index(slot), slot, table, block_units, unit, start,
                        num_earlier - start, BLOCK_SIZE, BOX, PANELS)  # fmt: skip
        else:
            load_tile(k_desc, k_new, k_ready.index(slot), slot, kv_head, first_token + start, query_len - start,
                      HALF, PANELS)  # fmt: skip
        mbarrier.wait(v_empty.index(slot), phase, pred=step >= STAGES)
        mbarrier.expect(v_ready.index(slot), TILE_BYTES)
        if HAS_CACHE and in_prefix:
            unit = kv_head * head_units + value_units
            load_blocks(cache_desc, v_old, v_ready.index(slot), slot, table, block_units, unit, start,
                        num_earlier - start, BLOCK_SIZE, BOX, PANELS)  # fmt: skip
        else:
            load_tile(v_desc, v_new, v_ready.index(slot), slot, kv_head, first_token + start, query_len - start,
                      HALF, PANELS)  # fmt: skip


@gluon.jit
def mask_scores(
    scores, first_query, num_earlier, window, step, query_tile, first_new, partial, prefix_tiles,
    HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """-inf where a key is not in the prefix, later than the query, or before its window. Queries count from 0."""
    layout: gl.constexpr = scores.type.layout
    in_prefix, index = place_of(step, query_tile, first_new, partial, prefix_tiles)
    keys = index * KEY_TILE + gl.arange(0, KEY_TILE, layout=gl.SliceLayout(0, layout))
    queries = first_query + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    keys = gl.where(in_prefix & (keys >= num_earlier), 1 << 30, keys)
    keys -= gl.where(in_prefix, num_earlier, 0)
    allowed = keys[None, :] <= queries[:, None]
    if HAS_WINDOW:
        allowed = allowed & (keys[None, :] > queries[:, None] - window)
    return gl.where(allowed, scores, float("-inf"))


@gluon.jit
def weigh(scores, peak, total, scale, soft_cap, HAS_SOFT_CAP: gl.constexpr):
    """One step of the running softmax on unscaled scores: (weights, new peak, new total, decay of what came before)."""
    if HAS_SOFT_CAP:
        scores = soft_cap * (1.0 - 2.0 / (gl.exp2(scores * (2.0 * LOG2_E * scale / soft_cap)) + 1.0))
        factor = LOG2_E
    else:
        factor = scale * LOG2_E
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    decay = gl.exp2((peak - new_peak) * factor)
    weights = gl.exp2(scores * factor - (new_peak * factor)[:, None])
    return weights, new_peak, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def attend(
    q_half, k_ring, v_ring, q_ready, k_ready, k_empty, v_ready, v_empty, my_turn, other_turn, o_desc, o_chunks,
    scale, soft_cap, window, head, first_token, query_len, num_earlier, query_tile, first_new, partial, prefix_tiles,
    steps, masked_steps,
    WHICH: gl.constexpr, D: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr, TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: HALF queries against every tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEY_TILE, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = k_ring.dtype
    first_query = query_tile * QUERY_TILE + WHICH * HALF
    nothing = gl.zeros([HALF, KEY_TILE], gl.float32, s_layout)
    peak = gl.full([HALF], float("-inf"), gl.float32, row_layout)
    total = gl.zeros([HALF], gl.float32, row_layout)
    acc = gl.zeros([HALF, D], gl.float32, o_layout)

    mbarrier.wait(q_ready, 0)
    mbarrier.wait(k_ready.index(0), 0)
    scores = warpgroup_mma(q_half, k_ring.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(0))
    scores = mask_scores(
        scores, first_query, num_earlier, window, 0, query_tile, first_new, partial, prefix_tiles, HAS_WINDOW
    )
    weights, peak, total, decay = weigh(scores, peak, total, scale, soft_cap, HAS_SOFT_CAP)
    p = gl.convert_layout(weights.to(dtype), p_layout)

    for step in range(1, masked_steps):
        slot = step % STAGES
        before = (step - 1) % STAGES
        mbarrier.wait(k_ready.index(slot), (step // STAGES) & 1)
        scores = warpgroup_mma(q_half, k_ring.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), ((step - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_empty.index(slot))
        scores = mask_scores(
            scores, first_query, num_earlier, window, step, query_tile, first_new, partial, prefix_tiles, HAS_WINDOW
        )
        weights, peak, total, decay = weigh(scores, peak, total, scale, soft_cap, HAS_SOFT_CAP)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.convert_layout(decay, o_row_layout)[:, None]
        p = gl.convert_layout(weights.to(dtype), p_layout)

    for step in range(masked_steps, steps):
        slot = step % STAGES
        before = (step - 1) % STAGES
        mbarrier.wait(k_ready.index(slot), (step // STAGES) & 1)
        if TAKE_TURNS:
            mbarrier.wait(my_turn, (step - masked_steps) & 1)
        scores = warpgroup_mma(q_half, k_ring.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), ((step - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
        if TAKE_TURNS:
            mbarrier.arrive(other_turn)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_empty.index(slot))
        weights, peak, total, decay = weigh(scores, peak, total, scale, soft_cap, HAS_SOFT_CAP)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.convert_layout(decay, o_row_layout)[:, None]
        p = gl.convert_layout(weights.to(dtype), p_layout)

    last = (steps - 1) % STAGES
    mbarrier.wait(v_ready.index(last), ((steps - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_ring.index(last), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    result = acc / gl.convert_layout(total, o_row_layout)[:, None]
    q_half.store(result.to(dtype))  # its queries are done with
    fence_async_shared()
    thread_barrier()
    rows = gl.minimum(gl.maximum(query_len - first_query, 0), HALF)
    for panel in gl.static_range(PANELS):
        tma.async_copy_shared_to_global(
            o_desc, [head, first_token + first_query + rows, HALF - rows, panel * COLUMNS],
            o_chunks.index(WHICH * PANELS + panel),
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["scale", "soft_cap", "window", "table_row", "block_units", "head_units", "value_units"],
    do_not_specialize_on_alignment=["work", "block_tables", "query_start_loc", "seq_lens"],
)
def prefill_hopper_kernel(
    q_desc,  # [H, T, D], boxes [1, HALF, COLUMNS]
    k_desc,  # [K, T + 1, HALF, D] of the new keys, boxes [1, 1, HALF, COLUMNS]
    v_desc,  # as k_desc, the new values
    cache_desc,  # [tiles of S slots, S + 1, BOX, D], boxes [1, 1, BOX, COLUMNS]
    o_desc,  # [H, T + 1, HALF, D], boxes [1, 1, HALF, COLUMNS]
    work,  # int32 [grid of dimension 1, 2]: row and query tile, longest first
    block_tables,  # int32 [N, B], strides (table_row, 1)
    query_start_loc,  # int32 [N+1]
    seq_lens,  # int32 [N]
    scale,
    soft_cap,
    window,
    table_row,
    block_units,  # tiles of S slots from one block to the next,
    head_units,  # from one KV head to the next,
    value_units,  # from keys to values
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_CACHE: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    TAKE_TURNS: gl.constexpr,
):
    """Grid (H, pieces of work)."""
    head = gl.program_id(0)
    kv_head = head // GROUP
    row = gl.load(work + gl.program_id(1) * 2)
    query_tile = gl.load(work + gl.program_id(1) * 2 + 1)
    first_token = gl.load(query_start_loc + row)
    query_len = gl.load(query_start_loc + row + 1) - first_token
    num_earlier = gl.load(seq_lens + row) - query_len
    prefix_tiles = num_earlier // KEY_TILE
    partial = (num_earlier % KEY_TILE != 0).to(gl.int32)
    first_new = 0
    num_old = prefix_tiles
    if HAS_WINDOW:
        lowest = gl.maximum(num_earlier + query_tile * QUERY_TILE - window + 1, 0)
        first_new = gl.maximum(lowest - num_earlier, 0) // KEY_TILE
        partial = gl.where(lowest < num_earlier, partial, 0)
        num_old = gl.maximum(prefix_tiles - lowest // KEY_TILE, 0)
    steps = 1 + partial + query_tile - first_new + num_old
    masked_steps = steps if HAS_WINDOW else 1 + partial

    PANELS: gl.constexpr = D // COLUMNS
    dtype: gl.constexpr = q_desc.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    table = block_tables + row.to(gl.int64) * table_row
    q_chunks = gl.allocate_shared_memory(dtype, [2 * PANELS, 1, HALF, COLUMNS], q_desc.layout)
    k_new = gl.allocate_shared_memory(dtype, [STAGES * PANELS * 2, 1, 1, HALF, COLUMNS], k_desc.layout)
    v_new = gl.allocate_shared_memory(dtype, [STAGES * PANELS * 2, 1, 1, HALF, COLUMNS], v_desc.layout)
    q_halves = q_chunks._reinterpret(dtype, [2, HALF, D], tile_layout)
    o_chunks = q_chunks._reinterpret(dtype, [2 * PANELS, 1, 1, HALF, COLUMNS], o_desc.layout)
    k_ring = k_new._reinterpret(dtype, [STAGES, KEY_TILE, D], tile_layout)
    v_ring = v_new._reinterpret(dtype, [STAGES, KEY_TILE, D], tile_layout)
    OLD: gl.constexpr = STAGES * PANELS * (KEY_TILE // BOX)
    k_old = k_new._reinterpret(dtype, [OLD, 1, 1, BOX, COLUMNS], cache_desc.layout)
    v_old = v_new._reinterpret(dtype, [OLD, 1, 1, BOX, COLUMNS], cache_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_empty.index(slot), count=2)
    fence_async_shared()
    if TAKE_TURNS:
        mbarrier.arrive(turns.index(0))
    gl.warp_specialize(
        [
            (attend, (
                q_halves.index(0), k_ring, v_ring, q_ready, k_ready, k_empty, v_ready, v_empty,
                turns.index(0), turns.index(1), o_desc, o_chunks,
                scale, soft_cap, window, head, first_token, query_len, num_earlier, query_tile, first_new, partial,
                prefix_tiles, steps, masked_steps, 0, D, PANELS, STAGES, HAS_WINDOW, HAS_SOFT_CAP, TAKE_TURNS,
            )),
            (attend, (
                q_halves.index(1), k_ring, v_ring, q_ready, k_ready, k_empty, v_ready, v_empty,
                turns.index(1), turns.index(0), o_desc, o_chunks,
                scale, soft_cap, window, head, first_token, query_len, num_earlier, query_tile, first_new, partial,
                prefix_tiles, steps, masked_steps, 1, D, PANELS, STAGES, HAS_WINDOW, HAS_SOFT_CAP, TAKE_TURNS,
            )),
            (load_all, (
                q_desc, k_desc, v_desc, cache_desc, q_chunks, k_new, v_new, k_old, v_old, q_ready, k_ready, k_empty,
                v_ready, v_empty, table, block_units, head_units, value_units, head, kv_head, first_token, query_len,
                num_earlier, query_tile, first_new, partial, prefix_tiles, steps,
                BLOCK_SIZE, BOX, PANELS, STAGES, HAS_CACHE,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
