"""The Hopper prefill kernel compiles without a GPU; its list of work and what its launch refuses."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

import torch  # noqa: E402

pytest.importorskip("triton.experimental.gluon", reason="this triton has no Gluon")

from tandem.kernels.triton_kernels.prefill import prefill_launch, unpack_prefix  # noqa: E402
from tandem.kernels.triton_kernels.prefill.prefill_hopper import prefill_hopper_kernel  # noqa: E402

SHARED_MEMORY_BYTES = 227 << 10  # a block's limit of sm_90, from the CUDA programming guide
INTEGERS = {"num_items", "window", "table_row", "block_units", "head_units", "value_units"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("bf16", {"head_size": 128, "block_size": 64, "has_cache": True}),
    "everything": (
        "fp16", {"head_size": 96, "block_size": 16, "has_cache": True, "has_alibi": True, "window_kind": 1,
                 "has_soft_cap": True}
    ),
    "chunks-and-sinks": (
        "bf16", {"head_size": 64, "block_size": 16, "has_cache": True, "window_kind": 2, "has_sinks": True}
    ),
    "alibi": ("bf16", {"head_size": 128, "block_size": 64, "has_cache": True, "has_alibi": True}),
    "large-heads": ("bf16", {"head_size": 256, "block_size": 64, "has_cache": True}),
    "large-heads-all": (
        "bf16", {"head_size": 256, "block_size": 16, "has_cache": True, "has_alibi": True, "window_kind": 1,
                 "has_soft_cap": True}
    ),
    "small-heads": ("bf16", {"head_size": 64, "block_size": 64, "has_cache": False}),
    "encoder": ("bf16", {"head_size": 64, "block_size": 64, "has_cache": False, "causal": False}),
    "cross": ("fp16", {"head_size": 128, "block_size": 16, "has_cache": True, "has_soft_cap": True, "causal": False}),
}  # fmt: skip
# Each of their options is another's, too: these are compiled by `make soak`.
MET_ELSEWHERE = ("plain", "alibi", "large-heads-all", "small-heads")


def compile_variant(dtype: str, **options: Any) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    constants = prefill_launch.hopper_constants(
        32, 4, **({"has_alibi": False, "window_kind": 0, "has_soft_cap": False} | options)
    )  # fmt: skip
    rows, box = prefill_launch.BOX_ROWS, constants["BOX"]
    boxes = {"q_desc": (1, rows), "cache_desc": (1, 1, box), "nothing_desc": (1, 1, box)}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_desc"):
            shape = (*boxes.get(name, (1, 1, rows)), prefill_launch.BOX_COLUMNS)
            return f"tensordesc<{dtype}{list(shape)},{prefill_launch._layout(len(shape))!r}>"
        if name in INTEGERS:
            return "i32"
        if name in {"alibi_slopes", "sinks"}:
            return "*fp32"
        return "fp32" if name in {"scale", "soft_cap"} else "*i32"

    signature = {name: kind(name) for name in prefill_hopper_kernel.arg_names}
    source = GluonASTSource(prefill_hopper_kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.slow) if name in MET_ELSEWHERE else name for name in VARIANTS]
)
def test_compiles_and_fits_shared_memory(variant: str) -> None:
    from triton.backends import backends

    if "nvidia" not in backends:
        pytest.skip("this triton build has no NVIDIA backend")
    dtype, options = VARIANTS[variant]
    compiled = compile_variant(dtype, **options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"):
        assert instruction in compiled.asm["ptx"]


def test_every_piece_of_work_is_listed_once_longest_first() -> None:
    new, total = (1, 0, 128, 129, 300, 2), (10, 7, 128, 500, 3000, 2)
    work = prefill_launch.list_work(new, total)
    assert work.dtype == np.int32
    assert sorted(map(tuple, work[:, :2])) == [
        (row, tile) for row, count in enumerate(new) for tile in range(-(-count // 128))
    ]
    starts = np.cumsum((0, *new))
    for row, tile, first_token, query_len, num_earlier, *rest in work:
        assert (first_token, query_len, num_earlier) == (starts[row], new[row], total[row] - new[row])
        assert tile * 128 < query_len
        assert not any(rest)
    keys = work[:, 4] + 128 * work[:, 1]
    assert (np.diff(keys) <= 0).all()


def test_no_rows_no_work() -> None:
    assert prefill_launch.list_work((), ()).shape == (0, prefill_launch.FIELDS)
    assert prefill_launch.list_work((0, 0), (5, 0)).shape == (0, prefill_launch.FIELDS)


def test_boxes_divide_blocks() -> None:
    assert [prefill_launch.box_of(size) for size in (16, 32, 48, 64, 96, 128, 256)] == [16, 32, 16, 64, 32, 64, 64]


def test_refuses_rows_the_copy_engine_cannot_read() -> None:
    rows = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    assert prefill_launch.why_not_tiles("query", rows) is None
    assert prefill_launch.why_not_tiles("query", rows.transpose(0, 1)) is None
    assert "16 bytes" in (prefill_launch.why_not_tiles("query", rows[:, :, 1:]) or "")
    assert "16 bytes" in (prefill_launch.why_not_tiles("query", rows.transpose(1, 2)) or "")
    assert "on each other" in (prefill_launch.why_not_tiles("key", rows[:, :1].expand(4, 2, 64)) or "")


def test_refuses_caches_that_are_no_line_of_tiles() -> None:
    pool = torch.zeros(5, 2, 3, 2, 16, 64, dtype=torch.bfloat16)
    keys, values = pool[:, :, 1, 0], pool[:, :, 1, 1]
    assert prefill_launch.why_not_cache(keys, values) is None
    assert "whole tiles after" in (prefill_launch.why_not_cache(values, keys) or "")
    assert "no multiple" in (prefill_launch.why_not_cache(keys[:, :, :8], values[:, :, :8]) or "")
    by_slot = torch.zeros(5, 2, 16, 2, 64, dtype=torch.bfloat16)
    assert "tiles apart" in (prefill_launch.why_not_cache(by_slot[:, :, :, 0], by_slot[:, :, :, 1]) or "")


def test_blocks_of_prefixes_are_placed_one_after_the_other() -> None:
    places, tables = unpack_prefix.place_prefixes((5, 1, 7, 0), (5, 34, 7, 16), 16)
    assert places.tolist() == [[1, 0], [1, 1], [1, 2], [3, 0]]
    assert tables[1].tolist() == [0, 1, 2]
    assert tables[3, 0] == 3
    places, tables = unpack_prefix.place_prefixes((5, 3), (5, 3), 16)
    assert (places.shape, tables.shape) == ((0, 2), (2, 1))


def test_unpacking_pays_for_many_queries_and_fits_memory() -> None:
    assert unpack_prefix.is_unpacking_worthwhile((1024,), (9216,), 32, 8, 128)
    assert unpack_prefix.is_unpacking_worthwhile((16,), (9216,), 32, 8, 128)
    assert not unpack_prefix.is_unpacking_worthwhile((15,), (9216,), 32, 8, 128)
    assert not unpack_prefix.is_unpacking_worthwhile((15, 4096), (60_000, 4096), 32, 8, 128)
    assert unpack_prefix.is_unpacking_worthwhile((4096, 4096), (4096, 4096), 32, 8, 128)
    assert not unpack_prefix.is_unpacking_worthwhile((1024,), (1024 + 65_537,), 32, 8, 128)


def test_the_unpacking_kernel_loads_sixteen_bytes() -> None:
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "nvidia" not in backends:
        pytest.skip("this triton build has no NVIDIA backend")
    kernel = unpack_prefix.unpack_prefix_kernel
    constants = {"TILE": 64 * 128, "CHUNK": unpack_prefix.CHUNK}
    kinds = {"pool": "*bf16", "key_cache": "*fp8e4nv", "value_cache": "*fp8e4nv", "k_scale": "*fp32",
             "v_scale": "*fp32", "block_tables": "*i32", "places": "*i32"}  # fmt: skip
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    vectors = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name in ("pool", "key_cache", "value_cache", "cache_block", "cache_head")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=vectors)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
