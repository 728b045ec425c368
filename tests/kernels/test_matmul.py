"""Products where no tuned kernel runs: torch's, with the same meaning; and the layout of gate and up."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tandem.kernels.products import matmul


def random_matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 330])
def test_falls_back_to_torch(num_rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = random_matrix(num_rows, 64, dtype), random_matrix(48, 64, dtype), random_matrix(1, 48, dtype)[0]
    expected = functional.linear(x, weight, bias)
    torch.testing.assert_close(matmul.linear(x, weight, bias), expected, rtol=0, atol=0)
    out = torch.full((num_rows, 48), float("nan"), dtype=dtype)
    assert matmul.linear(x, weight, bias, out) is out
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_gated_product_of_grouped_rows() -> None:
    x, gate_up = random_matrix(5, 64), random_matrix(2 * 24, 64)
    gate, up = (x.double() @ gate_up.double().t()).chunk(2, 1)
    out = matmul.linear_silu_mul(x, matmul.group_gate_up(gate_up))
    torch.testing.assert_close(out, (functional.silu(gate) * up).float(), rtol=1e-5, atol=1e-4)


def test_grouping_gate_and_up() -> None:
    rows = torch.arange(48)
    grouped = matmul.group_gate_up(rows)
    assert grouped.tolist() == [
        row for first in (0, 8, 16) for half in (0, 24) for row in range(half + first, half + first + 8)
    ]
    matrix = random_matrix(48, 7)
    assert torch.equal(matmul.group_gate_up(matrix), matrix[grouped])


@pytest.mark.parametrize("num_rows", [47, 40, 8])
def test_refuses_to_group_an_odd_number_of_rows(num_rows: int) -> None:
    with pytest.raises(ValueError, match="need a multiple of 16"):
        matmul.group_gate_up(torch.zeros(num_rows, 4))


def test_nothing_is_added_where_no_prompt_kernel_runs() -> None:
    residual = random_matrix(2048, 48, torch.bfloat16)
    before = residual.clone()
    assert not matmul.linear_onto(
        residual, random_matrix(2048, 64, torch.bfloat16), random_matrix(48, 64, torch.bfloat16)
    )
    assert torch.equal(residual, before)


def test_no_table_without_a_gpu() -> None:
    assert matmul.table_of(torch.device("cpu")) == {}
    matmul.prepare("cpu")
