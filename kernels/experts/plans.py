"""How a mixture chooses experts, and how its products are cut. Pure.

T tokens, k experts of each, X experts, E hidden size, F width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

GluonType = Literal["", "bf16", "fp16"]
NOT_HERE = -1  # an id: another rank has the expert
MOST_FEW_TOKENS = 4  # that take the way without tensor cores; a guess
MOST_QUANTISED_TOKENS = 4  # the same over 8 and 4 bits in Gluon: docs/measurements.md#few-rows-an-expert
SPARE = 1.5  # tiles have room for so many times the rows that an expert has on average; a guess
LANE_INPUTS = 32  # of a word's eight numbers of 4 bits, and those of its neighbours
# Inputs of a tile of e2m1 for few rows, from so many such tiles a row on: steps wait for each other, and those of 64
# inputs took most of the time (docs/measurements.md#mixtures-of-experts). Guesses.
LONG_TILE, FEW_STEPS = 256, 2
TILES_M = (16, 32, 64, 128)  # pairs of a tile; a guess
# Pairs of a tile whose weights go straight to registers, and the most that an expert has on average then: of integers
# and of e2m1, whose unpacking takes more (docs/measurements.md#few-rows-an-expert).
STREAMED_TILES, MOST_STREAMED, MOST_STREAMED_E2M1 = (8, 16), 16, 5
STREAMED_INPUTS = 128  # of a step
MOST_FEW_INPUTS = 65536  # of a token's experts that few_4bit.py has room for in shared memory
RING_GATES, RING_OUTPUTS = 128, 256  # of a tile, of gate and up and of down; over e4m3 half as many
FEW_PAIRS = 64  # so few of all experts together are spread over more programs; likewise


def experts_of_rank(rank: int, num_ranks: int, num_experts: int) -> tuple[int, int]:
    """The first expert of a rank, and the one after its last, where ranks hold whole ones."""
    return rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks


@dataclass(frozen=True, slots=True)
class Routing:
    """How a model chooses `top_k` experts of a token.

    `scores`: of all experts together (softmax), or of each by itself (sigmoid). `renormalises`: weights of a token's
    experts are made to add up to 1. `groups`: neighbouring experts form so many; only those of the best `kept_groups`
    are chosen from (DeepSeek-V2, V3: arXiv 2405.04434, 2412.19437), by their best expert or, `by_pairs`, by the sum
    of their two best. `factor`: weights are multiplied by it at last. `held`: the first of the experts that are here,
    and the one after the last (None: all); their ids count from the first, and others are NOT_HERE. `shared`: so many
    more experts, which lie behind all others that are here, go with every token's choice, each with a weight of 1.
    """

    top_k: int
    renormalises: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    by_pairs: bool = False
    factor: float = 1.0
    held: tuple[int, int] | None = None
    shared: int = 0

    @property
    def num_ids(self) -> int:
        """How many experts a token goes to."""
        return self.top_k + self.shared


class FewPlan(NamedTuple):
    """The constants of triton_kernels/experts/few.py."""

    tile_n: int
    tile_k: int
    warps: int


class FewQuantisedPlan(NamedTuple):
    """The constants of triton_kernels/experts/few_4bit.py and few_8bit.py: `outputs` of a warp, and how many steps
    `ahead` weights are asked for, where there are as many."""

    outputs: int
    ahead: int
    warps: int


class GroupedPlan(NamedTuple):
    """The constants of triton_kernels/experts/grouped.py."""

    tile_n: int
    tile_m: int
    tile_k: int
    stages: int
    warps: int


class GroupedRingPlan(NamedTuple):
    """The constants of triton_kernels/experts/grouped_ring.py."""

    tile_m: int
    tile_k: int
    stages: int


# Tiles of 64 and 32 pairs take longer: docs/measurements.md#prompts-over-experts
RING_TILE, RING_TILE_E4M3 = GroupedRingPlan(128, 64, 4), GroupedRingPlan(128, 128, 6)


class StreamedPlan(NamedTuple):
    """The constants of triton_kernels/experts/streamed.py. `registers`: the most of a thread; 0: no bound."""

    tile_m: int
    repeats: int
    ahead: int
    warps: int
    registers: int = 0

    def outputs(self, *, is_gated: bool) -> int:
        """How many a program makes."""
        return 16 * self.warps * self.repeats // (2 if is_gated else 1)


class Clamp(NamedTuple):
    """GPT-OSS's gate in place of silu(gate) * up: gate * sigmoid(alpha * gate) * (up + 1), with gate cut off above the
    limit, and up on both sides (arXiv 2508.10925)."""

    alpha: float
    limit: float


class MixtureSizes(NamedTuple):
    """What a mixture's matrices are: gate and up [num_experts, 2 * width, hidden], down [num_experts, hidden, width].
    Activations are of `element_bytes`; weights too, or of 8 `bits` (e4m3) or 4 (`is_e2m1`, or integers), of which
    `group` inputs (0: all) share a scale. `gluon`: activations' type, where our
    kernels in Gluon run."""

    num_experts: int
    top_k: int
    hidden: int
    width: int
    element_bytes: int = 2
    bits: int = 0
    is_e2m1: bool = False
    group: int = 0
    has_bias: bool = False
    clamp: Clamp | None = None
    gluon: GluonType = ""

    @property
    def weight_bytes(self) -> float:
        return self.bits / 8 if self.bits else self.element_bytes


class MixturePlan(NamedTuple):
    """The plans of both products: FewPlans, FewQuantisedPlans, or others of one `tile_m`. `rounded`: activations
    become e4m3, for fp8 products."""

    gate_up: FewPlan | FewQuantisedPlan | StreamedPlan | GroupedPlan | GroupedRingPlan
    down: FewPlan | FewQuantisedPlan | StreamedPlan | GroupedPlan | GroupedRingPlan
    rounded: bool = False


def _largest(size: int, tiles: tuple[int, ...]) -> int:
    """The largest of the tiles that divides `size`; 0: none does."""
    return next((tile for tile in tiles if size % tile == 0), 0)


def inputs_of_a_scale(group: int, bits: int, num_inputs: int) -> int:
    """Inputs of a step's product that are scaled alike before steps are added up; 0: sums are scaled at the end.
    Integers of 4 bits with one scale an output are a single group of all inputs: where nothing scaled the product of
    each step, tiles of 64 pairs gave sums that were wrong in places (Triton 3.6 on an H200)."""
    return group or (num_inputs if bits == 4 else 0)


def choose_plan(num_tokens: int, sizes: MixtureSizes, num_experts: int | None = None) -> MixturePlan | None:
    """The plan for so many tokens; None: the kernels serve no such sizes. `num_experts`: how many the model has, where
    some are elsewhere."""
    few = few_quantised_plan(sizes) if num_tokens <= MOST_QUANTISED_TOKENS else None
    few = few or (few_plan(sizes) if num_tokens <= MOST_FEW_TOKENS else None)
    if few is not None:
        return few
    mean = num_tokens * sizes.top_k / (num_experts or sizes.num_experts)
    if mean <= (MOST_STREAMED_E2M1 if sizes.is_e2m1 else MOST_STREAMED):
        tile_m = next((tile for tile in STREAMED_TILES if tile >= SPARE * mean), STREAMED_TILES[-1])
        streamed = streamed_plan(tile_m, sizes, is_spread=num_tokens * sizes.top_k <= FEW_PAIRS)
        if streamed is not None:
            return streamed
    tile_m = next((tile for tile in TILES_M if tile >= SPARE * mean), TILES_M[-1])
    ring = ring_plan(sizes) if tile_m == RING_TILE.tile_m else None
    return ring or grouped_plan(tile_m, sizes)


def every_plan(sizes: MixtureSizes) -> tuple[MixturePlan, ...]:
    """All plans that `choose_plan` can name."""
    streamed = (streamed_plan(tile, sizes, is_spread=each) for tile in STREAMED_TILES for each in (True, False))
    grouped = (grouped_plan(tile, sizes) for tile in TILES_M)
    plans = (few_quantised_plan(sizes), few_plan(sizes), *streamed, *grouped, ring_plan(sizes))
    return tuple(dict.fromkeys(plan for plan in plans if plan is not None))


def few_plan(sizes: MixtureSizes) -> MixturePlan | None:
    if sizes.bits == 4 or sizes.has_bias or sizes.clamp:
        return None
    gate_up = _few(sizes.width, sizes.hidden, 4, 2048, sizes.group)
    down = _few(sizes.hidden, sizes.width, 8, 1024, sizes.group)
    return None if gate_up is None or down is None else MixturePlan(gate_up, down)


def few_quantised_plan(sizes: MixtureSizes) -> MixturePlan | None:
    """The plan of very few rows over 8 or 4 bits in Gluon; None: they have others, or no tile fits. Both products are
    the fastest over three models' shapes, or within a tenth."""
    if not sizes.bits or sizes.gluon != "bf16" or sizes.top_k * sizes.width > MOST_FEW_INPUTS:
        return None
    if sizes.bits == 8 and (sizes.has_bias or sizes.clamp):
        return None
    whole = max(sizes.group, LANE_INPUTS)
    if sizes.group % 16 or any(size % whole or size % LANE_INPUTS for size in (sizes.hidden, sizes.width)):
        return None
    return MixturePlan(FewQuantisedPlan(4, 4, 4), FewQuantisedPlan(2, 4 if sizes.bits == 4 else 2, 8))


def streamed_plan(tile_m: int, sizes: MixtureSizes, *, is_spread: bool) -> MixturePlan | None:
    """The plan whose weights go straight to registers; None: they have other bits, or no tile fits. `is_spread`: there
    are few pairs."""
    inputs = inputs_of_a_scale(sizes.group, sizes.bits, sizes.hidden)
    whole = sizes.group if sizes.is_e2m1 else STREAMED_INPUTS
    if not sizes.gluon or sizes.bits != 4 or inputs % whole:
        return None
    if any(size % whole or (sizes.group and size % sizes.group) for size in (sizes.hidden, sizes.width)):
        return None
    wide = () if is_spread else (StreamedPlan(tile_m, 2, 2, 8, 128),)
    gate_ups = (*wide, StreamedPlan(tile_m, 1, 4, 8, 128), StreamedPlan(tile_m, 1, 4, 4, 128))
    downs = StreamedPlan(tile_m, 2, 2, 4), StreamedPlan(tile_m, 1, 4, 4, 128)
    gate_up = next((each for each in gate_ups if sizes.width % each.outputs(is_gated=True) == 0), None)
    down = next((each for each in downs if sizes.hidden % each.outputs(is_gated=False) == 0), None)
    return None if gate_up is None or down is None else MixturePlan(gate_up, down)


def ring_plan(sizes: MixtureSizes) -> MixturePlan | None:
    """The plan of many rows in Gluon, in 16 bits or e4m3; None: they are stored otherwise, or no tile fits."""
    if sizes.bits == 4 or not sizes.gluon or sizes.has_bias or sizes.clamp:
        return None
    tile, outputs = (RING_TILE_E4M3, RING_OUTPUTS // 2) if sizes.bits else (RING_TILE, RING_OUTPUTS)
    if sizes.hidden % outputs or sizes.width % (outputs // 2) or sizes.group % tile.tile_k:
        return None
    if any(size % tile.tile_k or (sizes.group and size % sizes.group) for size in (sizes.hidden, sizes.width)):
        return None
    return MixturePlan(tile, tile, rounded=bool(sizes.bits))


def _few(num_outputs: int, num_inputs: int, tile_n: int, most_inputs: int, group: int) -> FewPlan | None:
    """The plan of a product of few rows; None: no tile fits. A tile has whole groups of inputs, or lies in one."""
    tiles = tuple(tile for tile in (2048, 1024, 512, 256, 128, 64, 32) if tile <= most_inputs)
    tile_k = _largest(num_inputs, tuple(tile for tile in tiles if not group or tile % group == 0 or group % tile == 0))
    if not tile_k or num_outputs % tile_n or (group and num_inputs % group):
        return None
    return FewPlan(tile_n, tile_k, 4)


def grouped_plan(tile_m: int, sizes: MixtureSizes) -> MixturePlan | None:
    gate_up = _grouped(tile_m, sizes.width, sizes.hidden, sizes, is_gated=True)
    down = _grouped(tile_m, sizes.hidden, sizes.width, sizes, is_gated=False)
    if gate_up is None or down is None:
        return None
    # Products of e4m3 take 32 inputs at once, and other activations than those of 16 bits stay as they are.
    rounded = sizes.bits == 8 and sizes.element_bytes == 2 and min(gate_up.tile_k, down.tile_k) >= 32
    return MixturePlan(gate_up, down, rounded)


def _grouped(
    tile_m: int, num_outputs: int, num_inputs: int, sizes: MixtureSizes, *, is_gated: bool
) -> GroupedPlan | None:
    """The plan of a product by the tensor cores; None: no tile fits. Tiles of many rows have as many outputs as
    registers hold sums; of few, as many as a ring of loads takes. Groups' products are sums of their own before they
    are scaled."""
    is_wide, group, element_bytes = tile_m == TILES_M[-1], sizes.group, sizes.element_bytes
    has_scaled_steps = bool(inputs_of_a_scale(group, sizes.bits, num_inputs))
    fits = (is_wide and not has_scaled_steps) or not is_gated
    tile_n = _largest(num_outputs, (128, 64, 32, 16) if fits else (64, 32, 16))
    if sizes.is_e2m1 and tile_m < 64 and element_bytes == 2 and num_inputs > FEW_STEPS * LONG_TILE:
        tiles: tuple[int, ...] = (LONG_TILE,)  # the last one of a row may have less
    elif sizes.is_e2m1:  # a tile has whole groups, whose scales multiply weights
        tiles = (64, 32)
    else:
        most = (128, 64, 32, 16) if (tile_m < 64 or sizes.bits == 8) and element_bytes == 2 else (64, 32, 16)
        tiles = tuple(tile for tile in most if group % tile == 0 and (sizes.bits != 4 or tile >= LANE_INPUTS))
    tile_k = LONG_TILE if tiles == (LONG_TILE,) else _largest(num_inputs, tiles)
    if not tile_n or not tile_k or (group and num_inputs % group):
        return None
    warps = 8 if is_wide and tile_n == 128 else 4
    return GroupedPlan(tile_n, tile_m, tile_k, 3 if element_bytes == 2 else 2, warps)
