"""The products over quantised weights compile for each GPU generation without a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tandem.kernels.products.matmul_plans import SHARED_BYTES  # noqa: E402
from tandem.kernels.products.quantised_plans import choose_plan  # noqa: E402
from tandem.kernels.triton_kernels.products.matmul_quantised import matmul_quantised_kernel  # noqa: E402
from tandem.kernels.triton_kernels.products.matmul_quantised_launch import constants_of  # noqa: E402
from tandem.kernels.triton_kernels.products.quantise_rows import quantise_rows_kernel  # noqa: E402

TYPES = {"x": "*bf16", "x_scales": "*fp32", "bias": "*bf16", "y": "*bf16", "sums": "*fp32", "arrivals": "*i32"}


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int) -> Any:
    options = {name: constants.pop(name) for name in ("num_warps", "maxnreg") if name in constants}
    constants["PDL"] = capability >= 90
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in types}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize(
    ("num_rows", "group", "bits", "silu"),
    [
        (1, 0, 8, False),
        (16, 0, 8, False),
        (64, 0, 8, True),
        (256, 128, 8, False),
        (16, 128, 8, False),
        (128, 0, 8, False),
        (1, 128, 4, False),
        (64, 128, 4, True),
    ],
)
def test_products_compile(num_rows: int, group: int, bits: int, silu: bool, capability: int) -> None:
    plan = choose_plan(num_rows, 28672 if silu else 4096, 4096, group, bits)
    assert plan is not None
    shared_bytes = SHARED_BYTES if capability == 90 else 99 << 10
    assert plan == plan.fitting(SHARED_BYTES, bits), "tuned plans fit where they were measured"
    plan = plan.fitting(shared_bytes, bits)
    scale = "*fp32" if bits == 8 else "*fp16"
    types = {**TYPES, "values": "*fp8e4nv" if bits == 8 else "*i32", "scales": scale, "zeros": scale}
    if plan.rounded:
        types["x"] = "*fp8e4nv"
    constants = constants_of(plan, group, bits, silu=silu)
    compiled = compile_kernel(matmul_quantised_kernel, types, constants, capability)
    assert "cp.async" in compiled.asm["ptx"], "weights are not loaded ahead"
    assert compiled.metadata.shared <= shared_bytes
    if capability == 90 and num_rows > 1:
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert ("e4m3.e4m3" in compiled.asm["ptx"]) == plan.rounded


def test_rounding_of_activations_compiles() -> None:
    types = {"x": "*bf16", "values": "*fp8e4nv", "scales": "*fp32"}
    compile_kernel(quantise_rows_kernel, types, {"SIZE": 14336, "PADDED": 16384, "num_warps": 16}, 90)
