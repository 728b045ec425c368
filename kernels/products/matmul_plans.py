"""How a matrix product of few rows is cut, and which cut is taken: a pure function over a table measured on the device.

M rows, N outputs, K inputs: y = x @ weight^T.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

GATE_UP_GROUP = 8  # rows of gate, then rows of up; the kernels' epilogues depend on it
LONGEST_TUNED = 320  # rows
MAX_PROGRAMS = 264  # two on each multiprocessor
MULTIPROCESSORS = 132  # an H100's and an H200's
# Of gate and up of prompts: rows of one launch, the fewest of a step, and what must be of use of the tiles for which
# there is time on the multiprocessors. docs/measurements.md#inside-products-of-prompts
SLICE_ROWS, LEAST_PROMPT_ROWS, LEAST_USE = 2048, 1024, 0.96
LEAST_ADDED_ROWS = 512  # of a product that adds to the residual stream itself; likewise
EMPTY = -1  # a word of a workspace where nothing stands yet: as fp32 a NaN that no arithmetic makes
WORKSPACE_WORDS = MULTIPROCESSORS * 128 * 256
MANY_STEPS = 1 << 10  # along K, more than products have
SHARED_BYTES = 227 << 10  # a program's limit on Hopper
# Inputs at once and warps of a program for one or two rows, best first where nothing was measured; a guess.
ROWS_CUTS = ((2048, 4), (1024, 4), (512, 2), (256, 1))


class StreamPlan(NamedTuple):
    """The constants of triton_kernels/products/matmul_stream.py: tensor cores, tiles shared evenly."""

    tile_n: int
    tile_m: int
    tile_k: int
    stages: int
    warps: int
    programs: int  # for each tile along M
    lead: int = 0  # K steps; needs a whole number of programs, two or more, for each tile along N

    def lanes(self, num_rows: int) -> int:
        return -(-num_rows // self.tile_m)

    def grid(self, num_rows: int, num_outputs: int, num_inputs: int) -> int:
        units = -(-num_outputs // self.tile_n) * -(-num_inputs // self.tile_k)
        return self.lanes(num_rows) * min(self.programs, units)

    def is_valid(self, num_rows: int, num_outputs: int, num_inputs: int) -> bool:
        """Whether the workspace holds every program's unfinished tile, and all index arithmetic fits 32 bits."""
        grid, lanes = self.grid(num_rows, num_outputs, num_inputs), self.lanes(num_rows)
        units = -(-num_outputs // self.tile_n) * -(-num_inputs // self.tile_k)
        fits = grid * self.tile_n * self.tile_m <= WORKSPACE_WORDS and grid <= MAX_PROGRAMS
        return fits and units * (grid // lanes + 1) < 2**31 and (self.lead == 0 or self._can_lead(num_outputs, units))

    def _can_lead(self, num_outputs: int, units: int) -> bool:
        tiles = -(-num_outputs // self.tile_n)
        even = self.programs % tiles == 0 and tiles < self.programs <= units
        return even and 0 < self.lead < units // self.programs


class RingPlan(NamedTuple):
    """The constants of triton_kernels/products/matmul_ring.py: tensor cores, a loading warp, one or two multiplying
    warpgroups, whole tiles."""

    tile_n: int
    tile_m: int
    tile_k: int
    stages: int
    groups: int
    fp8_steps: int = 0  # over e4m3: so many K steps are summed in few bits, MANY_STEPS: all; 0: over 16 bits

    @property
    def height(self) -> int:
        """Outputs of one warpgroup."""
        return self.tile_n // self.groups

    @property
    def sums(self) -> int:
        """Registers of a thread that hold unfinished sums."""
        return self.height * self.tile_m // 128

    @property
    def parts(self) -> int:
        """The number of pieces in which a tile ends."""
        return 2 if self.sums >= 128 else 1

    @property
    def rows_stored(self) -> int:
        return self.tile_m // self.parts

    @property
    def item_bytes(self) -> int:
        """What a weight takes."""
        return 1 if self.fp8_steps else 2

    @property
    def shared_bytes(self) -> int:
        ring = self.stages * ((self.tile_n + self.tile_m) * self.tile_k * self.item_bytes + 16)
        return ring + self.tile_n * self.rows_stored * 2

    def lanes(self, num_rows: int) -> int:
        return -(-num_rows // self.tile_m)

    def programs(self, num_rows: int, num_outputs: int) -> int:
        """The number for each tile along M; 0: there are more such tiles than multiprocessors."""
        return min(-(-num_outputs // self.tile_n), MULTIPROCESSORS // self.lanes(num_rows))

    def grid(self, num_rows: int, num_outputs: int, num_inputs: int) -> int:
        return self.lanes(num_rows) * self.programs(num_rows, num_outputs)

    def is_valid(self, num_rows: int, num_outputs: int, num_inputs: int) -> bool:
        """Whether a program's tiles and sums fit a multiprocessor."""
        return self.groups <= 2 and self.sums <= 128 and self.shared_bytes <= SHARED_BYTES

    def use(self, num_rows: int, num_outputs: int) -> float:
        """The share of a product in what all multiprocessors could do in the time that it takes."""
        programs = self.programs(num_rows, num_outputs)
        if not programs:
            return 0.0
        in_turn = -(-num_outputs // (self.tile_n * programs))
        return num_rows * num_outputs / (MULTIPROCESSORS * in_turn * self.tile_n * self.tile_m)


class RowsPlan(NamedTuple):
    """The constants of triton_kernels/products/matmul_rows.py: up to four rows, every program a few whole outputs."""

    tile_n: int
    tile_k: int
    warps: int

    def is_valid(self, num_rows: int, num_outputs: int, num_inputs: int) -> bool:
        whole = num_outputs % self.tile_n == 0 and num_inputs % self.tile_k == 0
        return num_rows <= 4 and whole and self.tile_n <= 2 * GATE_UP_GROUP


Plan = StreamPlan | RingPlan | RowsPlan
PROMPT_PLAN = RingPlan(tile_n=128, tile_m=256, tile_k=64, stages=4, groups=2)
PLANS: dict[int, type[StreamPlan] | type[RingPlan] | type[RowsPlan]] = {
    7: StreamPlan, 6: RingPlan, 5: RingPlan, 3: RowsPlan
}  # fmt: skip
Table = Mapping[tuple[int, int], tuple[tuple[int, "Plan | None"], ...]]


def parse_table(text: str) -> Table:
    """Reads JSON {"products": {"N,K": [[rows, plan or null], ...]}}: rows rising; a plan lists the fields of a
    StreamPlan (seven), a RingPlan (five, or six) or a RowsPlan (three, or four). ValueError for anything else."""
    table = {}
    for sizes, steps in json.loads(text)["products"].items():
        num_outputs, num_inputs = (int(size) for size in sizes.split(","))
        if [rows for rows, _ in steps] != sorted({rows for rows, _ in steps}):
            raise ValueError(f"the numbers of rows of product {sizes} do not rise: write the table anew")
        table[num_outputs, num_inputs] = tuple((rows, _parse_plan(plan)) for rows, plan in steps)
    return table


def _parse_plan(fields: list[int] | None) -> Plan | None:
    if fields is None:
        return None
    if len(fields) not in PLANS:
        raise ValueError(f"a plan of {len(fields)} fields, expected 3, 5, 6 or 7: write the table anew")
    return PLANS[len(fields)](*fields)


def prompt_slices(num_rows: int, num_outputs: int) -> list[slice]:
    """The rows of each launch of `PROMPT_PLAN` that compute gate and up of a prompt's step; none: another way does."""
    slices = [slice(begin, min(begin + SLICE_ROWS, num_rows)) for begin in range(0, num_rows, SLICE_ROWS)]
    is_worth = all(PROMPT_PLAN.use(each.stop - each.start, num_outputs) >= LEAST_USE for each in slices)
    return slices if num_rows >= LEAST_PROMPT_ROWS and is_worth else []


def without_whole_tiles(num_rows: int) -> int:
    """The most rows, up to so many, that end in half a tile, so that `prompt_slices` has none for them."""
    tile = PROMPT_PLAN.tile_m
    return num_rows if num_rows < LEAST_PROMPT_ROWS else (num_rows - tile // 2) // tile * tile + tile // 2


def is_measured(table: Table, num_rows: int, num_outputs: int, num_inputs: int) -> bool:
    """Whether the table says what serves this product, be it torch."""
    steps = table.get((num_outputs, num_inputs), ())
    return bool(steps) and num_rows <= steps[-1][0]


def choose_plan(table: Table, num_rows: int, num_outputs: int, num_inputs: int) -> Plan | None:
    """The plan of the next larger number of rows measured for this weight; None: torch."""
    for rows, plan in table.get((num_outputs, num_inputs), ()):
        if num_rows <= rows:
            valid = plan is not None and num_rows > 0 and plan.is_valid(num_rows, num_outputs, num_inputs)
            return plan if valid else None
    return None
