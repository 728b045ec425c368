"""Mixtures of experts on a GPU against plain torch, also in graphs; models with experts served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import relative_error
from near_ties import check_against_reference

from in_process_cluster import client_of, cuda_pair
from tandem.engine.contracts.config_json.mixture_config import MixtureConfig
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.models.mixture_layer import MixtureOfExperts
from tandem.kernels.experts.mixture import GLUON_TYPES, mixture, run_plan, serves
from tandem.kernels.experts.plans import (
    NOT_HERE,
    Clamp,
    GluonType,
    GroupedPlan,
    MixturePlan,
    MixtureSizes,
    Routing,
    StreamedPlan,
    every_plan,
)
from tandem.kernels.experts.routing import route
from tandem.kernels.experts.stacked import StackedWeight, empty_stacked, stacked_mxfp4
from tandem.kernels.products.fused_ops import rms_norm
from tandem.kernels.products.matmul_device import is_hopper
from tandem.kernels.reference import experts as twins
from tandem.kernels.triton_kernels.experts.sort import sort_triton
from tiny_models import check_greedy, random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
SHAPES = (MixtureSizes(128, 8, 2048, 768), MixtureSizes(8, 2, 1024, 3584), MixtureSizes(6, 2, 64, 48))
ROUTINGS = (
    (Routing(8), 128, False),
    (Routing(2, renormalises=False), 6, False),
    (Routing(8, held=(32, 96)), 128, False),
    (Routing(8, scores="sigmoid", groups=8, kept_groups=4, by_pairs=True, factor=2.5), 256, True),
    (Routing(6, renormalises=False, groups=8, kept_groups=3, factor=16.0), 64, False),
)

Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def made(num_tokens: int, sizes: MixtureSizes, dtype: torch.dtype) -> Made:
    """x, ids, weights, and the matrices. The last expert is chosen by nobody, the first by every other token; the third
    isn't here."""
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, sizes.hidden, device=CUDA, dtype=dtype)
    scores = torch.randn(num_tokens, sizes.num_experts, device=CUDA)
    scores[:, -1], scores[::2, 0] = -100.0, 100.0
    ids, weights = route(scores, Routing(sizes.top_k))
    ids[ids == 2] = NOT_HERE
    gate_up = torch.randn(sizes.num_experts, 2 * sizes.width, sizes.hidden, device=CUDA, dtype=dtype)
    down = torch.randn(sizes.num_experts, sizes.hidden, sizes.width, device=CUDA, dtype=dtype)
    return x, ids, weights, gate_up * sizes.hidden**-0.5, down * sizes.width**-0.5


@pytest.mark.parametrize(("routing", "num_experts", "has_bias"), ROUTINGS)
@pytest.mark.parametrize("num_tokens", [1, 77, 3000])
def test_routing_is_its_twins(routing: Routing, num_experts: int, has_bias: bool, num_tokens: int) -> None:
    logits = torch.randn(num_tokens, num_experts, device=CUDA)
    bias = torch.rand(num_experts, device=CUDA) if has_bias else None
    ids, weights = route(logits, routing, bias)
    expected_ids, expected = twins.route(logits, routing, bias)
    is_same = (ids == expected_ids).all(1)  # a tie by rounding may go either way
    assert is_same.float().mean() > 0.99
    torch.testing.assert_close(weights[is_same], expected[is_same], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 8, 128), (64, 8, 128), (8192, 8, 128), (999, 2, 6)]
)
def test_pairs_are_sorted(num_tokens: int, top_k: int, num_experts: int) -> None:
    ids = torch.randint(0, num_experts, (num_tokens, top_k), device=CUDA, dtype=torch.int32)
    for tile_m in (16, 128):
        order, tiles = sort_triton(ids, num_experts, tile_m)
        assert bool(((tiles[:, 2] >= 0) & (tiles[:, 2] <= tile_m)).all())
        assert torch.equal(order.long(), ids.flatten().long().argsort(stable=True))
        expert, first, count, _ = tiles[tiles[:, 2] > 0].T.long()
        assert torch.equal(first, count.cumsum(0) - count)
        assert int(count.max()) <= tile_m
        assert torch.equal(expert.repeat_interleave(count), ids.flatten()[order.long()].long())


def gluon_of(dtype: torch.dtype) -> GluonType:
    """What sizes say of kernels in Gluon there."""
    return GLUON_TYPES.get(dtype, "") if is_hopper(CUDA) else ""


def run(plan: MixturePlan, x: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
    """What the plan makes, in memory that held no numbers: what a plan before it left there would look right."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    spoiled = torch.full((64 << 20,), float("nan"), device=CUDA)
    del spoiled
    return run_plan(plan, x, *rest, **more)


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 8e-3), (torch.float16, 2e-3), (torch.float32, 1e-5)])
def test_every_plan_makes_what_the_experts_make(sizes: MixtureSizes, dtype: torch.dtype, most: float) -> None:
    sizes = sizes._replace(element_bytes=dtype.itemsize, gluon=gluon_of(dtype))
    for num_tokens in (1, 3, 61, 700):
        x, ids, weights, gate_up, down = made(num_tokens, sizes, dtype)
        exact = twins.mixture(x.double(), ids, weights.double(), gate_up.double(), down.double())
        for plan in every_plan(sizes):
            out = run(plan, x, ids, weights, gate_up, down)
            assert relative_error(out, exact) < most, plan
            assert torch.equal(out, run_plan(plan, x, ids, weights, gate_up, down)), plan


def in_e4m3(plain_XNK: torch.Tensor, group: int) -> StackedWeight:
    """The matrices in e4m3, a scale an output, or one a group."""
    made = empty_stacked(*plain_XNK.shape, group, CUDA)
    groups = plain_XNK.float().unflatten(2, (-1, group or plain_XNK.shape[2]))
    scales = groups.abs().amax(3) / 448
    made.values.copy_((groups / scales[..., None]).flatten(2))
    made.scales.copy_(scales.transpose(1, 2))
    return made


@pytest.mark.parametrize(
    ("sizes", "group", "dtype"),
    [(SHAPES[0], 128, torch.bfloat16), (SHAPES[1], 0, torch.bfloat16), (SHAPES[2], 0, torch.float32)],
)
def test_every_plan_over_e4m3_makes_what_dequantised_experts_make(
    sizes: MixtureSizes, group: int, dtype: torch.dtype
) -> None:
    sizes = sizes._replace(element_bytes=dtype.itemsize, bits=8, group=group, gluon=gluon_of(dtype))
    for num_tokens in (1, 3, 61, 700):
        x, ids, weights, gate_up, down = made(num_tokens, sizes, dtype)
        gate_up, down = in_e4m3(gate_up, group), in_e4m3(down, group)
        assert serves(x, ids, gate_up, down)
        exact = twins.mixture(x.double(), ids, weights.double(), gate_up, down)
        plans = every_plan(sizes)
        grouped = next(plan for plan in plans if isinstance(plan.down, GroupedPlan))
        for plan in (*plans, grouped._replace(rounded=False)):
            out = run(plan, x, ids, weights, gate_up, down)
            most = 8e-2 if plan.rounded else 8e-3 if dtype == torch.bfloat16 else 1e-5
            assert relative_error(out, exact) < most, plan
            assert torch.equal(out, run_plan(plan, x, ids, weights, gate_up, down)), plan


def in_integers(num_experts: int, num_outputs: int, num_inputs: int, group: int, scales: torch.dtype) -> StackedWeight:
    """Matrices of any numbers of 4 bits."""
    made = empty_stacked(num_experts, num_outputs, num_inputs, group, CUDA, scales)
    assert made.zeros is not None
    made.values.random_(256)
    made.scales.uniform_(0.002, 0.006)
    made.zeros.random_(16)
    return made


@pytest.mark.parametrize(
    ("group", "scale_dtype", "dtype"),
    [
        (128, torch.float16, torch.bfloat16), (0, torch.bfloat16, torch.bfloat16), (256, torch.float16, torch.float16),
        (64, torch.float16, torch.float16),
    ],
)  # fmt: skip
def test_every_plan_over_integers_of_four_bits_makes_what_dequantised_experts_make(
    group: int, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    sizes = SHAPES[0]._replace(bits=4, group=group, gluon=gluon_of(dtype))
    gate_up = in_integers(sizes.num_experts, 2 * sizes.width, sizes.hidden, group, scale_dtype)
    down = in_integers(sizes.num_experts, sizes.hidden, sizes.width, group, scale_dtype)
    plans = every_plan(sizes)
    assert any(isinstance(plan.down, StreamedPlan) for plan in plans) == (bool(sizes.gluon) and group % 128 == 0)
    for num_tokens in (1, 61, 700):
        x, ids, weights, _, _ = made(num_tokens, SHAPES[0], dtype)
        assert serves(x, ids, gate_up, down)
        exact = twins.mixture(x.double(), ids, weights.double(), gate_up, down)
        for plan in plans:
            out = run(plan, x, ids, weights, gate_up, down)
            assert relative_error(out, exact) < 8e-3, plan
            assert torch.equal(out, run_plan(plan, x, ids, weights, gate_up, down)), plan


def test_weights_straight_to_registers_make_the_same_in_any_company() -> None:
    """Whatever the plan, too: they all add inputs up in one order."""
    sizes = SHAPES[0]._replace(bits=4, group=128, gluon=gluon_of(torch.bfloat16))
    plans = [plan for plan in every_plan(sizes) if isinstance(plan.down, StreamedPlan)]
    if not plans:
        pytest.skip("needs a Hopper device")
    gate_up = in_integers(sizes.num_experts, 2 * sizes.width, sizes.hidden, 128, torch.float16)
    down = in_integers(sizes.num_experts, sizes.hidden, sizes.width, 128, torch.float16)
    x, ids, weights, _, _ = made(300, SHAPES[0], torch.bfloat16)
    whole = run_plan(plans[0], x, ids, weights, gate_up, down)
    for plan in plans:
        some = torch.randperm(300, device=CUDA)[:41]
        assert torch.equal(run_plan(plan, x[some], ids[some], weights[some], gate_up, down), whole[some]), plan


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(MixtureSizes(32, 4, 2880, 2880), torch.bfloat16), (MixtureSizes(6, 2, 64, 96), torch.float32)],
)
def test_every_plan_over_e2m1_makes_what_dequantised_experts_make(sizes: MixtureSizes, dtype: torch.dtype) -> None:
    clamp = Clamp(1.702, 7.0)
    sizes = sizes._replace(element_bytes=dtype.itemsize, bits=4, is_e2m1=True, group=32, has_bias=True, clamp=clamp)
    sizes = sizes._replace(gluon=gluon_of(dtype))

    def stack(num_outputs: int, num_inputs: int) -> StackedWeight:
        shape = (sizes.num_experts, num_outputs, num_inputs)
        codes = torch.randint(0, 16, shape, dtype=torch.uint8, device=CUDA)
        exponents = torch.randint(118, 122, codes[:, :, ::32].shape, dtype=torch.uint8, device=CUDA)
        return stacked_mxfp4(codes, exponents, torch.randn(shape[:2], dtype=dtype, device=CUDA))

    gate_up, down = stack(2 * sizes.width, sizes.hidden), stack(sizes.hidden, sizes.width)
    for num_tokens in (1, 61, 700):
        torch.manual_seed(num_tokens)
        x = torch.randn(num_tokens, sizes.hidden, device=CUDA, dtype=dtype)
        ids, weights = route(torch.randn(num_tokens, sizes.num_experts, device=CUDA), Routing(sizes.top_k))
        assert serves(x, ids, gate_up, down, clamp)
        exact = twins.mixture(x.double(), ids, weights.double(), gate_up, down, clamp=clamp)
        for plan in every_plan(sizes):
            out = run(plan, x, ids, weights, gate_up, down, clamp=clamp)
            assert relative_error(out, exact) < (8e-3 if dtype == torch.bfloat16 else 1e-5), plan
            assert torch.equal(out, run_plan(plan, x, ids, weights, gate_up, down, clamp=clamp)), plan


def test_a_row_is_the_same_in_any_company() -> None:
    """By one plan: where a row lies in a tile, and who else goes to its experts, changes no bit."""
    sizes = SHAPES[0]._replace(gluon=gluon_of(torch.bfloat16))
    x, ids, weights, gate_up, down = made(300, sizes, torch.bfloat16)
    for plan in every_plan(sizes):
        whole = run_plan(plan, x, ids, weights, gate_up, down)
        some = torch.randperm(300, device=CUDA)[:41]
        assert torch.equal(run_plan(plan, x[some], ids[some], weights[some], gate_up, down), whole[some]), plan


@pytest.mark.parametrize("rows", [1, 2])
def test_a_layer_of_few_rows_is_the_layer(rows: int) -> None:
    """With the norm before and the addition after it inside; in graphs."""
    config = MixtureConfig(num_experts=32, top_k=8, width=768)
    layer = MixtureOfExperts(2048, config).to(CUDA, torch.bfloat16).requires_grad_(False)
    for matrix in (layer.gate.weight, layer.experts.gate_up_proj, layer.experts.down_proj):
        matrix.normal_(std=matrix.shape[-1] ** -0.5)
    assert layer.few_rows_products() == ((32, 2048),)
    residual, gain = torch.randn(rows, 2048, device=CUDA).bfloat16(), torch.rand(2048, device=CUDA).bfloat16() + 0.5
    added = residual.clone()
    layer.forward_few_rows(added, gain, 1e-6)
    expected = residual + layer(rms_norm(residual, gain, 1e-6))
    assert relative_error(added, expected.double()) < 1e-2
    graph, out = torch.cuda.CUDAGraph(), residual.clone()
    with torch.cuda.graph(graph):
        for _ in range(4):
            layer.forward_few_rows(out, gain, 1e-6)
    added.copy_(residual)
    for _ in range(4):
        layer.forward_few_rows(added, gain, 1e-6)
        torch.cuda.synchronize()
    for _ in range(20):
        out.copy_(residual)
        graph.replay()
        assert torch.equal(out, added)


@pytest.mark.parametrize("rows", [1, 2, 16, 64, 256])
def test_mixtures_are_replayed_in_graphs(rows: int) -> None:
    x, _, _, gate_up, down = made(rows, SHAPES[0], torch.bfloat16)
    logits = torch.randn(rows, 128, device=CUDA)

    def step() -> torch.Tensor:
        ids, weights = route(logits, Routing(8))
        assert serves(x, ids, gate_up, down)
        return mixture(x, ids, weights, gate_up, down)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        x.normal_()
        logits.normal_()
        graph.replay()
        assert torch.equal(out, step())


@pytest.mark.parametrize(("kind", "dtype"), [("mixtral", "bfloat16"), ("mixtral", "float32"), ("qwen3_moe", "float32")])
def test_greedy_against_fp32(kind: str, dtype: str) -> None:
    """In 16 bits a token may go to other experts by a rounding: Qwen3-MoE's, of which one counts much, say nothing."""
    folder = tiny_model(kind)
    nodes = decode, prefill = cuda_pair(folder, dtype)
    assert decode.process.loaded.replays_graphs
    sampling = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    with client_of(nodes) as client:
        prompts = {n: random_prompt(n, seed=n) for n in (1, 5, 17, 90, 300)}
        results = []
        for length, prompt in prompts.items():
            split = client.submit(f"s{length}", prompt, sampling, decode=decode.info, prefill=prefill.info)
            results += [(prompt, split), (prompt, client.submit(f"a{length}", prompt, sampling, decode=decode.info))]
        client.wait()
        for prompt, result in results:
            assert result.failed is None, result.failed
            if dtype == "float32":
                check_greedy(folder, prompt, result.output(), sampling.max_tokens)
            else:
                check_against_reference(folder, prompt, result.output(), torch.bfloat16)
