"""What the decode kernels share: attention of a few query rows over tiles of one sequence.

M query rows that read the same keys (heads of a group, times new tokens or sequences), D head size, TILE tokens. The
result is a part (decode_parts.py).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import INTERPRETED, LOG2_E, begin_late, dot, fetch_lines, oldest_seen


@triton.jit
def first_tile_of(seq_len, num_new, window, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The first tile that any of the row's `num_new` newest tokens sees."""
    if WINDOW:
        return tl.maximum(oldest_seen(tl.maximum(seq_len - num_new, 0), window, WINDOW), 0) // TILE
    else:
        return seq_len * 0


@triton.jit
def load_query(pointers, mask, k_scale, scale, IS_FP8: tl.constexpr):
    """-> as `prepare_query`, of the query at `pointers` [M, D_PAD]."""
    if IS_FP8:
        scale *= tl.load(k_scale)
    return prepare_query(tl.load(pointers, mask=mask, other=0.0), scale, IS_FP8)


@triton.jit
def fetch_tiles(
    key_cache, value_cache, table, head, first, last, cache_block, cache_slot,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, FETCHED: tl.constexpr,
):  # fmt: skip
    """Asks for the first FETCHED of tiles [first, last) to be brought into L2; returns at once. Needs sm_90."""
    LINE: tl.constexpr = 128 * 8 // key_cache.dtype.element_ty.primitive_bitwidth  # elements
    LINES: tl.constexpr = triton.cdiv(HEAD_SIZE, LINE)
    if BLOCK_SIZE % TILE == 0:
        part = tl.arange(0, TILE * triton.next_power_of_2(LINES))
        slot, column = part % TILE, part // TILE * LINE
        column = tl.minimum(column, HEAD_SIZE - 1)
        for tile in tl.static_range(FETCHED):
            if first + tile < last:
                start = (first + tile) * TILE
                block = tl.load(table + start // BLOCK_SIZE, cache_modifier=".cg").to(tl.int64)
                inside = head + block * cache_block + (start % BLOCK_SIZE + slot) * cache_slot + column
                fetch_lines(key_cache + inside, HEAD_SIZE % LINE == 0)
                fetch_lines(value_cache + inside, HEAD_SIZE % LINE == 0)


@triton.jit
def prepare_query(query, scale, IS_FP8: tl.constexpr):
    """-> (query in the type of the products, scale of each row's scores [M]).

    fp8 keys become fp16 exactly and cheaply, bf16 not: bf16 queries over fp8 caches are multiplied as fp16, each row
    brought to a largest magnitude of 1 first, so that nothing overflows.
    """
    row_scale = tl.zeros([query.shape[0]], tl.float32) + scale
    if IS_FP8 and query.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(query.to(tl.float32)), 1)
        largest = tl.where(largest > 0.0, largest, 1.0)
        query = (query.to(tl.float32) / largest[:, None]).to(tl.float16)
        row_scale *= largest
    return query, row_scale


@triton.jit
def load_tile(tiles, index, last, LISTED: tl.constexpr):
    """The index-th tile to read; any tile past the last."""
    if LISTED:
        return tl.load(tiles + index, mask=index < last, other=0)
    else:
        return index


@triton.jit
def load_block(table, tile, seq_len, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block that a tile lies in; 0 past the sequence's end."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table + tile * TILE // BLOCK_SIZE, mask=tile * TILE < seq_len, other=0)
    else:
        return 0


@triton.jit
def unpack_pairs(pairs):
    """16-bit words of two fp8 values each, of two neighbouring tokens in a register -> (the first values, the second
    values) as fp16. Left to the compiler, bringing tokens together takes four times the instructions."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def start_sums(M: tl.constexpr, D: tl.constexpr, KEYS_FIRST: tl.constexpr):
    if KEYS_FIRST:
        return tl.zeros([D, M], tl.float32)
    else:
        return tl.zeros([M, D], tl.float32)


@triton.jit
def add_values(sums, decay, weights, values, KEYS_FIRST: tl.constexpr):
    """decay * sums + weights @ values; all of these transposed if KEYS_FIRST."""
    if KEYS_FIRST:
        return sums * decay[None, :] + dot(values, weights)
    else:
        return sums * decay[:, None] + dot(weights, values)


@triton.jit
def attend_tiles(
    query_pointers,  # [M, D_PAD]
    query_mask,  # bool [M, D_PAD]
    late,  # LATE: whether the first tile waits for the launch before; tiles that follow are on their way by then
    k_scale,
    scale,
    query_positions,  # int32 [M]; -1: padding
    slopes,  # fp32 [M]
    sparse_shifts,  # int32 [M], SPARSE_STRIDE only
    key_cache,  # of the KV head
    value_cache,
    table,  # the sequence's block table
    tiles,  # SPARSE_STRIDE: the tiles to read
    first,  # tiles [first, last) of the sequence, or of the list
    last,
    seq_len,
    soft_cap,
    window,
    cache_block,
    cache_slot,
    sparse_local,
    HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    SPARSE_STRIDE: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    IS_FP8: tl.constexpr,
    LATE: tl.constexpr,
):
    """-> (peak, total, accumulator). Keys past `seq_len` are never loaded. KEYS_FIRST: products have keys, then values'
    columns, as rows and the queries as columns, of which 8 are enough; else queries are rows, of which 16 are."""
    M: tl.constexpr = query_pointers.shape[0]
    if LATE:
        query = tl.zeros(query_pointers.shape, tl.float16 if IS_FP8 else query_pointers.dtype.element_ty)
        row_scale = tl.zeros([M], tl.float32)
    else:
        query, row_scale = load_query(query_pointers, query_mask, k_scale, scale, IS_FP8)
    KEYS: tl.constexpr = 0 if KEYS_FIRST else 1  # the axis of the scores that is keys
    ROWS: tl.constexpr = 1 - KEYS
    PAIRS: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv and not INTERPRETED
    PER_WORD: tl.constexpr = 2 if PAIRS else 1  # values of a word that is loaded
    VALUE_POINTER: tl.constexpr = tl.pointer_type(tl.int16) if PAIRS else value_cache.dtype
    slots = tl.arange(0, TILE)
    columns = tl.arange(0, D_PAD)
    words = tl.arange(0, D_PAD // PER_WORD)
    values_inside = tl.expand_dims(slots * (cache_slot // PER_WORD), KEYS) + tl.expand_dims(words, ROWS)
    inside = slots[:, None] * cache_slot + columns[None, :]
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    HALF: tl.constexpr = D_PAD // 2
    accumulator = start_sums(M, D_PAD, KEYS_FIRST)
    even = start_sums(M, HALF, KEYS_FIRST)
    odd = start_sums(M, HALF, KEYS_FIRST)
    query_positions = tl.expand_dims(query_positions, KEYS)
    DIRECT: tl.constexpr = not HAS_SOFT_CAP and not HAS_ALIBI  # scores are scaled once, to base 2
    # One tile ahead by hand: a load of addresses inside the loop would be pipelined itself, at the cost of the keys.
    next_tile = load_tile(tiles, first, last, SPARSE_STRIDE > 0)
    next_block = load_block(table, next_tile, seq_len, BLOCK_SIZE, TILE)
    for index in range(first, last):
        if LATE:  # noqa: SIM102, known when the kernel is compiled
            if index == first:
                if late:
                    begin_late(True)
                query, row_scale = load_query(query_pointers, query_mask, k_scale, scale, IS_FP8)
        start = next_tile * TILE
        block = next_block
        next_tile = load_tile(tiles, index + 1, last, SPARSE_STRIDE > 0)
        next_block = load_block(table, next_tile, seq_len, BLOCK_SIZE, TILE)
        positions = start + slots
        stored = positions < seq_len
        if BLOCK_SIZE % TILE == 0:  # a tile lies in one block
            base = block.to(tl.int64) * cache_block + (start % BLOCK_SIZE) * cache_slot
            key_pointers = key_cache + base + inside
            value_pointers = (value_cache + base).to(VALUE_POINTER, bitcast=True) + values_inside
        else:
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
            rows = blocks * cache_block + (positions % BLOCK_SIZE) * cache_slot
            key_pointers = key_cache + rows[:, None] + columns[None, :]
            value_pointers = value_cache.to(VALUE_POINTER, bitcast=True) + (
                tl.expand_dims(rows // PER_WORD, KEYS) + tl.expand_dims(words, ROWS)
            )
        mask = stored[:, None]
        value_mask = tl.expand_dims(stored, KEYS)
        if HEAD_SIZE != D_PAD:
            mask = mask & (columns < HEAD_SIZE)[None, :]
            value_mask = value_mask & tl.expand_dims(words < HEAD_SIZE // PER_WORD, ROWS)
        key = tl.load(key_pointers, mask=mask, other=0.0).to(query.dtype)
        value = tl.load(value_pointers, mask=value_mask, other=0 if PAIRS else 0.0)
        scores = dot(key, tl.trans(query)) if KEYS_FIRST else dot(query, tl.trans(key))
        scores *= tl.expand_dims(row_scale * LOG2_E if DIRECT else row_scale, KEYS)
        if HAS_SOFT_CAP:
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / soft_cap)) + 1.0))  # soft_cap * tanh
        key_positions = tl.expand_dims(positions, ROWS)
        if HAS_ALIBI:
            scores += tl.expand_dims(slopes, KEYS) * (key_positions - query_positions).to(tl.float32)
        allowed = key_positions <= query_positions
        if WINDOW:
            allowed = allowed & (key_positions >= oldest_seen(query_positions, window, WINDOW))
        if SPARSE_STRIDE > 0:
            blocks = key_positions // SPARSE_BLOCK
            vertical = (blocks + tl.expand_dims(sparse_shifts, KEYS)) % SPARSE_STRIDE == 0
            oldest = query_positions // SPARSE_BLOCK - sparse_local
            allowed = allowed & (vertical | (blocks > oldest))
        if not DIRECT:
            scores *= LOG2_E
        scores = tl.where(allowed, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, KEYS))
        base_M = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # rows that saw no key yet: no inf - inf
        weights = tl.exp2(scores - tl.expand_dims(base_M, KEYS))
        decay = tl.exp2(peak - base_M)
        total = total * decay + tl.sum(weights, KEYS)
        weights = weights.to(query.dtype)
        if PAIRS:
            first_values, second_values = unpack_pairs(value)
            even = add_values(even, decay, weights, first_values.to(query.dtype), KEYS_FIRST)
            odd = add_values(odd, decay, weights, second_values.to(query.dtype), KEYS_FIRST)
        else:
            accumulator = add_values(accumulator, decay, weights, value.to(query.dtype), KEYS_FIRST)
        peak = new_peak
    if PAIRS:
        if KEYS_FIRST:
            even, odd = tl.trans(even), tl.trans(odd)
        accumulator = tl.reshape(tl.join(even, odd), [M, D_PAD])
    elif KEYS_FIRST:
        accumulator = tl.trans(accumulator)
    return peak, total, accumulator
