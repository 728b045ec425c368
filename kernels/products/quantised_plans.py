"""How a product of few rows over a quantised weight is cut. Pure.

M rows, N outputs, K inputs: y = x @ weight^T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tandem.kernels.products.matmul_plans import (
    GATE_UP_GROUP,
    MANY_STEPS,
    MULTIPROCESSORS,
    SHARED_BYTES,
    WORKSPACE_WORDS,
    Plan,
    RingPlan,
    RowsPlan,
    StreamPlan,
)

# Rows of matmul_quantised.py; beyond, where no other kernel serves, weights are few beside the work, and products take
# the way of prompts: of 4 bits measured (docs/measurements.md#weights-of-8-and-4-bits), of 8 a guess.
MOST_ROWS = {8: 256, 4: 128}
MANY_OUTPUTS = 16384  # from here tiles of 128 outputs keep all multiprocessors at work; a guess
LEAST_STEPS = 4  # along K of a split; a guess
MOST_SPLITS = 8  # as many as were measured to pay: docs/measurements.md#weights-of-8-and-4-bits
PREFETCHED = 1024  # bytes of a row, so 64 KiB of a tile; a guess
# What tells the sizes of an 8B Llama's products apart on Hopper: docs/measurements.md#weights-of-8-and-4-bits.
SMALL = 16 << 20  # weights
MANY_INPUTS = 8192
MANY_TILES = 96  # of 64 outputs
FEW_REGISTERS = 128  # of a thread: docs/measurements.md#weights-of-8-and-4-bits
PROGRAMS_OF_FEW_REGISTERS = 4 * MULTIPROCESSORS  # that run at once; likewise
INT4_TILE_K = 128  # inputs at once of matmul_ring_int4.py
INT4_LEAST_STEPS = 10  # of a part there: docs/measurements.md#many-rows-over-4-bits
MOST_RING_ROWS = 256  # over 4 bits; likewise
MOST_TILES = 1 << 16  # for whose arrivals there is room


class QuantisedPlan(NamedTuple):
    """The constants of triton_kernels/products/matmul_quantised.py."""

    tile_n: int
    tile_m: int
    tile_k: int
    splits: int
    warps: int
    stages: int
    prefetch: int = 0  # bytes of each row's share that are asked for before the preceding kernel has ended
    rounded: bool = False  # activations become e4m3, for fp8 products
    registers: int = 0  # of a thread, at most; 0: as many as the compiler wants

    def fitting(self, shared_bytes: int, bits: int) -> QuantisedPlan:
        """This plan with no more stages than a program's shared memory holds, at least two. A stage holds a tile of
        each factor, and scales and zeros of groups."""
        factors = self.tile_m * (1 if self.rounded else 2) * self.tile_k + self.tile_n * self.tile_k * bits // 8
        return self._replace(stages=min(self.stages, max(2, shared_bytes // (factors + 16 * self.tile_n))))

    def lanes(self, num_rows: int) -> int:
        return -(-num_rows // self.tile_m)

    def tiles(self, num_rows: int, num_outputs: int) -> int:
        return -(-num_outputs // self.tile_n) * self.lanes(num_rows)


class Int4RowPlan(NamedTuple):
    """The constants of triton_kernels/products/matmul_rows_int4.py: one row, every warp a few whole outputs."""

    outputs: int  # that a warp has at once; a power of two
    warps: int
    tiles: int = 1  # of a program, one after the other
    ahead: int = 1  # steps of 1,024 inputs whose weights are asked for before they are needed
    registers: int = FEW_REGISTERS  # of a thread, at most

    @property
    def tile_n(self) -> int:
        return self.outputs * self.warps

    def room(self, num_inputs: int) -> int:
        """For how many times 32 activations a program has shared memory: as many as its threads turn into integers, 32
        each at once, and a power of two."""
        at_once = 32 * self.warps
        return 1 << (-(-num_inputs // (32 * at_once)) * at_once - 1).bit_length()

    def is_valid(self, num_rows: int, num_outputs: int, num_inputs: int) -> bool:
        shared_bytes = self.room(num_inputs) * (32 * 2 + 8)  # two each, what 1 counts and their sum
        fits = self.outputs <= 2 * GATE_UP_GROUP and shared_bytes <= SHARED_BYTES
        whole = num_outputs % (self.tile_n * self.tiles) == 0 and num_inputs % 1024 == 0
        has_steps = self.ahead <= self.tiles * num_inputs // 1024
        in_turns = self.tiles == 1 or self.tile_n % (2 * GATE_UP_GROUP) == 0  # the next tile's rows follow this one's
        return num_rows == 1 and fits and whole and has_steps and in_turns


class Int4RingPlan(NamedTuple):
    """The constants of triton_kernels/products/matmul_ring_int4.py: tensor cores, a loading warp, two multiplying
    warpgroups, a tile or a part of its inputs for each program."""

    height: int  # outputs of a warpgroup: 64 or 128
    tile_m: int
    stages: int
    splits: int = 1

    @property
    def tile_n(self) -> int:
        return 2 * self.height

    @property
    def shared_bytes(self) -> int:
        stage = INT4_TILE_K * (self.tile_n // 2 + self.tile_m * 2) + 16
        return self.stages * stage + self.tile_n * self.tile_m * 2

    def lanes(self, num_rows: int) -> int:
        return -(-num_rows // self.tile_m)

    def grid(self, num_rows: int, num_outputs: int) -> int:
        return num_outputs // self.tile_n * self.splits * self.lanes(num_rows)

    def is_valid(self, num_rows: int, num_outputs: int, num_inputs: int) -> bool:
        """Whether tiles and sums fit a multiprocessor, and the workspace holds what parts leave."""
        sums = self.height * self.tile_m // 128  # registers of a thread, twice
        left = self.grid(num_rows, num_outputs) * self.tile_n * self.tile_m if self.splits > 1 else 0
        fits = sums <= 64 and self.shared_bytes <= SHARED_BYTES and left <= WORKSPACE_WORDS
        whole = num_outputs % self.tile_n == 0 == num_inputs % INT4_TILE_K
        return fits and whole and self.splits <= num_inputs // INT4_TILE_K


AnyPlan = QuantisedPlan | Int4RowPlan | Int4RingPlan | Plan


def takes_rounded(plan: AnyPlan) -> bool:
    """Whether its activations are e4m3."""
    if isinstance(plan, QuantisedPlan):
        return plan.rounded
    return not isinstance(plan, RowsPlan | Int4RowPlan | Int4RingPlan)


def choose_plan(
    num_rows: int, num_outputs: int, num_inputs: int, group: int, bits: int, *, may_round: bool = True
) -> QuantisedPlan | None:
    """None: the kernel doesn't serve these sizes. `group`: inputs that share a scale; 0: all. `may_round`: activations,
    in bf16, may become e4m3. Tiles, warps, stages and splits: docs/measurements.md#weights-of-8-and-4-bits."""
    whole = next((tile for tile in (128, 64, 32) if num_inputs % tile == 0 and group % tile == 0), None)
    if num_rows == 1 and bits == 8 and not group and num_inputs % 512 == 0 and num_outputs % 16 == 0:
        tile_k = 1024 if num_inputs >= 8192 and num_inputs % 1024 == 0 else 512
        return QuantisedPlan(16, 1, tile_k, 1, 4, 4, PREFETCHED)
    if not 0 < num_rows <= MOST_ROWS[bits] or whole is None or num_outputs % 64:
        return None
    tile_m = next(tile for tile in (16, 32, 64, 128) if num_rows <= tile or tile == 128)
    rounded = may_round and bits == 8 and whole == 128 and num_rows > 1
    wide = not rounded and num_outputs % 128 == 0 and (num_outputs >= MANY_OUTPUTS or (bits == 4 and tile_m < 64))
    stages = (6 if tile_m < 128 else 4) if rounded else (4 if tile_m < 128 else 3)
    plan = QuantisedPlan(
        128 if wide else 64, tile_m, whole, 1, 8 if tile_m == 128 and not rounded else 4, stages, PREFETCHED, rounded
    )
    tiles = plan.tiles(num_rows, num_outputs)
    if bits == 4 and tile_m == 16 and tiles > MULTIPROCESSORS:
        plan = plan._replace(splits=max(1, PROGRAMS_OF_FEW_REGISTERS // tiles), registers=FEW_REGISTERS)
    else:
        plan = plan._replace(splits=_splits(tiles, num_inputs // whole, is_narrow=bits == 4 and tile_m < 64))
    return plan if tiles <= MOST_TILES else None


def _splits(tiles: int, steps: int, *, is_narrow: bool) -> int:
    """Into how many parts K is cut: programs of few sums are small, and some five of them make use of a multiprocessor;
    of others two of three multiprocessors' worth are enough, since sums of parts cost as much as weights."""
    most = max(1, min(MOST_SPLITS, steps // LEAST_STEPS))
    if is_narrow:
        return min(most, -(-640 // tiles))
    splits = 1
    while tiles * splits < 192 and 2 * splits <= most:
        splits *= 2
    return splits


def choose_hopper_plan(
    num_rows: int, num_outputs: int, num_inputs: int, group: int, bits: int
) -> Plan | Int4RowPlan | Int4RingPlan | None:
    """A plan of the Hopper kernels: of one row, of some ten to 256 over 4 bits, and of 2 to 256 over fp8 with a scale
    an output. Those over 4 bits of several rows take bf16 and fp16, others bf16.
    Plans: docs/measurements.md#weights-of-8-and-4-bits."""
    sizes = num_rows, num_outputs, num_inputs
    plans: Sequence[Plan | Int4RowPlan | Int4RingPlan] = ()
    if num_rows == 1 and bits == 4 and group % 32 == 0:
        plans = _int4_plans(num_outputs, num_inputs)
    elif 1 < num_rows <= MOST_RING_ROWS and bits == 4 and group % INT4_TILE_K == 0:
        plans = _int4_ring_plans(*sizes)
    elif num_rows == 1 and bits == 8 and num_outputs % 16 == 0 and group % 32 == 0:
        warps_of = (4, 2, 1) if num_outputs * num_inputs <= SMALL else (2, 1)
        plans = [RowsPlan(4, 512 * warps, warps) for warps in warps_of]
    elif bits == 8 and not group and 1 < num_rows <= MOST_ROWS[8] and num_outputs % 16 == 0 and num_inputs % 128 == 0:
        plans = _tensor_core_plans(*sizes)
    return next((plan for plan in plans if plan.is_valid(*sizes)), None)


def _int4_plans(num_outputs: int, num_inputs: int) -> list[Int4RowPlan]:
    """The plans that were measured (docs/measurements.md#one-row-over-4-bits), then those that fit more sizes."""
    small = [Int4RowPlan(2, 8, 1, 2), Int4RowPlan(2, 8), Int4RowPlan(4, 1)]
    if num_inputs >= MANY_INPUTS and num_outputs < MANY_OUTPUTS:
        return small
    plans = [Int4RowPlan(4, 8, 1, 2), *small]
    return [Int4RowPlan(4, 8, 4, 2), *plans] if num_outputs >= MANY_OUTPUTS else plans


def _int4_ring_plans(num_rows: int, num_outputs: int, num_inputs: int) -> list[Int4RingPlan]:
    """The plans that were measured (docs/measurements.md#many-rows-over-4-bits); none where others are as fast, or
    where tiles are few."""
    if num_outputs >= MANY_OUTPUTS and num_rows > 16:
        if num_rows <= 64:
            return [Int4RingPlan(128, 32, 8) if num_rows <= 32 else Int4RingPlan(128, 64, 6)]
        return [Int4RingPlan(64, 128, 4)]
    if num_rows <= 32:
        return []
    is_small = num_outputs * num_inputs <= SMALL
    plan = Int4RingPlan(64, 64, 8) if num_rows <= 64 or is_small else Int4RingPlan(64, 128, 4)
    tiles = max(plan.grid(num_rows, num_outputs), 1)
    splits = max(1, min(MULTIPROCESSORS // tiles, num_inputs // INT4_TILE_K // INT4_LEAST_STEPS))
    return [plan._replace(splits=splits)] if tiles * splits >= MULTIPROCESSORS // 2 else []


def _tensor_core_plans(num_rows: int, num_outputs: int, num_inputs: int) -> list[Plan]:
    tile_m = 64 if num_rows <= 64 else 128
    if num_outputs >= MANY_OUTPUTS:
        return [RingPlan(256, tile_m, 128, 4, 2, MANY_STEPS)]
    tiles = -(-num_outputs // 64)
    if num_rows <= 64 and num_inputs >= MANY_INPUTS and 2 * tiles <= MULTIPROCESSORS:
        return [StreamPlan(64, 64, 256, 5, 4, MULTIPROCESSORS // tiles * tiles, 2)]
    if num_rows > 128 and tiles >= MANY_TILES:
        return [RingPlan(128, 128, 128, 6, 2, MANY_STEPS)]
    return [RingPlan(64, tile_m, 128, 8, 1, 4 if num_inputs >= MANY_INPUTS and num_rows > 128 else MANY_STEPS)]
