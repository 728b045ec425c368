"""The decode kernels compile for sm_80, sm_90 and sm_100 without a GPU, fit shared memory and spill nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

import torch  # noqa: E402

from tandem.kernels.triton_kernels.decode.block_sparse import list_tiles_kernel  # noqa: E402
from tandem.kernels.triton_kernels.decode.decode_launch import decode_constants  # noqa: E402
from tandem.kernels.triton_kernels.decode.decode_plan import plan_kernel  # noqa: E402
from tandem.kernels.triton_kernels.decode.latent_decode import (  # noqa: E402
    PARTS_AT_ONCE,
    latent_constants,
    latent_decode_kernel,
    merge_latents_kernel,
)
from tandem.kernels.triton_kernels.decode.paged_decode import paged_decode_kernel  # noqa: E402
from tandem.kernels.triton_kernels.decode.shared_prefix import prefix_constants, shared_prefix_kernel  # noqa: E402
from tandem.kernels.triton_kernels.latents import absorb, new_rows  # noqa: E402

SHARED_MEMORY_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # a block's limit, CUDA programming guide
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP32 = {"k_scale", "v_scale", "alibi_slopes", "sinks", "cos_sin"} | {
    f"{whose}{name}" for whose in ("", "prefix_") for name in ("peaks", "totals", "partial")
}
INT32 = {"plan", "block_tables", "seq_lens", "query_starts", "tile_lists", "lists", "counts", "prefix_lens"} | {
    "chunk_lens", "chunk_rows", "prefix_plan", "prefix_places",
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "NUM_KV_HEADS": 8, "SPLIT": True, "IS_FP8": False, "HAS_ALIBI": False, "WINDOW": 0, "HAS_SOFT_CAP": False,
    "HAS_SINKS": False, "HAS_PREFIX": False, "PREFIX_MEMBERS": 0, "SPARSE_STRIDE": 0, "SPARSE_BLOCK": 0,
    "EARLY": False, "PDL": False,
}  # fmt: skip
EVERY = {"HAS_ALIBI": True, "WINDOW": 1, "HAS_SOFT_CAP": True}
BF16, FP16, FP32_TYPE = torch.bfloat16, torch.float16, torch.float32


def compile_kernel(kernel: Any, capability: int, dtype: torch.dtype, constants: dict[str, Any]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    cache = "fp8e4nv" if constants.get("IS_FP8") else NAMES[dtype]
    signature = {name: _type_of(name, NAMES[dtype], cache, constants) for name in kernel.arg_names}
    vectors = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name in ("output", "query", "cache", "key_cache", "value_cache", "partial")
        or name.startswith(("cache_", "query_"))
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=vectors)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type_of(name: str, dtype: str, cache: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in FP32:
        return "*fp32"
    if name in INT32:
        return "*i32"
    if name in ("output", "query", "cache", "latents", "weight", "gain", "out", "summed"):
        return f"*{dtype}"
    if name in ("positions", "slots"):
        return "*i64"
    if name in ("key_cache", "value_cache"):
        return f"*{cache}"
    return "fp32" if name in ("scale", "soft_cap", "eps") else "i32"


def decode(dtype: torch.dtype, group: int, head_size: int, num_new: int = 1, **options: Any) -> Any:
    itemsize = 1 if options.get("IS_FP8") else dtype.itemsize
    sparse_block = options.get("SPARSE_BLOCK", 0)
    constants = decode_constants(dtype, itemsize, group, num_new, head_size, 64, sparse_block)
    return paged_decode_kernel, dtype, constants | PLAIN | options


def shared(dtype: torch.dtype, group: int, head_size: int, **options: Any) -> Any:
    itemsize = 1 if options.get("IS_FP8") else dtype.itemsize
    constants = prefix_constants(decode_constants(dtype, itemsize, group, 1, head_size, 64, 0), 64 // group)
    plain = {name: PLAIN[name] for name in ("NUM_KV_HEADS", "IS_FP8", "HAS_ALIBI", "HAS_SOFT_CAP", "EARLY", "PDL")}
    return shared_prefix_kernel, dtype, constants | plain | options


def latents(dtype: torch.dtype, num_heads: int, capability: int = 90, first: int = 0) -> Any:
    shared_bytes = SHARED_MEMORY_BYTES[capability]
    constants = latent_constants(dtype, num_heads, 512, 64, 64, shared_bytes)
    return latent_decode_kernel, dtype, constants | {"FIRST": first, "PDL": False}


def around_latents(kernel: Any, dtype: torch.dtype, num_heads: int) -> Any:
    """What lies before decode over latents, and after it."""
    rows = new_rows.row_constants(512, 64, 64, interleaved=True)
    heads = max(num_heads, 1)
    constants = {
        absorb.store_and_absorb_kernel: absorb.absorb_constants(heads, 128, 512, dtype) | rows,
        absorb.values_kernel: absorb.values_constants(heads, 128, 512, dtype),
        new_rows.store_and_rotate_kernel: {"NUM_HEADS": num_heads, "HEADS": min(32, heads), "KEY": 128} | rows,
    }[kernel]
    return kernel, dtype, constants | {"num_warps": 4, "PDL": True}


MERGED = {"GROUPS": 2, "GROUP": 64, "LATENT": 512, "COLUMNS": 128, "CHUNK": PARTS_AT_ONCE, "num_warps": 4, "PDL": True}
PLAN = {"TILE": 64, "MIN_TILES": 1, "CHUNK": 1024, "PROGRAMS_PAD": 512, "num_warps": 8, "PDL": True}
LISTS = {"GROUP": 4, "GROUP_PAD": 4, "STRIDE": 4, "BLOCK": 64, "TILE": 64, "CHUNK": 256, "PDL": False}
CASES = {
    "one-pass-bf16": (90, decode(BF16, 4, 128, SPLIT=False)),
    "split-bf16": (90, decode(BF16, 4, 128, PDL=True)),
    "split-early": (90, decode(BF16, 4, 128, EARLY=True, PDL=True)),
    "split-bf16-sm80": (80, decode(BF16, 4, 128)),
    "split-bf16-sm100": (100, decode(BF16, 4, 128)),
    "split-fp8": (90, decode(BF16, 4, 128, IS_FP8=True)),
    "split-fp8-early": (90, decode(BF16, 4, 80, IS_FP8=True, EARLY=True, WINDOW=True, PDL=True)),
    "split-fp8-sm100": (100, decode(FP16, 8, 64, IS_FP8=True)),
    "8-new-tokens": (90, decode(BF16, 4, 128, 8)),
    "8-new-tokens-256-sm80": (80, decode(FP16, 4, 256, 8)),
    "fp32-256-all": (80, decode(FP32_TYPE, 1, 256, SPLIT=False, **EVERY)),
    "fp32-80-all-split": (80, decode(FP32_TYPE, 4, 80, **EVERY)),
    "chunks-and-sinks": (90, decode(BF16, 8, 64, WINDOW=2, HAS_SINKS=True, EARLY=True, PDL=True)),
    "first-hidden": (90, decode(BF16, 4, 128, WINDOW=3, EARLY=True, PDL=True)),
    "prefix-sinks": (80, decode(FP16, 4, 128, HAS_PREFIX=True, PREFIX_MEMBERS=16, HAS_SINKS=True)),
    "sparse": (90, decode(BF16, 4, 128, SPARSE_STRIDE=8, SPARSE_BLOCK=64)),
    "prefix": (90, decode(BF16, 4, 128, HAS_PREFIX=True, PREFIX_MEMBERS=16, PDL=True)),
    "prefix-fp8-sm100": (100, decode(BF16, 4, 128, HAS_PREFIX=True, PREFIX_MEMBERS=16, IS_FP8=True, PDL=True)),
    "shared": (90, shared(BF16, 4, 128, EARLY=True, PDL=True)),
    "shared-sm80": (80, shared(FP16, 8, 128, HAS_ALIBI=True, HAS_SOFT_CAP=True)),
    "shared-sm100": (100, shared(BF16, 4, 128)),
    "shared-fp8": (90, shared(BF16, 4, 128, IS_FP8=True)),
    "shared-256": (90, shared(BF16, 4, 256)),
    "shared-fp32": (80, shared(FP32_TYPE, 4, 128)),
    "plan": (90, (plan_kernel, BF16, PLAN | {"WINDOW": 1, "HAS_PREFIX": True, "HAS_COUNTS": False})),
    "latents-16": (90, latents(BF16, 16)),
    "latents-16-first-hidden": (90, latents(BF16, 16, first=1)),
    "latents-128": (90, latents(BF16, 128)),
    "latents-16-sm80": (80, latents(BF16, 16, 80)),
    "latents-128-sm80": (80, latents(BF16, 128, 80)),
    "latents-merged": (90, (merge_latents_kernel, BF16, MERGED)),
    "latents-absorbed": (90, around_latents(absorb.store_and_absorb_kernel, BF16, 16)),
    "latents-absorbed-fp32": (90, around_latents(absorb.store_and_absorb_kernel, FP32_TYPE, 16)),
    "latents-values": (90, around_latents(absorb.values_kernel, BF16, 128)),
    "latents-values-fp32": (90, around_latents(absorb.values_kernel, FP32_TYPE, 16)),
    "latents-rotated": (90, around_latents(new_rows.store_and_rotate_kernel, BF16, 128)),
    "latents-stored": (90, around_latents(new_rows.store_and_rotate_kernel, BF16, 0)),
    "lists": (80, (list_tiles_kernel, BF16, LISTS)),
}
# Each of their options is another case's, too: these are compiled by `make soak`.
MET_ELSEWHERE = (
    "split-early", "split-bf16-sm80", "split-bf16-sm100", "split-fp8", "split-fp8-sm100", "8-new-tokens-256-sm80",
    "prefix", "shared-sm100", "latents-16-sm80", "shared-fp32", "fp32-80-all-split",
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in MET_ELSEWHERE else case for case in CASES]
)
def test_kernel_compiles_and_fits_shared_memory(case: str) -> None:
    from triton.backends import backends

    if "nvidia" not in backends:
        pytest.skip("this triton build has no NVIDIA backend")
    capability, (kernel, dtype, constants) = CASES[case]
    compiled = compile_kernel(kernel, capability, dtype, constants)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[capability]
    if kernel in (paged_decode_kernel, shared_prefix_kernel, latent_decode_kernel) and constants["num_stages"] > 1:
        assert "cp.async" in compiled.asm["ptx"], "keys and values are no longer loaded ahead"
