"""How a decode launch spreads its work: each program gets an equal run of tiles, whatever the rows' lengths.

A segment is one KV head of one row (or of one shared prefix); its tiles follow those of the segment before it, and
program p computes tiles [p * share, (p + 1) * share) of that sequence. So a program's run may cover the end of one
segment, whole segments, and the start of another; a segment cut by program borders has several parts. The part of
segment s that program p computes has slot s + p: unique, dense, and parts of a segment lie together ("stream-K",
Osama et al. 2023, for attention). Everything is computed on the device from the lengths: a captured graph stays
balanced when lengths change.

The plan is one int32 tensor: [share, total, a record of each program (4 P: its first segment, that one's first tile and
end, its row's length), first tile of each segment (S + 1), arrivals of each segment (S), arrivals of each set of parts
(by the set's first slot, S + P)]; arrivals are zero between launches. Records repeat what stands elsewhere, so that a
program waits for memory once before its first tile, not three times.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tandem.kernels.api.spec import Reach
from tandem.kernels.triton_kernels.common import begin, next_power_of_2, overlap
from tandem.kernels.triton_kernels.decode.decode_tiles import first_tile_of

SEGMENTS_AT_ONCE = 1024  # a guess
HEADER: tl.constexpr = tl.constexpr(2)  # int32 before the programs' records,
RECORD: tl.constexpr = tl.constexpr(4)  # of each record


@triton.jit
def load_share(plan, program):
    """-> (first tile, end) of a program's run, then of the first tile: its segment, that segment's first tile and end,
    and the length of its row. Reads past L1: a launch may read it before it waits for its predecessor."""
    share = tl.load(plan, cache_modifier=".cg")
    total = tl.load(plan + 1, cache_modifier=".cg")
    record = plan + HEADER + RECORD * program
    segment = tl.load(record, cache_modifier=".cg")
    segment_begin = tl.load(record + 1, cache_modifier=".cg")
    segment_end = tl.load(record + 2, cache_modifier=".cg")
    length = tl.load(record + 3, cache_modifier=".cg")
    return program * share, tl.minimum((program + 1) * share, total), segment, segment_begin, segment_end, length


@triton.jit
def load_segment(plan, programs, segment, wanted):
    """-> (first tile, end) of a segment; of nothing unless `wanted`."""
    starts = plan + HEADER + RECORD * programs + segment
    return tl.load(starts, mask=wanted, other=0), tl.load(starts + 1, mask=wanted, other=0)


@triton.jit
def parts_of(plan, begin, end):
    """-> (first program that computes some of tiles [begin, end), how many do)."""
    share = tl.load(plan)
    first = begin // share
    return first, (end - 1) // share + 1 - first


@triton.jit(
    do_not_specialize=["num_segments", "num_heads", "programs", "min_share", "window", "num_new"],
    do_not_specialize_on_alignment=["seq_lens", "prefix_lens", "counts"],
)
def plan_kernel(
    plan,
    seq_lens,  # int32 [rows]
    prefix_lens,  # int32 [rows], HAS_PREFIX: tokens that another launch reads, whole tiles
    counts,  # int32 [segments], HAS_COUNTS: tiles of each segment
    num_segments,
    num_heads,
    programs,
    min_share,
    window,
    num_new,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    PROGRAMS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (1,)."""
    begin(PDL)
    starts = plan + HEADER + RECORD * programs
    arrivals = starts + num_segments + 1
    total = 0
    tl.store(starts, 0)
    for first in range(0, num_segments, CHUNK):
        segments = first + tl.arange(0, CHUNK)
        mask = segments < num_segments
        if HAS_COUNTS:
            tiles = tl.load(counts + segments, mask=mask, other=0)
        else:
            seq_len = tl.load(seq_lens + segments // num_heads, mask=mask, other=0)
            tiles = (seq_len + TILE - 1) // TILE - first_tile_of(seq_len, num_new, window, WINDOW, TILE)
            if HAS_PREFIX:
                tiles -= tl.load(prefix_lens + segments // num_heads, mask=mask, other=0) // TILE
        tiles = tl.where(mask, tl.maximum(tiles, MIN_TILES), 0)
        tl.store(starts + 1 + segments, total + tl.cumsum(tiles, 0), mask=mask)
        tl.store(arrivals + segments, 0, mask=mask)
        tl.store(arrivals + num_segments + segments, 0, mask=mask)
        total += tl.sum(tiles, 0)
    share = tl.maximum((total + programs - 1) // programs, min_share)
    tl.store(plan, share)
    tl.store(plan + 1, total)
    tl.debug_barrier()  # the search below reads what other threads stored
    program = tl.arange(0, PROGRAMS_PAD)
    tl.store(arrivals + 2 * num_segments + program, 0, mask=program < programs)
    target = program * share
    low = tl.zeros([PROGRAMS_PAD], tl.int32)  # starts[low] <= target
    step = 1
    while step < num_segments:
        step *= 2
    while step > 0:
        middle = low + step
        inside = middle < num_segments
        start = tl.load(starts + middle, mask=inside, other=0)
        low = tl.where(inside & (start <= target), middle, low)
        step //= 2
    mask = (program < programs) & (low < num_segments)
    record = plan + HEADER + RECORD * program
    tl.store(record, low, mask=mask)
    tl.store(record + 1, tl.load(starts + low, mask=mask, other=0), mask=mask)
    tl.store(record + 2, tl.load(starts + low + 1, mask=mask, other=0), mask=mask)
    tl.store(record + 3, tl.load(seq_lens + low // num_heads, mask=mask, other=0), mask=mask)


@dataclass
class DecodePlan:
    """A launch's plan and the memory of its parts. Layers of a step share it: they run one after the other.

    `plan` int32 as the module says; `peaks`, `totals` fp32 [slots, rows], `partial` fp32 [slots, rows, D]. `is_new`
    until the first launch with it: until then it, and what it was made from, may still be on its way.
    """

    plan: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor
    partial: torch.Tensor
    num_segments: int
    programs: int
    is_new: bool = True

    @classmethod
    def allocate(
        cls, num_segments: int, programs: int, slot_rows: int, head_size: int, device: torch.device
    ) -> DecodePlan:
        slots = num_segments + programs
        memory = torch.empty(slots * slot_rows * (head_size + 2), dtype=torch.float32, device=device)
        peaks, totals, partial = memory.split((slots * slot_rows, slots * slot_rows, slots * slot_rows * head_size))
        plan = torch.empty(
            HEADER.value + 1 + (RECORD.value + 1) * programs + 3 * num_segments, dtype=torch.int32, device=device
        )
        return cls(plan, peaks, totals, partial, num_segments, programs)

    def expect_fill(self) -> None:
        """Notes that the next launch comes behind a `fill`, as a captured one does at each replay."""
        self.is_new = True

    def fill(
        self,
        seq_lens: torch.Tensor,
        num_heads: int,
        tile: int,
        *,
        num_new: int = 1,
        reach: Reach = Reach(),
        prefix_lens: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        min_tiles: int = 1,
        min_share: int = 1,
    ) -> None:
        """Plans for these lengths (int32 on the device): one launch, to be repeated whenever they change.

        `min_tiles` 1: empty rows get a tile of nothing, so that somebody writes their zeros.
        """
        self.is_new = True
        plan_kernel[(1,)](
            self.plan, seq_lens, seq_lens if prefix_lens is None else prefix_lens,
            seq_lens if counts is None else counts, self.num_segments, num_heads, self.programs, min_share,
            reach.size, num_new, TILE=tile, WINDOW=reach.kind, HAS_PREFIX=prefix_lens is not None,
            HAS_COUNTS=counts is not None, MIN_TILES=min_tiles, CHUNK=SEGMENTS_AT_ONCE,
            PROGRAMS_PAD=next_power_of_2(self.programs), num_warps=8, **overlap(seq_lens.device),
        )  # fmt: skip
