"""Products with adapters under Triton's interpreter, against their eager twin. Run by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.products.adapters import AdapterRows, AdapterStack, add_adapters_eager, padded_rank
from tandem.kernels.triton_kernels.products.adapters import add_adapters_triton

# Rows without an adapter, in no tile, alone, and more than one tile's.
TILES = [[0, 1, 2], [1, 1, 0], [2, 5, 1], [9, 16, 3], [25, 3, 2]]


def stack_of(part_sizes: tuple[int, ...], size: int, rank: int) -> AdapterStack:
    padded, parts = padded_rank(rank), len(part_sizes)
    a, b = torch.randn(3, parts * padded, size), torch.randn(3, sum(part_sizes), padded)
    ranks = torch.tensor([[rank] * parts, [max(1, rank // 2)] * parts, [0, *[rank] * (parts - 1)]], dtype=torch.int32)
    for slot, of_parts in enumerate(ranks.tolist()):  # what lies beyond a rank is never read
        for part, of_part in enumerate(of_parts):
            a[slot, part * padded + of_part : (part + 1) * padded] = torch.nan
            begin = sum(part_sizes[:part])
            b[slot, begin : begin + part_sizes[part], of_part:] = torch.nan
    return AdapterStack(a, b, ranks, part_sizes)


@pytest.mark.parametrize("rank", [1, 8, 24])
@pytest.mark.parametrize(
    ("part_sizes", "size", "group"), [((40,), 600, 0), ((48, 16, 16), 64, 0), ((24, 24), 80, 0), ((136, 136), 48, 8)]
)
def test_rows_take_their_own_adapters(part_sizes: tuple[int, ...], size: int, rank: int, group: int) -> None:
    torch.manual_seed(rank)
    stack = stack_of(part_sizes, size, rank)
    rows = AdapterRows(torch.tensor(TILES, dtype=torch.int32), 16)
    wide = torch.randn(30, size + 3)
    x, out = wide[:, :size], torch.randn(30, sum(part_sizes))
    expected = out.clone()
    add_adapters_eager(expected, x, stack, rows, group)
    add_adapters_triton(out, x, stack.a, stack.b, stack.ranks, part_sizes, rows.tiles, rows.tile_rows, group)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    untouched = [1, 7, 8, 28, 29]
    assert not out.isnan().any()
    assert torch.equal(out[untouched], expected[untouched])


def test_the_eager_twin_is_the_formula() -> None:
    torch.manual_seed(1)
    stack = stack_of((32, 16), 64, 4)
    rows = AdapterRows(torch.tensor([[1, 2, 1]], dtype=torch.int32), 16)
    x, out = torch.randn(4, 64), torch.zeros(4, 48)
    add_adapters_eager(out, x, stack, rows)
    for part, columns in enumerate((slice(0, 32), slice(32, 48))):
        a, b = stack.a[0, 16 * part : 16 * part + 4], stack.b[0, columns, :4]
        torch.testing.assert_close(out[1:3, columns], x[1:3] @ a.t() @ b.t(), rtol=1e-4, atol=1e-4)
    assert not out[[0, 3]].any()
