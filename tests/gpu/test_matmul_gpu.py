"""Products of few rows on a Hopper GPU against float64: every plan of the shipped table, odd sizes, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_checks import ON_HOPPER, relative_error
from torch.nn import functional

from tandem.kernels.products import matmul, matmul_device
from tandem.kernels.products.matmul_plans import PROMPT_PLAN, Plan, RingPlan, RowsPlan, StreamPlan, parse_table

pytestmark = ON_HOPPER
TABLE = parse_table((Path(matmul.__file__).parent / "tuned" / "matmul_NVIDIA_H200.json").read_text())
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
ODD = [
    (RowsPlan(2, 1024, 4), 1, 24, 1024),
    (RowsPlan(8, 512, 8), 3, 64, 1536),
    (RowsPlan(4, 2048, 4), 4, 4096, 14336),
    (StreamPlan(64, 8, 256, 6, 4, 264), 7, 1040, 1032),
    (StreamPlan(64, 16, 128, 5, 4, 7), 9, 200, 4096),
    (StreamPlan(64, 64, 128, 6, 4, 128, 4), 33, 4096, 4096),
    (StreamPlan(128, 64, 64, 3, 4, 44), 130, 1008, 1000),
    (StreamPlan(128, 128, 64, 6, 4, 132), 100, 6144, 4096),
    (StreamPlan(128, 256, 64, 4, 8, 132), 255, 4096, 4096),
    (StreamPlan(256, 128, 64, 3, 8, 66), 200, 4096, 4096),
    (RingPlan(64, 64, 128, 6, 1), 65, 2000, 1032),
    (RingPlan(128, 64, 64, 4, 1), 64, 28672, 520),
    (RingPlan(128, 128, 64, 6, 2), 127, 4096, 4096),
    (RingPlan(64, 128, 64, 8, 1), 129, 2040, 4096),
    (RingPlan(256, 128, 64, 4, 2), 97, 4088, 14336),
    (RingPlan(128, 256, 64, 4, 2), 255, 28672, 4096),
    (RingPlan(64, 256, 64, 5, 1), 200, 6160, 4096),
    (RingPlan(128, 256, 64, 4, 2), 320, 1000, 4104),
]


@pytest.fixture(autouse=True)
def workspace_stays_empty() -> Iterator[None]:
    yield
    matmul_device.workspace_of(torch.device("cuda", 0)).check_integrity()


def random_matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda:0").to(dtype)


def random_weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Products with normal inputs are normal again: nothing overflows."""
    return (torch.randn(rows, columns, device="cuda:0") * columns**-0.5).to(dtype)


def poisoned(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((rows, columns), float("nan"), device="cuda:0", dtype=dtype)


def silu_times_up(product: torch.Tensor) -> torch.Tensor:
    """Of outputs of gate and up that take turns."""
    gate, up = (half.flatten(1) for half in product.unflatten(1, (-1, 2, matmul.GATE_UP_GROUP)).unbind(2))
    return functional.silu(gate) * up


def check_plan(plan: Plan, rows: int, weight: torch.Tensor, *, gated: bool) -> None:
    x = random_matrix(rows, weight.shape[1], weight.dtype)
    product = x.double() @ weight.double().t()
    tolerance = TOLERANCE[weight.dtype]
    expected = silu_times_up(product) if gated else product
    out = poisoned(rows, expected.shape[1], weight.dtype)
    matmul.run_plan(plan, x, weight, out, silu=gated)
    assert relative_error(out, expected) < tolerance
    again = matmul.run_plan(plan, x, weight, silu=gated)
    assert torch.equal(out, again)
    if not gated:
        bias = random_matrix(1, weight.shape[0], weight.dtype)[0]
        biased = matmul._by_plan(plan, x, weight, bias, None, silu=False)
        assert relative_error(biased, product + bias.double()) < tolerance


@pytest.mark.parametrize("sizes", TABLE, ids=str)
def test_every_plan_of_the_table(sizes: tuple[int, int]) -> None:
    weight = random_weight(*sizes)
    fewest = 1
    for rows, plan in TABLE[sizes]:
        if plan is not None:
            for num_rows in {fewest, (fewest + rows) // 2, rows}:
                check_plan(plan, num_rows, weight, gated=sizes == (28672, 4096))
        fewest = rows + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("plan", "rows", "outputs", "inputs"), ODD)
def test_odd_sizes(plan: Plan, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = random_weight(outputs, inputs, dtype)
    check_plan(plan, rows, weight, gated=False)
    if outputs % 16 == 0:
        check_plan(plan, rows, weight, gated=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "num_launches"),
    [
        (1024, 28672, 4096, 1),
        (3072, 28672, 1032, 2),
        (4096, 6144, 1024, 2),
        (1088, 28672, 1024, 0),
        (8192, 6144, 64, 4),
    ],
)
def test_gate_and_up_of_prompts(
    rows: int, outputs: int, inputs: int, num_launches: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = random_matrix(rows, inputs, dtype), random_weight(outputs, inputs, dtype)
    launched: list[Plan] = []
    launch = matmul._by_plan

    def noted(plan: Plan, *args: Any, **flags: Any) -> torch.Tensor:
        launched.append(plan)
        return launch(plan, *args, **flags)

    monkeypatch.setattr(matmul, "_by_plan", noted)
    matmul.linear_silu_mul(x, weight)  # tries itself
    launched.clear()
    out = poisoned(rows, outputs // 2, dtype)
    assert matmul.linear_silu_mul(x, weight, out) is out
    assert launched == [PROMPT_PLAN] * num_launches
    assert relative_error(out, silu_times_up(x.double() @ weight.double().t())) < TOLERANCE[dtype]
    assert torch.equal(matmul.linear_silu_mul(x, weight), out)


@pytest.mark.parametrize("rows", [512, 1500, 8192])
def test_products_of_prompts_add_to_the_stream(rows: int) -> None:
    x, weight, residual = random_matrix(rows, 1024), random_weight(512, 1024), random_matrix(rows, 512)
    expected = residual.double() + x.double() @ weight.double().t()
    assert matmul.linear_onto(residual, x, weight)
    assert relative_error(residual, expected) < 4e-3
    before = residual.clone()
    assert not matmul.linear_onto(residual[:511], x[:511], weight)  # rows of decode steps
    assert not matmul.linear_onto(residual, x, weight.half())
    assert torch.equal(residual, before)


def test_rows_of_a_larger_matrix() -> None:
    wide, weight = random_matrix(64, 8192), random_weight(8192, 4096)
    x, half = wide[:, 4096:], weight[4096:]
    for num_rows, plan in ((1, RowsPlan(2, 2048, 4)), (64, StreamPlan(64, 64, 128, 6, 4, 128, 2))):
        expected = x[:num_rows].double() @ half.double().t()
        whole = poisoned(num_rows, 8192)
        matmul.run_plan(plan, x[:num_rows], half, whole[:, :4096])
        assert relative_error(whole[:, :4096], expected) < 4e-3
        assert whole[:, 4096:].isnan().all()


def test_a_sum_that_is_not_a_number_does_not_hang() -> None:
    x, weight = random_matrix(64, 4096), random_weight(4096, 4096)
    x[3], x[5, 7] = float("nan"), float("inf")
    out = matmul.run_plan(StreamPlan(64, 64, 128, 6, 4, 128, 2), x, weight)
    assert out[3].isnan().all()
    assert not out[5].isfinite().any()
    assert out[6:].isfinite().all()


def test_a_chain_in_a_graph_gives_what_single_launches_give() -> None:
    """Kernels overlap their predecessors: each product reads what the one before wrote."""
    matmul.prepare("cuda:0")
    weights = [random_weight(4096, 4096) for _ in range(12)]
    for num_rows in (1, 5, 16, 30, 64, 128, 256):
        x = random_matrix(num_rows, 4096)
        hidden = x
        for weight in weights:
            hidden = matmul.linear(hidden, weight)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = x
            for weight in weights:
                replayed = matmul.linear(replayed, weight)
        for _ in range(5):
            replayed.fill_(float("nan"))
            graph.replay()
            assert torch.equal(replayed, hidden)


def test_capturing_before_prepare_is_refused() -> None:
    matmul_device.workspace_of.cache_clear()
    graph = torch.cuda.CUDAGraph()
    x, weight = random_matrix(8, 4096), random_weight(4096, 4096)
    with pytest.raises(RuntimeError, match="the first product of a device"), torch.cuda.graph(graph):
        matmul.run_plan(StreamPlan(64, 8, 256, 6, 4, 128, 2), x, weight)
