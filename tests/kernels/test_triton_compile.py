"""Every Triton kernel compiles for sm_90 and sm_80 without a GPU and fits their shared memory."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

import torch  # noqa: E402

from tandem.kernels.triton_kernels.prefill.paged_prefill import prefill_constants  # noqa: E402

SHARED_MEMORY_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # a block's limit, from the CUDA programming guide
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
INT32 = {"block_tables", "seq_lens", "query_start_loc"}
INT64 = {"slot_mapping", "overflow", "sources", "destinations", "counts"}
FP32 = {"k_scale", "v_scale", "alibi_slopes", "sinks", "peaks", "totals", "partial"}
TOKENS = {"output", "query", "key", "value"}
CACHES = {"key_cache", "value_cache"}
FLOATS = {"scale", "soft_cap"}
PLAIN = {
    "HAS_ALIBI": False, "WINDOW": 0, "HAS_SOFT_CAP": False, "HAS_SINKS": False, "IS_FP8": False, "SPARSE_STRIDE": 0,
    "SPARSE_BLOCK": 0, "CAUSAL": True,
}  # fmt: skip
EVERY = {"HAS_ALIBI": True, "WINDOW": 1, "HAS_SOFT_CAP": True, "HAS_SINKS": True}


def compile_kernel(kernel: Any, capability: int, dtype: torch.dtype, constants: dict[str, Any]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    cache = "fp8e4nv" if constants.get("IS_FP8") else NAMES[dtype]
    signature = {name: _type_of(name, NAMES[dtype], cache, constants) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type_of(name: str, dtype: str, cache: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name == "output" and constants.get("SPLIT"):
        return "*fp32"
    for group, kind in (
        (INT32, "*i32"), (INT64, "*i64"), (FP32, "*fp32"), (FLOATS, "fp32"),
        (TOKENS, f"*{dtype}"), (CACHES, f"*{cache}"),
    ):  # fmt: skip
        if name in group:
            return kind
    return "*i16" if name == "pool" else "i32"


def kernel_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"tandem.kernels.triton_kernels.{module}"), name)


def prefill(
    dtype: torch.dtype, group: int, head_size: int, **options: Any
) -> tuple[str, str, torch.dtype, dict[str, Any]]:
    constants = prefill_constants(dtype, group, head_size, 64) | {"HAS_CACHE": True} | PLAIN | options
    return "prefill.paged_prefill", "paged_prefill_kernel", dtype, constants


WRITE = {"BLOCK_SIZE": 64, "HEAD_SIZE": 128, "D_PAD": 128, "num_warps": 1}
CASES = {
    "prefill-bf16": (90, prefill(torch.bfloat16, 4, 128)),
    "prefill-fp16-256-all": (80, prefill(torch.float16, 8, 256, **EVERY)),
    "prefill-fp32-128": (80, prefill(torch.float32, 1, 128)),
    "prefill-sm100": (100, prefill(torch.bfloat16, 4, 128)),
    "encoder": (80, prefill(torch.bfloat16, 1, 64, HAS_CACHE=False, CAUSAL=False)),
    "cross-fp8-all-sm100": (100, prefill(torch.float16, 4, 128, IS_FP8=True, CAUSAL=False, **EVERY)),
    "sparse-prefill": (90, prefill(torch.bfloat16, 4, 128, SPARSE_STRIDE=8, SPARSE_BLOCK=64)),
    "prefill-fp8": (90, prefill(torch.bfloat16, 4, 128, IS_FP8=True)),
    "write-bf16": (80, ("blocks.cache_write", "cache_write_kernel", torch.bfloat16, {**WRITE, "IS_FP8": False})),
    "write-fp8": (90, ("blocks.cache_write", "cache_write_kernel", torch.bfloat16, {**WRITE, "IS_FP8": True})),
    "copy": (80, ("blocks.copy_blocks", "copy_blocks_kernel", torch.bfloat16, {"CHUNK": 2048})),
}
# Each of their options is another case's, too, or, as prompts in fp32, what GPU tests run: `make soak` compiles these.
MET_ELSEWHERE = ("prefill-sm100", "prefill-fp8", "prefill-fp32-128")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in MET_ELSEWHERE else case for case in CASES]
)
def test_kernel_compiles_and_fits_shared_memory(case: str) -> None:
    from triton.backends import backends

    if "nvidia" not in backends:
        pytest.skip("this triton build has no NVIDIA backend")
    capability, (module, name, dtype, constants) = CASES[case]
    compiled = compile_kernel(kernel_of(module, name), capability, dtype, constants)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[capability]
