"""The sampling kernels compile for each GPU generation without a GPU, with next to no shared memory."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tandem.kernels.triton_kernels.sampling import (  # noqa: E402
    sampling,
    sampling_groups,
    sampling_limits,
    token_masks,
)

TYPES = {
    "temperatures": "*fp32", "top_ks": "*i64", "top_ps": "*fp32", "min_ps": "*fp32", "cuts": "*fp32",
    "peaks": "*fp32", "masses": "*fp32", "listed": "*i32", "last_ids": "*i32",
    "seeds": "*i64", "sample_indices": "*i64", "output_indices": "*i64", "scores": "*fp64",
    "places": "*i32", "tokens": "*i64", "rows": "*i64", "masks": "*i32",
}  # fmt: skip
PARTS = {"MAX_SPLITS": sampling.MAX_SPLITS, "BLOCK": sampling.PARTS_BLOCK}
CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "limits": (
        sampling_limits.sampling_limits_kernel,
        {
            "BLOCK": sampling_limits.LIMITS_BLOCK,
            "GROUPS": sampling_limits.LISTED_AT_ONCE,
            "GROUP": sampling_groups.GROUP,
        },
        sampling_limits.LIMITS_WARPS,
    ),
    "groups": (
        sampling_groups.sampling_groups_kernel,
        {"GROUPS": sampling_groups.GROUPS_AT_ONCE, "GROUP": sampling_groups.GROUP},
        sampling_groups.GROUPS_WARPS,
    ),
    "parts": (sampling.sampling_parts_kernel, {**PARTS, "FILTERED": False}, sampling.PARTS_WARPS),
    "parts-filtered": (sampling.sampling_parts_kernel, {**PARTS, "FILTERED": True}, sampling.PARTS_WARPS),
    "masks": (token_masks.ban_tokens_kernel, {"BLOCK": token_masks.MASK_BLOCK}, token_masks.MASK_WARPS),
    "whole": (sampling.sampling_whole_kernel, {"MAX_SPLITS": sampling.MAX_SPLITS}, 2),
}


@pytest.mark.parametrize(
    ("capability", "logits"), [(80, "*fp32"), pytest.param(90, "*bf16", marks=pytest.mark.slow), (100, "*bf16")]
)
@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str, capability: int, logits: str) -> None:
    kernel, constants, num_warps = CASES[name]
    if "PDL" in kernel.arg_names:
        constants = {**constants, "PDL": capability >= 90}
    types = {**TYPES, "logits": logits}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 4 << 10
