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

from tandem.kernels.triton_kernels.adapters import launch, rows, tiles  # noqa: E402

INTEGERS = dict.fromkeys(("ranks", "order", "slots", "tiles"), "*i32")
FLOATS = {"low": "*fp32", **dict.fromkeys(("x", "a", "b", "gate_up", "out"), "*bf16")}
QKV = {"START_1": 4096, "START_2": 5120, "SIZE": 6144, "FIRST_1": 32, "FIRST_2": 40, "LANES": 48, "RANK": 16}
BOTH = {"START_1": 14336, "START_2": 28672, "SIZE": 28672, "FIRST_1": 112, "FIRST_2": launch.NEVER}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shrink": (rows.shrink_rows_kernel, {"SIZE": 4096, "LANES": 48, "RANK": 16, "BLOCK_K": launch.BLOCK_K}),
    "shrink-256": (
        rows.shrink_rows_kernel,
        {"SIZE": 14336, "LANES": 256, "RANK": 256, "BLOCK_K": launch.BLOCK_K},
    ),
    "expand": (rows.expand_rows_kernel, {**QKV, "BLOCK_N": 128}),
    "expand-256": (rows.expand_rows_kernel, {**QKV, "LANES": 768, "RANK": 256, "BLOCK_N": 16}),
    "shrink-8": (rows.shrink_rows_kernel, {"SIZE": 4096, "LANES": 24, "RANK": 8, "BLOCK_K": launch.BLOCK_K}),
    "expand-silu-8": (rows.expand_silu_rows_kernel, {"SIZE": 14336, "GROUP": 8, "RANK": 8, "BLOCK_N": 128}),
    "prompts-expand-8": (
        tiles.expand_tiles_kernel,
        {**BOTH, "GROUP": 8, "LANES": 16, "RANK": 8, "BLOCK_N": 128},
    ),
    "expand-silu": (rows.expand_silu_rows_kernel, {"SIZE": 14336, "GROUP": 8, "RANK": 16, "BLOCK_N": 128}),
    "expand-silu-64": (rows.expand_silu_rows_kernel, {"SIZE": 14336, "GROUP": 8, "RANK": 64, "BLOCK_N": 32}),
    "prompts-shrink": (tiles.shrink_tiles_kernel, {"SIZE": 4096, "LANES": 48, "RANK": 16, "BLOCK_K": 64}),
    "prompts-expand": (tiles.expand_tiles_kernel, {**QKV, "GROUP": 0, "BLOCK_N": 128}),
    "prompts-expand-64": (
        tiles.expand_tiles_kernel,
        {**BOTH, "GROUP": 8, "LANES": 128, "RANK": 64, "BLOCK_N": 64},
    ),
}


# The large ones of each kernel, and those of rank 8, are compiled for one generation, the others for both; `make soak`
# compiles the rest.
FOR_ONE = (
    "shrink-8",
    "expand-silu-8",
    "prompts-expand-8",
    "shrink-256",
    "expand-256",
    "expand-silu-64",
    "prompts-expand-64",
)


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        pytest.param(case, capability, marks=[pytest.mark.slow] if capability == 80 and case in FOR_ONE else [])
        for case in CASES
        for capability in (80, 90)
    ],
)
def test_compiles(case: str, capability: int) -> None:
    kernel, fixed = CASES[case]
    takes_tiles = "tiles" in kernel.arg_names
    splits = launch.TILE_SPLITS if takes_tiles else launch.num_splits(fixed.get("LANES", 2 * fixed["RANK"]), 4096)
    constants = {
        **fixed,
        "SPLITS": splits,
        "SPLITS_PAD": triton.next_power_of_2(splits),
        "PLACES": launch.PLACES,
        "BLOCK_M": 64,
        "TILE": launch.SILU_TILE,
    }
    constants["CHUNK"] = 64 if takes_tiles else min(launch.CHUNK, fixed["RANK"])
    constants["INNER"] = max(launch.LEAST_INNER, fixed["RANK"])
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    constants["PDL"] = capability >= 90
    if "BESIDE" in kernel.arg_names:
        constants["BESIDE"] = constants["PDL"]
    types = INTEGERS | FLOATS
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert compiled.metadata.shared <= 100 << 10
