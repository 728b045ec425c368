"""The fused kernels, decode inputs and pushes compile for each GPU generation without a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tandem.kernels.triton_kernels.blocks import digest, move_blocks  # noqa: E402
from tandem.kernels.triton_kernels.decode import decode_inputs  # noqa: E402
from tandem.kernels.triton_kernels.products import fused, rotation  # noqa: E402
from tandem.kernels.triton_kernels.sampling import argmax  # noqa: E402

HEADS = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEADS": 32, "KV_HEADS": 8, "HEAD_SIZE": 128, "HALF": 64}
ROPE_TYPES = {
    "qkv": "*bf16", "positions": "*i64", "cos_sin": "*fp32", "q_weight": "*bf16", "k_weight": "*bf16",
    "slot_mapping": "*i64", "k_scale": "*fp32", "v_scale": "*fp32", "overflow": "*i64", "eps": "fp32",
}  # fmt: skip
ROPE = {**HEADS, "HALF_PAD": 64, "D_PAD": 128, "BLOCK_SIZE": 64, "HAS_CACHE": True}
PLAIN = {**dict.fromkeys(("low", "b", "ranks", "order", "slots")), "RANK": 0, "SPLITS": 1, "SPLITS_PAD": 1}
PLAIN |= {"B_SLOT": 0, "RANK_SLOT": 0}
ADAPTED_TYPES = {"low": "*fp32", "b": "*bf16", **dict.fromkeys(("ranks", "order", "slots"), "*i32")}
ADAPTED = {"RANK": 16, "SPLITS": 8, "SPLITS_PAD": 8, "B_SLOT": 41943040, "RANK_SLOT": 384}
NORM = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "eps": "fp32"}
MOVE_TYPES = {"source": "i64", "target": "i64", "pairs": "*i64"}
MOVE = {"POOL_LAYERS": 32, "PLANES": 2, "PLANE_WORDS": 2048, "SLOT_WORDS": 32, "CHUNK": 2048}
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "add_rms_norm": (
        fused.rms_norm_kernel,
        {**NORM, "out": "*bf16"},
        {"SIZE": 4096, "PADDED": 4096, "HAS_RESIDUAL": True, "ROUNDS": False, "scales": None, **PLAIN},
    ),
    "add_rms_norm_adapted": (
        fused.rms_norm_kernel,
        {**NORM, "out": "*bf16", **ADAPTED_TYPES},
        {"SIZE": 4096, "PADDED": 4096, "HAS_RESIDUAL": True, "ROUNDS": False, "scales": None, **ADAPTED},
    ),
    "add_rms_norm_rounded": (
        fused.rms_norm_kernel,
        {**NORM, "out": "*fp8e4nv", "scales": "*fp32"},
        {"SIZE": 4096, "PADDED": 4096, "HAS_RESIDUAL": True, "ROUNDS": True, **PLAIN},
    ),
    "embedding": (
        fused.embedding_kernel,
        {"ids": "*i32", "table": "*bf16", "out": "*bf16"},
        {"SIZE": 5120, "PADDED": 8192},
    ),
    "silu_mul": (
        fused.silu_mul_kernel,
        {"gate_up": "*bf16", "out": "*bf16"},
        {"SIZE": 14336, "BLOCK": 2048, "GROUP": 8},
    ),
    "rotate_halves": (
        rotation.rotate_halves_kernel,
        dict.fromkeys(("query", "key", "query_out", "key_out", "cos", "sin"), "*bf16"),
        {"NUM_HEADS": 64, "NUM_KV_HEADS": 8, "HALF": 32, "HALF_PAD": 32, "WIDE": False, "HEADS": 16},
    ),
    "rope": (
        rotation.rope_and_store_kernel,
        {**ROPE_TYPES, "key_cache": "*bf16", "value_cache": "*bf16"},
        {**ROPE, "HAS_NORM": True, "IS_FP8": False, **PLAIN},
    ),
    "rope-adapted": (
        rotation.rope_and_store_kernel,
        {**ROPE_TYPES, "key_cache": "*bf16", "value_cache": "*bf16", **ADAPTED_TYPES},
        {**ROPE, "HAS_NORM": True, "IS_FP8": False, **ADAPTED, "HEADS": 4, "KV_HEADS": 4},
    ),
    "rope-fp8": (
        rotation.rope_and_store_kernel,
        {**ROPE_TYPES, "key_cache": "*fp8e4nv", "value_cache": "*fp8e4nv"},
        {**ROPE, "HAS_NORM": False, "IS_FP8": True, **PLAIN},
    ),
    "argmax-parts": (
        argmax.argmax_parts_kernel,
        {"logits": "*bf16", "peaks": "*fp32", "places": "*i32"},
        {"MAX_SPLITS": 64, "BLOCK": 2048},
    ),
    "argmax-whole": (
        argmax.argmax_whole_kernel,
        {"peaks": "*fp32", "places": "*i32", "tokens": "*i64"},
        {"MAX_SPLITS": 64, "STORES": False, **dict.fromkeys(("slots", "positions", "token_ids"))},
    ),
    "argmax-whole-stored": (
        argmax.argmax_whole_kernel,
        {
            "peaks": "*fp32", "places": "*i32", "tokens": "*i64", "slots": "*i64", "positions": "*i64",
            "token_ids": "*i32",
        },
        {"MAX_SPLITS": 64, "STORES": True},
    ),
    "decode-inputs": (
        decode_inputs.gather_decode_inputs_kernel,
        {
            "slots": "*i64", "positions": "*i64", "token_ids": "*i32", "block_table": "*i32", "input_ids": "*i32",
            "seq_lens": "*i32", "slot_mapping": "*i64", "block_tables": "*i32",
        },
        {"BLOCK_SIZE": 64, "COLUMNS": 256},
    ),
    "store-tokens": (
        decode_inputs.store_tokens_kernel,
        {"slots": "*i64", "positions": "*i64", "tokens": "*i64", "token_ids": "*i32"},
        {"ROWS": 128},
    ),
    "block-sums": (
        digest.block_sums_kernel,
        {"words": "*i64", "job": "*i64", "table": "*i64"},
        {"SEGMENT": 8192, "SLICE": 2048},
    ),
    "move-blocks": (
        move_blocks.move_blocks_kernel,
        {**MOVE_TYPES, "sums": "*i64", "keys": "*i64", "table": "*i64"},
        {**MOVE, "PAIRS": 8, "ALIGNMENT": 16, "HAS_SUMS": False, "SEGMENT": 1},
    ),
    "move-and-sum-blocks": (
        move_blocks.move_blocks_kernel,
        {**MOVE_TYPES, "sums": "*i64", "keys": "*i64", "table": "*i64"},
        {**MOVE, "PAIRS": 8, "ALIGNMENT": 16, "HAS_SUMS": True, "SEGMENT": 8192},
    ),
}  # fmt: skip
LARGE = ("rope-adapted", "add_rms_norm_adapted")  # compiled for one generation; `make soak` compiles them for others
WARPS = {"add_rms_norm_adapted": 16}  # as it is launched: with fewer a thread has more than a compiler does in time


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, capability, marks=[pytest.mark.slow] if name in LARGE and capability != 90 else [])
        for name in CASES
        for capability in (80, 90, 100)
    ],
)
def test_compiles(name: str, capability: int) -> None:
    kernel, types, constants = CASES[name]
    if capability == 80 and name in ("rope-fp8", "add_rms_norm_rounded"):
        pytest.skip("fp8 needs compute capability 8.9")
    if "PDL" in kernel.arg_names:
        constants = {**constants, "PDL": capability >= 90}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS.get(name, 4)}
    )
    assert compiled.metadata.shared <= 48 << 10
