"""Plans worth measuring for a product of few rows. Pure.

M rows, N outputs, K inputs: y = x @ weight^T.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tandem.kernels.products.matmul_plans import (
    MULTIPROCESSORS,
    ROWS_CUTS,
    SHARED_BYTES,
    Plan,
    RingPlan,
    RowsPlan,
    StreamPlan,
    Table,
)

# Numbers of rows between which another plan was best on an H200: docs/measurements.md#products-of-few-rows.
LADDER = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 127, 128, 255, 256)
SHORT_LADDER = (1, 8, 16, 32, 64, 128, 256)  # of a start, which waits for what is measured; a guess
# Rows of a tile -> (tile_n, tile_k, warpgroups).
RING_TILES = {
    64: ((64, 64, 1), (64, 128, 1), (128, 64, 1), (128, 128, 1), (128, 64, 2), (256, 64, 2)),
    128: ((64, 64, 1), (64, 128, 1), (128, 64, 1), (128, 64, 2), (256, 64, 2)),
    256: ((64, 64, 1), (128, 64, 2)),
}


class Product(NamedTuple):
    """A weight's sizes, and whether its product ends in silu of gate times up."""

    outputs: int
    inputs: int
    gated: bool = False


class Kernel(NamedTuple):
    """What is compiled for a plan, with the sizes of a small product to try it on."""

    plan: Plan
    gated: bool
    rows: int
    outputs: int
    inputs: int


def candidates(rows: int, product: Product, multiprocessors: int = MULTIPROCESSORS) -> list[Plan]:
    """Plans worth measuring for one product on a Hopper GPU."""
    outputs, inputs, _ = product
    plans: set[Plan] = {*_stream_plans(rows, outputs, multiprocessors), *_ring_plans(rows)}
    if rows <= 4:
        cuts = (*ROWS_CUTS, (2048, 8), (1024, 2))
        plans |= {RowsPlan(tile_n, tile_k, warps) for tile_n in (2, 4) for tile_k, warps in cuts}
    return sorted(plan for plan in plans if plan.is_valid(rows, outputs, inputs))


def few_candidates(
    rows: int, product: Product, tables: Iterable[Table], multiprocessors: int = MULTIPROCESSORS
) -> list[Plan]:
    """Candidates whose kernels the tables name for so many rows of any weight, and what serves one row without a
    table: some ten plans of some two kernels, which a start has the time for."""
    known: set[Plan] = {
        kernel_of(plan, rows, product).plan
        for table in tables
        for steps in table.values()
        for measured, plan in steps
        if plan is not None and measured == rows
    }
    if rows == 1:
        cuts = (RowsPlan(2, *cut) for cut in ROWS_CUTS)
        known.update([plan for plan in cuts if plan.is_valid(1, *product[:2])][:1])
    return [plan for plan in candidates(rows, product, multiprocessors) if kernel_of(plan, rows, product).plan in known]


def kernel_of(plan: Plan, rows: int, product: Product) -> Kernel:
    if isinstance(plan, StreamPlan):  # the same for all sizes
        return Kernel(plan._replace(programs=1, lead=0), product.gated, min(plan.tile_m, 64), 512, 1024)
    if isinstance(plan, RingPlan):
        return Kernel(plan, product.gated, plan.tile_m - 3, 2 * plan.tile_n, 1536)
    return Kernel(plan, product.gated, rows, 512, product.inputs)


def wanted(
    products: Iterable[Product], ladder: Iterable[int], shipped: Table, made: Table
) -> list[tuple[int, Product]]:
    """(rows, product) of all that neither table has, few rows of every product first: whatever the time suffices for is
    of use by itself. Of a weight that is multiplied both ways, the gated product counts."""
    by_sizes = {product[:2]: product for product in sorted(products)}
    missing = [product for sizes, product in by_sizes.items() if sizes not in shipped]
    return [
        (rows, product)
        for rows in sorted(ladder)
        for product in reversed(missing)
        if rows not in dict(made.get(product[:2], ()))
    ]


def _stream_tiles(rows: int) -> Iterator[tuple[int, int, int, int]]:
    """(tile_n, tile_m, tile_k, warps) worth measuring for a number of rows."""
    tile_m = next(tile for tile in (8, 16, 32, 64, 128, 256) if tile >= rows or tile == 256)
    if rows <= 16:
        yield from ((64, tile_m, 128, 4), (64, tile_m, 256, 4))
    elif rows <= 64:
        yield from ((64, tile_m, 128, 4), (64, tile_m, 256, 4), (128, tile_m, 64, 4), (128, tile_m, 128, 4))
        yield (256, tile_m, 64, 8)
    elif rows <= 128:
        yield from ((64, 128, 128, 4), (128, 128, 64, 4), (256, 128, 64, 8))
    else:
        yield from ((128, 128, 64, 4), (128, 256, 64, 8))


def _stream_plans(rows: int, outputs: int, multiprocessors: int) -> Iterator[StreamPlan]:
    """Programs of a plan wait for each other, so there are never more than run at once."""
    for tile_n, tile_m, tile_k, warps in _stream_tiles(rows):
        stage = (tile_n + tile_m) * tile_k * 2
        staged_out = tile_n * min(tile_m, 128) * 2
        tiles, lanes = -(-outputs // tile_n), -(-rows // tile_m)
        for resident in (1, 2):
            stages = min(12, ((SHARED_BYTES - 1024) // resident - staged_out - 2048) // stage)
            if stages < 2 + (resident == 1) or (resident == 2 and tile_n * tile_m > 128 * 128):
                continue
            most = multiprocessors * resident // lanes
            plan = StreamPlan(tile_n, tile_m, tile_k, stages, warps, most)
            yield plan
            if tiles <= most:
                whole = plan._replace(programs=most // tiles * tiles)
                yield from (whole._replace(lead=lead) for lead in (0, 128 // tile_k, 256 // tile_k, 512 // tile_k))


def _ring_plans(rows: int) -> Iterator[RingPlan]:
    """Tiles as high as the rows or, above 128, two beside each other; rings as deep as fits."""
    tiles_m = [tile for tile in RING_TILES if rows <= tile < 2 * rows] or [256]
    for tile_m in {*tiles_m, *([128] if rows > 128 else [])} if rows > 32 else ():
        for tile_n, tile_k, groups in RING_TILES[tile_m]:
            plan = RingPlan(tile_n, tile_m, tile_k, 0, groups)
            stages = (SHARED_BYTES - 512 - plan.shared_bytes) // ((tile_n + tile_m) * tile_k * 2 + 16)
            yield plan._replace(stages=min(10, stages))
