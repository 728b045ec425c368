"""Products with adapters under Triton's interpreter, against their eager twin. Run by test_triton_interpreter.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.kernels.products import fused_ops
from tandem.kernels.products.adapter_rows import (
    AdapterRows,
    AdapterStack,
    UnaddedProduct,
    padded_rank,
    sorted_rows,
    tiles_of,
)
from tandem.kernels.products.adapters import expand_eager, expand_silu_mul_eager, shrink_eager
from tandem.kernels.products.fused_ops import HeadNorms
from tandem.kernels.products.matmul import group_gate_up
from tandem.kernels.triton_kernels.adapters.launch import expand_silu_mul_triton, expand_triton, shrink_triton
from tandem.kernels.triton_kernels.products.fused import rms_norm_triton
from tandem.kernels.triton_kernels.products.rotation import rope_and_store_triton

# Rows without an adapter, adapters of one row and of more than one tile's, rows of one far from each other.
ADAPTERS = [2, 0, 1, 3, 1, 1, 1, 0, 0, *[3] * 17, *[2] * 2, 0, 0]


def rows_of(adapters: list[int], are_prompts: bool = False) -> AdapterRows:
    order, slots = sorted_rows(np.array(adapters))
    tiles = torch.from_numpy(tiles_of(slots)) if are_prompts else None
    return AdapterRows(torch.from_numpy(order), torch.from_numpy(slots), tiles)


def stack_of(part_sizes: tuple[int, ...], size: int, rank: int) -> AdapterStack:
    padded, parts = padded_rank(rank), len(part_sizes)
    a, b = torch.randn(3, parts * padded, size), torch.randn(3, sum(part_sizes), padded)
    ranks = torch.tensor([[rank] * parts, [max(1, rank // 2)] * parts, [0, *[rank] * (parts - 1)]], dtype=torch.int32)
    for slot, of_parts in enumerate(ranks.tolist()):  # what lies beyond a rank counts for nothing
        for part, of_part in enumerate(of_parts):
            a[slot, part * padded + of_part : (part + 1) * padded] = torch.nan
            begin = sum(part_sizes[:part])
            b[slot, begin : begin + part_sizes[part], of_part:] = 1e3
    return AdapterStack(a, b, ranks, part_sizes)


@pytest.mark.parametrize("are_prompts", [False, True])
@pytest.mark.parametrize(
    ("part_sizes", "size", "rank"),
    [((40,), 1400, 24), ((48, 16, 16), 64, 1), ((24, 24), 80, 8)],
)
def test_rows_take_their_own_adapters(part_sizes: tuple[int, ...], size: int, rank: int, are_prompts: bool) -> None:
    torch.manual_seed(rank)
    stack, rows = stack_of(part_sizes, size, rank), rows_of(ADAPTERS, are_prompts)
    wide = torch.randn(30, size + 3)
    x, out = wide[:, :size], torch.randn(30, sum(part_sizes))
    before, expected = out.clone(), out.clone()
    expand_eager(expected, shrink_eager(x, stack, rows), stack, rows)
    expand_triton(out, shrink_triton(x, stack, rows, beside=not are_prompts), stack, rows)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    assert not out.isnan().any()
    untouched = [row for row, adapter in enumerate(ADAPTERS) if not adapter]
    assert torch.equal(out[untouched], before[untouched])


@pytest.mark.parametrize("are_prompts", [False, True])
@pytest.mark.parametrize(("rank", "group"), [(8, 0), (24, 8)])
def test_silu_takes_adapters_in(rank: int, group: int, are_prompts: bool) -> None:
    check_silu(rank, group, are_prompts)


def check_silu(rank: int, group: int, are_prompts: bool) -> None:
    torch.manual_seed(rank)
    stack, rows = stack_of((136, 136), 48, rank), rows_of(ADAPTERS, are_prompts)
    x, gate_up = torch.randn(30, 48), torch.randn(30, 272)
    expected = expand_silu_mul_eager(gate_up, shrink_eager(x, stack, rows), stack, rows, group)
    made = expand_silu_mul_triton(gate_up, shrink_triton(x, stack, rows), stack, rows, group)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("size", "rank"), [(64, 1), (80, 24)])
def test_a_norm_takes_adapters_in(size: int, rank: int) -> None:
    torch.manual_seed(rank)
    stack, rows = stack_of((size,), 48, rank), rows_of(ADAPTERS)
    x, out, weight = torch.randn(30, 48), torch.randn(30, size + 3)[:, :size], torch.randn(size)
    stream, twin, whole = torch.randn(30, size), torch.empty(30, size), out.clone()
    twin.copy_(stream)
    expand_eager(whole, shrink_eager(x, stack, rows), stack, rows)
    product = UnaddedProduct(out, shrink_triton(x, stack, rows), stack, rows)
    made = rms_norm_triton(out, stream, weight, 1e-5, adapted=product)
    torch.testing.assert_close(made, fused_ops.add_rms_norm(whole, twin, weight, 1e-5), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stream, twin, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "rank"), [(4, 2, 16, 8), (5, 1, 20, 24), (8, 4, 16, 1)])
def test_a_rotation_takes_adapters_in(heads: int, kv_heads: int, size: int, rank: int) -> None:
    torch.manual_seed(rank)
    parts = (heads * size, kv_heads * size, kv_heads * size)
    stack, rows, num_tokens = stack_of(parts, 48, rank), rows_of(ADAPTERS), len(ADAPTERS)
    x, qkv, positions = (
        torch.randn(num_tokens, 48),
        torch.randn(num_tokens, sum(parts)),
        torch.randint(32, (num_tokens,)),
    )
    angles = torch.rand(32, size // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = HeadNorms(torch.randn(size), torch.randn(size), 1e-5)
    whole = qkv.clone()
    expand_eager(whole, shrink_eager(x, stack, rows), stack, rows)
    pool, twin = torch.zeros(8, kv_heads, 2, 8, size), torch.zeros(8, kv_heads, 2, 8, size)
    slots = torch.randperm(64)[:num_tokens]
    slots[3] = -1
    product = UnaddedProduct(qkv, shrink_triton(x, stack, rows), stack, rows)
    of_norms = norms.q_weight, norms.k_weight, norms.eps
    for at, into, adapted in ((qkv, pool, product), (whole, twin, None)):
        caches = into[:, :, 0], into[:, :, 1], slots
        rope_and_store_triton(at, positions, table, heads, kv_heads, of_norms, caches, None, adapted)
    torch.testing.assert_close(qkv, whole, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(pool, twin, rtol=1e-4, atol=1e-3)
    assert pool.any()


def test_a_rows_sums_do_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(3)
    stack, x = stack_of((40,), 1400, 8), torch.randn(30, 1400)
    together, alone = torch.zeros(30, 40), torch.zeros(1, 40)
    rows, row = rows_of(ADAPTERS), rows_of([ADAPTERS[5]])
    expand_triton(together, shrink_triton(x, stack, rows), stack, rows)
    expand_triton(alone, shrink_triton(x[5:6], stack, row), stack, row)
    assert torch.equal(together[5], alone[0])


@pytest.mark.parametrize("alone", [[1] * 20, [0] * 3, [2, 1] * 4 + [3]])
def test_silu_of_a_row_does_not_depend_on_the_rows_beside_it(alone: list[int]) -> None:
    """Whole tiles of one adapter, of none and of several."""
    torch.manual_seed(4)
    stack, x, gate_up = stack_of((136, 136), 48, 8), torch.randn(30, 48), torch.randn(30, 272)

    def made(adapters: list[int]) -> torch.Tensor:
        rows, num_rows = rows_of(adapters), len(adapters)
        low = shrink_triton(x[:num_rows], stack, rows)
        return expand_silu_mul_triton(gate_up[:num_rows], low, stack, rows, 8)

    mixed = made([*alone, *[3] * 5, 2, 0])
    assert torch.equal(made(alone), mixed[: len(alone)])
    expected = expand_silu_mul_eager(
        gate_up[: len(alone)], shrink_eager(x[: len(alone)], stack, rows_of(alone)), stack, rows_of(alone), 8
    )
    torch.testing.assert_close(mixed[: len(alone)], expected, rtol=1e-4, atol=1e-3)


def test_the_eager_twin_is_the_formula() -> None:
    torch.manual_seed(1)
    stack = stack_of((32, 16), 64, 4)
    rows = rows_of([0, 1, 1, 0])
    x, out = torch.randn(4, 64), torch.zeros(4, 48)
    expand_eager(out, shrink_eager(x, stack, rows), stack, rows)
    for part, columns in enumerate((slice(0, 32), slice(32, 48))):
        a, b = stack.a[0, 8 * part : 8 * part + 4], stack.b[0, columns, :4]
        torch.testing.assert_close(out[1:3, columns], x[1:3] @ a.t() @ b.t(), rtol=1e-4, atol=1e-4)
    assert not out[[0, 3]].any()


def test_the_eager_silu_is_that_of_the_sum() -> None:
    torch.manual_seed(2)
    stack, rows = stack_of((32, 32), 64, 4), rows_of([0, 2, 1, 2])
    x, gate_up = torch.randn(4, 64), torch.randn(4, 64)
    low, whole = shrink_eager(x, stack, rows), gate_up.clone()
    expand_eager(whole, low, stack, rows)
    expected = torch.nn.functional.silu(whole[:, :32]) * whole[:, 32:]
    torch.testing.assert_close(expand_silu_mul_eager(gate_up, low, stack, rows, 0), expected)
    by_turns = group_gate_up(gate_up.t()).t().contiguous()
    torch.testing.assert_close(expand_silu_mul_eager(by_turns, low, stack, rows, 8), expected)
