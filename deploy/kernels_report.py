"""`tandem kernels`: which kernels this machine has, which would serve a layer and why, and a short self-test."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from tandem.engine.contracts.errors import ConfigError
from tandem.kernels.api.errors import BackendUnavailableError, UnsupportedOptionError
from tandem.kernels.api.selection import select_backend
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.check import self_test
from tandem.kernels.check.kernel_cases import Shape
from tandem.kernels.check.measure import Limits, measure_limits
from tandem.kernels.check.self_test import Result
from tandem.kernels.reference import paged

PACKAGES = ("torch", "triton", "flash-attn", "flashinfer-python", "xformers")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report, or tunes. Returns 1 when a kernel failed or was wrong. Raises ConfigError."""
    shape = shape_of(arguments)
    print(_describe_machine(shape.device))
    if arguments.tune:
        from tandem.deploy.tune_products import run as tune

        return tune(arguments, shape.device)
    spec = shape.spec
    options = [f"{shape.cache_dtype} cache".replace("torch.", "")]
    options += [f"window {spec.sliding_window}"] * bool(spec.sliding_window)
    options += [f"soft cap {spec.logits_soft_cap}"] * bool(spec.logits_soft_cap)
    options += ["ALiBi"] * (spec.alibi_slopes is not None)
    dtype = str(shape.dtype).removeprefix("torch.")
    print(
        f"\nAttention of {spec.num_heads} query and {spec.num_kv_heads} KV heads of {spec.head_size}, {dtype}, "
        f"blocks of {shape.block_size}, {', '.join(options)}"
    )
    for backend in self_test.report_backends(shape):
        state = "chosen" if backend.is_chosen else "no" if backend.reason else "fits"
        print(f"  {backend.name:12} {state:7} {backend.reason}")
    print("\nKernels")
    for operation, text in self_test.describe_kernels(shape, arguments.rows, arguments.length):
        print(f"  {operation:28} {text}")
    return _test(shape, arguments.attention_backend) if arguments.test else 0


def shape_of(arguments: argparse.Namespace) -> Shape:
    """The layer that the flags describe. Raises ConfigError."""
    name = arguments.device
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: {error}") from error
    if device.type not in ("cuda", "cpu") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"--device {name}: there is no such device here; try --device cpu")
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = default if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    slopes = torch.tensor(paged.alibi_slopes(arguments.heads)) if arguments.alibi else None
    try:
        spec = AttentionSpec(
            arguments.heads, arguments.head_size, arguments.head_size**-0.5, arguments.kv_heads, slopes,
            arguments.sliding_window or None, arguments.soft_cap or None,
            "auto" if arguments.kv_cache_dtype == "auto" else "fp8",
        )  # fmt: skip
    except UnsupportedOptionError as error:
        raise ConfigError(str(error)) from error
    return Shape(spec, arguments.block_size, dtype, device)


def _describe_machine(device: torch.device) -> str:
    parts = []
    for package in PACKAGES:
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"no {package}")
    if device.type == "cpu":
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads); " + ", ".join(parts)
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name} (compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB); "
        + ", ".join(parts)
    )


def _test(shape: Shape, backend: str) -> int:
    backends = None
    if backend != "auto":
        try:
            layer = (shape.device, shape.dtype, shape.spec.head_size, shape.spec)
            backends = [select_backend(*layer, backend, shape.block_size)[0]]
        except BackendUnavailableError as error:
            raise ConfigError(str(error)) from error
    limits = measure_limits(shape.device, shape.dtype)
    product = _rate(limits.operations_s, True)
    print(f"\nSelf-test beside a copy of {_rate(limits.bytes_s, False)} and a matrix product of {product}")
    print(f"  {'kernel':24} {'size':22} {'error':>8} {'limit':>8} {'time':>11} {'rate':>14} {'share':>6}")
    wrong = 0
    for result in self_test.run_cases(shape, backends):
        print(format_result(result, limits), flush=True)
        wrong += not result.is_right
    print(f"{wrong} of the kernels above are not fit for use here" if wrong else "all right")
    return 1 if wrong else 0


def format_result(result: Result, limits: Limits) -> str:
    if result.failure:
        return f"  {result.name:24} FAILED: {result.failure}"
    verdict = "" if result.is_right else "  WRONG"
    return (
        f"  {result.name:24} {result.size:22} {result.error:8.1e} {result.tolerance:8.1e} {_time(result.seconds):>11} "
        f"{_rate(result.rate, result.is_product):>14} {result.share_of(limits):6.0%}{verdict}"
    )


def _rate(rate: float, is_product: bool) -> str:
    unit = "FLOP/s" if is_product else "B/s"
    return f"{rate / 1e12:.3g} T{unit}" if rate >= 1e12 else f"{rate / 1e9:.3g} G{unit}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
