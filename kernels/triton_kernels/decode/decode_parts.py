"""Parts of decode attention: how they are stored, merged, and who merges them.

A part is what M query rows make of some keys: (peak [M]: largest score in log2 units, total [M]: sum of
exp2(score - peak), accumulator [M, D]: sum of exp2(score - peak) * value), as in flash decoding; parts over disjoint
keys merge exactly. D head size.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.decode.decode_plan import HEADER, RECORD, load_segment, parts_of
from tandem.kernels.triton_kernels.decode.decode_segment import store_output


@triton.jit
def store_part(
    slot,
    used,  # bool [M]: rows to store
    peak,
    total,
    accumulator,
    peaks,  # fp32 [slots, slot_rows]
    totals,  # fp32 [slots, slot_rows]
    partial,  # fp32 [slots, slot_rows, HEAD_SIZE]
    slot_rows,
    HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
):
    members = tl.arange(0, peak.shape[0])
    columns = tl.arange(0, D_PAD)
    entries = slot.to(tl.int64) * slot_rows + members
    tl.store(peaks + entries, peak, mask=used)
    tl.store(totals + entries, total, mask=used)
    mask = used[:, None] & (columns < HEAD_SIZE)[None, :]
    tl.store(partial + entries[:, None] * HEAD_SIZE + columns[None, :], accumulator, mask=mask)


@triton.jit
def merge_two(peak, total, accumulator, other_peak, other_total, other_accumulator):
    """The part over the keys of both parts."""
    new_peak = tl.maximum(peak, other_peak)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp2(peak - base)
    other_decay = tl.exp2(other_peak - base)
    accumulator = accumulator * decay[:, None] + other_accumulator * other_decay[:, None]
    return new_peak, total * decay + other_total * other_decay, accumulator


@triton.jit
def merge_parts(
    first_slot,
    stride,  # between the parts' slots
    num_parts,
    peaks,
    totals,
    partial,
    slot_rows,  # rows of a slot
    first_row,  # of these rows in each slot
    num_rows,
    HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The part [ROWS] over the keys of all these parts. Reads past L1: other programs have just written them."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, D_PAD], tl.float32)
    members = tl.arange(0, ROWS)
    columns = tl.arange(0, D_PAD)
    for first in range(0, num_parts, CHUNK):
        parts = first + tl.arange(0, CHUNK)
        entries = (first_slot + parts * stride).to(tl.int64)[:, None] * slot_rows + first_row + members[None, :]
        used = (parts < num_parts)[:, None] & (members < num_rows)[None, :]
        some_peaks = tl.load(peaks + entries, mask=used, other=float("-inf"), cache_modifier=".cg")
        some_totals = tl.load(totals + entries, mask=used, other=0.0, cache_modifier=".cg")
        mask = used[:, :, None] & (columns < HEAD_SIZE)[None, None, :]
        pointers = partial + entries[:, :, None] * HEAD_SIZE + columns[None, None, :]
        some = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(some_peaks, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(some_peaks - base[None, :])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights * some_totals, 0)
        accumulator = accumulator * decay[:, None] + tl.sum(weights[:, :, None] * some, 0)
        peak = new_peak
    return peak, total, accumulator


@triton.jit
def finish_segment(
    output, partial, peaks, totals, plan, query_starts, v_scale, sinks, prefix_partial, prefix_peaks, prefix_totals,
    prefix_plan, prefix_lens, prefix_places, segment, first_program, num_parts, num_segments, prefix_programs,
    GROUP: tl.constexpr, NUM_NEW: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, MERGE_SET: tl.constexpr,
    HEAD_SIZE: tl.constexpr, D_PAD: tl.constexpr, NUM_KV_HEADS: tl.constexpr, IS_FP8: tl.constexpr,
    HAS_SINKS: tl.constexpr, PREFIX_MEMBERS: tl.constexpr,
):  # fmt: skip
    """Says that this program's part of the segment is stored. Whoever says so last in a set merges it, and so on."""
    program = tl.program_id(0)
    row, kv_head = segment // NUM_KV_HEADS, segment % NUM_KV_HEADS
    if PREFIX_MEMBERS > 0:  # loaded ahead: nothing waits for it when the segment is complete
        given = tl.load(prefix_lens + row) > 0
        place = tl.load(prefix_places + row)
        chunk = place // PREFIX_MEMBERS * NUM_KV_HEADS + kv_head
        begin, end = load_segment(prefix_plan, prefix_programs, chunk, given)
        first, given_parts = parts_of(prefix_plan, begin, end)
        given_parts = tl.where(given, given_parts, 0)
    slot_rows: tl.constexpr = GROUP * NUM_NEW
    # arrivals of segments, after the S + 1 first tiles; then of sets
    arrivals = plan + HEADER + RECORD * tl.num_programs(0) + num_segments + 1
    first_slot = segment + first_program
    set_slot = first_slot + (program - first_program) // MERGE_SET * MERGE_SET
    set_parts = tl.minimum(first_slot + num_parts - set_slot, MERGE_SET)
    tl.debug_barrier()  # every thread's part is stored before the program says so
    if arrive(arrivals + num_segments + set_slot, set_parts):
        peak, total, accumulator = merge_parts(
            set_slot, 1, set_parts, peaks, totals, partial, slot_rows, 0, slot_rows, HEAD_SIZE, D_PAD, ROWS, CHUNK
        )  # fmt: skip
        complete = num_parts <= MERGE_SET
        if not complete:
            used = tl.arange(0, ROWS) < slot_rows
            store_part(
                set_slot, used, peak, total, accumulator, peaks, totals, partial, slot_rows, HEAD_SIZE, D_PAD
            )  # fmt: skip
            tl.debug_barrier()
            sets = tl.cdiv(num_parts, MERGE_SET)
            if arrive(arrivals + segment, sets):
                peak, total, accumulator = merge_parts(
                    first_slot, MERGE_SET, sets, peaks, totals, partial, slot_rows, 0, slot_rows, HEAD_SIZE, D_PAD,
                    ROWS, CHUNK,
                )  # fmt: skip
                complete = True
        if complete:
            if PREFIX_MEMBERS > 0:
                given_peak, given_total, given_accumulator = merge_parts(
                    chunk + first, 1, given_parts, prefix_peaks, prefix_totals, prefix_partial,
                    PREFIX_MEMBERS * GROUP, place % PREFIX_MEMBERS * GROUP, GROUP, HEAD_SIZE, D_PAD, ROWS, CHUNK,
                )  # fmt: skip
                peak, total, accumulator = merge_two(
                    peak, total, accumulator, given_peak, given_total, given_accumulator
                )
            store_output(
                peak, total, accumulator, output, query_starts, v_scale, sinks, row, kv_head,
                GROUP, NUM_NEW, NUM_KV_HEADS, HEAD_SIZE, D_PAD, IS_FP8, HAS_SINKS,
            )  # fmt: skip


@triton.jit
def arrive(arrivals, expected):
    """Whether this program is the last of so many to arrive; leaves zero for the next launch then."""
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(arrivals, 0)
    return last
