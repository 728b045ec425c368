"""Decode over latents as captured steps run it: GB/s beside a copy, TFLOP/s beside a product, of the same run.

    python benchmarks/latent_attention.py [--sweep] [--tiny]

Rows of 512 + 64 elements, bf16, blocks of 64, every layer of a step over memory of its own: DeepSeek-V2-Lite's 16
heads, V2's and V3's 128. First each shape is compared with the same in torch. `--sweep` tries other tiles, warps,
stages and programs. `--tiny`: small shapes, for a look under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from product_steps import captured

from tandem.kernels.check.measure import Limits, measure_limits, median_event_seconds
from tandem.kernels.products.matmul_device import shared_bytes_of
from tandem.kernels.triton_kernels.decode.latent_decode import (
    latent_constants,
    latent_decode,
    plan_latents,
)

LATENT, ROTATED, BLOCK, LAYERS = 512, 64, 64, 8
SHAPES = {
    "1 x 8k": [8192],
    "8 x 8k": [8192] * 8,
    "64 x 8k": [8192] * 64,
    "64 x 1k-15k": [1024 + 224 * i for i in range(64)],
    "256 x 1k": [1024] * 256,
    "1 x 128k": [131072],
}
HEADS = (16, 32, 128)
# Tile, warps, stages; of up to 16 heads, and of more.
SETTINGS = (
    ((32, 4, 2), (32, 4, 3), (32, 4, 4), (32, 8, 3), (64, 4, 2), (64, 8, 2), (64, 8, 3)),
    ((32, 4, 3), (32, 8, 2), (32, 8, 3), (32, 8, 4), (64, 4, 2), (64, 8, 2)),
)
SWEPT_HEADS = (16, 32, 128)
ERROR = 2e-2  # of outputs of about 1, bf16


class Step:
    """The decode attention of one step, layer after layer."""

    def __init__(self, lengths: list[int], heads: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        counts = [-(-length // BLOCK) for length in lengths]
        shape = sum(counts), 1, LAYERS, 1, BLOCK, LATENT + ROTATED
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        ids = torch.randperm(shape[0], generator=generator, device=device).to(torch.int32)
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
        for row, part in enumerate(ids.split(counts)):
            self.tables[row, : len(part)] = part
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        query = torch.empty(len(lengths), heads, LATENT + ROTATED, dtype=torch.bfloat16, device=device)
        self.query = query.normal_(generator=generator)
        self.scale = 1.5 / (LATENT + ROTATED) ** 0.5
        self.bytes = sum(lengths) * (LATENT + ROTATED) * 2 * LAYERS
        self.operations = 2 * sum(lengths) * heads * (2 * LATENT + ROTATED) * LAYERS

    def run(self, constants: dict[str, int], programs: int = 0) -> torch.Tensor:
        plan, outputs = plan_latents(self.seq_lens, constants, programs), []
        for layer in range(LAYERS):
            cache = self.pool[:, :, layer, 0]
            outputs.append(
                latent_decode(self.query, cache, self.tables, self.seq_lens, self.scale, constants, plan)
            )  # fmt: skip
        return outputs[-1]

    def expected(self, row: int) -> torch.Tensor:
        """[H, L] of one row in the last layer, fp32."""
        length = int(self.seq_lens[row])
        blocks = self.tables[row, : -(-length // BLOCK)].long()
        keys = self.pool[blocks, 0, LAYERS - 1, 0].flatten(0, 1)[:length].float()
        weights = (self.query[row].float() @ keys.T * self.scale).softmax(-1)
        return weights @ keys[:, :LATENT]

    def said(self, took: float, limits: Limits) -> str:
        rate, work = self.bytes / took, self.operations / took
        return (
            f"{took / LAYERS * 1e6:8.1f} us a layer {rate / 1e9:6.0f} GB/s {rate / limits.bytes_s:4.0%} of a copy, "
            f"{work / 1e12:4.0f} TFLOP/s {work / limits.operations_s:4.0%} of a product"
        )


def seconds(run: Callable[[], object]) -> float:
    """Seconds of one replay of a graph of `run`."""
    if not torch.cuda.is_available():
        run()
        return float("nan")
    return median_event_seconds(captured(run).replay, 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = {"tiny": [100, 33]} if options.tiny else SHAPES
    limits = measure_limits(device, torch.bfloat16)
    print(f"copy {limits.bytes_s / 1e9:.0f} GB/s, read and written; product {limits.operations_s / 1e12:.0f} TFLOP/s")
    for heads, (name, lengths) in itertools.product((16,) if options.tiny else HEADS, shapes.items()):
        step = Step(lengths, heads, device)
        constants = latent_constants(torch.bfloat16, heads, LATENT, ROTATED, BLOCK, shared_bytes_of(device))
        output = step.run(constants)
        worst = max(float((output[row].float() - step.expected(row)).abs().max()) for row in (0, len(lengths) - 1))
        took = seconds(lambda step=step, constants=constants: step.run(constants))
        wrong = "" if worst < ERROR else " WRONG"
        print(f"{heads:4} heads {name:12} {step.said(took, limits)}; error {worst:.1e}{wrong}")
        if options.sweep and heads in SWEPT_HEADS and name in ("64 x 8k", "1 x 8k", "tiny"):
            settings = SETTINGS[heads > 16]
            sweep(step, constants, limits, settings[:2] if options.tiny else settings)
        del step


def sweep(step: Step, constants: dict[str, int], limits: Limits, settings: tuple[tuple[int, int, int], ...]) -> None:
    """Prints the best settings: tile, warps, stages, programs a multiprocessor."""
    on_gpu = step.pool.is_cuda
    processors = torch.cuda.get_device_properties(step.pool.device).multi_processor_count if on_gpu else 5
    found = []
    for (tile, warps, stages), each in itertools.product(settings, (1, 2)):
        tried = constants | {"TILE": tile, "num_warps": warps, "num_stages": stages}
        try:
            step.run(tried, processors)
            took = seconds(lambda tried=tried, each=each: step.run(tried, processors * each))
        except Exception as error:
            if "out of resource" not in str(error).lower():
                raise
            continue
        found.append((took, tile, warps, stages, each))
    for took, tile, warps, stages, each in sorted(found)[:4]:
        print(f"     tile {tile}, {warps} warps, {stages} stages, {each} programs: {step.said(took, limits)}")


if __name__ == "__main__":
    main()
