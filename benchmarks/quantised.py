"""Products of an 8B Llama over quantised weights: decode steps beside reading weights once, prompts beside bf16.

python benchmarks/quantised.py              # ms a step and TB/s of weights by the shipped plans; TFLOP/s of prompts
python benchmarks/quantised.py --sweep      # every plan worth trying, and the best of each product
python benchmarks/quantised.py --sweep hopper --kinds fp8 --rows 64     # the same of the Hopper kernels
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from product_steps import PRODUCTS, measure_limits, random_matrix, replay_ms
from torch.nn import functional

from tandem.kernels.products import quantised, quantised_plans
from tandem.kernels.products.fused_ops import quantise_rows, silu_mul
from tandem.kernels.products.matmul_plans import (
    MANY_STEPS,
    MULTIPROCESSORS,
    SHARED_BYTES,
    Plan,
    RingPlan,
    RowsPlan,
    StreamPlan,
)
from tandem.kernels.products.quantised_plans import Int4RingPlan, Int4RowPlan, QuantisedPlan, choose_plan
from tandem.kernels.products.quantised_weight import FP8, QuantisedWeight, quantise_fp8, quantise_int4

AnyPlan = quantised_plans.AnyPlan | None  # None: whatever `linear` takes
GROUPS = {"fp8": 0, "fp8 blocks": 128, "int4": 128}
NAMES = ("qkv", "o", "gate_up", "down")
GATED = "gate_up"
LADDER = (1, 16, 64, 128, 256)
WRONG = 2e-2  # more than sums in few bits cost
UNCACHED_BYTES = 250 << 20  # five times an H200's cache


def weight_of(kind: str, outputs: int, inputs: int) -> QuantisedWeight:
    plain = random_matrix(outputs, inputs)
    if kind == "int4":
        return quantise_int4(plain, GROUPS[kind], torch.float16)
    made = quantise_fp8(plain)
    groups = inputs // GROUPS[kind] if GROUPS[kind] else 1
    return QuantisedWeight(made.values, made.scales.repeat(groups, 1), None, GROUPS[kind])


def candidates(kind: str, rows: int, outputs: int, inputs: int) -> Iterator[QuantisedPlan]:
    """Plans worth trying: tiles, warps and stages; splits that make one to six programs for each multiprocessor."""
    base = choose_plan(rows, outputs, inputs, GROUPS[kind], 4 if kind == "int4" else 8)
    if base is None:
        return
    if base.tile_m == 1:
        tiles = [(tile_n, 2048, 4, stages) for tile_n in (2, 4, 8) for stages in (1, 2, 3)]
        tiles += [(tile_n, 1024, warps, stages) for tile_n in (4, 8, 16) for warps in (2, 4) for stages in (2, 4)]
        tiles += [(8, 512, 2, 4), (8, 512, 1, 4), (16, 512, 4, 6), (4, 4096, 8, 2), (8, 4096, 8, 2)]
        for tile_n, tile_k, warps, stages in tiles:
            if inputs % tile_k == 0:
                for ahead in (1024, 4096) if stages == 2 else (1024,):
                    yield base._replace(
                        tile_n=tile_n, tile_k=tile_k, warps=warps, stages=stages, splits=1, prefetch=ahead
                    )
        return
    shapes = [(64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4)] + ([(256, 8, 3)] if kind == "int4" else [])
    for tile_n, warps, stages in shapes:
        if outputs % tile_n or tile_n * base.tile_m > (4096 if kind == "fp8" else 2048) * warps:
            continue
        if stages * 128 * (tile_n + base.tile_m * (1 if base.rounded else 2)) > 220 << 10:
            continue
        for splits in (1, 2, 3, 4, 6, 8, 12):
            programs = base._replace(tile_n=tile_n).tiles(rows, outputs) * splits
            if inputs // 128 >= 2 * splits and (130 <= programs <= 800 or (splits == 1 and programs > 800)):
                yield base._replace(tile_n=tile_n, warps=warps, stages=stages, splits=splits)


def hopper_candidates(kind: str, rows: int, outputs: int, inputs: int) -> Iterator[Plan | Int4RowPlan | Int4RingPlan]:
    """Plans of the Hopper kernels worth trying, for a table tuned to a device."""
    if rows == 1 and kind == "int4":
        for of_warp, warps, tiles, ahead in itertools.product((2, 4, 8), (4, 8), (1, 2, 4), (1, 2, 4, 8)):
            programs = outputs // (of_warp * warps * tiles)
            if of_warp * ahead <= 16 and (tiles == 1 or programs >= MULTIPROCESSORS):
                yield Int4RowPlan(of_warp, warps, tiles, ahead)
    elif kind == "int4":
        tile_m = next(tile for tile in (16, 32, 64, 128) if rows <= tile or tile == 128)
        for height, splits in itertools.product((64, 128), (1, 2, 3, 4, 6, 8)):
            plan, more = Int4RingPlan(height, tile_m, 0, splits), Int4RingPlan(height, tile_m, 1, splits)
            stages = (SHARED_BYTES - 1024 - plan.shared_bytes) // (more.shared_bytes - plan.shared_bytes)
            if splits == 1 or plan.grid(rows, outputs) <= 2 * MULTIPROCESSORS:
                yield plan._replace(stages=min(stages, 8))
    elif rows == 1:
        for tile_n in (2, 4, 8):
            yield from (RowsPlan(tile_n, 512 * warps, warps) for warps in (1, 2, 4))
    elif kind == "fp8":
        tile_m = next(tile for tile in (16, 32, 64, 128, 256) if rows <= tile or tile == 256)
        for height, groups in ((64, 1), (128, 1), (64, 2), (128, 2)):
            for width in {tile_m, min(tile_m, 128)}:
                plan = RingPlan(height * groups, width, 128, 0, groups, 1)
                stages = (SHARED_BYTES - 1024 - plan.shared_bytes) // ((plan.tile_n + width) * 128 + 16)
                for fp8_steps in (4, MANY_STEPS) if plan.sums <= 64 else (MANY_STEPS,):
                    yield plan._replace(stages=min(stages, 8), fp8_steps=fp8_steps)
        for tile_n, tile_k in ((64, 256), (64, 128), (128, 128)) if rows <= 128 else ():
            stages = min(2048 // tile_k, (160 << 10) // ((tile_n + tile_m) * tile_k))
            yield from (
                StreamPlan(tile_n, tile_m, tile_k, stages, 4, programs, lead)
                for programs in (96, 128, 132)
                for lead in (0, 2)
            )


def plans_of(sweep: str, kind: str, rows: int, name: str) -> list[AnyPlan]:
    sizes = rows, *PRODUCTS[name][:2]
    if sweep == "hopper":
        plans = [plan for plan in hopper_candidates(kind, *sizes) if plan.is_valid(*sizes)]
        return [None, *plans] if plans else []
    return [None, *candidates(kind, *sizes)] if sweep else [None]


class Case(NamedTuple):
    """What one compiled kernel serves, by the sizes of the smallest product that takes it."""

    kind: str
    plan: AnyPlan
    rows: int
    outputs: int
    inputs: int
    gated: bool


def case_of(kind: str, plan: AnyPlan, rows: int, name: str) -> Case:
    outputs, inputs, _ = PRODUCTS[name]
    if plan is None:
        return Case(kind, plan, rows, outputs, inputs, name == GATED)
    if isinstance(plan, RowsPlan | Int4RowPlan):
        return Case(kind, plan, 1, 512, inputs, name == GATED)
    plan = plan._replace(programs=1, lead=0) if isinstance(plan, StreamPlan) else plan
    return Case(kind, plan, plan.tile_m, 256, 4096, name == GATED)


def run_by(plan: AnyPlan, x: torch.Tensor, gated: bool, weight: QuantisedWeight) -> torch.Tensor:
    if plan is None:
        return quantised.linear(x, weight, silu=gated)
    return quantised.run_plan(plan, x, weight, silu=gated)


def compile_case(case: Case) -> str:
    """Runs one small product, so that its kernel lies in Triton's cache; -> why it can't be used, or ''."""
    try:
        weight = weight_of(case.kind, case.outputs, case.inputs)
        run_by(case.plan, random_matrix(case.rows, case.inputs), case.gated, weight)
        torch.cuda.synchronize()
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:80]}"
    return ""


def microseconds(run: Callable[[QuantisedWeight], object], weights: list[QuantisedWeight]) -> float:
    return replay_ms(lambda: [run(weight) for weight in weights], 3) * 1e3 / len(weights)


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.float() - expected).norm() / expected.norm()).item()


def expected_of(kind: str, x: torch.Tensor, weight: QuantisedWeight, gated: bool) -> torch.Tensor:
    """The product of what is multiplied: over fp8 of more rows than one that are e4m3, too."""
    rounds = kind != "int4" and len(x) > 1
    values, scales = quantise_rows(x) if rounds else (x, torch.ones((), device=x.device))
    product = functional.linear(values.float() * scales, weight.dequantised(torch.float32))
    return silu_mul(product, 8) if gated else product


def copies_of(kind: str, outputs: int, inputs: int) -> list[QuantisedWeight]:
    """Copies of a weight, so many that the cache doesn't hold them."""
    first = weight_of(kind, outputs, inputs)
    number = max(8, UNCACHED_BYTES // first.num_bytes)
    return [first] + [replace(first, values=first.values.clone()) for _ in range(number - 1)]


def compiled_cases(kinds: list[str], ladder: list[int], sweep: str) -> dict[Case, str]:
    """Every kernel, by several processes -> why it can't be used, or ''."""
    cases = {
        case_of(kind, plan, rows, name)
        for kind in kinds
        for rows in ladder
        for name in NAMES
        for plan in plans_of(sweep, kind, rows, name)
    }
    ordered = sorted(cases, key=repr)
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        reasons = dict(zip(ordered, pool.map(compile_case, ordered, chunksize=1), strict=True))
    for case, why in reasons.items():
        if why:
            print(f"left out {case}: {why}")
    print(f"{len(cases)} kernels; of each product us, error, plan (None: what serves)", flush=True)
    return reasons


def decode_steps(kinds: list[str], ladder: list[int], sweep: str) -> None:
    reasons = compiled_cases(kinds, ladder, sweep)
    for kind in kinds:
        weights = {name: copies_of(kind, *PRODUCTS[name][:2]) for name in NAMES}
        for rows in ladder:
            if not plans_of(sweep, kind, rows, GATED):
                continue
            total, num_bytes = 0.0, 0
            for name in NAMES:
                x, gated = random_matrix(rows, PRODUCTS[name][1]), name == GATED
                times: dict[AnyPlan, float] = {}
                errors, expected = {}, expected_of(kind, x, weights[name][0], gated)
                for plan in dict.fromkeys(plans_of(sweep, kind, rows, name)):
                    if not reasons[case_of(kind, plan, rows, name)]:
                        run = functools.partial(run_by, plan, x, gated)
                        errors[plan] = error_of(run(weights[name][0]), expected)
                        times[plan] = microseconds(run, weights[name]) if errors[plan] < WRONG else math.inf
                best = sorted(times, key=lambda plan: times[plan])
                shown = best if not sweep else [*best[:4], *([None] if None in best[4:] else [])]
                told = "; ".join(f"{times[plan]:.1f} {errors[plan]:.0e} {plan and tuple(plan)}" for plan in shown)
                print(f"  {kind:10} {rows:4} {name:8} {told}", flush=True)
                total += min(times.values(), default=math.nan)
                num_bytes += weights[name][0].num_bytes
            print(
                f"{kind:10} {rows:4} rows: {total * 32e-3:.2f} ms of 32 layers, {num_bytes / total / 1e6:.2f} TB/s",
                flush=True,
            )


def rounding(rows: int) -> None:
    for inputs in (4096, 14336):
        x = random_matrix(rows, inputs)
        us = replay_ms(lambda x=x: [quantise_rows(x) for _ in range(16)], 3) * 1e3 / 16
        print(f"{rows} rows of {inputs} rounded: {us:.1f} us", flush=True)


def prompts(rows: int) -> None:
    """TFLOP/s of a layer's products for so many rows."""
    operations = sum(2 * rows * PRODUCTS[name][0] * PRODUCTS[name][1] for name in NAMES)
    xs = {name: random_matrix(rows, PRODUCTS[name][1]) for name in NAMES}
    plain = {name: random_matrix(*PRODUCTS[name][:2]) for name in NAMES}
    made = {name: quantise_fp8(plain[name]) for name in NAMES}
    small = {name: weight_of("int4", *PRODUCTS[name][:2]) for name in NAMES}
    rounded = {name: quantise_rows(x) for name, x in xs.items()}
    one = torch.ones((), device="cuda")

    def scaled_mm(name: str, is_fast: bool, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
        values = made[name].values.view(FP8)
        return torch._scaled_mm(
            rounded[name][0], values.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=is_fast
        )

    ways: dict[str, Callable[[str], object]] = {
        "bf16": lambda name: functional.linear(xs[name], plain[name]),
        "fp8, activations rounded": lambda name: quantised.scaled_linear(xs[name], made[name]),
        "fp8 product alone, a scale a row": lambda name: scaled_mm(name, True, rounded[name][1], made[name].scales),
        "the same, precise sums": lambda name: scaled_mm(name, False, rounded[name][1], made[name].scales),
        "fp8 product alone, a scale a tensor": lambda name: scaled_mm(name, True, one, one),
        "int4 made whole": lambda name: functional.linear(xs[name], quantised.made_whole(small[name], xs[name])),
    }
    for what, run in ways.items():
        try:
            ms = {name: replay_ms(functools.partial(run, name), 3) for name in NAMES}
            listed = ", ".join(f"{name} {time:.3f}" for name, time in ms.items())
            print(f"{rows} rows {what:36} {operations / sum(ms.values()) / 1e9:7.0f} TFLOP/s; ms: {listed}", flush=True)
        except Exception as failure:
            print(f"{rows} rows {what:36} failed: {str(failure)[:120]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", nargs="?", const="triton", default="", choices=("triton", "hopper"))
    parser.add_argument("--kinds", nargs="+", default=list(GROUPS))
    parser.add_argument("--rows", type=int, nargs="+", default=LADDER)
    parser.add_argument("--prompt-rows", type=int, nargs="*", default=[8192])
    options = parser.parse_args()
    bandwidth, rate = measure_limits()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s", flush=True)
    for rows in options.prompt_rows:
        rounding(rows)
        prompts(rows)
    decode_steps(options.kinds, options.rows, options.sweep)


if __name__ == "__main__":
    main()
