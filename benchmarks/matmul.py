"""Matrix products of one decode step of an 8B Llama: ours against cuBLAS and the limits measured in the same run.

python benchmarks/matmul.py                 # the table: ms a step at each number of rows
python benchmarks/matmul.py --tune FILE     # measures every plan and writes the tuned table
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from tandem.kernels import matmul
from tandem.kernels.matmul import Plan

LADDER = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320)
# Name -> outputs, inputs, times a step.
PRODUCTS = {
    "qkv": (6144, 4096, 32),
    "o": (4096, 4096, 32),
    "gate_up": (28672, 4096, 32),
    "down": (4096, 14336, 32),
    "lm_head": (128256, 4096, 1),
}
SHARED_BYTES = 226 << 10
MULTIPROCESSORS = 132
WORTH = 0.985  # a plan is taken when it needs less than this share of torch's time
REUSE = 1.01  # a plan whose kernel is compiled for other sizes anyway may be this much slower than the best

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def torch_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


def our_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    matmul.linear(x, weight, None, out)


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.05


def replay_ms(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a graph of `run`, in ms."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def relative_error(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    expected = x.double() @ weight.double().t()
    return ((out.double() - expected).norm() / expected.norm()).item()


def candidates(rows: int, outputs: int, inputs: int) -> Iterator[Plan]:
    """Plans worth measuring for one product."""
    seen = set()
    smallest = next((tile for tile in (8, 16, 32, 64, 128, 256) if tile >= rows), 256)
    tiles_m = {smallest, *(tile for tile in (32, 64, 128) if rows >= 96 and -(-rows // tile) <= 5)}
    for tile_m, (tile_n, warps), tile_k in itertools.product(
        tiles_m, ((64, 4), (128, 4), (128, 8), (256, 8)), (64, 128, 256)
    ):
        registers = tile_n * tile_m // (warps * 32)
        if (
            registers > 128
            or (tile_k > 64 and tile_m > 64)
            or (tile_k == 256 and tile_m > 16)
            or (warps == 8 and tile_m < 64)
        ):
            continue
        stage = (tile_n + tile_m) * tile_k * 2
        staged_out = tile_n * (tile_m // 2 if tile_m > 128 else tile_m) * 2
        tiles, lanes = -(-outputs // tile_n), -(-rows // tile_m)
        for resident in (1, 2):
            stages = min(8, (SHARED_BYTES // resident - staged_out - 1024) // stage)
            if stages < 3 or (resident == 2 and (warps == 8 or registers > 96)):
                continue
            most = MULTIPROCESSORS * resident // lanes
            whole = tiles * (most // tiles) if tiles <= most else most
            for programs in {most, whole, MULTIPROCESSORS // lanes}:
                plan = Plan(tile_n, tile_m, tile_k, stages, warps, programs)
                if plan not in seen and plan.is_valid(rows, outputs, inputs):
                    seen.add(plan)
                    yield plan


def compile_plan(plan: Plan) -> tuple[Plan, str]:
    """Runs one small product, so that the compiled kernel lies in Triton's cache; -> (plan, why it can't run)."""
    try:
        x, weight = random_matrix(min(plan.tile_m, 64), 1024), random_matrix(512, 1024)
        error = relative_error(matmul.run_plan(plan, x, weight), x, weight)
        torch.cuda.synchronize()
    except Exception as failure:
        return plan, f"{type(failure).__name__}: {str(failure)[:120]}"
    return plan, "" if error < 1e-2 else f"error {error:.1e}"


def compile_all(plans: set[Plan], workers: int) -> set[Plan]:
    """Kernels that run, by their tiles; -> those plans' tile choices that don't."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.map(compile_plan, sorted(plans), chunksize=1)
    for plan, why in results:
        if why:
            print(f"left out {tuple(plan)}: {why}")
    return {plan for plan, why in results if why}


def measure_product(rows: int, weights: list[torch.Tensor], product: Product, check: bool = False) -> float:
    """Microseconds of one of many products in a graph, each with its own weight."""
    x = random_matrix(rows, weights[0].shape[1])
    out = torch.empty(rows, weights[0].shape[0], device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for weight in weights:
            product(x, weight, out)

    if check:
        out.fill_(float("nan"))
        product(x, weights[0], out)
        expected = functional.linear(x, weights[0]).float()
        if not ((out.float() - expected).norm() / expected.norm()).item() < 1e-2:
            return float("inf")
    return replay_ms(run, 5) * 1e3 / len(weights)


def tune(path: str, ladder: tuple[int, ...], workers: int, names: list[str]) -> None:
    """Measures all plans of all products and writes the table with the fastest of each."""
    sizes = [(PRODUCTS[name][0], PRODUCTS[name][1]) for name in names]
    grid = {(rows, *size): list(candidates(rows, *size)) for rows in ladder for size in sizes}
    kernels = {plan._replace(programs=1) for plans in grid.values() for plan in plans}
    print(f"{len(kernels)} kernels, {sum(map(len, grid.values()))} plans", flush=True)
    broken = compile_all(kernels, workers)
    measured: dict[tuple[int, int, int], dict[Plan | None, float]] = {}
    for outputs, inputs in sizes:
        copies = max(2, min(16, int(2.5e9 / (outputs * inputs * 2))))
        weights = [random_matrix(outputs, inputs) for _ in range(copies)]
        for rows in ladder:
            times: dict[Plan | None, float] = {None: measure_product(rows, weights, torch_product)}
            for plan in grid[rows, outputs, inputs]:
                if plan._replace(programs=1) not in broken:
                    run = lambda x, weight, out, plan=plan: matmul.run_plan(plan, x, weight, out)  # noqa: E731
                    times[plan] = measure_product(rows, weights, run, check=True)
            measured[rows, outputs, inputs] = times
            best = sorted((time, plan) for plan, time in times.items() if plan is not None)[:4]
            floor = outputs * inputs * 2 / 4.27e6
            listed = "; ".join(f"{time:.1f} {','.join(map(str, plan))}" for time, plan in best)
            print(
                f"{outputs}x{inputs} rows {rows}: torch {times[None]:.1f} floor {floor:.1f} us | {listed}", flush=True
            )
    write_table(path, measured)


def write_table(path: str, measured: dict[tuple[int, int, int], dict[Plan | None, float]]) -> None:
    """Picks plans, preferring kernels that serve other sizes too; what doesn't beat torch is null."""
    used: dict[Plan, int] = {}
    for times in measured.values():
        limit = REUSE * min(times.values())
        for kernel in {plan._replace(programs=1) for plan, time in times.items() if plan and time <= limit}:
            used[kernel] = used.get(kernel, 0) + 1
    products: dict[str, list[list[object]]] = {}
    for (rows, outputs, inputs), times in sorted(measured.items()):
        ours = {plan: time for plan, time in times.items() if plan is not None}
        best = min(ours.values(), default=float("inf"))
        near = [plan for plan, time in ours.items() if time <= REUSE * best]
        chosen = (
            max(near, key=lambda plan: (used[plan._replace(programs=1)], -ours[plan]), default=None)
            if best <= WORTH * times[None]
            else None
        )
        products.setdefault(f"{outputs},{inputs}", []).append([rows, list(chosen) if chosen else None])
    with open(path, "w") as file:
        lines = ",\n".join(f'    "{key}": {json.dumps(steps)}' for key, steps in products.items())
        file.write(f'{{\n  "device": "{torch.cuda.get_device_name()}",\n  "products": {{\n{lines}\n  }}\n}}\n')
    kernels = {tuple(plan[:5]) for steps in products.values() for _, plan in steps if plan}  # type: ignore[index]
    print(f"{len(kernels)} kernels chosen: {sorted(kernels)}")


def measure_limits() -> tuple[float, float]:
    """(bytes a second of a large copy, read and written; FLOP a second of a large product)."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_ms = replay_ms(functools.partial(target.copy_, source))
    left, right = random_matrix(8192, 8192), random_matrix(8192, 8192)
    out = torch.empty_like(left)
    return 2 * (2 << 30) / copy_ms * 1e3, 2 * 8192**3 / replay_ms(lambda: torch_product(left, right, out)) * 1e3


def step_ms(rows: int, weights: dict[str, list[torch.Tensor]], product: Product) -> float:
    """One decode step's products in the order of the layers, every layer with its own weights, as one graph."""
    inputs = {name: random_matrix(rows, sizes[1]) for name, sizes in PRODUCTS.items()}
    outputs = {
        name: torch.empty(rows, sizes[0], device="cuda", dtype=torch.bfloat16) for name, sizes in PRODUCTS.items()
    }

    def run() -> None:
        for layer in range(32):
            for name in ("qkv", "o", "gate_up", "down"):
                product(inputs[name], weights[name][layer], outputs[name])
        product(inputs["lm_head"], weights["lm_head"][0], outputs["lm_head"])

    return replay_ms(run, 20)


def report(ladder: tuple[int, ...]) -> None:
    bandwidth, rate = measure_limits()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s")
    weights = {name: [random_matrix(out, k) for _ in range(times)] for name, (out, k, times) in PRODUCTS.items()}
    num_bytes = sum(weight.numel() * 2 for layers in weights.values() for weight in layers)
    print(f"{'rows':>5} {'floor':>7} {'cuBLAS':>7} {'ours':>7}  ms a step; torch serves; largest error")
    for rows in ladder:
        worst, by_torch = 0.0, []
        for name, layers in weights.items():
            x = random_matrix(rows, layers[0].shape[1])
            out = torch.full((rows, layers[0].shape[0]), float("nan"), device="cuda", dtype=torch.bfloat16)
            our_product(x, layers[0], out)
            worst = max(worst, relative_error(out, x, layers[0]))
            if matmul.choose_plan(matmul.table_of(x.device), rows, *layers[0].shape) is None:
                by_torch.append(name)
        assert worst < 1e-2, f"wrong product at {rows} rows: relative error {worst}"
        floor = max(num_bytes / bandwidth, num_bytes * rows / rate) * 1e3
        figures = (
            f"{floor:7.2f} {step_ms(rows, weights, torch_product):7.2f} {step_ms(rows, weights, our_product):7.2f}"
        )
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
