"""Products over quantised weights under Triton's interpreter, against the weights made whole. Run by
test_triton_interpreter.py."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional

from tandem.kernels.products.fused_ops import quantise_rows, rms_norm, silu_mul
from tandem.kernels.products.quantised_plans import QuantisedPlan
from tandem.kernels.products.quantised_weight import FP8, QuantisedWeight, quantise_fp8, quantise_int4
from tandem.kernels.triton_kernels.products.fused import rms_norm_triton
from tandem.kernels.triton_kernels.products.matmul_quantised_launch import dequantise, launch
from tandem.kernels.triton_kernels.products.quantise_rows import quantise_rows_triton


def weight_of(kind: str, num_outputs: int, num_inputs: int) -> QuantisedWeight:
    plain = torch.randn(num_outputs, num_inputs)
    if kind == "fp8":
        return quantise_fp8(plain)
    if kind == "fp8 in groups":
        values = (plain * 20).clamp(-448, 448).to(FP8)
        return QuantisedWeight(values, torch.rand(-(-num_inputs // 64), num_outputs) + 0.5, None, 64)
    made = quantise_int4(plain, 0 if kind == "int4" else 64, torch.float16)
    assert made.zeros is not None
    return QuantisedWeight(made.values, made.scales, torch.randint(0, 16, made.zeros.shape).half(), made.group)


@pytest.mark.parametrize("kind", ["fp8", "fp8 in groups", "int4", "int4 in groups"])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "plan"),
    [
        (1, 64, 128, QuantisedPlan(32, 16, 64, 1, 4, 3)),
        (1, 64, 256, QuantisedPlan(32, 1, 64, 2, 4, 3)),  # without tensor cores
        (19, 64, 320, QuantisedPlan(32, 16, 32, 3, 4, 2)),  # rows and K in several parts
        (19, 64, 256, QuantisedPlan(32, 16, 64, 2, 4, 3, rounded=True)),
    ],
)
def test_the_product_is_that_of_the_weights_made_whole(
    kind: str, num_rows: int, num_outputs: int, num_inputs: int, plan: QuantisedPlan
) -> None:
    torch.manual_seed(num_rows)
    weight, bias = weight_of(kind, num_outputs, num_inputs), torch.randn(num_outputs)
    x, arrivals = torch.randn(num_rows, num_inputs + 16)[:, :num_inputs], torch.zeros(64, dtype=torch.int32)
    plan = plan if weight.bits == 8 else plan._replace(rounded=False)  # over 4 bits activations stay as they are
    stored, x_scales = quantise_rows(x.bfloat16()) if plan.rounded else (x, None)
    x = x if x_scales is None else stored.float() * x_scales
    run = functools.partial(launch, plan, stored, x_scales=x_scales, arrivals=arrivals)
    whole = weight.dequantised(torch.float32)
    out = torch.full((num_rows, num_outputs), torch.nan)
    run(weight, out, bias_N=bias, silu=False)
    torch.testing.assert_close(out, functional.linear(x, whole, bias), rtol=1e-4, atol=1e-3)
    gated = torch.full((num_rows, num_outputs // 2), torch.nan)
    run(weight, gated, bias_N=None, silu=True)
    torch.testing.assert_close(gated, silu_mul(functional.linear(x, whole), 8), rtol=1e-4, atol=1e-2)
    some = torch.full((num_rows, 32), torch.nan)
    run(weight.rows(32, 64), some, bias_N=None, silu=False)
    torch.testing.assert_close(some, functional.linear(x, whole[32:64]), rtol=1e-4, atol=1e-3)
    assert not arrivals.any()
    made = torch.full(weight.shape, torch.nan)
    dequantise(weight, made, plan.tile_k)
    torch.testing.assert_close(made, whole, rtol=1e-6, atol=0)


def test_rows_of_activations_are_divided_by_their_largest_number() -> None:
    exact = torch.randn(5, 72).mul(100).clamp(-448, 448).to(FP8).float()  # the interpreter rounds to e4m3 wrongly
    exact[:, 3] = -448
    x = exact * torch.tensor([1.0, 2**-9, 2**9, 0.0, 0.5])[:, None]
    values, scales = quantise_rows_triton(x)
    expected, their_scales = quantise_rows(x)
    assert torch.equal(scales, their_scales)
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(values.float() * scales, x)


def test_norms_round_what_they_give() -> None:
    x, residual, gain = torch.randn(3, 72), torch.randn(3, 72), torch.randn(72)
    expected, scales = rms_norm(x + residual, gain, 1e-5), torch.empty(3, 1)
    values = rms_norm_triton(x, residual, gain, 1e-5, scales)
    torch.testing.assert_close(scales[:, 0], expected.abs().amax(1) / 448)
    errors = (values.float() * scales - expected).abs() / expected.abs()
    assert errors.median() < 0.07  # the interpreter gets some wrong: those rounded up to a power of two
