"""What a user runs first on a new device: which kernels would serve a layer and why, whether they are right, how fast.

Errors are against float64; speeds stand beside a copy's or a matrix product's in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tandem.kernels.api.backend import AttentionBackend
from tandem.kernels.api.selection import load_backend, order_for, rank_backends, select_backend
from tandem.kernels.check.cache_cases import copy_case, digest_case, gather_case, push_case, swap_case
from tandem.kernels.check.kernel_cases import Case, Shape, decode_case, prefill_case
from tandem.kernels.check.layer_cases import (
    greedy_case,
    mask_case,
    norm_case,
    product_case,
    rope_case,
    sampling_case,
    silu_case,
)
from tandem.kernels.check.measure import Limits, median_seconds
from tandem.kernels.products import fused_ops, matmul, matmul_device
from tandem.kernels.products.tuning import stored


@dataclass(frozen=True)
class Workload:
    """Sizes of the self-test: a second or two of work for the device."""

    prompt: tuple[int, int]  # rows, new tokens of each
    prefix: tuple[int, int, int]  # rows, new tokens, tokens in the cache
    decodes: tuple[tuple[int, int], ...]  # rows, tokens in the cache
    tokens: int
    product_rows: tuple[int, ...]
    sampled: tuple[int, int]  # rows, vocabulary
    blocks: tuple[int, int]  # blocks, layers


WORKLOADS = {
    "cuda": Workload((2, 4096), (1, 1024, 8192), ((8, 4096), (64, 1024)), 8192, (1, 64), (64, 128_256), (16, 32)),
    "cpu": Workload((1, 128), (1, 64, 256), ((4, 256),), 128, (1, 16), (4, 4000), (4, 2)),
}


@dataclass(frozen=True)
class BackendReport:
    """What the selection says of one backend for the layer in question."""

    name: str
    is_chosen: bool
    reason: str  # why it is chosen, or why it can't serve; "" for one that could


@dataclass(frozen=True)
class Result:
    """One kernel's outcome. `failure`: the exception's text, or "" when it ran."""

    name: str
    size: str
    error: float = float("nan")
    tolerance: float = 0.0
    seconds: float = float("nan")
    rate: float = float("nan")  # bytes or operations a second
    is_product: bool = False
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return not self.failure and self.error <= self.tolerance

    def share_of(self, limits: Limits) -> float:
        return self.rate / (limits.operations_s if self.is_product else limits.bytes_s)


def report_backends(shape: Shape) -> list[BackendReport]:
    """Every attention backend, best first as the selection table has them for this device."""
    layer = (shape.device, shape.dtype, shape.spec.head_size, shape.spec)
    usable, reasons = rank_backends(*layer, shape.block_size)
    reports = []
    for name in order_for(shape.device, shape.dtype, shape.spec):
        is_chosen = bool(usable) and load_backend(name) is usable[0]
        why = select_backend(*layer, block_size=shape.block_size)[1].split(" (")[0] if is_chosen else ""
        reports.append(BackendReport(name, is_chosen, reasons.get(name, why)))
    return reports


def describe_kernels(shape: Shape, num_rows: int, length: int) -> list[tuple[str, str]]:
    """(operation, which of our kernels serves it and why) for a decode step of `num_rows` x `length` tokens."""
    spec = shape.spec
    on_gpu = fused_ops.is_fused(torch.empty(0, device=shape.device))
    lines = []
    if on_gpu:
        from tandem.kernels.backends.triton_prefill import why_general_layer

        why = why_general_layer(shape.device, shape.dtype, spec)
        lines.append(("prefill by triton", "the Hopper kernel" if why is None else f"the general kernel: {why}"))
        lines.append((f"decode of {num_rows} x {length} by triton", describe_decode(shape, num_rows, length)))
    lines.append(("between the products", "fused Triton kernels" if on_gpu else "plain PyTorch: Triton needs CUDA"))
    lines.append(("sampling", "Triton kernels, no sort" if on_gpu else "plain PyTorch, with a sort"))
    lines.append((f"products of up to {matmul.LONGEST_TUNED} rows", describe_tables(shape.device)))
    return lines


def describe_tables(device: torch.device) -> str:
    """Says whose plans the products of decode steps take."""
    if not matmul_device.is_hopper(device):
        return "torch: our kernels need a Hopper GPU"
    tables = matmul_device.tables_of(device)
    said = [f"shipped for this device: {len(tables.shipped)} weights"] * bool(tables.shipped)
    if tables.made:
        said.append(f"made here: {len(tables.made)} weights, {stored.made_path(stored.key_of(device))}")
    if not tables.measured:
        said.append("no table for this device, `tandem kernels --tune MODEL` makes one")
    said.append(f"else as devices like this one: {len(tables.like)} weights" if tables.like else "else torch")
    return "; ".join(said)


def describe_decode(shape: Shape, num_rows: int, length: int) -> str:
    """Which version of the Triton kernel serves a decode step of `num_rows` x `length` tokens that no graph holds."""
    from tandem.kernels.backends.triton_decode import version_of
    from tandem.kernels.triton_kernels.decode.decode_launch import decode_constants

    spec = shape.spec
    constants = decode_constants(
        shape.dtype, shape.cache_dtype.itemsize, spec.group_size, 1, spec.head_size, shape.block_size, 0
    )
    if version_of(constants, length, num_rows, spec.num_heads) == "V1":
        return "V1: one pass over each row; inside a captured graph V2"
    ever = "whatever the lengths" if constants["num_warps"] == 1 else "V1 for short rows"
    return f"V2: keys shared among programs, parts merged; {ever}"


def run_cases(shape: Shape, backends: list[type[AttentionBackend]] | None = None) -> Iterator[Result]:
    """One result after the other; a kernel that fails doesn't stop the rest. `backends`: default all usable ones."""
    if backends is None:
        backends, _ = rank_backends(shape.device, shape.dtype, shape.spec.head_size, shape.spec, shape.block_size)
    for name, make in _cases(shape, backends):
        yield measure(name, make, shape.device)


def measure(name: str, make: Callable[[], Case], device: torch.device) -> Result:
    """Error first, then speed."""
    try:
        case = make()
        error = case.error()
        seconds = median_seconds(case.run, device)
    except Exception as failure:  # whatever a kernel raises on a device that nobody has tried
        return Result(name, "", failure=f"{type(failure).__name__}: {failure}".splitlines()[0][:300])
    return Result(name, case.size, error, case.tolerance, seconds, case.work / seconds, case.is_product)


def _cases(shape: Shape, backends: list[type[AttentionBackend]]) -> Iterator[tuple[str, Callable[[], Case]]]:
    work, spec = WORKLOADS[shape.device.type], shape.spec
    for backend in backends:
        name, ops = backend.get_name().lower(), backend.get_ops()
        yield f"prefill, {name}", partial(prefill_case, shape, ops, *work.prompt)
        yield f"prefix, {name}", partial(prefill_case, shape, ops, *work.prefix)
        for rows, length in work.decodes:
            yield f"decode, {name}", partial(decode_case, shape, ops, rows, length)
    hidden = spec.num_heads * spec.head_size
    yield "rope + cache write", partial(rope_case, shape, work.tokens)
    yield "add + RMS norm", partial(norm_case, shape, work.tokens, hidden)
    yield "silu * up", partial(silu_case, shape, work.tokens, 3 * hidden)
    for rows in work.product_rows:
        yield "product", partial(product_case, shape, rows, shape.columns, hidden)
    yield "greedy sampling", partial(greedy_case, shape, *work.sampled)
    for filters in ("", "both"):
        name = "sampling, top-k + top-p" if filters else "sampling"
        yield name, partial(sampling_case, shape, *work.sampled, filters)
    yield "token masks", partial(mask_case, shape, *work.sampled)
    yield "copy of blocks", partial(copy_case, shape, *work.blocks)
    yield "digest of blocks", partial(digest_case, shape, *work.blocks)
    yield "gather of a layer", partial(gather_case, shape, *work.blocks, layer=1)
    if shape.device.type == "cuda":
        yield "push and digest", partial(push_case, shape, *work.blocks, with_sums=True, num_programs=64)
        for to_host in (True, False):
            yield f"swap {'out' if to_host else 'in'}", partial(swap_case, shape, *work.blocks, to_host=to_host)
