"""The kernels of decode steps of few rows compile for Hopper without a GPU, ask for weights and keys before they wait;
which products they serve."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from tandem.kernels.api.spec import AttentionSpec  # noqa: E402
from tandem.kernels.products import few_rows, few_rows_attention  # noqa: E402
from tandem.kernels.triton_kernels.products import few_rows_launch, matmul_launch  # noqa: E402
from tandem.kernels.triton_kernels.products.few_rows_attention import few_rows_attention_kernel  # noqa: E402
from tandem.kernels.triton_kernels.products.matmul_rows import matmul_rows_kernel  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
WAIT = "griddepcontrol.wait"
POINTERS = {
    **dict.fromkeys(("output", "qkv", "q_weight", "k_weight", "key_cache", "value_cache"), "*bf16"),
    "cos_sin": "*fp32",
    "partial": "*i64",
    "block_tables": "*i32",
    "seq_lens": "*i32",
    "slot_mapping": "*i64",
    "scale": "fp32",
    "eps": "fp32",
}


def signature(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    return {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}


@pytest.mark.parametrize(
    ("rows", "kv_heads", "group", "head_size", "block_size", "has_norm"),
    [(1, 8, 4, 128, 64, True), (8, 8, 7, 128, 64, True), (1, 2, 7, 64, 16, False)],
)
def test_attention_compiles(
    rows: int, kv_heads: int, group: int, head_size: int, block_size: int, has_norm: bool
) -> None:
    constants = few_rows_launch.attention_constants(rows, kv_heads, group, head_size, block_size, has_norm=has_norm)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    constants["PDL"] = True
    names = few_rows_attention_kernel.arg_names
    aligned = ("qkv", "key_cache", "value_cache", "qkv_row", "cache_block", "cache_head", "cache_slot")
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    types = signature(few_rows_attention_kernel, POINTERS, constants)
    compiled = triton.compile(
        ASTSource(few_rows_attention_kernel, types, constants, hints), target=HOPPER, options=options
    )
    before, _, after = compiled.asm["ptx"].partition(WAIT)
    tile = constants["TILE"] * head_size * 2 // (16 * 32 * options["num_warps"])  # loads of 16 bytes, of each thread
    assert before.count("ld.global") >= 2 * tile
    assert "st.global" not in before
    assert "st.global" in after
    assert compiled.metadata.shared <= 227 << 10


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "flags"),
    [
        (1, 4096, 1024, {"normalises": True, "has_bias": True}),
        (2, 6144, 1024, {"normalises": True, "silu": True}),
        (1, 1024, 3072, {"adds": True, "has_bias": True}),
        (2, 1024, 2048, {"adds": True}),
    ],
)
def test_products_compile(rows: int, outputs: int, inputs: int, flags: dict[str, bool]) -> None:
    plan = few_rows.plan_for(rows, outputs, inputs)
    assert plan is not None
    constants = matmul_launch.rows_constants(plan, rows, inputs, **{"has_bias": False, "silu": False, **flags})
    types = {**dict.fromkeys(("x", "weight", "y", "bias", "gain"), "*bf16"), "eps": "fp32"}
    names = matmul_rows_kernel.arg_names
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in ("x", "weight", "gain", "x_row", "w_row")}
    source = GluonASTSource(matmul_rows_kernel, signature(matmul_rows_kernel, types, constants), constants, hints)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": plan.warps})
    before, _, _ = compiled.asm["ptx"].partition(WAIT)
    assert before.count("ld.global") * 8 * 32 * plan.warps == plan.tile_n * plan.tile_k


def test_which_products_are_served() -> None:
    large = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    small = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
    for rows in range(1, few_rows.MOST_ROWS + 1):
        for outputs, inputs in large + small:
            plan = few_rows.plan_for(rows, outputs, inputs)
            assert plan is not None
            assert plan.is_valid(rows, outputs, inputs)
        assert few_rows.pays(rows, small)
        assert not few_rows.pays(rows, large)
    most = few_rows.MOST_ROWS
    for sizes in [(0, 4096, 4096), (most + 1, 4096, 4096), (1, 4096, 1000), (1, 4095, 4096), (1, 0, 4096), (1, 64, 0)]:
        assert few_rows.plan_for(*sizes) is None
    assert not few_rows.pays(1, ())  # a layer whose gate and up don't take turns
    assert not few_rows.pays(most + 1, small)
    assert not few_rows.serves(torch.zeros(1, 1024, dtype=torch.bfloat16), small)  # not on a CPU


def test_which_layers_one_launch_attends_for() -> None:
    cache = torch.zeros(1, 8, 2, 64, 128, dtype=torch.bfloat16)
    spec = AttentionSpec(32, 128, 0.1, 8)
    assert few_rows_attention.why_not(8, torch.bfloat16, spec, cache) is None
    assert few_rows_attention.why_not(9, torch.bfloat16, spec, cache) == "9 rows"
    assert few_rows_attention.why_not(0, torch.bfloat16, spec, cache) is not None
    others = [
        (torch.float32, spec, cache.float()),
        (torch.bfloat16, spec, cache.to(torch.float8_e4m3fn)),
        (torch.bfloat16, spec, cache[:0]),
        (torch.bfloat16, spec, cache[:, :, :, :40]),
        (torch.bfloat16, AttentionSpec(32, 96, 0.1, 8), cache[..., :96]),
        (torch.bfloat16, AttentionSpec(256, 128, 0.1, 8), cache),
        (torch.bfloat16, AttentionSpec(32, 128, 0.1, 8, sliding_window=7), cache),
        (torch.bfloat16, AttentionSpec(32, 128, 0.1, 8, logits_soft_cap=7.0), cache),
    ]
    for dtype, layer, kept in others:
        assert few_rows_attention.why_not(1, dtype, layer, kept) is not None
