"""How a product of few rows over a quantised weight is cut. Pure.

M rows, N outputs, K inputs: y = x @ weight^T.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_ROWS = 256  # beyond, weights are few beside the work, and products take the way of prompts; a guess
# Rows; beyond, a second part costs more than it saves: docs/measurements.md#weights-of-8-and-4-bits.
MOST_IN_TWO_PARTS = 64
PROGRAMS_OF_PARTS = 160  # that a split product over parts aims at: docs/measurements.md#weights-of-8-and-4-bits
PROGRAMS = 256  # that a split product aims at: two on each multiprocessor of an H200; a guess
LEAST_STEPS = 4  # along K of a part; a guess
MOST_SPLITS = 8  # a guess
PREFETCHED = 1024  # bytes of a row, so 64 KiB of a tile; a guess
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
    parts: int = 0  # e4m3 numbers that an activation becomes, for fp8 products; 0: it stays as it is

    def lanes(self, num_rows: int) -> int:
        return -(-num_rows // self.tile_m)

    def tiles(self, num_rows: int, num_outputs: int) -> int:
        return -(-num_outputs // self.tile_n) * self.lanes(num_rows)


def choose_plan(
    num_rows: int, num_outputs: int, num_inputs: int, group: int, bits: int, *, by_parts: bool = True
) -> QuantisedPlan | None:
    """None: the kernel doesn't serve these sizes. `group`: inputs that share a scale; 0: all. `by_parts`: activations,
    in bf16, may become e4m3."""
    whole = next((tile for tile in (128, 64, 32) if num_inputs % tile == 0 and group % tile == 0), None)
    if num_rows == 1 and not group and num_inputs % 512 == 0 and num_outputs % 16 == 0:
        return _plan_of_one(num_inputs)
    tile_m = next(tile for tile in (16, 32, 64, 128) if num_rows <= tile or tile == 128)
    most_by_parts = MOST_IN_TWO_PARTS if group else MOST_ROWS
    if by_parts and bits == 8 and whole == 128 and num_outputs % 64 == 0 and 1 < num_rows <= most_by_parts:
        return _plan_of_parts(num_rows, num_outputs, num_inputs, tile_m)
    tile_n = next((tile for tile in ((128, 64) if tile_m >= 64 else (64,)) if num_outputs % tile == 0), None)
    if not 0 < num_rows <= MOST_ROWS or whole is None or tile_n is None:
        return None
    warps = 8 if tile_m * tile_n >= 128 * 128 else 4
    plan = QuantisedPlan(tile_n, tile_m, whole, 1, warps, 4 if tile_m < 64 else 3, PREFETCHED)
    return _split(plan, num_rows, num_outputs, num_inputs, PROGRAMS)


def _split(
    plan: QuantisedPlan, num_rows: int, num_outputs: int, num_inputs: int, programs: int
) -> QuantisedPlan | None:
    tiles, splits = plan.tiles(num_rows, num_outputs), 1
    while (
        tiles * splits < programs
        and 2 * splits <= MOST_SPLITS
        and num_inputs // plan.tile_k >= 2 * splits * LEAST_STEPS
    ):
        splits *= 2
    return plan._replace(splits=splits) if tiles <= MOST_TILES else None


def _plan_of_parts(num_rows: int, num_outputs: int, num_inputs: int, tile_m: int) -> QuantisedPlan | None:
    """Tiles: docs/measurements.md#weights-of-8-and-4-bits, measured with one row in 16, with 64 and 128."""
    tile_n = 128 if tile_m == 16 and num_outputs % 128 == 0 else 64
    parts = 2 if num_rows <= MOST_IN_TWO_PARTS else 1
    plan = QuantisedPlan(tile_n, tile_m, 128, 1, tile_n // 16, 4, PREFETCHED, parts)
    return _split(plan, num_rows, num_outputs, num_inputs, PROGRAMS_OF_PARTS)


def _plan_of_one(num_inputs: int) -> QuantisedPlan:
    """One row, without tensor cores; not in groups, whose steps are too short for that. Tiles, and int4 in groups:
    docs/measurements.md#weights-of-8-and-4-bits."""
    return QuantisedPlan(16, 1, 512, 1 if num_inputs < 8192 else 2, 4, 4, PREFETCHED)
