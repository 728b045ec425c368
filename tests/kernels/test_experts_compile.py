"""The kernels of mixtures of experts compile for each GPU generation without a GPU, and their plans hold together."""

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

from tandem.kernels.experts.plans import (  # noqa: E402
    FewPlan,
    FewQuantisedPlan,
    GroupedPlan,
    GroupedRingPlan,
    MixtureSizes,
    StreamedPlan,
    choose_plan,
    every_plan,
)
from tandem.kernels.products.matmul_plans import SHARED_BYTES  # noqa: E402
from tandem.kernels.triton_kernels.experts import few_4bit, few_8bit, launch, launch_gluon, route, sort  # noqa: E402
from tandem.kernels.triton_kernels.experts.few import few_down_kernel, few_gate_up_kernel  # noqa: E402
from tandem.kernels.triton_kernels.experts.grouped import add_up_kernel, grouped_kernel  # noqa: E402
from tandem.kernels.triton_kernels.experts.grouped_ring import (  # noqa: E402
    BOX,
    gather_rows_kernel,
    grouped_ring_kernel,
)
from tandem.kernels.triton_kernels.experts.grouped_ring_e4m3 import grouped_ring_e4m3_kernel  # noqa: E402
from tandem.kernels.triton_kernels.experts.stored import Stored  # noqa: E402
from tandem.kernels.triton_kernels.experts.streamed import streamed_kernel  # noqa: E402
from tandem.kernels.triton_kernels.products.matmul_launch import tile_layout  # noqa: E402

TYPES = {
    "x": "*bf16", "weight": "*bf16", "y": "*bf16", "products": "*bf16", "logits": "*bf16", "bias": "*fp32",
    "weights": "*fp32", "ids": "*i32", "order": "*i32", "tiles": "*i32", "scales": "*fp32", "x_scales": "*fp32",
    "tally": "*i32", "slots": "*i64", "own_counts": "*fp32",
    "own_scales": "*fp32",
}  # fmt: skip
UNUSED = {"zeros": "*fp32", "counts": "*fp32", "alpha": "fp32", "limit": "fp32"}
QWEN3_30B = MixtureSizes(128, 8, 2048, 768)
QWEN3_30B_INT4 = QWEN3_30B._replace(bits=4, group=128, gluon="bf16")
QWEN3_30B_FP8 = QWEN3_30B._replace(bits=8, group=128, gluon="bf16")
GPT_OSS = MixtureSizes(32, 4, 2880, 2880, bits=4, is_e2m1=True, group=32, has_bias=True, gluon="bf16")


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int = 90, source: Any = ASTSource
) -> Any:
    options = {name: constants.pop(name) for name in ("num_warps", "maxnreg") if name in constants}
    if "num_warps" in kernel.arg_names:  # of kernels in Gluon
        constants["num_warps"] = options["num_warps"]
    if "PDL" in kernel.arg_names:
        constants["PDL"] = capability >= 90
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    pointers = [place for place, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    made = source(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in pointers})
    return triton.compile(made, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("num_tokens", [1, 64, 256, 1024, 8192])
def test_products_compile(num_tokens: int) -> None:
    plan = choose_plan(num_tokens, QWEN3_30B)
    assert plan is not None
    if isinstance(plan.gate_up, FewPlan):
        assert isinstance(plan.down, FewPlan)
        types = {**TYPES, "counts": "*fp32"}
        constants = {"NORM": True, **launch.few_constants(plan.gate_up, 768, 2048)}
        compile_kernel(few_gate_up_kernel, {**types, "gain": "*bf16", "eps": "fp32"}, constants)
        constants = {"TOP_K": 8, "ADD": True, **launch.few_constants(plan.down, 2048, 768)}
        compiled = compile_kernel(few_down_kernel, types, constants)
        assert "ld.global.cg.v4" in compiled.asm["ptx"], "weights are not read in long pieces"
        return
    for product, is_gated in ((plan.gate_up, True), (plan.down, False)):
        assert isinstance(product, GroupedPlan)
        constants = launch.grouped_constants(product, is_gated=is_gated)
        compiled = compile_kernel(grouped_kernel, {**TYPES, **UNUSED}, constants)
        assert "cp.async" in compiled.asm["ptx"], "weights are not loaded ahead"
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= SHARED_BYTES


def test_products_over_e4m3_compile() -> None:
    sizes = QWEN3_30B._replace(bits=8, group=128)
    types = {**TYPES, "weight": "*fp8e4nv", **UNUSED}
    few, grouped = choose_plan(1, sizes), choose_plan(64, sizes)
    assert few is not None
    assert grouped is not None
    assert isinstance(few.down, FewPlan)
    constants = {"TOP_K": 8, "ADD": False, **launch.few_constants(few.down, 2048, 768, is_scaled=True, group=128)}
    assert "ld.global.cg.v4" in compile_kernel(few_down_kernel, types, constants).asm["ptx"]
    assert isinstance(grouped.gate_up, GroupedPlan)
    constants = launch.grouped_constants(grouped.gate_up, is_gated=True, rounded=True, bits=8, group=128)
    compiled = compile_kernel(grouped_kernel, {**types, "x": "*fp8e4nv"}, constants)
    assert "m64n16k32.f32.e4m3.e4m3" in compiled.asm["ptx"]


def test_products_over_e2m1_compile() -> None:
    plan = choose_plan(64, MixtureSizes(32, 4, 2880, 2880, bits=4, is_e2m1=True, group=32))
    assert plan is not None
    assert isinstance(plan.gate_up, GroupedPlan)
    constants = launch.grouped_constants(plan.gate_up, is_gated=True, bits=4, is_e2m1=True, has_bias=True, clamped=True)
    types = {**TYPES, **UNUSED, "weight": "*i32", "scales": "*u8"}
    compiled = compile_kernel(grouped_kernel, types, constants)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "fma.rn.bf16x2" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    "sizes",
    [QWEN3_30B_INT4, QWEN3_30B_INT4._replace(group=32), GPT_OSS, QWEN3_30B_FP8, QWEN3_30B_FP8._replace(group=0)],
)
def test_products_of_very_few_rows_over_quantised_experts_compile(sizes: MixtureSizes) -> None:
    plan = choose_plan(1, sizes)
    assert plan is not None
    assert isinstance(plan.gate_up, FewQuantisedPlan)
    assert isinstance(plan.down, FewQuantisedPlan)
    scales = "*u8" if sizes.is_e2m1 else "*fp16" if sizes.bits == 4 else "*fp32"
    types = {**TYPES, **UNUSED, "weight": "*fp8e4nv", "scales": scales, "zeros": scales}
    of_clamp: dict[str, Any] = {}
    if sizes.bits == 4:
        types |= {"x": "*i32", "weight": "*i32"}
        of_clamp = {"CLAMPED": sizes.is_e2m1}
    few = few_4bit if sizes.bits == 4 else few_8bit
    gate_up_kernel, down_kernel = (getattr(few, f"few_{sizes.bits}bit_{name}_kernel") for name in ("gate_up", "down"))
    empty = torch.empty(0)
    weight = Stored(
        empty, empty, empty, empty, 0, 0, sizes.bits, sizes.is_e2m1, 0 if sizes.is_e2m1 else sizes.group, sizes.has_bias
    )
    constants = launch_gluon.few_quantised_constants(plan.gate_up, weight, sizes.hidden, sizes.hidden) | of_clamp
    gate_up = compile_kernel(gate_up_kernel, types, constants, source=GluonASTSource)
    constants = launch_gluon.few_quantised_constants(plan.down, weight, sizes.width, sizes.top_k * sizes.width)
    down = compile_kernel(down_kernel, types, constants | {"TOP_K": sizes.top_k}, source=GluonASTSource)
    for compiled in (gate_up, down):
        assert "ld.global.cg.v4" in compiled.asm["ptx"], "weights are not read in long pieces"
        assert ("dp4a.u32.s32" if sizes.bits == 4 else "cvt.rn.f16x2.e4m3x2") in compiled.asm["ptx"]
        assert compiled.metadata.shared <= SHARED_BYTES


def test_products_over_integers_of_four_bits_compile() -> None:
    plan = choose_plan(64, QWEN3_30B._replace(bits=4, group=128))
    assert plan is not None
    assert isinstance(plan.gate_up, GroupedPlan)
    constants = launch.grouped_constants(plan.gate_up, is_gated=True, bits=4, group=128)
    types = {**TYPES, **UNUSED, "weight": "*i32", "scales": "*fp16", "zeros": "*fp16"}
    assert "wgmma.mma_async" in compile_kernel(grouped_kernel, types, constants).asm["ptx"]


@pytest.mark.parametrize(("sizes", "num_tokens"), [(QWEN3_30B_INT4, 8), (QWEN3_30B_INT4, 200), (GPT_OSS, 10)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_products_whose_weights_go_straight_to_registers_compile(
    sizes: MixtureSizes, num_tokens: int, dtype: str
) -> None:
    plan = choose_plan(num_tokens, sizes)
    assert plan is not None
    if sizes.is_e2m1 and dtype == "fp16":
        return  # is too narrow for the powers of two
    numbers = "*u8" if sizes.is_e2m1 else f"*{dtype}"
    types = {**TYPES, **UNUSED, "weight": "*i32", "scales": numbers, "zeros": numbers, "x": f"*{dtype}"}
    for product, num_inputs, is_gated in ((plan.gate_up, sizes.hidden, True), (plan.down, sizes.width, False)):
        assert isinstance(product, StreamedPlan)
        constants = launch_gluon.streamed_constants(
            product, num_inputs, is_gated=is_gated, is_e2m1=sizes.is_e2m1, group=sizes.group,
            has_bias=sizes.has_bias, clamped=is_gated and sizes.is_e2m1,
        )  # fmt: skip
        compiled = compile_kernel(
            streamed_kernel, {**types, "y": f"*{dtype}", "bias": "*bf16"}, constants, source=GluonASTSource
        )
        ptx = compiled.asm["ptx"]
        assert "ld.global.cg.v4" in ptx, "weights are not read in long pieces"
        assert "mma.sync.aligned.m16n8k16" in ptx
        assert "ld.shared.v4" in ptx, "x is not read in long pieces"
        assert compiled.metadata.shared <= SHARED_BYTES


def test_weights_go_straight_to_registers_where_experts_have_few_pairs() -> None:
    def tile_of(num_tokens: int, sizes: MixtureSizes) -> int:
        plan = choose_plan(num_tokens, sizes)
        return plan.gate_up.tile_m if plan is not None and isinstance(plan.gate_up, StreamedPlan) else 0

    assert [tile_of(tokens, QWEN3_30B_INT4) for tokens in (4, 5, 64, 85, 86, 256, 257)] == [0, 8, 8, 8, 16, 16, 0]
    assert [tile_of(tokens, GPT_OSS) for tokens in (4, 5, 40, 41)] == [0, 8, 8, 0]
    others: tuple[dict[str, Any], ...] = ({"gluon": ""}, {"group": 64}, {"hidden": 2112}, {"width": 48})
    for other in others:
        assert tile_of(64, QWEN3_30B_INT4._replace(**other)) == 0
    assert tile_of(1, QWEN3_30B_INT4._replace(gluon="fp16")) == 8
    tried = every_plan(QWEN3_30B_INT4)
    assert len([plan for plan in tried if isinstance(plan.gate_up, StreamedPlan)]) == 4


@pytest.mark.parametrize("is_gated", [True, False])
def test_products_of_many_rows_in_gluon_compile(is_gated: bool) -> None:
    plan = choose_plan(8192, QWEN3_30B._replace(gluon="bf16"))
    assert plan is not None
    product = plan.gate_up
    assert isinstance(product, GroupedRingPlan)
    constants = launch_gluon.ring_constants(product, torch.bfloat16, is_gated=is_gated)
    tiles = {"w_desc": (BOX.value, product.tile_k), "x_desc": (product.tile_m, product.tile_k)}
    types = {**TYPES, **UNUSED}
    for name, tile in tiles.items():
        types[name] = f"tensordesc<bf16{list(tile)},{tile_layout(*tile, torch.bfloat16)!r}>"
    compiled = compile_kernel(grouped_ring_kernel, types, constants, source=GluonASTSource)
    assert "wgmma.mma_async.sync.aligned.m64n128k16" in compiled.asm["ptx"]
    assert "cp.async.bulk.tensor.2d" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("group", [0, 128])
def test_products_of_many_rows_over_e4m3_in_gluon_compile(group: int, is_gated: bool) -> None:
    plan = choose_plan(8192, QWEN3_30B_FP8._replace(group=group))
    assert plan is not None
    assert plan.rounded
    product = plan.gate_up
    assert isinstance(product, GroupedRingPlan)
    constants = launch_gluon.ring_e4m3_constants(product, torch.bfloat16, group, is_gated=is_gated)
    tiles = {"w_desc": (launch_gluon.ring_e4m3_box(is_gated=is_gated), 128), "x_desc": (product.tile_m, 128)}
    types = {**TYPES, **UNUSED, "w_scales": "*fp32"}
    for name, tile in tiles.items():
        types[name] = f"tensordesc<fp8e4nv{list(tile)},{tile_layout(*tile, torch.float8_e4m3fn)!r}>"
    compiled = compile_kernel(grouped_ring_e4m3_kernel, types, constants, source=GluonASTSource)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_BYTES


def test_rows_are_multiplied_in_gluon_where_experts_have_many() -> None:
    def takes_ring(num_tokens: int, sizes: MixtureSizes) -> bool:
        plan = choose_plan(num_tokens, sizes)
        return plan is not None and isinstance(plan.gate_up, GroupedRingPlan)

    sizes = QWEN3_30B._replace(gluon="bf16")
    assert [takes_ring(tokens, sizes) for tokens in (1, 64, 682, 683, 8192)] == [False, False, False, True, True]
    others: tuple[dict[str, Any], ...] = ({"gluon": ""}, {"width": 704}, {"hidden": 1920}, {"has_bias": True})
    for other in others:
        assert not takes_ring(8192, sizes._replace(**other))
    assert takes_ring(8192, QWEN3_30B_FP8)
    assert not takes_ring(8192, QWEN3_30B_FP8._replace(group=64))
    assert not takes_ring(8192, QWEN3_30B_INT4)


def test_what_lies_between_products_compiles() -> None:
    constants = {
        "NUM_EXPERTS": 256, "PADDED": 256, "TOP_K": 8, "TOP_K_PAD": 16, "SHARED": 1, "SIGMOID": True, "HAS_BIAS": True,
        "RENORMALISE": True, "GROUPS": 8, "KEPT_GROUPS": 4, "BY_PAIRS": True, "COUNTS": True,
        "num_warps": 1,
    }  # fmt: skip
    compile_kernel(route.route_kernel, {**TYPES, "factor": "fp32"}, constants)
    compile_kernel(sort.sort_kernel, TYPES, {"BLOCK": sort.MANY_PAIRS, "num_warps": 16})
    compile_kernel(add_up_kernel, TYPES, {"SIZE": 2048, "TOP_K": 8, "BLOCK": 1024, "num_warps": 4})
    compile_kernel(
        gather_rows_kernel,
        {**TYPES, **UNUSED},
        {"SIZE": 2880, "BLOCK": 2048, "ROWS": 4, "HAS_SCALES": True, "num_warps": 4},
    )


def test_every_number_of_tokens_takes_a_plan_that_was_tried() -> None:
    for sizes in (
        QWEN3_30B,
        MixtureSizes(8, 2, 4096, 14336),
        MixtureSizes(64, 6, 2048, 1408),
        MixtureSizes(4, 2, 64, 32, 4),
        QWEN3_30B._replace(gluon="bf16"),
        QWEN3_30B_INT4,
        QWEN3_30B_FP8,
        GPT_OSS,
    ):
        tried = every_plan(sizes)
        assert all(choose_plan(tokens, sizes) in tried for tokens in (*range(1, 300), 1000, 5000, 20000))
    assert choose_plan(8, MixtureSizes(4, 2, 60, 32)) is None
    half = QWEN3_30B._replace(num_experts=64)
    assert choose_plan(256, half, 128) == choose_plan(256, QWEN3_30B), "an expert has as many rows, wherever it is"
    assert choose_plan(256, half) != choose_plan(256, QWEN3_30B)
