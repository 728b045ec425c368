"""Matrix products of one decode step of an 8B Llama: ours against cuBLAS and the limits measured in the same run.

python benchmarks/matmul.py    # ms a step at each number of rows; `tandem kernels --tune MODEL` measures plans
"""

from __future__ import annotations

import argparse

import torch
from product_steps import PAUSE, PRODUCTS, measure_limits, our_product, random_matrix, steps_ms, torch_product

from tandem.kernels.products import matmul
from tandem.kernels.products.tuning.candidates import LADDER


def relative_error(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    expected = x.double() @ weight.double().t()
    return ((out.double() - expected).norm() / expected.norm()).item()


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
            if matmul.chosen_plan(rows, *layers[0].shape, x.device) is None:
                by_torch.append(name)
        assert worst < 1e-2, f"wrong product at {rows} rows: relative error {worst}"
        floor = max(num_bytes / bandwidth, num_bytes * rows / rate) * 1e3
        both = torch_product, our_product
        busy, rested = steps_ms(rows, weights, both), steps_ms(rows, weights, both, PAUSE)
        figures = f"{floor:7.2f} {busy[0]:7.2f} {busy[1]:7.2f} {rested[0]:15.2f} {rested[1]:7.2f}"
        print(f"{rows:5} {figures}  {','.join(by_torch) or '-'}; {worst:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=LADDER)
    report(tuple(parser.parse_args().rows))


if __name__ == "__main__":
    main()
