"""Attention of a decode step of few rows, from the QKV product to the output projection in one launch: head norms,
rotation, the new token's way into the cache, attention over the paged cache, and merging.

With few rows a step waits for one thing after the other, so everything that does not hang on the product before is done
while that still runs: a program has the keys and values of its newest tile in registers when queries arrive, and takes
the new token's from there, too. All programs get runs of about equally many tiles, none of two KV heads or rows: each
works out from the lengths which is its own.

Behind them in the grid stand programs that merge the runs of some query heads each, in their order. A run leaves words
of 64 bits for them, a value and how much it counts, which arrive whole; a word that is not there yet is EMPTY. So who
merges waits for the words themselves, for no fence and no counter, and leaves EMPTY behind for the next launch. It
waits for programs in front of it alone: however few run at once, the wait ends.

R rows of one new token, H query heads in groups of G over K KV heads, D head size, C = (H + 2K) * D, S slots a block,
B table columns, P positions, N programs that attend.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.products import matmul_plans
from tandem.kernels.triton_kernels.common import LOG2_E, dot

EMPTY: tl.constexpr = tl.constexpr(matmul_plans.EMPTY)


@triton.jit
def load_heads(pointers, columns, mask, weight, cos, sin, eps, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads of the QKV product, normed and rotated: (first halves [heads, HALF], second halves), fp32."""
    first = tl.load(pointers + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        first *= scale * tl.load(weight + columns).to(tl.float32)[None, :]
        second *= scale * tl.load(weight + HALF + columns).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def attend_tile(query, keys, values, visible, scale, peak, total, accumulator):
    """A step of the running softmax; `scale` includes log2(e), the accumulator is [M, D]."""
    scores = tl.where(visible[None, :], dot(query, tl.trans(keys)) * scale, float("-inf"))  # [M, TILE]
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # rows that saw no key yet: no inf - inf
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    accumulator = accumulator * decay[:, None] + dot(weights.to(values.dtype), values)
    return new_peak, total * decay + tl.sum(weights, 1), accumulator


@triton.jit
def find_runs(seq_lens, num_rows, programs, TILE: tl.constexpr, K: tl.constexpr, MOST_ROWS: tl.constexpr):
    """-> (rows [MOST_ROWS], their lengths, runs of each of their KV heads, tiles of a run)."""
    rows = tl.arange(0, MOST_ROWS)
    is_row = rows < num_rows
    lens = tl.load(seq_lens + rows, mask=is_row, other=0, cache_modifier=".cg")
    tiles = tl.where(is_row, tl.maximum((lens + TILE - 1) // TILE, 1), 0)  # an empty row's zeros are written, too
    share = find_share(tiles, num_rows, programs, K)
    return rows, lens, (tiles + share - 1) // share, share


@triton.jit
def find_share(tiles, num_rows, programs, K: tl.constexpr):
    """Tiles of a run, as few as make no more runs than `programs`, so that none waits for another's end: tried with
    less and less of the programs, since the last run of a head is short. With all of them where none of that fits."""
    TRIES: tl.constexpr = 8
    spared = (num_rows * K + TRIES - 2) // (TRIES - 1) * tl.arange(0, TRIES)  # at last one for each head
    left = tl.maximum(programs - spared, 1)
    shares = tl.maximum((tl.sum(tiles, 0) * K + left - 1) // left, 1)
    runs = tl.sum((tiles[:, None] + shares[None, :] - 1) // shares[None, :], 0) * K
    NONE: tl.constexpr = 1 << 30
    share = tl.min(tl.where(runs <= programs, shares, NONE), 0)
    return tl.where(share == NONE, tl.min(shares, 0), share)


@triton.jit
def pack(values, logs):
    """int64: the bits of fp32 `logs` above those of `values`. None is EMPTY: arithmetic makes no NaN of ones alone,
    but what was loaded may be one."""
    words = values.to(tl.uint32, bitcast=True)
    words = tl.where(words == 0xFFFFFFFF, 0x7FFFFFFF, words).to(tl.uint64)
    return ((logs.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | words).to(tl.int64, bitcast=True)


@triton.jit
def merge_runs(
    merger,  # of all rows' query heads, HEADS each
    output,
    partial,
    seq_lens,
    num_rows,
    programs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges the runs of HEADS query heads of a KV head, if there are several; each column goes its own way."""
    MERGERS: tl.constexpr = GROUP // HEADS  # of a KV head
    COLUMNS: tl.constexpr = HEADS * HEAD_SIZE
    STEP: tl.constexpr = CHUNK * NUM_KV_HEADS * GROUP * HEAD_SIZE
    rows, _, all_runs, _ = find_runs(seq_lens, num_rows, programs, TILE, NUM_KV_HEADS, MOST_ROWS)
    row, kv_head = merger // (NUM_KV_HEADS * MERGERS), merger // MERGERS % NUM_KV_HEADS
    runs = tl.sum(tl.where(rows == row, all_runs, 0), 0)
    if runs > 1:
        first_program = tl.sum(tl.where(rows < row, all_runs, 0), 0) * NUM_KV_HEADS + kv_head
        columns, parts = tl.arange(0, WIDTH), tl.arange(0, CHUNK)
        inside = columns < COLUMNS
        entries = ((first_program + parts * NUM_KV_HEADS) * MERGERS + merger % MERGERS).to(tl.int64)
        places = partial + entries[:, None] * COLUMNS + columns[None, :]
        peak, total = tl.full([WIDTH], float("-inf"), tl.float32), tl.zeros([WIDTH], tl.float32)
        accumulator = tl.zeros([WIDTH], tl.float32)
        if PDL:
            gdc_wait()  # the launches in front may still read or clear what lies here
        following = tl.load(places, mask=(parts < runs)[:, None] & inside[None, :], other=0, volatile=True)
        for first in range(0, runs, CHUNK):
            used = (first + parts < runs)[:, None] & inside[None, :]
            packed = following
            more = (first + CHUNK + parts < runs)[:, None] & inside[None, :]
            following = tl.load(places + STEP, mask=more, other=0, volatile=True)
            while tl.max((packed == EMPTY).to(tl.int32)) > 0:
                packed = tl.load(places, mask=used, other=0, volatile=True)
            tl.store(places, tl.full([CHUNK, WIDTH], EMPTY, tl.int64), mask=used)
            logs = tl.where(used, (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logs, 0))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(logs - base[None, :])
            decay = tl.exp2(peak - base)
            total = total * decay + tl.sum(weights, 0)
            values = packed.to(tl.int32).to(tl.float32, bitcast=True)
            accumulator = accumulator * decay + tl.sum(weights * values, 0)
            peak = new_peak
            places += STEP
        accumulator /= tl.where(total == 0.0, 1.0, total)
        into = output + merger.to(tl.int64) * COLUMNS + columns
        tl.store(into, accumulator.to(output.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["num_rows", "programs", "table_row"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "slot_mapping"],
)
def few_rows_attention_kernel(
    output,  # [R, H, D] contiguous
    partial,  # int64 [N, G, D], EMPTY between launches: what a run makes of its keys alone, and above it the
    # logarithm of its weight
    qkv,  # [R, C], strides (qkv_row, 1): query heads, key heads, value heads
    cos_sin,  # fp32 [P, D] contiguous: cos of the D / 2 angles, then sin
    q_weight,  # [D], HAS_NORM
    k_weight,  # [D], HAS_NORM
    key_cache,  # [num_blocks, K, S, D], strides (cache_block, cache_head, cache_slot, 1)
    value_cache,  # as key_cache
    block_tables,  # int32 [R, B], strides (table_row, 1)
    seq_lens,  # int32 [R], the new token counted; 0: padding
    slot_mapping,  # int64 [R]; -1: not stored
    scale,
    eps,
    num_rows,
    programs,  # that share all tiles; N = programs + R * K, since runs end with their head
    qkv_row,
    cache_block,
    cache_head,
    cache_slot,
    table_row,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M_PAD: tl.constexpr,
    HEADS: tl.constexpr,  # query heads that a program merges: one, or all of a KV head
    CHUNK: tl.constexpr,  # runs that it loads at once
    WIDTH: tl.constexpr,  # HEADS * D or more, a power of two
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N + R * H / HEADS,). What is read before the wait was complete before the pass began: lengths, tables,
    older tokens. (A pass begins with an embedding, which lets nothing start before that is complete.)"""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    workers = programs + num_rows * NUM_KV_HEADS
    if program >= workers:
        merge_runs(
            program - workers, output, partial, seq_lens, num_rows, programs,
            NUM_KV_HEADS, GROUP, HEADS, CHUNK, WIDTH, HEAD_SIZE, TILE, MOST_ROWS, PDL,
        )  # fmt: skip
        return
    rows, lens, all_runs, share = find_runs(seq_lens, num_rows, programs, TILE, NUM_KV_HEADS, MOST_ROWS)
    row = tl.sum(((rows < num_rows) & (tl.cumsum(all_runs, 0) * NUM_KV_HEADS <= program)).to(tl.int32), 0)
    if row >= num_rows:
        return
    mine = rows == row
    place_in_row = program - tl.sum(tl.where(rows < row, all_runs, 0), 0) * NUM_KV_HEADS
    kv_head, run = place_in_row % NUM_KV_HEADS, place_in_row // NUM_KV_HEADS  # runs of a head are K programs apart
    runs, seq_len = tl.sum(tl.where(mine, all_runs, 0), 0), tl.sum(tl.where(mine, lens, 0), 0)
    tiles = tl.maximum(tl.cdiv(seq_len, TILE), 1)
    newest = tl.minimum((run + 1) * share, tiles) - 1
    HALF: tl.constexpr = HEAD_SIZE // 2
    slots, columns, half = tl.arange(0, TILE), tl.arange(0, HEAD_SIZE), tl.arange(0, HALF)
    in_head = kv_head.to(tl.int64) * cache_head
    inside = in_head + slots[:, None] * cache_slot + columns[None, :]
    table = block_tables + row.to(tl.int64) * table_row
    block = tl.load(table + newest * TILE // BLOCK_SIZE, mask=seq_len > 0, other=0, cache_modifier=".cg")
    place = block.to(tl.int64) * cache_block + newest * TILE % BLOCK_SIZE * cache_slot
    is_old = newest * TILE + slots < seq_len - 1
    keys = tl.load(key_cache + place + inside, mask=is_old[:, None], other=0.0, cache_modifier=".cg")
    values = tl.load(value_cache + place + inside, mask=is_old[:, None], other=0.0, cache_modifier=".cg")
    angles = cos_sin + tl.maximum(seq_len - 1, 0).to(tl.int64) * HEAD_SIZE + half
    cos, sin = tl.load(angles)[None, :], tl.load(angles + HALF)[None, :]
    slot = tl.load(slot_mapping + row, cache_modifier=".cg")
    if PDL:
        gdc_wait()

    dtype: tl.constexpr = qkv.dtype.element_ty
    of_row = qkv + row.to(tl.int64) * qkv_row
    members, one = tl.arange(0, M_PAD), tl.arange(0, 1)
    used = members < GROUP
    heads = of_row + (kv_head * GROUP + members[:, None]) * HEAD_SIZE
    first, second = load_heads(heads, half, used[:, None], q_weight, cos, sin, eps, HALF, HAS_NORM)
    of_head = of_row + (NUM_KV_HEADS * GROUP + kv_head + one[:, None]) * HEAD_SIZE
    key, key_second = load_heads(of_head, half, (one == 0)[:, None], k_weight, cos, sin, eps, HALF, HAS_NORM)
    value = tl.load(of_row + (NUM_KV_HEADS * (GROUP + 1) + kv_head) * HEAD_SIZE + columns)
    first, second, key, key_second = first.to(dtype), second.to(dtype), key.to(dtype), key_second.to(dtype)
    has_new = (newest == tiles - 1) & (seq_len > 0)
    if has_new & (slot >= 0):
        into = (slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * cache_slot + in_head
        tl.store(key_cache + into + half[None, :], key)
        tl.store(key_cache + into + HALF + half[None, :], key_second)
        tl.store(value_cache + into + columns, value)

    # The new token opens the running softmax of the run that it belongs to.
    scale *= LOG2_E
    score = tl.sum(first.to(tl.float32) * key.to(tl.float32) + second.to(tl.float32) * key_second.to(tl.float32), 1)
    peak = tl.where(has_new, score * scale, float("-inf"))
    total = tl.where(has_new, 1.0, tl.zeros([M_PAD], tl.float32))
    accumulator = tl.where(has_new, value.to(tl.float32), 0.0)[None, :] + tl.zeros([M_PAD, HEAD_SIZE], tl.float32)
    query = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [M_PAD, HEAD_SIZE])
    peak, total, accumulator = attend_tile(query, keys, values, is_old, scale, peak, total, accumulator)
    if run * share < newest:
        # One tile ahead by hand: a load of addresses in the loop would be pipelined itself, at the cost of the keys.
        next_block = tl.load(table + run * share * TILE // BLOCK_SIZE)
        for tile in range(run * share, newest):
            place = next_block.to(tl.int64) * cache_block + tile * TILE % BLOCK_SIZE * cache_slot
            next_block = tl.load(table + (tile + 1) * TILE // BLOCK_SIZE)
            keys = tl.load(key_cache + place + inside)
            values = tl.load(value_cache + place + inside)
            peak, total, accumulator = attend_tile(query, keys, values, slots < TILE, scale, peak, total, accumulator)

    head = row * NUM_KV_HEADS + kv_head
    out = output + head.to(tl.int64) * (GROUP * HEAD_SIZE)
    accumulator /= tl.where(total == 0.0, 1.0, total)[:, None]
    if runs == 1:
        tl.store(out + members[:, None] * HEAD_SIZE + columns[None, :], accumulator.to(dtype), mask=used[:, None])
    else:
        entries = program * GROUP + members
        into = partial + entries.to(tl.int64)[:, None] * HEAD_SIZE + columns[None, :]
        logs = tl.broadcast_to((peak + tl.log2(total))[:, None], [M_PAD, HEAD_SIZE])
        tl.store(into, pack(accumulator, logs), mask=used[:, None])
