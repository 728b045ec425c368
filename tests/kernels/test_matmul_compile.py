"""The products' kernels compile for Hopper without a GPU, every one that a shipped table names; and the shares of a
product's work, recomputed here, cover it once and never wait in a circle."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from tandem.kernels.products import matmul  # noqa: E402
from tandem.kernels.products.matmul_plans import SHARED_BYTES, Plan, RingPlan, RowsPlan, StreamPlan, parse_table  # noqa: E402
from tandem.kernels.products.quantised_plans import INT4_TILE_K, Int4RingPlan, Int4RowPlan, choose_hopper_plan  # noqa: E402
from tandem.kernels.triton_kernels.products import matmul_launch  # noqa: E402
from tandem.kernels.triton_kernels.products.matmul_ring import matmul_ring_kernel  # noqa: E402
from tandem.kernels.triton_kernels.products.matmul_ring_int4 import matmul_ring_int4_kernel  # noqa: E402
from tandem.kernels.triton_kernels.products.matmul_rows import matmul_rows_kernel  # noqa: E402
from tandem.kernels.triton_kernels.products.matmul_rows_int4 import matmul_rows_int4_kernel  # noqa: E402
from tandem.kernels.triton_kernels.products.matmul_rows_scaled import matmul_rows_scaled_kernel  # noqa: E402
from tandem.kernels.triton_kernels.products.matmul_stream import matmul_stream_kernel  # noqa: E402

TUNED = Path(matmul.__file__).parent / "tuned"
GATED_OUTPUTS = 28672


def table_kernels() -> list[tuple[Plan, int, bool]]:
    """(plan, inputs, gated) of every kernel that the shipped tables need."""
    seen = set()
    for file in sorted(TUNED.glob("matmul_*.json")):
        for (num_outputs, num_inputs), steps in parse_table(file.read_text()).items():
            for _, plan in steps:
                if isinstance(plan, StreamPlan):
                    seen.add((plan._replace(programs=1, lead=0), 0, num_outputs == GATED_OUTPUTS))
                elif isinstance(plan, RingPlan):
                    seen.add((plan, 0, num_outputs == GATED_OUTPUTS))
                elif plan is not None:
                    seen.add((plan, num_inputs, num_outputs == GATED_OUTPUTS))
    return sorted(seen)


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    options = {name: constants[name] for name in ("num_warps", "maxnreg") if name in constants}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = GluonASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32"}


def descriptor(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> str:
    return f"tensordesc<{NAMES[dtype]}{[rows, columns]},{matmul_launch.tile_layout(rows, columns, dtype)!r}>"


def scales_of(dtype: torch.dtype) -> tuple[dict[str, str], dict[str, None]]:
    """Types and constants of what only products over e4m3 have."""
    names = ("w_scales", "x_scales")
    return ({}, dict.fromkeys(names)) if dtype == torch.bfloat16 else (dict.fromkeys(names, "*fp32"), {})


def compile_stream(
    plan: StreamPlan, *, has_bias: bool, silu: bool, late: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Any:
    scale_types, scales = scales_of(dtype)
    constants = matmul_launch.stream_constants(plan, has_bias=has_bias, silu=silu, late=late)
    y_tile = descriptor(plan.tile_m // constants["PARTS"], plan.tile_n // (2 if silu else 1))
    types = {
        "w_desc": descriptor(plan.tile_n, plan.tile_k, dtype), "x_desc": descriptor(plan.tile_m, plan.tile_k, dtype),
        "y_desc": y_tile, "bias": "*bf16", "workspace": "*i32", **scale_types,
    }  # fmt: skip
    return compile_kernel(matmul_stream_kernel, types, {**constants, **scales})


def compile_ring(
    plan: RingPlan, *, has_bias: bool, silu: bool, late: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Any:
    scale_types, scales = scales_of(dtype)
    types = {
        "w_desc": descriptor(plan.height, plan.tile_k, dtype), "x_desc": descriptor(plan.tile_m, plan.tile_k, dtype),
        "y_desc": descriptor(*matmul_launch.ring_y_tile(plan, silu)), "bias": "*bf16", **scale_types,
    }  # fmt: skip
    constants = matmul_launch.ring_constants(plan, has_bias=has_bias, silu=silu, late=late)
    return compile_kernel(matmul_ring_kernel, types, {**constants, **scales})


def compile_rows(plan: RowsPlan, num_rows: int, num_inputs: int, *, has_bias: bool, silu: bool) -> Any:
    flags = {"has_bias": has_bias, "silu": silu}
    constants = matmul_launch.rows_constants(plan, num_rows, num_inputs, **flags)
    types = dict.fromkeys(("x", "weight", "y", "bias"), "*bf16")
    return compile_kernel(matmul_rows_kernel, types, constants)


# One in four here, the others in `make soak`: on a clean machine each takes a second, and they differ in sizes alone.
@pytest.mark.parametrize(
    ("plan", "num_inputs", "gated"),
    [pytest.param(*each, marks=[pytest.mark.slow] if place % 4 else []) for place, each in enumerate(table_kernels())],
)
def test_every_kernel_of_the_tables_compiles(plan: Plan, num_inputs: int, gated: bool) -> None:
    flags = {"has_bias": False, "silu": gated}
    if isinstance(plan, StreamPlan):
        compiled = compile_stream(plan, **flags)
        assert "wgmma.mma_async" in compiled.asm["ptx"]
    elif isinstance(plan, RingPlan):
        compiled = compile_ring(plan, **flags)
        assert compiled.metadata.shared <= plan.shared_bytes + 512
    else:
        compiled = compile_rows(plan, 1, num_inputs, **flags)
    assert compiled.metadata.shared <= SHARED_BYTES
    assert "griddepcontrol.wait" in compiled.asm["ptx"]


@pytest.mark.parametrize("gated", [False, True])
def test_bias_and_gating_compile(gated: bool) -> None:
    flags = {"has_bias": not gated, "silu": gated}
    assert compile_stream(StreamPlan(128, 256, 64, 4, 8, 132), **flags).metadata.shared <= SHARED_BYTES
    assert compile_rows(RowsPlan(4, 1024, 8), 3, 2048, **flags).metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize(
    ("plan", "gated"),
    [
        (RingPlan(128, 256, 64, 4, 2), True),
        (RingPlan(256, 128, 64, 4, 2), False),
        (RingPlan(64, 128, 128, 4, 1), True),
    ],
)
def test_kernels_with_a_loading_warp_compile(plan: RingPlan, gated: bool) -> None:
    compiled = compile_ring(plan, has_bias=not gated, silu=gated)
    assert compiled.metadata.shared <= plan.shared_bytes + 512 <= SHARED_BYTES
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "griddepcontrol.wait", "setmaxnreg"):
        assert instruction in compiled.asm["ptx"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("plan", [StreamPlan(64, 64, 128, 6, 4, 1), RingPlan(64, 64, 128, 6, 1)])
def test_who_starts_late_lets_others_start_once_it_has_waited(plan: StreamPlan | RingPlan, late: bool) -> None:
    compiled = (compile_stream if isinstance(plan, StreamPlan) else compile_ring)(
        plan, has_bias=False, silu=False, late=late
    )
    waits, starts = (compiled.asm["ptx"].index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
    if late:
        assert waits < starts
    elif isinstance(plan, StreamPlan):  # a loading warp's code stands before what comes first
        assert starts < waits


def shares(tiles: int, steps: int, programs: int, lead: int) -> list[int]:
    """Where each program's share of tiles * steps units starts, as `share_start` of the kernel says."""
    units = tiles * steps
    return [p * units // programs + (lead if p * tiles % programs else 0) for p in range(programs + 1)]


@pytest.mark.parametrize("seed", range(100))
def test_shares_cover_all_units_and_who_finishes_knows_all_others(seed: int) -> None:
    draw = random.Random(seed)
    tiles, steps = draw.randint(1, 40), draw.randint(1, 30)
    even = draw.random() < 0.5 and steps > 2
    programs = tiles * draw.randint(2, max(2, steps // 2)) if even else draw.randint(1, tiles * steps)
    plan = StreamPlan(64, 64, 64, 4, 4, programs)
    leads = [lead for lead in range(steps) if plan._replace(lead=lead).is_valid(64, tiles * 64, steps * 64)]
    lead = draw.choice(leads or [0])
    starts = shares(tiles, steps, programs, lead)
    assert (starts[0], starts[-1]) == (0, tiles * steps)
    assert starts == sorted(set(starts))  # no program without work
    for tile in range(tiles):
        begin, end = tile * steps, (tile + 1) * steps
        parts = [p for p in range(programs) if starts[p] < end and starts[p + 1] > begin]
        finisher, last = parts[0], (end * programs - 1) // (tiles * steps)
        assert parts == list(range(finisher, last + 1))
        assert starts[finisher] <= begin  # the finisher has the first step, so no other program has part and start
        assert all(starts[p] > begin for p in parts[1:])


def test_one_row_over_scaled_weights_compiles() -> None:
    plan = choose_hopper_plan(1, 4096, 4096, 128, 8)
    assert isinstance(plan, RowsPlan)
    constants = matmul_launch.rows_scaled_constants(plan, 4096, 128, silu=True)
    types = {"x": "*bf16", "weight": "*fp8e4nv", "scales": "*fp16", "bias": "*bf16", "y": "*bf16"}
    assert "e4m3" in compile_kernel(matmul_rows_scaled_kernel, types, constants).asm["ptx"]


@pytest.mark.parametrize(
    ("inputs", "flags"),
    [
        (4096, {"silu": True}),
        (4096, {"has_bias": True}),
        pytest.param(14336, {"has_bias": True}, marks=pytest.mark.slow),
    ],
)
def test_one_row_over_4_bits_compiles(inputs: int, flags: dict[str, bool]) -> None:
    plan = choose_hopper_plan(1, 28672, inputs, 128, 4)
    assert isinstance(plan, Int4RowPlan)
    constants = matmul_launch.rows_int4_constants(plan, inputs, 128, **flags)
    types = {"x": "*i32", "weight": "*i32", "scales": "*fp16", "zeros": "*fp16", "bias": "*bf16", "y": "*bf16"}
    compiled = compile_kernel(matmul_rows_int4_kernel, types, constants)
    before, _, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert before.count("ld.global") >= plan.outputs  # its first weights
    assert after.count("dp4a") >= plan.outputs * inputs // 32 // 2  # four numbers of two bytes each
    assert compiled.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype", "flags"),
    [
        (64, 28672, 4096, torch.bfloat16, {"silu": True}),
        (32, 28672, 4096, torch.float16, {"silu": True}),
        (128, 4096, 14336, torch.bfloat16, {"has_bias": True}),
        (64, 4096, 4096, torch.float16, {}),
    ],
)
def test_many_rows_over_4_bits_compile(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, flags: dict[str, bool]
) -> None:
    """A lane unpacks what it multiplies: the compiler refuses an exchange, which would take longer than the product."""
    plan = choose_hopper_plan(rows, outputs, inputs, 128, 4)
    assert isinstance(plan, Int4RingPlan)
    types = {
        "w_desc": descriptor(plan.height, INT4_TILE_K // 8, torch.int32),
        "x_desc": descriptor(plan.tile_m, INT4_TILE_K, dtype),
        "y_desc": descriptor(*matmul_launch.ring_int4_y_tile(plan, flags.get("silu", False)), dtype),
        **dict.fromkeys(("scales", "zeros"), "*fp16"), "bias": "*bf16", "workspace": "*i32",
    }  # fmt: skip
    compiled = compile_kernel(
        matmul_ring_int4_kernel, types, matmul_launch.ring_int4_constants(plan, inputs, 128, **flags)
    )
    before = compiled.asm["ptx"].partition("griddepcontrol.launch_dependents")[0]
    assert "cp.async.bulk.tensor" in before  # its first words
    assert f"wgmma.mma_async.sync.aligned.m64n{plan.tile_m}k16.f32" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("plan", [RingPlan(128, 64, 128, 8, 1, 4), StreamPlan(64, 64, 256, 6, 4, 128, 2)])
def test_products_over_e4m3_compile(plan: RingPlan | StreamPlan) -> None:
    compiling = compile_ring if isinstance(plan, RingPlan) else compile_stream
    compiled = compiling(plan, has_bias=False, silu=True, dtype=torch.float8_e4m3fn)  # type: ignore[operator]
    assert "e4m3.e4m3" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_BYTES
