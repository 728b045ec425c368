"""Mixtures of experts beside their limits: reading the experts that were chosen, and the tensor cores' rate.

python benchmarks/experts.py              # us a layer by the shipped plans, and what each part of it takes
python benchmarks/experts.py --sweep      # every plan worth trying, and the best of each product
python benchmarks/experts.py --weights fp8-blocks    # weights of e4m3 with a scale a block of 128, fp8: an output
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable

import torch
from product_steps import measure_limits, random_matrix, replay_ms

from tandem.kernels.experts.mixture import Stack, run_plan
from tandem.kernels.experts.plans import (
    TILES_M,
    FewPlan,
    FewQuantisedPlan,
    GluonType,
    GroupedPlan,
    GroupedRingPlan,
    MixturePlan,
    MixtureSizes,
    Routing,
    StreamedPlan,
    choose_plan,
    few_plan,
    few_quantised_plan,
    grouped_plan,
    streamed_plan,
)
from tandem.kernels.experts.routing import route
from tandem.kernels.experts.stacked import MX_GROUP, empty_stacked, stacked_mxfp4
from tandem.kernels.products.fused_ops import quantise_rows
from tandem.kernels.products.matmul import linear
from tandem.kernels.products.matmul_device import is_hopper
from tandem.kernels.reference import experts as twins

SHAPES = {
    "qwen3-30b-a3b": MixtureSizes(128, 8, 2048, 768),
    "mixtral-8x7b": MixtureSizes(8, 2, 4096, 14336),
    "deepseek-v2-lite": MixtureSizes(64, 6, 2048, 1408),
    "gpt-oss-20b": MixtureSizes(32, 4, 2880, 2880),  # without biases
}
LADDER = (1, 8, 64, 256, 4096, 8192)
LAYERS = 4  # with weights of their own, more than caches hold
SHARED = 227 << 10  # bytes of a Hopper multiprocessor that a program can have

# bits, whether they are e2m1, group
FORMATS = {
    "bf16": (0, False, 0), "fp8": (8, False, 0), "fp8-blocks": (8, False, 128), "int4": (4, False, 128),
    "mxfp4": (4, True, 32),
}  # fmt: skip

Layer = tuple[Stack, Stack]
Product = FewPlan | FewQuantisedPlan | StreamedPlan | GroupedPlan | GroupedRingPlan
# tile_n, tile_k, stages, warps of plans worth trying, of gate and up, and of down.
FEW_ROWS = (
    ((64, 128, 3, 4), (64, 128, 2, 4), (64, 64, 4, 4), (64, 64, 6, 4), (128, 64, 3, 8), (64, 256, 2, 4)),
    ((128, 128, 3, 4), (128, 64, 4, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 2, 4)),
)  # fmt: skip
MANY_ROWS = (
    ((128, 64, 3, 8), (128, 64, 4, 8), (64, 64, 4, 4), (64, 64, 4, 8), (64, 128, 2, 8), (128, 32, 4, 8)),
    ((128, 64, 3, 8), (128, 64, 4, 8), (128, 64, 4, 4), (256, 64, 3, 8), (256, 64, 4, 8), (128, 128, 2, 8)),
)  # fmt: skip
ONE_ROW = (
    ((4, 2048, 4), (2, 2048, 4), (8, 1024, 4), (4, 1024, 4), (2, 2048, 2), (4, 2048, 8), (8, 512, 4)),
    ((8, 256, 4), (4, 256, 4), (4, 256, 2), (16, 256, 4), (16, 256, 8), (8, 256, 2), (4, 128, 2)),
)
# The same of e4m3.
FP8_FEW_ROWS = (
    ((64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (64, 64, 6, 4), (128, 128, 3, 8)),
    ((128, 128, 3, 4), (128, 128, 5, 4), (64, 128, 4, 4), (64, 128, 6, 4), (128, 64, 6, 4)),
)
FP8_MANY_ROWS = (
    ((128, 128, 3, 8), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 3, 8), (128, 64, 4, 8)),
    ((128, 128, 3, 8), (128, 128, 4, 8), (128, 128, 3, 4), (64, 128, 4, 4)),
)
FP8_ONE_ROW = (
    ((4, 2048, 4), (8, 2048, 4), (8, 1024, 4), (16, 1024, 4), (4, 2048, 2), (8, 2048, 8)),
    ((8, 256, 4), (16, 256, 4), (32, 256, 4), (16, 256, 2), (8, 256, 2), (4, 256, 1)),
)
# Of 8 and 4 bits in Gluon: outputs of a warp, steps ahead, warps.
QUANTISED_ONE_ROW = (
    ((4, 4, 4), (4, 4, 8), (2, 4, 4), (4, 1, 8), (8, 2, 4), (4, 2, 8)),
    ((2, 4, 8), (2, 3, 8), (2, 6, 8), (4, 3, 8), (4, 2, 4), (1, 4, 8), (2, 2, 8)),
)
# Of e2m1 by the tensor cores, for inputs that 64 divides and 128 doesn't.
E2M1_FEW_ROWS = (
    ((64, 256, 3, 4), (64, 256, 2, 4), (32, 256, 3, 4), (64, 64, 6, 4), (32, 64, 6, 4)),
    ((64, 256, 3, 4), (64, 256, 2, 4), (32, 256, 3, 4), (64, 64, 6, 4), (32, 64, 6, 4)),
)
E2M1_MANY_ROWS = (
    ((64, 64, 3, 4), (64, 64, 4, 8), (64, 64, 4, 4), (32, 64, 4, 4)),
    ((64, 64, 3, 4), (64, 64, 4, 8), (64, 64, 4, 4)),
)
# Of 4 bits straight to registers: repeats, steps ahead, warps, registers.
STREAMED = ((2, 2, 8, 128), (1, 4, 8, 128), (1, 4, 4, 128), (2, 2, 4, 0), (2, 4, 4, 0), (1, 2, 4, 0), (1, 2, 8, 0))


def candidates(base: MixturePlan, sizes: MixtureSizes) -> list[list[Product]]:
    """Plans worth trying, of both products."""
    if isinstance(base.gate_up, StreamedPlan):
        plans = [StreamedPlan(base.gate_up.tile_m, *each) for each in STREAMED]
        outputs = ((sizes.width, True), (sizes.hidden, False))
        return [[each for each in plans if n % each.outputs(is_gated=gated) == 0] for n, gated in outputs]
    if isinstance(base.gate_up, FewQuantisedPlan):
        return [[FewQuantisedPlan(*each) for each in some] for some in QUANTISED_ONE_ROW]
    if isinstance(base.gate_up, FewPlan):
        inputs = (sizes.hidden, sizes.width)
        tried = FP8_ONE_ROW if sizes.bits else ONE_ROW
        return [[FewPlan(*each) for each in some if k % each[1] == 0] for some, k in zip(tried, inputs, strict=True)]
    if isinstance(base.gate_up, GroupedRingPlan):
        return [[base.gate_up], [base.down]]
    tile_m, found = base.gate_up.tile_m, []
    few, many = (FP8_FEW_ROWS, FP8_MANY_ROWS) if sizes.bits == 8 else (FEW_ROWS, MANY_ROWS)
    few, many = (E2M1_FEW_ROWS, E2M1_MANY_ROWS) if sizes.is_e2m1 else (few, many)
    row_bytes = tile_m * (1 if base.rounded else sizes.element_bytes)
    for some, matrices, k in zip(few if tile_m <= 32 else many, (2, 1), (sizes.hidden, sizes.width), strict=True):
        fits = [
            each for each in some
            if each[2] * each[1] * (sizes.weight_bytes * matrices * each[0] + row_bytes) <= SHARED
        ]  # fmt: skip
        found.append(
            [GroupedPlan(n, tile_m, tk, stages, warps) for n, tk, stages, warps in fits if sizes.is_e2m1 or k % tk == 0]
        )
    return found


def bases(num_tokens: int, sizes: MixtureSizes) -> list[MixturePlan]:
    """The shipped plan, and those of neighbouring tiles."""
    shipped = choose_plan(num_tokens, sizes)
    mean = num_tokens * sizes.top_k / sizes.num_experts
    tiles = [tile for tile in TILES_M if mean / 2 <= tile <= max(16, 8 * mean)] or [TILES_M[-1]]
    others = [few_plan(sizes), few_quantised_plan(sizes)] if num_tokens <= 16 else []
    if sizes.bits == 4:
        others += [streamed_plan(tile, sizes, is_spread=False) for tile in (8, 16) if tile >= mean / 2]
    if sizes.bits != 8:
        others += [grouped_plan(tile, sizes) for tile in tiles[: 1 if sizes.bits else 3]]
    elif num_tokens > 1:
        base = grouped_plan(tiles[0], sizes)
        others += [base, base and base._replace(rounded=False)]
    return list(dict.fromkeys(plan for plan in (shipped, *others) if plan is not None))


def made(num_tokens: int, sizes: MixtureSizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, and each token's experts and weights, drawn evenly."""
    x = random_matrix(num_tokens, sizes.hidden) * 20
    ids, weights = route(random_matrix(num_tokens, sizes.num_experts).float() * 20, Routing(sizes.top_k))
    return x, ids, weights


def layers_of(sizes: MixtureSizes, count: int = LAYERS) -> list[Layer]:
    shapes = (sizes.num_experts, 2 * sizes.width, sizes.hidden), (sizes.num_experts, sizes.hidden, sizes.width)
    return [(_stack(*shapes[0], sizes), _stack(*shapes[1], sizes)) for _ in range(count)]


def _stack(num_experts: int, num_outputs: int, num_inputs: int, sizes: MixtureSizes) -> Stack:
    plain = random_matrix(num_experts * num_outputs, num_inputs).view(num_experts, num_outputs, num_inputs)
    if not sizes.bits:
        return plain
    if sizes.is_e2m1:
        codes = torch.randint(0, 16, plain.shape, dtype=torch.uint8, device="cuda")
        return stacked_mxfp4(codes, torch.full_like(codes[:, :, ::MX_GROUP], 120))
    made = empty_stacked(
        num_experts, num_outputs, num_inputs, sizes.group, "cuda", torch.float16 if sizes.bits == 4 else None
    )
    made.scales.uniform_(0.03, 0.07)
    if made.zeros is None:
        made.values.copy_(plain.mul_(20))
    else:
        made.values.random_(256)
        made.scales.div_(4)
        made.zeros.fill_(8)
    return made


def rounded(rows: torch.Tensor) -> torch.Tensor:
    values, scales = quantise_rows(rows.bfloat16())
    return values.float() * scales


def compile_plan(case: tuple[MixturePlan, MixtureSizes]) -> str:
    """Runs a small mixture, so that its kernels lie in Triton's cache; -> why it can't be used, or ''."""
    plan, sizes = case
    few = sizes._replace(num_experts=sizes.top_k)  # as many as a token takes
    try:
        x, ids, weights = made(3, few)
        run_plan(plan, x, ids, weights, *layers_of(few, 1)[0])
        torch.cuda.synchronize()
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:90]}"
    return ""


def microseconds(run: Callable[[Layer], object], layers: list[Layer]) -> float:
    return replay_ms(lambda: [run(layer) for layer in layers], 5) * 1e3 / len(layers)


def report(num_tokens: int, sizes: MixtureSizes, layers: list[Layer], copied: float) -> None:
    """The shipped plan, whole and without the routing, beside what must be read and computed."""
    plan = choose_plan(num_tokens, sizes)
    assert plan is not None
    x, ids, weights = made(num_tokens, sizes)
    router = random_matrix(sizes.num_experts, sizes.hidden)
    time = microseconds(lambda layer: run_plan(plan, x, ids, weights, *layer), layers)
    routing = microseconds(lambda layer: route(linear(x, router), Routing(sizes.top_k)), layers)
    bytes_read = 3 * sizes.weight_bytes * sizes.hidden * sizes.width * len(ids.unique())
    operations = 6 * sizes.hidden * sizes.width * ids.numel()
    error = float("nan")
    if num_tokens <= 256:
        out = run_plan(plan, x, ids, weights, *layers[0])
        exact_layer = [each.float() if isinstance(each, torch.Tensor) else each for each in layers[0]]
        exact = twins.mixture(x.float(), ids, weights, *exact_layer, *((rounded,) if plan.rounded else ()))
        error = ((out.float() - exact).norm() / exact.norm()).item()
        assert torch.equal(out, run_plan(plan, x, ids, weights, *layers[0])), "not the same twice"
    rate, floor = bytes_read / time / 1e6, bytes_read / copied * 1e6
    print(
        f"{num_tokens:5} rows: {time:8.1f} us ({rate:5.2f} TB/s of weights, floor {floor:6.1f} us; "
        f"{operations / time / 1e6:5.0f} TFLOP/s), routing {routing:5.1f} us, error {error:.0e}, {plan}",
        flush=True,
    )


def sweep(num_tokens: int, sizes: MixtureSizes, layers: list[Layer], reasons: dict[MixturePlan, str]) -> None:
    """First gate and up, beside the shipped down; then down beside the best of these."""
    x, ids, weights = made(num_tokens, sizes)
    told = []
    for base in bases(num_tokens, sizes):
        best, best_time = base, float("inf")
        for place, some in enumerate(candidates(base, sizes)):
            times = {}
            for each in some:
                plan = best._replace(**{MixturePlan._fields[place]: each})
                if not reasons.get(base._replace(**{MixturePlan._fields[place]: each})):
                    times[plan] = microseconds(lambda layer, plan=plan: run_plan(plan, x, ids, weights, *layer), layers)
            ranked = sorted(times, key=lambda plan: times[plan])
            best, best_time = ranked[0], times[ranked[0]]
            listed = " ".join(f"{','.join(map(str, plan[place]))}:{times[plan]:.1f}" for plan in ranked)
            told.append(f"  {MixturePlan._fields[place]:8} {listed}")
        told.append(f"  -> {best_time:.1f} us {best}")
    print(f"{num_tokens} rows, us a layer", *told, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--weights", choices=FORMATS, default="bf16")
    parser.add_argument("--rows", type=int, nargs="+", default=LADDER)
    options = parser.parse_args()
    bits, is_e2m1, group = FORMATS[options.weights]
    gluon: GluonType = "bf16" if is_hopper(torch.device("cuda", 0)) else ""
    sizes = SHAPES[options.shape]._replace(bits=bits, is_e2m1=is_e2m1, group=group, gluon=gluon)
    copied, rate = measure_limits()
    print(
        f"{options.shape}, {options.weights}: copy {copied / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    reasons: dict[MixturePlan, str] = {}
    if options.sweep:
        every = {base for rows in options.rows for base in bases(rows, sizes)}
        plans = sorted({
            base._replace(**{MixturePlan._fields[place]: each})
            for base in every for place, some in enumerate(candidates(base, sizes)) for each in some
        })  # fmt: skip
        with multiprocessing.get_context("spawn").Pool(12) as pool:
            why = pool.map(compile_plan, [(plan, sizes) for plan in plans], chunksize=1)
        reasons = dict(zip(plans, why, strict=True))
        print(
            f"{len(plans)} plans compiled",
            *(f"left out {plan}: {why}" for plan, why in reasons.items() if why),
            sep="\n",
        )
    layers = layers_of(sizes)
    for rows in options.rows:
        report(rows, sizes, layers, copied)
        if options.sweep:
            sweep(rows, sizes, layers, reasons)


if __name__ == "__main__":
    main()
