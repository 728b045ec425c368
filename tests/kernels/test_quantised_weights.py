"""The one layout of quantised weights: parts of it are parts of the weight, and plans cover what they are asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

from tandem.kernels.products.fused_ops import quantise_rows
from tandem.kernels.products.matmul import group_gate_up, linear, linear_silu_mul
from tandem.kernels.products.matmul_plans import GATE_UP_GROUP, RingPlan, RowsPlan, StreamPlan
from tandem.kernels.products.quantised_plans import (
    MOST_ROWS,
    Int4RingPlan,
    Int4RowPlan,
    QuantisedPlan,
    choose_hopper_plan,
    choose_plan,
    takes_rounded,
)
from tandem.kernels.products.quantised_weight import FP8, QuantisedWeight, packed, quantise_fp8, quantise_int4, unpacked

PLAIN = torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
WEIGHTS = {
    "fp8": quantise_fp8(PLAIN),
    "fp8 in groups": QuantisedWeight(PLAIN.to(FP8), torch.rand(2, 48), None, 128),
    "int4": quantise_int4(PLAIN, 0, torch.float16),
    "int4 in groups": quantise_int4(PLAIN, 64, torch.float32),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_parts_are_parts_of_the_weight(kind: str) -> None:
    weight = WEIGHTS[kind]
    whole, order = weight.dequantised(torch.float32), torch.randperm(48)
    assert (weight.shape, whole.shape) == ((48, 256), (48, 256))
    assert torch.equal(weight.rows(16, 40).dequantised(torch.float32), whole[16:40])
    assert torch.equal(weight.columns(128, 256).dequantised(torch.float32), whole[:, 128:])
    assert torch.equal(weight.reordered(order).dequantised(torch.float32), whole[order])
    assert weight.num_bytes < 0.6 * PLAIN.numel() * 2
    if weight.group:
        with pytest.raises(ValueError, match="cut groups"):
            weight.columns(16, 256)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_without_kernels_products_are_those_of_the_weight_made_whole(kind: str) -> None:
    x, weight = torch.randn(3, 256), WEIGHTS[kind]
    whole, out = weight.dequantised(torch.float32), torch.empty(3, 48)
    assert torch.equal(linear(x, weight, None, out), torch.nn.functional.linear(x, whole))
    order = group_gate_up(torch.arange(48))
    assert torch.equal(linear_silu_mul(x, weight.reordered(order)), linear_silu_mul(x, whole[order]))


def test_numbers_come_back_out_of_their_bytes() -> None:
    stored = torch.randint(0, 16, (5, 96), dtype=torch.uint8)
    pairs = packed(stored)
    assert (pairs.dtype, pairs.shape) == (torch.uint8, (5, 48))
    assert torch.equal(unpacked(pairs), stored)
    assert torch.equal(stored[:, [0, 16, 1, 17]] | stored[:, [8, 24, 9, 25]] << 4, pairs[:, :4])


def test_groups_of_8_bits_are_quantised_each_alone() -> None:
    """The last one has fewer inputs."""
    made = quantise_fp8(PLAIN, 96)
    assert (made.group, made.shape, made.scales.shape, made.values.dtype) == (96, (48, 256), (3, 48), FP8)
    for start in range(0, 256, 96):
        alone = quantise_fp8(PLAIN[:, start : start + 96]).dequantised(torch.float32)
        assert torch.equal(made.dequantised(torch.float32)[:, start : start + 96], alone)


def test_only_tensor_cores_of_8_bits_take_rounded_activations() -> None:
    of_8_bits = QuantisedPlan(64, 16, 128, 1, 4, 6, rounded=True), RingPlan(64, 64, 128, 8, 1, 1), StreamPlan(*[64] * 6)
    assert all(map(takes_rounded, of_8_bits))
    others = of_8_bits[0]._replace(rounded=False), RowsPlan(4, 512, 1), Int4RowPlan(4, 8), Int4RingPlan(64, 64, 8)
    assert not any(map(takes_rounded, others))


def test_rows_are_rounded_by_their_largest_numbers() -> None:
    x = torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]])
    values, scales = quantise_rows(x)
    assert (values.dtype, scales.shape) == (FP8, (2, 1))
    assert values[0].tolist() == [112, -448, 224]
    assert torch.equal(values.float() * scales, x)


def test_rounding_errors_are_those_of_the_formats() -> None:
    for made, bound in ((WEIGHTS["fp8"], 0.03), (WEIGHTS["int4 in groups"], 0.15)):
        error = (made.dequantised(torch.float32) - PLAIN).norm() / PLAIN.norm()
        assert bound / 4 < error < bound


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sizes", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (512, 96), (64, 32)])
def test_plans_cover_the_product(sizes: tuple[int, int], bits: int) -> None:
    for num_rows in (1, 2, 16, 17, 64, 65, 128, MOST_ROWS[bits]):
        for group in (0, 32, 128):
            plan = choose_plan(num_rows, *sizes, group, bits)
            assert plan is not None
            assert sizes[1] % plan.tile_k == 0 == group % plan.tile_k
            assert plan.splits <= sizes[1] // plan.tile_k
            assert sizes[0] % plan.tile_n == 0
            assert plan.tiles(num_rows, sizes[0]) * plan.tile_n * plan.tile_m >= num_rows * sizes[0]
    for num_rows, outputs, inputs, group in (
        (MOST_ROWS[bits] + 1, 64, 32, 0),
        (1, 48, 32, 0),
        (1, 64, 48, 0),
        (1, 64, 32, 24),
    ):
        assert choose_plan(num_rows, outputs, inputs, group, bits) is None


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (8, 128), (4, 128), (4, 0)])
def test_plans_for_hopper_hold_their_kernels_assumptions(bits: int, group: int) -> None:
    served, all_sizes = (
        set(),
        [(28672, 4096), (4096, 14336), (1024, 8192), (5120, 17408), (1040, 1024), (2048, 11008), (64, 96)],
    )
    for num_rows, sizes in itertools.product((0, 1, 2, 64, 65, 129, 256, 257), all_sizes):
        plan = choose_hopper_plan(num_rows, *sizes, group, bits)
        if plan is not None:
            served.add(num_rows)
            assert plan.is_valid(num_rows, *sizes)
            assert isinstance(plan, RowsPlan | Int4RowPlan) == (num_rows == 1)
            assert getattr(plan, "fp8_steps", 1) > 0, "a plan of 16 bits"
            assert 4 * plan.tile_n % (2 * GATE_UP_GROUP) == 0, "it is tried on so many outputs, gate and up by turns"
    many = {64, 65, 129, 256} if bits == 4 or not group else set()
    assert served == {1, *many, *({2} if bits == 8 and not group else ())}
