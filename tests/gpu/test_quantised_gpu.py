"""Products over quantised weights on a GPU against the weights made whole, also in graphs; quantised models served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_checks import ON_HOPPER, relative_error
from near_ties import check_against_reference
from quantised_checkpoints import quantised_folders
from tiny_hf_models import tiny_hf_model
from torch.nn import functional

from in_process_cluster import client_of, cuda_pair
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.kernels.products import quantised
from tandem.kernels.products.fused_ops import add_rms_norm, quantise_rows, silu_mul
from tandem.kernels.products.matmul_device import workspace_of
from tandem.kernels.products.matmul_plans import RingPlan, RowsPlan, StreamPlan
from tandem.kernels.products.quantised_plans import Int4RingPlan, Int4RowPlan
from tandem.kernels.products.quantised_weight import QuantisedWeight, quantise_fp8, quantise_int4
from tiny_models import random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
ROUNDING_FORMS = ("compressed_channel", "fp8_blocks")
KINDS = ("fp8", "fp8 in groups", "int4 in groups")


def weight_of(kind: str, outputs: int, inputs: int) -> QuantisedWeight:
    plain = torch.randn(outputs, inputs, device=CUDA) * inputs**-0.5
    if kind == "int4 in groups":
        made = quantise_int4(plain, 128, torch.float16)
        assert made.zeros is not None
        return QuantisedWeight(made.values, made.scales, torch.randint_like(made.zeros, 16), 128)
    made = quantise_fp8(plain)
    if kind == "fp8":
        return made
    groups = torch.rand(inputs // 128, outputs, device=CUDA) + 0.5
    return QuantisedWeight(made.values, made.scales * groups, None, 128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128, 256)])
def test_few_rows_are_products_with_the_weights_made_whole(kind: str, outputs: int, inputs: int) -> None:
    weight = weight_of(kind, outputs, inputs)
    whole = weight.dequantised(torch.float32)
    for rows in (1, 2, 16, 17, 64, 65, 128, 200, 256):
        x = torch.randn(rows, inputs, device=CUDA).bfloat16()
        rounds = rows > 1 and kind != "int4 in groups"
        assert quantised.rounds(x, weight) == rounds
        values, scales = quantise_rows(x) if rounds else (x, 1)
        product = functional.linear(values.float() * scales, whole)
        out = quantised.linear(x, weight)
        assert relative_error(out, product) < 5e-3
        assert torch.equal(out, quantised.linear(x, weight))
        bias = torch.randn(outputs, device=CUDA).bfloat16()
        assert relative_error(quantised.linear(x, weight, bias), product + bias) < 5e-3
        assert relative_error(quantised.linear(x, weight, silu=True), silu_mul(product, 8)) < 6e-3
    assert not quantised.arrivals_of(CUDA).any()
    assert relative_error(quantised.made_whole(weight, x), whole) < 4e-3


@ON_HOPPER[1]
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4096, 14336), (16384, 2048), (1040, 1024)])
def test_one_row_goes_by_whole_outputs(kind: str, outputs: int, inputs: int) -> None:
    x, weight = torch.randn(1, inputs, device=CUDA).bfloat16(), weight_of(kind, outputs, inputs)
    for silu in (False, True):
        assert isinstance(quantised._plan(x, weight, silu=silu), RowsPlan | Int4RowPlan), "failed its trial"
    product = functional.linear(x.float(), weight.dequantised(torch.float32))
    bias = torch.randn(outputs, device=CUDA).bfloat16()
    assert relative_error(quantised.linear(x, weight, bias), product + bias) < 5e-3
    assert relative_error(quantised.linear(x, weight, silu=True), silu_mul(product, 8)) < 6e-3
    x[0, 5] = torch.nan
    assert quantised.linear(x, weight).isnan().all()


@ON_HOPPER[1]
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (28672, 4096), (4096, 14336)])
def test_many_rows_over_4_bits_go_by_tensor_cores(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = weight_of("int4 in groups", outputs, inputs)
    whole = weight.dequantised(torch.float32)
    for rows in (20, 33, 64, 100, 130, 256):
        x = torch.randn(rows, inputs, device=CUDA).to(dtype)
        for silu in (False, True):
            serves = rows > 32 or outputs == 28672
            assert isinstance(quantised._plan(x, weight, silu=silu), Int4RingPlan) == serves, "failed its trial"
        product = functional.linear(x.float(), whole)
        assert relative_error(quantised.linear(x, weight), product) < 5e-3
        assert relative_error(quantised.linear(x, weight, silu=True), silu_mul(product, 8)) < 6e-3
        x[3, 5] = torch.nan
        spoilt = quantised.linear(x, weight).isnan()
        assert spoilt[3].all()
        assert spoilt.sum() == outputs
    workspace_of(CUDA).check_integrity()


@ON_HOPPER[1]
@pytest.mark.parametrize("rows", [3, 100])
@pytest.mark.parametrize(
    "plan",
    [
        StreamPlan(64, 64, 128, 8, 4, 132, 0),
        StreamPlan(64, 64, 256, 5, 4, 128, 2),
        RingPlan(64, 128, 128, 8, 1, 4),
        RingPlan(64, 256, 128, 4, 1, 1024),
    ],
)
def test_hopper_products_take_e4m3(plan: StreamPlan | RingPlan, rows: int) -> None:
    weight, x = weight_of("fp8", 4096, 4096), torch.randn(rows, 4096, device=CUDA).bfloat16()
    assert plan.is_valid(rows, *weight.shape)
    values, scales = quantise_rows(x)
    product = functional.linear(values.float() * scales, weight.dequantised(torch.float32))
    assert relative_error(quantised.run_plan(plan, x, weight), product) < 5e-3
    assert relative_error(quantised.run_plan(plan, x, weight, silu=True), silu_mul(product, 8)) < 6e-3


@pytest.mark.parametrize("rows", [2, 64, 1000])
def test_norms_round_what_they_give(rows: int) -> None:
    """A norm that rounds adds its squares in another order: a thread has 16 numbers, as e4m3 is stored, not 8. So the
    last bit of the sum may be another one, which takes some number in 100,000 across the middle of two of bf16, and a
    few of those across the middle of two of e4m3."""
    x, residual = (torch.randn(rows, 4096, device=CUDA).bfloat16() for _ in range(2))
    gain, weight = torch.randn(4096, device=CUDA).bfloat16(), weight_of("fp8", 6144, 4096)
    assert quantised.rounds(x, weight)
    after = residual.clone()
    values, scales = quantise_rows(add_rms_norm(x, after, gain, 1e-5))
    rounded = quantised.rounded_rms_norm(x, residual, gain, 1e-5)
    assert torch.equal(residual, after)
    same = (rounded.scales == scales)[:, 0]
    assert (~same).sum() <= 1 + rows // 100, "rows whose largest number is another one"
    assert torch.allclose(rounded.scales, scales, rtol=2**-7, atol=0), "by more than a unit of bf16"
    ours, theirs = rounded.values.float()[same], values.float()[same]
    assert (ours != theirs).sum() <= 4 + ours.numel() * 1e-5
    unit = torch.maximum(theirs.abs() / 8, torch.tensor(2.0**-9, device=CUDA))
    assert ((ours - theirs).abs() <= unit).all(), "by more than a unit of e4m3"
    product = functional.linear(rounded.values.float() * rounded.scales, weight.dequantised(torch.float32))
    assert relative_error(quantised.linear(rounded, weight), product) < 5e-3


def test_prompts_over_fp8_lose_what_rounding_activations_loses() -> None:
    weight = weight_of("fp8", 6144, 4096)
    x = torch.randn(1000, 4096, device=CUDA).bfloat16()
    assert quantised._takes_scaled(x, weight), "fp8 products don't serve"
    values, scales = quantise_rows(x)
    rounded = functional.linear(values.float() * scales, weight.dequantised(torch.float32))
    assert relative_error(quantised.linear(x, weight), rounded) < 5e-3
    assert relative_error(rounded, functional.linear(x.float(), weight.dequantised(torch.float32))) < 0.04


@pytest.mark.parametrize("rows", [2, 16, 64, 128, 200, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_replayed_in_graphs(kind: str, rows: int) -> None:
    weight, x = weight_of(kind, 4096, 4096), torch.zeros(rows, 4096, device=CUDA, dtype=torch.bfloat16)
    quantised.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantised.linear(x, weight)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, quantised.linear(x, weight))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("llama", form) for form in ("compressed_channel", "fp8_blocks", "awq", "packed")),
        *(("gemma2", form) for form in ("compressed_channel", "awq")),  # by transformers' modules
    ],
)
def test_greedy_against_the_dequantised_weights_in_fp32(kind: str, form: str, tmp_path: Path) -> None:
    plain = tiny_model(kind) if kind == "llama" else tiny_hf_model(kind)
    folder, twin = quantised_folders(plain, tmp_path, form)
    nodes = decode, prefill = cuda_pair(folder)
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with client_of(nodes) as client:
        lengths = (1,) if form in ROUNDING_FORMS else (1, 17, 60)  # one row alone keeps its activations over fp8
        for prompt in (random_prompt(length, seed=length) for length in lengths):
            for name, both in (("split", {"prefill": prefill.info}), ("alone", {})):
                result = client.submit(f"{name}{len(prompt)}", prompt, sampling, decode=decode.info, **both)
                client.wait()
                assert result.failed is None, result.failed
                check_against_reference(twin, prompt, result.output(), torch.bfloat16)
