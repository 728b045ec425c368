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

COMMON = {"ranks": "*i32", "order": "*i32", "tiles": "*i32", "num_tiles": "*i32", "low": "*fp32"}
SHRINK = (adapters.shrink_kernel, {**COMMON, "x": "*bf16", "a": "*bf16"})
EXPAND = (adapters.expand_kernel, {**COMMON, "b": "*bf16", "out": "*bf16"})
SILU = (adapters.expand_silu_kernel, {**COMMON, "b": "*bf16", "gate_up": "*bf16", "out": "*bf16"})
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "shrink": (*SHRINK, {"SIZE": 4096, "LANES": 48, "RANK": 16}),
    "shrink-256": (*SHRINK, {"SIZE": 14336, "LANES": 256, "RANK": 256}),
    "expand": (
        *EXPAND,
        {"START_1": 4096, "START_2": 5120, "SIZE": 6144, "FIRST_1": 32, "FIRST_2": 40, "LANES": 48}
        | {"RANK": 16, "BLOCK_N": 128},
    ),
    "expand-silu": (*SILU, {"SIZE": 14336, "GROUP": 8, "RANK": 16, "BLOCK_N": 64}),
    "expand-silu-64": (*SILU, {"SIZE": 14336, "GROUP": 8, "RANK": 64, "BLOCK_N": 64}),
}


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_compiles(case: str, capability: int, block_m: int) -> None:
    kernel, types, fixed = CASES[case]
    inputs = 4096 if kernel is not adapters.shrink_kernel else fixed["SIZE"]
    lanes = 2 * fixed["RANK"] if kernel is adapters.expand_silu_kernel else fixed["LANES"]
    plan = adapters.ShrinkPlan.of(lanes, fixed["RANK"], inputs, block_m, itemsize=2)
    constants = {**fixed, "BLOCK_M": block_m, "SPLITS": plan.splits, "CHUNK": plan.chunk, "BLOCK_K": plan.block}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    constants["PDL"] = capability >= 90
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 1}
    )
    assert compiled.metadata.shared <= 100 << 10
