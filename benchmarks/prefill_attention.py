"""Paged causal prefill: TFLOP/s of each shape beside torch's built-in flash attention, in one run.

python benchmarks/prefill_attention.py [--general | --variants]

32 query and 8 KV heads of 128, bf16, blocks of 64 in a block-major pool. A multiplication and an addition for each
pair of a query and a key it may see, once for scores and once for values. `--variants`: other head sizes, ALiBi and
fp8 prefixes by the Hopper kernel beside the general one, which serves what isn't faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends import triton_prefill
from tandem.kernels.backends.triton import TritonOps
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.check.measure import event_seconds
from tandem.kernels.check.sample_batches import PagedBatch, random_batch
from tandem.kernels.reference.paged import alibi_slopes
from tandem.kernels.triton_kernels.prefill import unpack_prefix

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 64
# Name -> (new tokens of each row, earlier tokens of each row).
SHAPES = {
    "32 x 512": ((512,) * 32, 0),
    "8 x 2k": ((2048,) * 8, 0),
    "4 x 4k": ((4096,) * 4, 0),
    "1 x 8k": ((8192,), 0),
    "1 x 16k": ((16384,), 0),
    "1k over 8k": ((1024,), 8192),
    "4 x 1k over 8k": ((1024,) * 4, 8192),
    "ragged 16k": ((100, 4000, 37, 1, 2500, 8000, 700, 1046), 0),
}


VARIANT_SHAPES = ("8 x 2k", "1 x 8k", "1k over 8k")


@dataclass(frozen=True)
class Variant:
    """A layer that differs from the usual one in one thing."""

    size: int = SIZE
    has_alibi: bool = False
    is_fp8: bool = False

    def spec(self) -> AttentionSpec:
        slopes = torch.tensor(alibi_slopes(HEADS)) if self.has_alibi else None
        return AttentionSpec(
            HEADS, self.size, self.size**-0.5, KV_HEADS, alibi_slopes=slopes,
            kv_cache_dtype="fp8" if self.is_fp8 else "auto",
        )  # fmt: skip


VARIANTS = {
    "128": Variant(), "64": Variant(64), "80": Variant(80), "96": Variant(96), "256": Variant(256),
    "ALiBi": Variant(has_alibi=True), "fp8": Variant(is_fp8=True),
}  # fmt: skip
FEW_QUERIES = (16, 32, 64, 128, 256)  # over an fp8 prefix: where unpacking it begins to pay


def tera_operations(lengths: tuple[int, ...], earlier: int, size: int = SIZE) -> float:
    pairs = sum(new * earlier + new * (new + 1) / 2 for new in lengths)
    return 4 * HEADS * size * pairs / 1e12


def median_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """GPU time of a call whose inputs come from memory: 256 MB are cleared first, which also hides the launch."""
    clear = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(3 + repeats):
        clear.zero_()
        times.append(event_seconds(run))
    return statistics.median(times[3:])


def ours(batch: PagedBatch, spec: AttentionSpec) -> Callable[[], object]:
    new = batch.prefill()
    return lambda: TritonOps.prefill(new, spec)


def torch_flash(batch: PagedBatch, lengths: tuple[int, ...]) -> Callable[[], object]:
    """torch's own kernel on contiguous rows of one length, keys and values repeated for every query head."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        by_row = tensor.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2)
        return by_row.repeat_interleave(HEADS // by_row.shape[1], dim=1)

    query, key, value = rows(batch.query), rows(batch.key), rows(batch.value)

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return run


def host_microseconds(run: Callable[[], object], repeats: int = 200) -> float:
    """Time to issue one call, the GPU kept from being the limit by short work."""
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / repeats * 1e6


def make_batch(lengths: tuple[int, ...], earlier: int, variant: Variant | None = None) -> PagedBatch:
    variant = variant or Variant()
    return random_batch(
        lengths, tuple(new + earlier for new in lengths), num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_size=variant.size, block_size=BLOCK, dtype=torch.bfloat16, device="cuda",
        cache_dtype=FP8_DTYPE if variant.is_fp8 else None,
    )  # fmt: skip


def both_kernels(batch: PagedBatch, spec: AttentionSpec) -> tuple[float, float]:
    """Seconds by the Hopper kernel and by the general one."""
    run = ours(batch, spec)
    hopper = median_seconds(run, 10)
    triton_prefill._failures.append("asked for")
    general = median_seconds(run, 10)
    triton_prefill._failures.clear()
    return hopper, general


def print_variants() -> None:
    unpack_prefix.WORTHWHILE_QUERIES = 0
    print(f"{'Hopper kernel / general, TFLOP/s':34}" + "".join(f"{name:>14}" for name in VARIANT_SHAPES))
    for name, variant in VARIANTS.items():
        cells = []
        for shape in VARIANT_SHAPES:
            lengths, earlier = SHAPES[shape]
            work = tera_operations(lengths, earlier, variant.size)
            hopper, general = both_kernels(make_batch(lengths, earlier, variant), variant.spec())
            cells.append(f"{work / hopper:.0f} / {work / general:.0f}")
        print(f"{name:34}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
    for new in FEW_QUERIES:
        hopper, general = both_kernels(make_batch((new,), 8192, VARIANTS["fp8"]), VARIANTS["fp8"].spec())
        print(f"{new} over 8k of fp8: {1e6 * hopper:.1f} / {1e6 * general:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--general", action="store_true", help="measure the general kernel, as other GPUs run it")
    parser.add_argument("--variants", action="store_true", help="measure other layers by both kernels")
    args = parser.parse_args()
    if args.variants:
        print_variants()
        return
    if args.general:
        triton_prefill._failures.append("asked for")
    spec = Variant().spec()
    print(f"{torch.cuda.get_device_name()}, {HEADS}/{KV_HEADS} heads of {SIZE}, bf16, blocks of {BLOCK}; TFLOP/s")
    print(f"{'shape':16} {'ours':>8} {'torch':>8}")
    for name, (lengths, earlier) in SHAPES.items():
        batch = make_batch(lengths, earlier)
        work = tera_operations(lengths, earlier)
        rate = work / median_seconds(ours(batch, spec))
        plain = earlier == 0 and len(set(lengths)) == 1
        peer = f"{work / median_seconds(torch_flash(batch, lengths)):8.0f}" if plain else f"{'-':>8}"
        print(f"{name:16} {rate:8.0f} {peer}", flush=True)
    print(f"host time of a call: {host_microseconds(ours(make_batch((64,), 64), spec)):.0f} us")


if __name__ == "__main__":
    main()
