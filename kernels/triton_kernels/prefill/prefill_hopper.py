"""Prefill attention on Hopper, in Gluon: one warp loads tiles, two warpgroups multiply and weigh them.

The algorithm is FlashAttention-3's (Shah et al., 2024): scores of the next tile are computed while the weights of the
one before meet its values. N rows, T new tokens, H query heads over K KV heads, D head size, S slots a block.

Programs stay: each does one item after the other, QUERY_TILE queries of one head of one row, longest items first and
in turns forwards and backwards through the programs, which keeps their sums even. The loading warp runs ahead into the
next item. An item sees its keys in tiles of KEY_TILE in this order: the new tokens on the diagonal, the last tile of
the prefix if it isn't full, then everything that needs no mask, backwards. Encoders (not CAUSAL) see all new tokens,
cross attention the prefix alone, a tile that isn't full first.
prefill_loads.py says how tiles arrive.
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

from tandem.kernels.triton_kernels.prefill.prefill_loads import (
    COLUMNS,
    HALF,
    QUERY_TILE,
    count_items,
    load_all,
    plan_item,
    read_item,
)
from tandem.kernels.triton_kernels.prefill.prefill_scores import LOG2_E, add_bias, cap_scores, mask_scores, weigh

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name changed after 3.6


@gluon.jit
def attend(
    q_halves, k_ring, v_ring, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, my_turn, other_turn, o_desc,
    o_chunks, work, num_items, alibi_slopes, sinks, scale, soft_cap, window,
    WHICH: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, KEY_TILE: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr, Q_SLOTS: gl.constexpr, HAS_CACHE: gl.constexpr, HAS_ALIBI: gl.constexpr,
    WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, HAS_SINKS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: HALF queries of each item against every tile. Results go out through their queries'
    memory; the loading warp gets it back once the copy engine has read them, seen while the next item runs."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEY_TILE, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = k_ring.dtype
    MAY_HIDE_ALL: gl.constexpr = WINDOW > 0 and KEY_TILE < QUERY_TILE
    nothing = gl.zeros([HALF, KEY_TILE], gl.float32, s_layout)
    head, _row, query_tile, first_token, query_len, num_earlier = read_item(work, 0, num_items, HEADS)
    factor = LOG2_E if HAS_SOFT_CAP else scale * LOG2_E
    slope = factor
    count = 0  # tiles seen
    num_turns = 0
    for turn in range(count_items(num_items)):
        following = read_item(work, turn + 1, num_items, HEADS)
        first_new, partial, prefix_tiles, steps, masked_steps = plan_item(
            query_tile, query_len, num_earlier, window, KEY_TILE, HAS_CACHE, WINDOW, CAUSAL
        )
        first_query = query_tile * QUERY_TILE + WHICH * HALF
        peak = gl.full([HALF], float("-inf"), gl.float32, row_layout)
        total = gl.zeros([HALF], gl.float32, row_layout)
        acc = gl.zeros([HALF, D], gl.float32, o_layout)
        q_slot = turn % Q_SLOTS
        q_half = q_halves.index(q_slot * 2 + WHICH)
        if HAS_ALIBI:
            slope = gl.load(alibi_slopes + head) * (LOG2_E / factor)  # as `weigh` takes scores

        mbarrier.wait(q_ready.index(q_slot), (turn // Q_SLOTS) & 1)
        mbarrier.wait(k_ready.index(count % STAGES), (count // STAGES) & 1)
        keys = k_ring.index(count % STAGES).permute((1, 0))
        scores = warpgroup_mma(q_half, keys, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(count % STAGES))
        scores = cap_scores(scores, scale, soft_cap, HAS_SOFT_CAP)
        scores = add_bias(
            scores, slope, first_query, num_earlier, 0, query_tile, first_new, partial, prefix_tiles,
            KEY_TILE, HAS_CACHE, HAS_ALIBI, CAUSAL,
        )  # fmt: skip
        scores = mask_scores(
            scores, first_query, query_len, num_earlier, window, 0, query_tile, first_new, partial, prefix_tiles,
            KEY_TILE, HAS_CACHE, WINDOW, CAUSAL,
        )  # fmt: skip
        weights, peak, total, decay = weigh(scores, peak, total, factor, MAY_HIDE_ALL)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        if Q_SLOTS == 2 and turn > 0:
            tma.store_wait(0)
            thread_barrier()
            mbarrier.arrive(q_empty.index(1 - q_slot))

        for step in range(1, masked_steps):
            count += 1
            slot = count % STAGES
            before = (count - 1) % STAGES
            mbarrier.wait(k_ready.index(slot), (count // STAGES) & 1)
            scores = warpgroup_mma(q_half, k_ring.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(k_empty.index(slot))
            scores = cap_scores(scores, scale, soft_cap, HAS_SOFT_CAP)
            scores = add_bias(
                scores, slope, first_query, num_earlier, step, query_tile, first_new, partial, prefix_tiles,
                KEY_TILE, HAS_CACHE, HAS_ALIBI, CAUSAL,
            )  # fmt: skip
            scores = mask_scores(
                scores, first_query, query_len, num_earlier, window, step, query_tile, first_new, partial, prefix_tiles,
                KEY_TILE, HAS_CACHE, WINDOW, CAUSAL,
            )  # fmt: skip
            weights, peak, total, decay = weigh(scores, peak, total, factor, MAY_HIDE_ALL)
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            mbarrier.arrive(v_empty.index(before))
            acc = acc * gl.convert_layout(decay, o_row_layout)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)

        for step in range(masked_steps, steps):
            count += 1
            slot = count % STAGES
            before = (count - 1) % STAGES
            mbarrier.wait(k_ready.index(slot), (count // STAGES) & 1)
            mbarrier.wait(my_turn, num_turns & 1)
            num_turns += 1
            scores = warpgroup_mma(q_half, k_ring.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
            mbarrier.arrive(other_turn)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(k_empty.index(slot))
            scores = cap_scores(scores, scale, soft_cap, HAS_SOFT_CAP)
            scores = add_bias(
                scores, slope, first_query, num_earlier, step, query_tile, first_new, partial, prefix_tiles,
                KEY_TILE, HAS_CACHE, HAS_ALIBI, CAUSAL,
            )  # fmt: skip
            weights, peak, total, decay = weigh(scores, peak, total, factor, MAY_HIDE_ALL)
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            mbarrier.arrive(v_empty.index(before))
            acc = acc * gl.convert_layout(decay, o_row_layout)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)

        last = count % STAGES
        mbarrier.wait(v_ready.index(last), (count // STAGES) & 1)
        acc = warpgroup_mma(p, v_ring.index(last), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(last))
        count += 1
        if HAS_SINKS:  # every query saw a key; a sink far above its peak makes the result zero, as it should
            total += gl.exp2(gl.load(sinks + head) * LOG2_E - peak * factor)
        result = acc / gl.convert_layout(total, o_row_layout)[:, None]
        q_half.store(result.to(dtype))
        fence_async_shared()
        thread_barrier()
        rows = gl.minimum(gl.maximum(query_len - first_query, 0), HALF)
        if rows > 0:
            for panel in gl.static_range(PANELS):
                tma.async_copy_shared_to_global(
                    o_desc, [head, first_token + first_query + rows, HALF - rows, panel * COLUMNS],
                    o_chunks.index((q_slot * 2 + WHICH) * PANELS + panel),
                )  # fmt: skip
        if Q_SLOTS == 1:
            tma.store_wait(0)
            thread_barrier()
            mbarrier.arrive(q_empty.index(0))
        head, _row, query_tile, first_token, query_len, num_earlier = following
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_items", "scale", "soft_cap", "window", "table_row", "block_units", "head_units", "value_units",
    ],
    do_not_specialize_on_alignment=["work", "block_tables", "alibi_slopes", "sinks"],
)  # fmt: skip
def prefill_hopper_kernel(
    q_desc,  # [H, T, D], boxes [1, HALF, COLUMNS]
    k_desc,  # [K, T + 1, HALF, D] of the new keys, boxes [1, 1, HALF, COLUMNS]
    v_desc,  # as k_desc, the new values
    cache_desc,  # [tiles of S slots, S + 1, BOX, D], boxes [1, 1, BOX, COLUMNS]
    nothing_desc,  # [1, 1, BOX, COLUMNS], boxes [1, 1, BOX, COLUMNS], of any memory: read past its end
    o_desc,  # [H, T + 1, HALF, D], boxes [1, 1, HALF, COLUMNS]
    work,  # int32 [pieces, ITEM_FIELDS]: row, query tile, first token, new tokens, earlier tokens; longest first
    num_items,  # pieces * H
    block_tables,  # int32 [N, B], strides (table_row, 1)
    alibi_slopes,  # fp32 [H], HAS_ALIBI
    sinks,  # fp32 [H], HAS_SINKS
    scale,
    soft_cap,
    window,
    table_row,
    block_units,  # tiles of S slots from one block to the next,
    head_units,  # from one KV head to the next,
    value_units,  # from keys to values
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEY_TILE: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    HAS_CACHE: gl.constexpr,
    HAS_ALIBI: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Grid (programs that stay), at most num_items."""
    PANELS: gl.constexpr = D // COLUMNS
    dtype: gl.constexpr = q_desc.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_chunks = gl.allocate_shared_memory(dtype, [2 * Q_SLOTS * PANELS, 1, HALF, COLUMNS], q_desc.layout)
    k_new = gl.allocate_shared_memory(dtype, [STAGES * PANELS * (KEY_TILE // HALF), 1, 1, HALF, COLUMNS], k_desc.layout)
    v_new = gl.allocate_shared_memory(dtype, [STAGES * PANELS * (KEY_TILE // HALF), 1, 1, HALF, COLUMNS], v_desc.layout)
    q_halves = q_chunks._reinterpret(dtype, [2 * Q_SLOTS, HALF, D], tile_layout)
    o_chunks = q_chunks._reinterpret(dtype, [2 * Q_SLOTS * PANELS, 1, 1, HALF, COLUMNS], o_desc.layout)
    k_ring = k_new._reinterpret(dtype, [STAGES, KEY_TILE, D], tile_layout)
    v_ring = v_new._reinterpret(dtype, [STAGES, KEY_TILE, D], tile_layout)
    OLD: gl.constexpr = STAGES * PANELS * (KEY_TILE // BOX)
    k_old = k_new._reinterpret(dtype, [OLD, 1, 1, BOX, COLUMNS], cache_desc.layout)
    v_old = v_new._reinterpret(dtype, [OLD, 1, 1, BOX, COLUMNS], cache_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(Q_SLOTS):
        mbarrier.init(q_ready.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=2)
    for slot in gl.static_range(2):
        mbarrier.init(turns.index(slot), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_empty.index(slot), count=2)
    fence_async_shared()
    mbarrier.arrive(turns.index(0))
    gl.warp_specialize(
        [
            (attend, (
                q_halves, k_ring, v_ring, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns.index(0),
                turns.index(1), o_desc, o_chunks, work, num_items, alibi_slopes, sinks, scale, soft_cap,
                window, 0, HEADS, D, KEY_TILE, PANELS, STAGES, Q_SLOTS, HAS_CACHE, HAS_ALIBI, WINDOW,
                HAS_SOFT_CAP, HAS_SINKS, CAUSAL,
            )),
            (attend, (
                q_halves, k_ring, v_ring, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns.index(1),
                turns.index(0), o_desc, o_chunks, work, num_items, alibi_slopes, sinks, scale, soft_cap,
                window, 1, HEADS, D, KEY_TILE, PANELS, STAGES, Q_SLOTS, HAS_CACHE, HAS_ALIBI, WINDOW,
                HAS_SOFT_CAP, HAS_SINKS, CAUSAL,
            )),
            (load_all, (
                q_desc, k_desc, v_desc, cache_desc, nothing_desc, q_chunks, k_new, v_new, k_old, v_old, q_ready,
                q_empty, k_ready, k_empty, v_ready, v_empty, work, num_items, block_tables, table_row, window,
                block_units, head_units, value_units, HEADS, GROUP, BLOCK_SIZE, KEY_TILE, BOX, PANELS,
                STAGES, Q_SLOTS, HAS_CACHE, WINDOW, CAUSAL,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
