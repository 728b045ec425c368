"""Sums and maxima over the GPUs of one host: each rank writes into its peers' memory.

Few rows: every 32-bit word of data travels in a 64-bit word together with the number of the exchange, and 64-bit stores
arrive whole: who reads the number it waits for has the data too, without a fence or a flag (NCCL's "LL" protocol). An
exchange costs one trip over NVLink. More rows: plain words, and when a row's are written, a flag with the number; half
the bytes, but the writer waits for its writes before the flag. With three ranks or more a row then goes to one of them,
which sends the sum to all (reduce-scatter and all-gather, row by row). All ranks add the same parts in the same order,
so all get the same bits.

A *lane* is what one program sends: it has a counter of exchanges and two halves in every rank's mail, used by turns.
A rank overwrites a half two exchanges later; between lies an exchange in which it heard from every peer, and a peer
sends that only after its kernel of the one before has ended. So nothing is overwritten unread. Programs wait only for
the same lane of other ranks, and all ranks start lanes in the same order: however few run at once, the wait ends.

E hidden size, W = E / 2 words of a row (E for fp32), R ranks, N rows.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin
from tandem.kernels.triton_kernels.peers import await_row, memory_of, send_row

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _post(target, words, number, mask):
    """Stores int32 `words` with the exchange's number above them at `target`, a peer's memory: two words at once, and
    past the caches (.wt), so that they leave as whole pieces of 16 bytes."""
    low = words.to(tl.uint32, bitcast=True).to(tl.uint64)
    packed = ((number.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low).to(tl.int64, bitcast=True)
    tl.store(target, packed, mask=mask, cache_modifier=".wt")


@triton.jit
def _receive(source, number, mask):
    """int32 words of this exchange, from this rank's own memory; waits until all are there."""
    packed = tl.load(source, mask=mask, other=0, volatile=True)
    missing = tl.sum((mask & ((packed >> 32).to(tl.int32) != number)).to(tl.int32), 0)
    while missing > 0:
        packed = tl.load(source, mask=mask, other=0, volatile=True)
        missing = tl.sum((mask & ((packed >> 32).to(tl.int32) != number)).to(tl.int32), 0)
    return packed.to(tl.int32)


@triton.jit
def _unpack(words, dtype: tl.constexpr, IS_WIDE: tl.constexpr):
    """The two values of each word (IS_WIDE: its one value, and 0), fp32."""
    if IS_WIDE:
        return words.to(tl.float32, bitcast=True), tl.zeros_like(words).to(tl.float32)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        return low, high


@triton.jit
def _pack(low, high, dtype: tl.constexpr, IS_WIDE: tl.constexpr):
    if IS_WIDE:
        return low.to(tl.int32, bitcast=True)
    else:
        low_bits = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low_bits | (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def sum_add_rms_norm_words_kernel(
    x,  # int32 words of [N, E], strides (x_row, 1): this rank's part of the sum
    residual,  # int32 words of [N, E], strides (residual_row, 1): becomes residual + sum
    weight,  # int32 words of [E]
    out,  # int32 words of [N, E] contiguous
    addresses,  # int64 [R]: where each rank's mail begins, as this rank maps it
    counters,  # int32 [lanes]: exchanges so far
    x_row,
    residual_row,
    eps,
    DTYPE: tl.constexpr,
    IS_WIDE: tl.constexpr,
    SIZE: tl.constexpr,  # E
    WORDS: tl.constexpr,  # W
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N,), one lane a row. Mail: [2 halves, LANES, R senders, W]."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    mask = columns < WORDS
    number = tl.load(counters + row) + 1
    place = ((number & 1) * LANES + row) * RANKS
    own = tl.load(x + row * x_row + columns, mask=mask, other=0)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            mail = memory_of(addresses, peer, 0, tl.int64)
            _post(mail + (place + RANK) * WORDS + columns, own, number, mask)
    added = tl.load(residual + row * residual_row + columns, mask=mask, other=0)
    scales = tl.load(weight + columns, mask=mask, other=0)
    mail = memory_of(addresses, RANK, 0, tl.int64)
    low = tl.zeros([PADDED], tl.float32)
    high = tl.zeros([PADDED], tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            part_low, part_high = _unpack(own, DTYPE, IS_WIDE)
        else:
            words = _receive(mail + (place + peer) * WORDS + columns, number, mask)
            part_low, part_high = _unpack(words, DTYPE, IS_WIDE)
        low += part_low
        high += part_high
    tl.store(counters + row, number)
    added_low, added_high = _unpack(added, DTYPE, IS_WIDE)
    low = (low.to(DTYPE).to(tl.float32) + added_low).to(DTYPE)
    high = (high.to(DTYPE).to(tl.float32) + added_high).to(DTYPE)
    tl.store(residual + row * residual_row + columns, _pack(low, high, DTYPE, IS_WIDE), mask=mask)
    low, high = low.to(tl.float32), high.to(tl.float32)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / SIZE + eps)
    weight_low, weight_high = _unpack(scales, DTYPE, IS_WIDE)
    low = (low * scale).to(DTYPE).to(tl.float32) * weight_low
    high = (high * scale).to(DTYPE).to(tl.float32) * weight_high
    tl.store(out + row * WORDS + columns, _pack(low, high, DTYPE, IS_WIDE), mask=mask)


@triton.jit
def sum_add_rms_norm_rows_kernel(
    x,  # [N, E], strides (x_row, 1): this rank's part of the sum
    residual,  # [N, E], strides (residual_row, 1): becomes residual + sum
    weight,  # [E]
    out,  # [N, E] contiguous
    addresses,  # int64 [R]: where each rank's mail begins, as this rank maps it
    counters,  # int32 [lanes]: exchanges so far
    x_row,
    residual_row,
    eps,
    rows_at,  # bytes before these lanes in the mail
    flags_at,  # bytes before their flags
    SIZE: tl.constexpr,  # E
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SCATTERS: tl.constexpr,  # row n is summed by rank n % R alone
    PDL: tl.constexpr,
):
    """Grid (N,), one lane a row. Mail: rows [2 halves, LANES, R senders, E], flags int32 [2, LANES, R]."""
    begin(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    mask = columns < SIZE
    number = tl.load(counters + row) + 1
    place = ((number & 1) * LANES + row) * RANKS
    owner = row % RANKS
    own = tl.load(x + row * x_row + columns, mask=mask, other=0.0)
    added = tl.load(residual + row * residual_row + columns, mask=mask, other=0.0)
    weights = tl.load(weight + columns, mask=mask, other=0.0)
    for peer in tl.static_range(RANKS):
        if peer != RANK:  # noqa: SIM102 (one is a constant, the other is not)
            if not SCATTERS or owner == peer:
                send_row(
                    memory_of(addresses, peer, rows_at, dtype), memory_of(addresses, peer, flags_at, tl.int32),
                    place + RANK, own, columns, mask, number, SIZE,
                )  # fmt: skip
    mail = memory_of(addresses, RANK, rows_at, dtype)
    flags = memory_of(addresses, RANK, flags_at, tl.int32)
    total = tl.zeros([PADDED], tl.float32)
    if not SCATTERS or owner == RANK:
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                total += own.to(tl.float32)
            else:
                total += await_row(mail, flags, place + peer, columns, mask, number, SIZE)
        if SCATTERS:
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    send_row(
                        memory_of(addresses, peer, rows_at, dtype), memory_of(addresses, peer, flags_at, tl.int32),
                        place + RANK, total.to(dtype), columns, mask, number, SIZE,
                    )  # fmt: skip
    else:
        total = await_row(mail, flags, place + owner, columns, mask, number, SIZE)
    tl.store(counters + row, number)
    stream = (total.to(dtype).to(tl.float32) + added.to(tl.float32)).to(dtype)
    tl.store(residual + row * residual_row + columns, stream, mask=mask)
    stream = stream.to(tl.float32)
    scale = tl.rsqrt(tl.sum(stream * stream, 0) / SIZE + eps)
    normed = (stream * scale).to(dtype).to(tl.float32) * weights.to(tl.float32)
    tl.store(out + row * SIZE + columns, normed.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def argmax_of_shards_kernel(
    logits,  # [N, V / R] of any float dtype, strides (logits_row, 1): this rank's part of the vocabulary
    best,  # int64 [N]: where its largest logit is
    tokens,  # int64 [N]
    addresses,  # int64 [R]: where each rank's mail begins, as this rank maps it
    counters,  # int32 [lanes]
    logits_row,
    num_rows,
    offset,  # bytes before these lanes in the mail
    SHARD: tl.constexpr,  # V / R
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(N / ROWS),), one lane a program. Mail: [2 halves, LANES, R senders, 2, ROWS]: values, then ids."""
    begin(PDL)
    lane = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, ROWS)
    rows = lane * ROWS + inside
    mask = rows < num_rows
    number = tl.load(counters + lane) + 1
    place = ((number & 1) * LANES + lane) * RANKS
    own_id = tl.load(best + rows, mask=mask, other=0)
    own_value = tl.load(logits + rows * logits_row + own_id, mask=mask, other=0.0).to(tl.float32)
    own_value = own_value.to(tl.int32, bitcast=True)
    own_id = (own_id + RANK * SHARD).to(tl.int32)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            mail = memory_of(addresses, peer, offset, tl.int64) + (place + RANK) * 2 * ROWS
            _post(mail + inside, own_value, number, mask)
            _post(mail + ROWS + inside, own_id, number, mask)
    own_mail = memory_of(addresses, RANK, offset, tl.int64)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    token = tl.zeros([ROWS], tl.int32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            value, found = own_value, own_id
        else:
            mail = own_mail + (place + peer) * 2 * ROWS
            value = _receive(mail + inside, number, mask)
            found = _receive(mail + ROWS + inside, number, mask)
        value = value.to(tl.float32, bitcast=True)
        better = (value > peak) | (peer == 0)  # of equals the first rank's, which has the lower ids
        peak = tl.where(better, value, peak)
        token = tl.where(better, found, token)
    tl.store(counters + lane, number)
    tl.store(tokens + rows, token.to(tl.int64), mask=mask)
