"""The kernels of adapters compile for each GPU generation without a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tandem.kernels.triton_kernels.products import adapters  # noqa: E402

COMMON = {"ranks": "*i32", "tiles": "*i32", "low": "*fp32"}
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "shrink": (
        adapters.shrink_kernel,
        {**COMMON, "x": "*bf16", "a": "*bf16"},
        {"SIZE": 4096, "PARTS": 3, "RANK": 16, "BLOCK_K": 256},
    ),
    "shrink-256": (
        adapters.shrink_kernel,
        {**COMMON, "x": "*bf16", "a": "*bf16"},
        {"SIZE": 14336, "PARTS": 1, "RANK": 256, "BLOCK_K": 32},
    ),
    "expand": (
        adapters.expand_kernel,
        {**COMMON, "b": "*bf16", "out": "*bf16"},
        {"START_1": 4096, "START_2": 5120, "SIZE": 6144, "FIRST_1": 32, "FIRST_2": 40, "GROUP": 0}
        | {"PARTS": 3, "RANK": 16, "BLOCK_N": 128},
    ),
    "expand-grouped": (
        adapters.expand_kernel,
        {**COMMON, "b": "*bf16", "out": "*bf16"},
        {"START_1": 14336, "START_2": 28672, "SIZE": 28672, "FIRST_1": 112, "FIRST_2": adapters.NEVER, "GROUP": 8}
        | {"PARTS": 2, "RANK": 64, "BLOCK_N": 128},
    ),
}


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_compiles(case: str, capability: int, block_m: int) -> None:
    kernel, types, fixed = CASES[case]
    constants = {**fixed, "BLOCK_M": block_m, "PDL": capability >= 90}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert compiled.metadata.shared <= 160 << 10
