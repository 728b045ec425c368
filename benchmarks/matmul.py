"""Matrix products of one decode step of an 8B Llama: ours against cuBLAS and the limits measured in the same run.

python benchmarks/matmul.py                 # the table: ms a step at each number of rows
python benchmarks/matmul.py --tune FILE     # measures every plan and writes the tuned table
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from product_steps import (
    PAUSE,
    PRODUCTS,
    measure_limits,
    our_product,
    random_matrix,
    replay_ms,
    steps_ms,
    torch_product,
)
from torch.nn import functional

from tandem.kernels.products import matmul
from tandem.kernels.products.fused_ops import silu_mul
from tandem.kernels.products.matmul_plans import (
    GATE_UP_GROUP,
    SHARED_BYTES,
    Plan,
    RingPlan,
    RowsPlan,
    StreamPlan,
    choose_plan,
)

LADDER = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 127, 128, 255, 256)
GATED = ("gate_up",)  # measured with its SiLU times up
MULTIPROCESSORS = 132
WORTH = 0.98  # a plan is taken when it needs less than this share of torch's time
REUSE = 1.015  # a plan whose kernel is compiled for other sizes anyway may be this much slower than the best


def relative_error(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    expected = x.double() @ weight.double().t()
    return ((out.double() - expected).norm() / expected.norm()).item()


def stream_tiles(rows: int) -> Iterator[tuple[int, int, int, int]]:
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


def stream_plans(rows: int, outputs: int, inputs: int) -> Iterator[StreamPlan]:
    for tile_n, tile_m, tile_k, warps in stream_tiles(rows):
        stage = (tile_n + tile_m) * tile_k * 2
        staged_out = tile_n * min(tile_m, 128) * 2
        tiles, lanes = -(-outputs // tile_n), -(-rows // tile_m)
        for resident in (1, 2):
            stages = min(12, ((226 << 10) // resident - staged_out - 2048) // stage)
            if stages < 2 + (resident == 1) or (resident == 2 and tile_n * tile_m > 128 * 128):
                continue
            most = MULTIPROCESSORS * resident // lanes
            plan = StreamPlan(tile_n, tile_m, tile_k, stages, warps, most)
            yield plan
            if tiles <= most:
                whole = plan._replace(programs=most // tiles * tiles)
                yield from (whole._replace(lead=lead) for lead in (0, 128 // tile_k, 256 // tile_k, 512 // tile_k))


# Rows of a tile -> (tile_n, tile_k, warpgroups).
RING_TILES = {
    64: ((64, 64, 1), (64, 128, 1), (128, 64, 1), (128, 128, 1), (128, 64, 2), (256, 64, 2)),
    128: ((64, 64, 1), (64, 128, 1), (128, 64, 1), (128, 64, 2), (256, 64, 2)),
    256: ((64, 64, 1), (128, 64, 2)),
}


def ring_plans(rows: int) -> Iterator[RingPlan]:
    """Tiles as high as the rows or, above 128, two beside each other; rings as deep as fits."""
    tiles_m = [tile for tile in RING_TILES if rows <= tile < 2 * rows] or [256]
    for tile_m in {*tiles_m, *([128] if rows > 128 else [])} if rows > 32 else ():
        for tile_n, tile_k, groups in RING_TILES[tile_m]:
            plan = RingPlan(tile_n, tile_m, tile_k, 0, groups)
            stages = (SHARED_BYTES - 512 - plan.shared_bytes) // ((tile_n + tile_m) * tile_k * 2 + 16)
            yield plan._replace(stages=min(10, stages))


def candidates(rows: int, outputs: int, inputs: int) -> list[Plan]:
    """Plans worth measuring for one product."""
    plans: set[Plan] = {*stream_plans(rows, outputs, inputs), *ring_plans(rows)}
    if rows <= 4:
        plans |= {RowsPlan(tile_n, 2048, warps) for tile_n in (2, 4) for warps in (4, 8)}
    return sorted(plan for plan in plans if plan.is_valid(rows, outputs, inputs))


class Kernel(NamedTuple):
    """What is compiled for a plan, with a product to try it on."""

    plan: Plan
    gated: bool
    rows: int
    outputs: int
    inputs: int


def kernel_of(plan: Plan, rows: int, inputs: int, gated: bool) -> Kernel:
    if isinstance(plan, StreamPlan):  # the same for all sizes
        return Kernel(plan._replace(programs=1, lead=0), gated, min(plan.tile_m, 64), 512, 1024)
    if isinstance(plan, RingPlan):
        return Kernel(plan, gated, plan.tile_m - 3, 2 * plan.tile_n, 1536)
    return Kernel(plan, gated, rows, 512, inputs)


def compile_kernel(kernel: Kernel) -> str:
    """Runs one small product, so that the compiled kernel lies in Triton's cache; -> why it can't be used, or ''."""
    plan, gated, rows, outputs, inputs = kernel
    try:
        x, weight = random_matrix(rows, inputs), random_matrix(outputs, inputs)
        out = matmul.run_plan(plan, x, weight, silu=gated)
        expected = by_torch(x, weight, gated)
        torch.cuda.synchronize()
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:120]}"
    return "" if (error := relative_distance(out, expected)) < 1e-2 else f"error {error:.1e}"


def compile_all(kernels: set[Kernel], workers: int) -> set[Kernel]:
    """Compiles all. Returns those that can't be used."""
    ordered = sorted(kernels)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        reasons = pool.map(compile_kernel, ordered, chunksize=1)
    for kernel, why in zip(ordered, reasons, strict=True):
        if why:
            print(f"left out {kernel}: {why}")
    return {kernel for kernel, why in zip(ordered, reasons, strict=True) if why}


def by_torch(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    product = functional.linear(x, weight)
    return silu_mul(product, GATE_UP_GROUP) if gated else product


def relative_distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.float() - expected.float()).norm() / expected.float().norm()).item()


def measure_plans(
    rows: int, weights: list[torch.Tensor], gated: bool, plans: Iterable[Plan]
) -> dict[Plan | None, float]:
    """Microseconds of one of many products in a graph, each with its own weight; None: by torch."""
    x = random_matrix(rows, weights[0].shape[1])
    expected = by_torch(x, weights[0], gated)
    out = torch.empty_like(expected)

    def time_of(product: Callable[[torch.Tensor], object]) -> float:
        return replay_ms(lambda: [product(weight) for weight in weights], 5) * 1e3 / len(weights)

    times: dict[Plan | None, float] = {None: time_of(lambda weight: by_torch(x, weight, gated))}
    for plan in plans:
        run = functools.partial(matmul.run_plan, plan, x, out_MN=out, silu=gated)
        out.fill_(float("nan"))
        run(weights[0])
        if relative_distance(out, expected) < 1e-2:
            times[plan] = time_of(run)
        else:
            print(f"wrong: {rows} rows of {tuple(weights[0].shape)} by {plan}")
    return times


def tune(path: str, ladder: tuple[int, ...], workers: int, names: list[str]) -> None:
    """Measures all plans of all products and writes the table with the fastest of each."""
    grid = {(rows, name): list(candidates(rows, *PRODUCTS[name][:2])) for rows in ladder for name in names}
    kernels = {
        kernel_of(plan, rows, PRODUCTS[name][1], name in GATED)
        for (rows, name), plans in grid.items()
        for plan in plans
    }
    print(f"{len(kernels)} kernels, {sum(map(len, grid.values()))} plans", flush=True)
    broken = compile_all(kernels, workers)
    measured: dict[tuple[int, int, int], dict[Plan | None, float]] = {}
    for name in names:
        outputs, inputs, _ = PRODUCTS[name]
        copies = max(2, min(16, int(2.5e9 / (outputs * inputs * 2))))
        weights = [random_matrix(outputs, inputs) for _ in range(copies)]
        for rows in ladder:
            gated = name in GATED
            plans = [plan for plan in grid[rows, name] if kernel_of(plan, rows, inputs, gated) not in broken]
            times = measure_plans(rows, weights, gated, plans)
            measured[rows, outputs, inputs] = times
            best = sorted((time, plan) for plan, time in times.items() if plan is not None)[:4]
            listed = "; ".join(f"{time:.1f} {','.join(map(str, plan))}" for time, plan in best)
            floor = outputs * inputs * 2 / 4.27e6
            print(f"{name} rows {rows}: torch {times[None]:.1f} floor {floor:.1f} us | {listed}", flush=True)
        write_table(path, measured)


def write_table(path: str, measured: dict[tuple[int, int, int], dict[Plan | None, float]]) -> None:
    """Picks plans, preferring kernels that serve other sizes too; what doesn't beat torch is null."""
    used: Counter[tuple[int, ...]] = Counter()
    for times in measured.values():
        limit = REUSE * min(times.values())
        used.update({tuple(plan[:5]) for plan, time in times.items() if plan and time <= limit})
    products: dict[str, list[list[object]]] = {}
    for (rows, outputs, inputs), times in sorted(measured.items()):
        ours = {plan: time for plan, time in times.items() if plan is not None}
        best = min(ours.values(), default=float("inf"))
        near = [plan for plan, time in ours.items() if time <= REUSE * best and best <= WORTH * times[None]]
        chosen = max(near, key=lambda plan: (used[tuple(plan[:5])], -ours[plan]), default=None)
        products.setdefault(f"{outputs},{inputs}", []).append([rows, chosen])
    with open(path, "w") as file:
        lines = ",\n".join(f'    "{key}": {json.dumps(steps)}' for key, steps in products.items())
        file.write(f'{{\n  "device": "{torch.cuda.get_device_name()}",\n  "products": {{\n{lines}\n  }}\n}}\n')


def report(ladder: tuple[int, ...]) -> None:
    bandwidth, rate = measure_limits()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s")
    weights = {name: [random_matrix(out, k) for _ in range(times)] for name, (out, k, times) in PRODUCTS.items()}
    num_bytes = sum(weight.numel() * 2 for layers in weights.values() for weight in layers)
    print(f"{'rows':>5} {'floor':>7} {'cuBLAS':>7} {'ours':>7} {'rested: cuBLAS':>15} {'ours':>7}  ms a step; ", end="")
    print("torch serves; largest error")
    for rows in ladder:
        worst, by_torch = 0.0, []
        for name, layers in weights.items():
            x = random_matrix(rows, layers[0].shape[1])
            out = torch.full((rows, layers[0].shape[0]), float("nan"), device="cuda", dtype=torch.bfloat16)
            our_product(x, layers[0], out)
            worst = max(worst, relative_error(out, x, layers[0]))
            if choose_plan(matmul.table_of(x.device), rows, *layers[0].shape) is None:
                by_torch.append(name)
        assert worst < 1e-2, f"wrong product at {rows} rows: relative error {worst}"
        floor = max(num_bytes / bandwidth, num_bytes * rows / rate) * 1e3
        both = torch_product, our_product
        busy, rested = steps_ms(rows, weights, both), steps_ms(rows, weights, both, PAUSE)
        figures = f"{floor:7.2f} {busy[0]:7.2f} {busy[1]:7.2f} {rested[0]:15.2f} {rested[1]:7.2f}"
        print(f"{rows:5} {figures}  {','.join(by_torch) or '-'}; {worst:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", metavar="FILE")
    parser.add_argument("--rows", type=int, nargs="+", default=LADDER)
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS))
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    if options.tune:
        tune(options.tune, tuple(options.rows), options.workers, options.products)
    else:
        report(tuple(options.rows))


if __name__ == "__main__":
    main()
