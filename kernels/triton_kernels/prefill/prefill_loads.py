"""What the Hopper prefill kernel loads, in Gluon: a program's items, their tiles, and the warp that fetches them.

Tiles arrive through the tensor memory accelerator in boxes of BOX rows and 64 columns, the width of its swizzle. Each
descriptor has the token dimension twice, as (x, y) with y below BOX: a box that starts at y = BOX - n holds n rows and
then zeros (loads) or nothing (stores), so that no value of another row, or of an unused slot, ever meets a weight. Such
a descriptor starts up to BOX rows before its tensor, where no memory may be. A box with n = 0 would touch its start all
the same, as if to fetch what it then leaves out (seen on an H200), so those are read through another descriptor.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

COLUMNS: gl.constexpr = gl.constexpr(64)  # 128 bytes of 16-bit elements
QUERY_TILE: gl.constexpr = gl.constexpr(128)
HALF: gl.constexpr = gl.constexpr(64)  # queries of one warpgroup
ITEM_FIELDS: gl.constexpr = gl.constexpr(8)  # int32 a piece of work, so that one sector holds it


@gluon.jit
def count_items(num_items):
    """How many items this program does."""
    place, programs = gl.program_id(0), gl.num_programs(0)
    rounds = num_items // programs
    last = gl.where(rounds % 2 == 0, place, programs - 1 - place)
    return rounds + (last < num_items % programs).to(gl.int32)


@gluon.jit
def read_item(work, turn, num_items, HEADS: gl.constexpr):
    """The turn-th item of this program (any one past the end): head, row, query tile, first token, new and earlier
    tokens of the row."""
    place, programs = gl.program_id(0), gl.num_programs(0)
    item = turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)
    item = gl.minimum(item, num_items - 1)
    piece = work + item // HEADS * ITEM_FIELDS
    return (
        item % HEADS, gl.load(piece), gl.load(piece + 1), gl.load(piece + 2), gl.load(piece + 3), gl.load(piece + 4),
    )  # fmt: skip


@gluon.jit
def oldest_seen(positions, window, WINDOW: gl.constexpr):
    """The first position that queries at these see, as spec.Reach says: WINDOW is its kind, `window` its size."""
    if WINDOW == 2:
        return positions // window * window
    elif WINDOW == 3:
        return positions * 0 + window
    else:
        return positions - window + 1


@gluon.jit
def plan_item(
    query_tile, query_len, num_earlier, window, KEY_TILE: gl.constexpr, HAS_CACHE: gl.constexpr,
    WINDOW: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """(first tile of new tokens, whether a prefix tile is partial, full prefix tiles, steps, those with a mask: at
    least one). Not CAUSAL: the tiles are the prefix's, or if there is no cache the new tokens', all of them."""
    if CAUSAL:
        DIAGONAL: gl.constexpr = QUERY_TILE // KEY_TILE
        prefix_tiles = num_earlier // KEY_TILE
        partial = (num_earlier % KEY_TILE != 0).to(gl.int32)
        first_new = 0
        num_old = prefix_tiles
        if WINDOW:
            lowest = gl.maximum(oldest_seen(num_earlier + query_tile * QUERY_TILE, window, WINDOW), 0)
            first_new = gl.maximum(lowest - num_earlier, 0) // KEY_TILE
            partial = gl.where(lowest < num_earlier, partial, 0)
            num_old = gl.maximum(prefix_tiles - lowest // KEY_TILE, 0)
        steps = DIAGONAL + partial + query_tile * DIAGONAL - first_new + num_old
        masked_steps = steps if WINDOW else DIAGONAL + partial
        return first_new, partial, prefix_tiles, steps, masked_steps
    else:
        num_keys = num_earlier if HAS_CACHE else query_len
        full = num_keys // KEY_TILE
        rest = (num_keys % KEY_TILE != 0).to(gl.int32)
        return 0, rest, full, full + rest, 1


@gluon.jit
def place_of(
    step, query_tile, first_new, partial, prefix_tiles, KEY_TILE: gl.constexpr, HAS_CACHE: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """The step-th tile a program sees: (whether it lies in the prefix, its index there or among the new tokens)."""
    if CAUSAL:
        DIAGONAL: gl.constexpr = QUERY_TILE // KEY_TILE
        diagonal = query_tile * DIAGONAL
        later = step - DIAGONAL - partial
        num_new = diagonal - first_new
        is_tail = (step == DIAGONAL) & (partial == 1)
        in_prefix = is_tail | (later >= num_new)
        index = gl.where(in_prefix, prefix_tiles - 1 - later + num_new, diagonal - 1 - later)
        return in_prefix, gl.where(step < DIAGONAL, diagonal + step, gl.where(is_tail, prefix_tiles, index))
    else:
        return HAS_CACHE, prefix_tiles + partial - 1 - step


@gluon.jit
def load_nothing(
    desc, chunks, barrier, slot, first,
    COUNT: gl.constexpr, KEY_TILE: gl.constexpr, BOX: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """Zeros in boxes first ... first + COUNT - 1 of a tile: past the end of a descriptor that starts in a tensor."""
    for box in gl.static_range(COUNT):
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                desc, [1, 0, 0, 0], barrier, chunks.index((slot * PANELS + panel) * (KEY_TILE // BOX) + first + box)
            )


@gluon.jit
def load_tile(
    desc, nothing_desc, chunks, boxes, barrier, slot, unit, start, count,
    KEY_TILE: gl.constexpr, BOX: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """KEY_TILE rows from `start` of one head's tokens, zeros after the first `count`. `boxes` are the chunks by BOX."""
    PARTS: gl.constexpr = KEY_TILE // HALF
    for part in gl.static_range(PARTS):
        rows = gl.minimum(gl.maximum(count - part * HALF, 0), HALF)
        if rows > 0:
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    desc, [unit, start + part * HALF + rows, HALF - rows, panel * COLUMNS], barrier,
                    chunks.index((slot * PANELS + panel) * PARTS + part),
                )  # fmt: skip
        else:
            load_nothing(nothing_desc, boxes, barrier, slot, part * (HALF // BOX), HALF // BOX, KEY_TILE, BOX, PANELS)


@gluon.jit
def read_blocks(table, start, count, BLOCK_SIZE: gl.constexpr, KEY_TILE: gl.constexpr, BOX: gl.constexpr):
    """The block of each box of KEY_TILE slots from position `start` of a row's prefix."""
    blocks = ()
    for part in gl.static_range(KEY_TILE // BOX):
        position = start + part * BOX
        block = gl.load(table + position // BLOCK_SIZE, mask=part * BOX < count, other=0)
        blocks += (block,)  # type: ignore[assignment]
    return blocks


@gluon.jit
def load_blocks(
    desc, nothing_desc, boxes, barrier, slot, blocks, block_units, unit, start, count, BLOCK_SIZE: gl.constexpr,
    KEY_TILE: gl.constexpr, BOX: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """KEY_TILE slots from position `start` of a row's prefix, zeros after the first `count`."""
    PARTS: gl.constexpr = KEY_TILE // BOX
    for part in gl.static_range(PARTS):
        rows = gl.minimum(gl.maximum(count - part * BOX, 0), BOX)
        if rows > 0:
            slot_row = (start + part * BOX) % BLOCK_SIZE + rows
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    desc, [blocks[part] * block_units + unit, slot_row, BOX - rows, panel * COLUMNS], barrier,
                    boxes.index((slot * PANELS + panel) * PARTS + part),
                )  # fmt: skip
        else:
            load_nothing(nothing_desc, boxes, barrier, slot, part, 1, KEY_TILE, BOX, PANELS)


@gluon.jit
def load_all(
    q_desc, k_desc, v_desc, cache_desc, nothing_desc, q_chunks, k_new, v_new, k_old, v_old, q_ready, q_empty, k_ready,
    k_empty, v_ready, v_empty, work, num_items, block_tables, table_row, window, block_units, head_units, value_units,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEY_TILE: gl.constexpr, BOX: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr, HAS_CACHE: gl.constexpr,
    WINDOW: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    TILE_BYTES: gl.constexpr = KEY_TILE * PANELS * COLUMNS * 2
    QUERY_BYTES: gl.constexpr = QUERY_TILE * PANELS * COLUMNS * 2
    head, row, query_tile, first_token, query_len, num_earlier = read_item(work, 0, num_items, HEADS)
    count = 0
    for turn in range(count_items(num_items)):
        following = read_item(work, turn + 1, num_items, HEADS)
        first_new, partial, prefix_tiles, steps, _ = plan_item(
            query_tile, query_len, num_earlier, window, KEY_TILE, HAS_CACHE, WINDOW, CAUSAL
        )  # fmt: skip
        table = block_tables + row.to(gl.int64) * table_row
        kv_head = head // GROUP
        q_slot = turn % Q_SLOTS
        mbarrier.wait(q_empty.index(q_slot), (turn // Q_SLOTS - 1) & 1, pred=turn >= Q_SLOTS)
        mbarrier.expect(q_ready.index(q_slot), QUERY_BYTES)
        for part in gl.static_range(2):
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    q_desc, [head, first_token + query_tile * QUERY_TILE + part * HALF, panel * COLUMNS],
                    q_ready.index(q_slot), q_chunks.index((q_slot * 2 + part) * PANELS + panel),
                )  # fmt: skip
        for step in range(steps):
            slot = count % STAGES
            phase = (count // STAGES - 1) & 1
            in_prefix, index = place_of(
                step, query_tile, first_new, partial, prefix_tiles, KEY_TILE, HAS_CACHE, CAUSAL
            )  # fmt: skip
            start = index * KEY_TILE
            left = num_earlier - start
            if HAS_CACHE:
                blocks = read_blocks(table, start, gl.where(in_prefix, left, 0), BLOCK_SIZE, KEY_TILE, BOX)
            mbarrier.wait(k_empty.index(slot), phase, pred=count >= STAGES)
            mbarrier.expect(k_ready.index(slot), TILE_BYTES)
            if HAS_CACHE and in_prefix:
                load_blocks(cache_desc, nothing_desc, k_old, k_ready.index(slot), slot, blocks, block_units,
                            kv_head * head_units, start, left, BLOCK_SIZE, KEY_TILE, BOX, PANELS)  # fmt: skip
            else:
                load_tile(k_desc, nothing_desc, k_new, k_old, k_ready.index(slot), slot, kv_head, first_token + start,
                          query_len - start, KEY_TILE, BOX, PANELS)  # fmt: skip
            mbarrier.wait(v_empty.index(slot), phase, pred=count >= STAGES)
            mbarrier.expect(v_ready.index(slot), TILE_BYTES)
            if HAS_CACHE and in_prefix:
                load_blocks(cache_desc, nothing_desc, v_old, v_ready.index(slot), slot, blocks, block_units,
                            kv_head * head_units + value_units, start, left, BLOCK_SIZE, KEY_TILE, BOX,
                            PANELS)  # fmt: skip
            else:
                load_tile(v_desc, nothing_desc, v_new, v_old, v_ready.index(slot), slot, kv_head, first_token + start,
                          query_len - start, KEY_TILE, BOX, PANELS)  # fmt: skip
            count += 1
        head, row, query_tile, first_token, query_len, num_earlier = following
