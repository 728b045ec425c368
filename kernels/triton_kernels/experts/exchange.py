"""Tokens on their way to the GPUs that have their experts, and what these made of them on its way back.

Each rank of a group has tokens of its own and some of the experts. It writes a token's row into the memory of every
rank that has one of the token's experts, and to all ranks which experts that are; they compute, and write their part of
the token's sum into its rank's memory. All places are fixed: row n of rank r comes to place r * C + n, where C, the
capacity, is the same on all ranks for one exchange. So nothing is counted or sorted on the way.

Every program waits for its row of every rank, in both kernels, whether or not data travels. So whoever has ended the
second kernel knows that nobody reads or writes the places of the first one any more, and one set of places is enough.
Programs wait only for the same program of other ranks, and all ranks start them in the same order: however few run at
once, the wait ends.

E hidden size, k experts of a token, R ranks, X experts of all ranks.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin
from tandem.kernels.triton_kernels.peers import await_flag, memory_of, raise_flag


@triton.jit
def _is_sent(row, num_rows, slots, alone, HAS_SLOTS: tl.constexpr):
    """Whether this row is a token, and not padding, which takes part where a start measures how long steps take."""
    inside = row < num_rows
    if HAS_SLOTS:
        inside = inside & ((tl.load(slots + row, mask=inside, other=-1) >= 0) | alone)
    return inside


@triton.jit
def _experts_of(ids, rank, num_experts, RANKS: tl.constexpr):
    """These experts as `rank` counts its own, -1 for those of others."""
    first = rank * num_experts // RANKS
    last = (rank + 1) * num_experts // RANKS
    return tl.where((ids >= first) & (ids < last), ids - first, -1)


@triton.jit
def _deliver(
    rows, mail_ids, mail_weights, values, own, counts, columns, choices, SIZE: tl.constexpr, TOP_K: tl.constexpr
):
    """Puts a token into its place at a rank: which experts it has there, the rest only if it has some."""
    tl.store(mail_ids + choices, own, mask=choices < TOP_K)
    if tl.max(own, 0) >= 0:
        tl.store(mail_weights + choices, counts, mask=choices < TOP_K)
        tl.store(rows + columns, values, mask=columns < SIZE)


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def dispatch_kernel(
    x,  # [N, E], strides (x_row, 1): this rank's tokens
    ids,  # int32 [N, k] contiguous: their experts, of all X
    weights,  # fp32 [N, k] contiguous
    slots,  # int64 [N], below 0: padding
    addresses,  # int64 [R]: where each rank's mail begins, as this rank maps it
    counters,  # int32 [lanes]: exchanges so far
    is_alone,  # int32: not 0: the other ranks don't take part
    x_row,
    num_rows,  # N
    capacity,  # C
    num_experts,  # X
    ids_at,  # bytes before what follows the rows in the mail
    weights_at,
    flags_at,
    SIZE: tl.constexpr,  # E
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,  # k
    PADDED_K: tl.constexpr,
    LANES: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (C,), one lane a row. Mail: rows [R * C, E], ids int32 [R * C, k], weights fp32 [R * C, k], flags int32
    [R, LANES]."""
    begin(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    alone = tl.load(is_alone) != 0
    number = tl.load(counters + row) + 1
    sent = _is_sent(row, num_rows, slots, alone, HAS_SLOTS)
    columns = tl.arange(0, PADDED)
    choices = tl.arange(0, PADDED_K)
    values = tl.load(x + row * x_row + columns, mask=(columns < SIZE) & sent, other=0.0)
    chosen = tl.load(ids + row * TOP_K + choices, mask=(choices < TOP_K) & sent, other=-1)
    counts = tl.load(weights + row * TOP_K + choices, mask=(choices < TOP_K) & sent, other=0.0)
    place = RANK * capacity.to(tl.int64) + row
    for peer in tl.static_range(RANKS):
        own = _experts_of(chosen, peer, num_experts, RANKS)
        rows = memory_of(addresses, peer, 0, dtype) + place * SIZE
        mail_ids = memory_of(addresses, peer, ids_at, tl.int32) + place * TOP_K
        mail_weights = memory_of(addresses, peer, weights_at, tl.float32) + place * TOP_K
        if peer == RANK:
            _deliver(rows, mail_ids, mail_weights, values, own, counts, columns, choices, SIZE, TOP_K)
        else:
            if not alone:
                _deliver(rows, mail_ids, mail_weights, values, own, counts, columns, choices, SIZE, TOP_K)
                raise_flag(memory_of(addresses, peer, flags_at, tl.int32) + RANK * LANES + row, number)
    flags = memory_of(addresses, RANK, flags_at, tl.int32)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            if alone:
                mail_ids = memory_of(addresses, RANK, ids_at, tl.int32) + (peer * capacity.to(tl.int64) + row) * TOP_K
                tl.store(mail_ids + choices, tl.full([PADDED_K], -1, tl.int32), mask=choices < TOP_K)
            else:
                await_flag(flags + peer * LANES + row, number)
    if not alone:
        tl.store(counters + row, number)


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def combine_kernel(
    parts,  # [R * C, E] contiguous: what this rank's experts made of each place
    out,  # [N, E] contiguous
    ids,  # int32 [N, k] contiguous: the experts of this rank's tokens, of all X
    slots,  # int64 [N], below 0: padding
    addresses,  # int64 [R]
    counters,  # int32 [lanes]: exchanges so far, this one counted
    is_alone,  # int32
    num_rows,  # N
    capacity,  # C
    num_experts,  # X
    ids_at,
    results_at,  # bytes before results in the mail
    flags_at,  # bytes before their flags
    SIZE: tl.constexpr,  # E
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,  # k
    PADDED_K: tl.constexpr,
    LANES: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (C,), one lane a row. Parts are added in fp32 in the order of ranks, and rounded once. Mail: results
    [R, LANES, E], their flags int32 [R, LANES]."""
    begin(PDL)
    dtype: tl.constexpr = parts.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    alone = tl.load(is_alone) != 0
    number = tl.load(counters + row)
    columns = tl.arange(0, PADDED)
    mask = columns < SIZE
    choices = tl.arange(0, PADDED_K)
    for peer in tl.static_range(RANKS):
        if peer != RANK:  # noqa: SIM102 (one is a constant, the other is not)
            if not alone:
                place = peer * capacity.to(tl.int64) + row
                here = memory_of(addresses, RANK, ids_at, tl.int32) + place * TOP_K
                if tl.max(tl.load(here + choices, mask=choices < TOP_K, other=-1), 0) >= 0:
                    results = memory_of(addresses, peer, results_at, dtype) + (RANK * LANES + row) * SIZE
                    part = tl.load(parts + place * SIZE + columns, mask=mask, other=0.0)
                    tl.store(results + columns, part, mask=mask)
                raise_flag(memory_of(addresses, peer, flags_at, tl.int32) + RANK * LANES + row, number)
    sent = _is_sent(row, num_rows, slots, alone, HAS_SLOTS)
    chosen = tl.load(ids + row * TOP_K + choices, mask=(choices < TOP_K) & sent, other=-1)
    results = memory_of(addresses, RANK, results_at, dtype)
    flags = memory_of(addresses, RANK, flags_at, tl.int32)
    total = tl.zeros([PADDED], tl.float32)
    for peer in tl.static_range(RANKS):
        has_part = tl.max(_experts_of(chosen, peer, num_experts, RANKS), 0) >= 0
        if peer == RANK:
            place = RANK * capacity.to(tl.int64) + row
            total += tl.load(parts + place * SIZE + columns, mask=mask & has_part, other=0.0).to(tl.float32)
        else:
            if not alone:
                await_flag(flags + peer * LANES + row, number)
            taken = mask & has_part & (not alone)
            part = tl.load(results + (peer * LANES + row) * SIZE + columns, mask=taken, other=0.0, volatile=True)
            total += part.to(tl.float32)
    if row < num_rows:
        tl.store(out + row * SIZE + columns, total.to(dtype), mask=mask)
