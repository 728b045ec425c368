"""What was asked of each kernel: target, best peer and limit beside what this device does, in one process.

`python benchmarks/kernels.py --targets [--plot FILE.svg]`. One H200, 32 query and 8 KV heads of 128, bf16, blocks of 64
in a block-major pool. Peers' figures are of the same kind of machine, not of this run: FlashAttention-3 and FlashInfer
for attention, cuBLAS for products (which is also measured here).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import decode_attention
import prefill_attention
import product_steps
import torch

from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.check.cache_cases import digest_case
from tandem.kernels.check.kernel_cases import Shape
from tandem.kernels.check.layer_cases import rope_case
from tandem.kernels.check.measure import median_seconds

SPEC = AttentionSpec(32, 128, 128**-0.5, 8)
FP8_TARGET = 0.54
# Shape -> (peer, target)
PREFILL = {"8 x 2k": (434, 430), "1 x 8k": (560, 510), "1 x 16k": (578, 530)}
DECODE = {
    "8 x 8k": (3267, 3400),
    "64 x 2k": (3775, 3800),
    "64 x 8k": (4273, 4280),
    "128 x 1k": (3644, 3700),
    "1 x 128k": (3649, 3800),
}
PRODUCTS = {1: (3.92, 3.65), 64: (4.26, 3.9), 128: (4.71, 4.3), 256: (7.12, 6.2)}


@dataclass(frozen=True)
class Target:
    """One row of the table: what was measured beside what was asked for and what others reach."""

    name: str
    unit: str
    value: float
    target: float
    limit: float  # what bytes or FLOPs allow here
    peer: float | None = None
    most: bool = False  # the target is an upper bound

    @property
    def is_met(self) -> bool:
        return self.value <= self.target if self.most else self.value >= self.target

    @property
    def share(self) -> float:
        """The part of the limit that is reached, at most 1."""
        return min(1.0, self.limit / self.value if self.most else self.value / self.limit)

    def line(self) -> str:
        peer = f"{self.peer:9.2f}" if self.peer else f"{'-':>9}"
        verdict = "met" if self.is_met else "MISSED"
        return f"{self.name:44} {self.value:9.2f} {self.target:9.2f} {peer} {self.limit:9.2f} {self.unit:8} {verdict}"


HEADING = f"{'':44} {'here':>9} {'target':>9} {'peer':>9} {'limit':>9}"


def all_targets() -> Iterator[Target]:
    """Measures one after the other; each part frees its memory."""
    bandwidth, flops = product_steps.measure_limits()
    for part in (prefill_targets, decode_targets, cache_targets, product_targets):
        yield from part(bandwidth, flops)
        torch.cuda.empty_cache()


def prefill_targets(_: float, flops: float) -> Iterator[Target]:
    limit = flops / 1e12
    rates = {}
    for name in (*PREFILL, "1k over 8k"):
        lengths, earlier = prefill_attention.SHAPES[name]
        run = prefill_attention.ours(prefill_attention.make_batch(lengths, earlier), SPEC)
        rates[name] = prefill_attention.tera_operations(lengths, earlier) / prefill_attention.median_seconds(run)
    for name, (peer, target) in PREFILL.items():
        yield Target(f"prefill {name}", "TFLOP/s", rates[name], target, limit, peer)
    yield Target("prefill 1k over 8k, of the rate of 1 x 8k", "", rates["1k over 8k"] / rates["1 x 8k"], 0.85, 1.0)


def decode_targets(bandwidth: float, _: float) -> Iterator[Target]:
    wide = random_memory(torch.bfloat16)
    narrow = torch.empty(wide.shape, dtype=FP8_DTYPE, device="cuda")
    for piece, source in zip(narrow.split(1 << 29), wide.split(1 << 29), strict=True):
        piece.copy_(source)
    ratios = {}
    for name, (peer, target) in DECODE.items():
        lengths = decode_attention.SHAPES[name]
        num_bytes = sum(lengths) * decode_attention.KV_HEADS * decode_attention.SIZE * 2 * 2
        time, narrow_time = (decode_attention.Step.make(pool, lengths).microseconds() for pool in (wide, narrow))
        ratios[name] = narrow_time / time
        yield Target(f"decode {name}", "GB/s", num_bytes / time / 1e3, target, bandwidth / 1e9, peer)
    for name, ratio in ratios.items():
        yield Target(f"decode {name}, fp8 KV, time of bf16's", "", ratio, FP8_TARGET, 0.5, most=True)
    groups = decode_attention.TARGET_GROUPS
    own = decode_attention.OWN_TOKENS
    step = decode_attention.Step.make(wide, [tokens + own for rows, tokens in groups for _ in range(rows)], groups)
    times = step.microseconds() / step.microseconds(step.prefixes())
    read = sum(rows * (tokens + own) for rows, tokens in groups) / sum(tokens + rows * own for rows, tokens in groups)
    yield Target("decode 64 x 4.3k over 8 prefixes of 4k, times", "", times, 3.0, read)


def random_memory(dtype: torch.dtype) -> torch.Tensor:
    memory = torch.empty(decode_attention.POOL_VALUES, dtype=dtype, device="cuda")
    for piece in memory.split(1 << 30):
        piece.normal_()
    return memory


def cache_targets(bandwidth: float, _: float) -> Iterator[Target]:
    shape = Shape(SPEC, 64, torch.bfloat16, torch.device("cuda"))
    rope, digest = rope_case(shape, 8192), digest_case(shape, 128, 32)
    share = rope.work / median_seconds(rope.run, shape.device) / bandwidth
    yield Target("rotation + cache write, 8k tokens, of a copy", "", share, 0.75, 1.0)
    rate = digest.work / median_seconds(digest.run, shape.device) / 1e12
    yield Target("digest of 1 GiB of blocks", "TB/s", rate, 3.5, bandwidth / 1e12)


def product_targets(bandwidth: float, flops: float) -> Iterator[Target]:
    weights = {
        name: [product_steps.random_matrix(out, k) for _ in range(times)]
        for name, (out, k, times) in product_steps.PRODUCTS.items()
    }
    num_bytes = sum(weight.numel() * 2 for layers in weights.values() for weight in layers)
    for rows, (peer, target) in PRODUCTS.items():
        floor = max(num_bytes / bandwidth, num_bytes * rows / flops) * 1e3
        both = product_steps.our_product, product_steps.torch_product
        here, cublas = product_steps.steps_ms(rows, weights, both)
        yield Target(f"products of a step, {rows} rows", "ms", here, target, floor, peer, most=True)
        yield Target("  the same by cuBLAS, here", "ms", cublas, target, floor, peer, most=True)
        here, cublas = product_steps.steps_ms(rows, weights, both, product_steps.PAUSE)
        yield Target("  below the power limit", "ms", here, target, floor, peer, most=True)
        yield Target("  the same by cuBLAS", "ms", cublas, target, floor, peer, most=True)


def bars(targets: list[Target]) -> list[tuple[str, float, float]]:
    """(name, share of the limit, the target's share) of each, for a plot."""
    shares = [t.limit / t.target if t.most else t.target / t.limit for t in targets]
    return [(target.name, target.share, min(1.0, share)) for target, share in zip(targets, shares, strict=True)]


def print_targets(measure: Callable[[], Iterator[Target]] = all_targets) -> list[Target]:
    print(HEADING)
    found = []
    for target in measure():
        found.append(target)
        print(target.line(), flush=True)
    missed = sum(not target.is_met for target in found if not target.name.startswith("  "))
    print(f"{missed} missed")
    return found
