"""Cache operations, what runs between matrix products, and sampling: each beside its limit and torch, in one run.

    python benchmarks/kernels.py --targets [--plot FILE.svg]   # the table of targets, attention and products too
    python benchmarks/kernels.py [--plot FILE.svg] [--only NAME] [--device cpu]

Medians between CUDA events with the host ahead, so launches cost nothing. `share` is the rate as a part of a copy's
(of the bus's for swaps) in this process; `torch` is the time of the same done with torch's own operations. Prefill,
decode and matrix products have benchmarks of their own: prefill_attention.py, decode_attention.py, matmul.py.
32 query and 8 KV heads of 128, bf16, blocks of 64 over 32 layers (8 MiB), hidden size 4,096, vocabulary 128,256.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.check.cache_cases import copy_case, digest_case, gather_case, push_case, random_pool, swap_case
from tandem.kernels.check.kernel_cases import Case, Shape
from tandem.kernels.check.layer_cases import (
    FILTERS,
    greedy_case,
    mask_case,
    norm_case,
    rope_case,
    sampling_case,
    silu_case,
)
from tandem.kernels.check.measure import Limits, measure_limits, median_seconds
from tandem.kernels.sampling import sampling

SPEC = AttentionSpec(32, 128, 128**-0.5, 8)
LAYERS, HIDDEN, MLP, VOCABULARY = 32, 4096, 14336, 128_256
Peer = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """What is measured, beside what, against which target."""

    case: Case
    peer: Peer | None = None
    target: float | None = None  # share of the limit
    over_bus: bool = False


@dataclass(frozen=True)
class Outcome:
    """What was measured of a row. `error` is against float64, times are a run's."""

    row: Row
    error: float
    seconds: float
    share: float
    peer_seconds: float | None


def rows_of(shape: Shape, small: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """(name, what makes the row): one after the other, so that only one case holds memory."""
    tokens, blocks, vocabulary = (256, 4, 8000) if small else (8192, 128, VOCABULARY)
    fp8 = Shape(AttentionSpec(32, 128, 128**-0.5, 8, kv_cache_dtype="fp8"), 64, shape.dtype, shape.device)
    yield "rope", lambda: Row(rope_case(shape, tokens), target=0.75)
    yield "rope fp8", lambda: Row(rope_case(fp8, tokens))
    yield "digest", lambda: Row(digest_case(shape, blocks, LAYERS), target=3.5 / 4.27)
    yield "copy", lambda: Row(copy_case(shape, blocks // 2, LAYERS))
    yield "gather", lambda: Row(gather_case(shape, blocks, LAYERS), torch_gather(shape, blocks, None))
    yield "gather layer", lambda: Row(gather_case(shape, blocks, LAYERS, layer=5), torch_gather(shape, blocks, 5))
    if shape.device.type == "cuda":
        for with_sums, programs in itertools.product((False, True), (16, 64, 1024)):
            yield "push", partial(push_row, shape, blocks, with_sums, programs)
        for to_host, layer in itertools.product((True, False), (None, 5)):
            yield "swap", partial(swap_row, shape, blocks // 2, to_host, layer)
    for count in (64, tokens):
        yield "norm", lambda n=count: Row(norm_case(shape, n, HIDDEN), torch_norm(shape, n))
        yield "silu", lambda n=count: Row(silu_case(shape, n, MLP), torch_silu(shape, n))
    for count in (4, 8) if small else (1, 64, 256):
        yield "greedy", lambda n=count: Row(greedy_case(shape, n, vocabulary), torch_argmax(shape, n, vocabulary))
        yield "masks", lambda n=count: Row(mask_case(shape, n, vocabulary))
        for filters in FILTERS:
            yield "sampling", partial(sampling_row, shape, count, vocabulary, filters)


def push_row(shape: Shape, num_blocks: int, with_sums: bool, programs: int) -> Row:
    return Row(push_case(shape, num_blocks, LAYERS, with_sums, programs))


def swap_row(shape: Shape, num_blocks: int, to_host: bool, layer: int | None) -> Row:
    return Row(swap_case(shape, num_blocks, LAYERS, to_host, layer), over_bus=True)


def sampling_row(shape: Shape, num_rows: int, vocabulary: int, filters: str) -> Row:
    peer = torch_sampling(shape, num_rows, vocabulary, filters)
    return Row(sampling_case(shape, num_rows, vocabulary, filters), peer)


def torch_gather(shape: Shape, num_blocks: int, layer: int | None) -> Peer:
    pool = random_pool(shape, 2 * num_blocks, LAYERS)
    ids = torch.randperm(2 * num_blocks, device=shape.device)[:num_blocks]
    source = pool if layer is None else pool[:, :, layer]
    return lambda: source.index_select(0, ids)


def torch_norm(shape: Shape, num_tokens: int) -> Peer:
    x, residual, weight = shape.random(num_tokens, HIDDEN), shape.random(num_tokens, HIDDEN), shape.random(HIDDEN)
    return lambda: functional.rms_norm(residual.add_(x), (HIDDEN,), weight, 1e-5)


def torch_silu(shape: Shape, num_tokens: int) -> Peer:
    gate_up = shape.random(num_tokens, 2 * MLP)
    return lambda: functional.silu(gate_up[:, :MLP]) * gate_up[:, MLP:]


def torch_argmax(shape: Shape, num_rows: int, vocabulary: int) -> Peer:
    logits = shape.random(num_rows, vocabulary)
    return lambda: logits.argmax(-1)


def torch_sampling(shape: Shape, num_rows: int, vocabulary: int, filters: str) -> Peer:
    """The eager path of our own sampler: a sort where there are filters."""
    top_k, top_p, min_p = FILTERS[filters]
    logits, order = shape.random(num_rows, vocabulary), torch.arange(num_rows, device=shape.device)
    fractions = (torch.full((num_rows,), value, device=shape.device) for value in (0.8, top_p, min_p))
    temperature, top_ps, min_ps = fractions
    settings = (temperature, order * 0 + top_k, top_ps, min_ps, order, order, order)
    return lambda: sampling._sample_eagerly(logits.float(), *settings, bool(filters))


def bus_bytes_s(device: torch.device) -> float:
    """The rate of a copy to pinned memory."""
    source = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    target = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    return source.numel() / median_seconds(lambda: target.copy_(source, non_blocking=True), device)


def measure(row: Row, device: torch.device, limits: Limits, bus: float) -> Outcome:
    error = row.case.error()
    seconds = median_seconds(row.case.run, device)
    share = row.case.work / seconds / (bus if row.over_bus else limits.bytes_s)
    return Outcome(row, error, seconds, share, median_seconds(row.peer, device) if row.peer else None)


def format_outcome(outcome: Outcome) -> str:
    case = outcome.row.case
    target = f"{outcome.row.target:.0%}" if outcome.row.target else "-"
    peer = f"{outcome.peer_seconds * 1e6:10.1f}" if outcome.peer_seconds else f"{'-':>10}"
    verdict = "" if outcome.error <= case.tolerance else f"  WRONG: error {outcome.error:.1e}"
    rate = case.work / outcome.seconds / 1e9
    return (
        f"{case.name:22} {case.size:20} {outcome.seconds * 1e6:10.1f} {rate:9.1f} {outcome.share:6.0%} {target:>6} "
        f"{peer}{verdict}"
    )


def bars(outcomes: list[Outcome]) -> list[tuple[str, float, float | None]]:
    """(name, share of the limit, the target's share) of each."""
    return [(f"{o.row.case.name}, {o.row.case.size}", o.share, o.row.target) for o in outcomes]


def draw(bars: Sequence[tuple[str, float, float | None]], title: str) -> str:
    """An SVG of bars: the share of the limit, marks at targets."""
    height, left, width = 22, 330, 500
    drawn = []
    for index, (name, share, target) in enumerate(bars):
        y, length = 40 + index * height, min(share, 1.0) * width
        drawn.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}</text>')
        drawn.append(f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="{height - 6}" fill="#4878a8"/>')
        drawn.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}">{share:.0%}</text>')
        if target:
            x = left + target * width
            drawn.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + height - 2}" stroke="#c03030"/>')
    size = f'width="{left + width + 60}" height="{60 + len(bars) * height}"'
    heading = f'<text x="{left}" y="24" font-weight="bold">{title}</text>'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{heading}{"".join(drawn)}</svg>\n'


def print_all(device: torch.device, only: str) -> list[Outcome]:
    small = device.type == "cpu"
    shape = Shape(SPEC, 64, torch.float32 if small else torch.bfloat16, device)
    limits = measure_limits(device, shape.dtype)
    bus = limits.bytes_s if small else bus_bytes_s(device)
    print(f"copy {limits.bytes_s / 1e9:.0f} GB/s, bus {bus / 1e9:.1f} GB/s")
    print(f"{'kernel':22} {'size':20} {'us':>10} {'GB/s':>9} {'share':>6} {'target':>6} {'torch us':>10}")
    outcomes = []
    for case_name, make in rows_of(shape, small):
        if only in case_name:
            outcomes.append(measure(make(), device, limits, bus))
            print(format_outcome(outcomes[-1]), flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the shares")
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="rope, digest, copy, gather, push, swap, norm, silu, greedy, masks or sampling",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: small sizes, to try it out")
    parser.add_argument("--targets", action="store_true", help="the table of targets, needs a GPU")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}")
    if arguments.targets:
        import kernel_targets

        drawn = kernel_targets.bars(kernel_targets.print_targets())
    else:
        drawn = bars(print_all(device, arguments.only))
    if arguments.plot:
        with open(arguments.plot, "w", encoding="utf-8") as file:
            file.write(draw(drawn, f"{name}: share of what bytes or FLOPs allow, lines: targets"))


if __name__ == "__main__":
    main()
