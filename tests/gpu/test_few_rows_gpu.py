"""What decode steps of few rows are made of, on a Hopper GPU against float64: products with their norms, gating and
additions, attention from the QKV product on, a layer's chain of launches in a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_checks import ON_HOPPER, relative_error

from tandem.kernels.products import few_rows, few_rows_scratch, matmul
from tandem.kernels.products import few_rows_attention as attention
from tandem.kernels.products.fused_ops import CacheSlots, HeadNorms
from tandem.kernels.reference import few_rows as reference_few_rows

pytestmark = ON_HOPPER
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
EPS = 1e-5
DEVICE = torch.device("cuda", 0)


def random(*sizes: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*sizes, device=DEVICE) * scale).to(dtype)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype"),
    [
        (1, 6144, 4096, torch.bfloat16),
        (1, 4096, 14336, torch.bfloat16),
        (1, 1024, 3072, torch.bfloat16),
        (1, 48, 512, torch.float16),
        (2, 4096, 1024, torch.bfloat16),
        (2, 1024, 2048, torch.float16),
        (2, 64, 768, torch.bfloat16),
    ],
)
def test_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, gain = random(rows, inputs, dtype=dtype, scale=3.0), random(inputs, dtype=dtype)
    weight, bias = random(outputs, inputs, dtype=dtype, scale=inputs**-0.5), random(outputs, dtype=dtype)
    expected = reference_few_rows.norm_linear(x, gain, EPS, weight)
    for given in (None, bias):
        wanted = expected if given is None else expected + given.double()
        out = few_rows.norm_linear(x, gain, EPS, weight, given)
        assert relative_error(out, wanted) < TOLERANCE[dtype]
        assert torch.equal(out, few_rows.norm_linear(x, gain, EPS, weight, given))
    activated = few_rows.norm_linear_silu_mul(x, gain, EPS, matmul.group_gate_up(weight))
    assert relative_error(activated, reference_few_rows.norm_linear_silu_mul(x, gain, EPS, weight)) < TOLERANCE[dtype]
    residual = random(rows, outputs, dtype=dtype)
    total = residual.double() + x.double() @ weight.double().t() + bias.double()
    few_rows.add_linear(residual, x, weight, bias)
    assert relative_error(residual, total) < TOLERANCE[dtype]


def paged_case(
    lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(qkv, cos_sin, tables, lengths, pool [blocks, K, 2, S, D], slots); NaN wherever nothing may be read."""
    columns = max(lengths) // block + 1
    tables = torch.randperm(len(lengths) * columns).view(len(lengths), columns).to(DEVICE, torch.int32)
    pool = random(len(lengths) * columns, kv_heads, 2, block, size, dtype=dtype)
    slots = torch.full((len(lengths),), -1, dtype=torch.int64)
    for row, length in enumerate(lengths):
        newest = max(length - 1, 0)
        own = tables[row].long()
        pool[own[newest // block], :, :, newest % block :] = float("nan")
        pool[own[newest // block + 1 :]] = float("nan")
        if length:
            slots[row] = int(own[newest // block]) * block + newest % block
    angles = torch.rand(max(lengths) + 1, size // 2, device=DEVICE) * 6
    qkv = random(len(lengths), (heads + 2 * kv_heads) * size, dtype=dtype)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    return qkv, cos_sin, tables, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), pool, slots.to(DEVICE)


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "size", "block", "with_norms", "dtype"),
    [
        ((1,), 32, 8, 128, 64, False, torch.bfloat16),
        ((700,), 32, 8, 128, 64, False, torch.bfloat16),
        ((2300,), 16, 8, 128, 64, True, torch.bfloat16),
        ((64, 65, 0, 1), 8, 2, 64, 16, True, torch.float16),
        ((1100, 1, 17, 300, 64, 0, 129, 200), 28, 4, 128, 48, False, torch.float16),
    ],
)
def test_attention(
    lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, block: int, with_norms: bool, dtype: torch.dtype
) -> None:
    qkv, cos_sin, tables, seq_lens, pool, slots = paged_case(lengths, heads, kv_heads, size, block, dtype)
    norms = HeadNorms(random(size, dtype=dtype), random(size, dtype=dtype), EPS) if with_norms else None
    on_host = None if norms is None else HeadNorms(norms.q_weight.cpu(), norms.k_weight.cpu(), EPS)
    host = pool.cpu()
    expected, stored = reference_few_rows.attention(
        qkv.cpu(), cos_sin.cpu(), tables.tolist(), lengths, host[:, :, 0], host[:, :, 1], heads, size**-0.5, on_host
    )
    cache = CacheSlots(pool[:, :, 0], pool[:, :, 1], slots)
    outputs = [
        attention.few_rows_attention(qkv, cos_sin, tables, seq_lens, cache, heads, size**-0.5, norms) for _ in range(3)
    ]
    assert relative_error(outputs[0].cpu(), expected) < TOLERANCE[dtype]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert relative_error(pool[slot // block, :, :, slot % block].cpu(), stored[row]) < TOLERANCE[dtype]
            pool[slot // block, :, :, slot % block] = float("nan")
    assert torch.equal(pool.cpu().nan_to_num(), host.nan_to_num())  # nothing else was written
    few_rows_scratch.scratch_for(len(lengths) * kv_heads, heads // kv_heads, size, DEVICE).check_integrity()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_chain_of_launches_sees_what_the_one_before_it_wrote(rows: int) -> None:
    """Layers in one graph, replayed: kernels overlap, so a missing wait shows as another result."""
    hidden, middle, heads, kv_heads, size, block, layers = 1024, 3072, 16, 8, 128, 16, 6
    gains = [random(hidden) for _ in range(2 * layers)]
    qkv_weights = [random((heads + 2 * kv_heads) * size, hidden, scale=hidden**-0.5) for _ in range(layers)]
    o_weights = [random(hidden, heads * size, scale=(heads * size) ** -0.5) for _ in range(layers)]
    gate_ups = [random(2 * middle, hidden, scale=hidden**-0.5) for _ in range(layers)]
    downs = [random(hidden, middle, scale=middle**-0.5) for _ in range(layers)]
    lengths = (300, 40, 7, 1000)[:rows]
    _, cos_sin, tables, seq_lens, pool, slots = paged_case(lengths, heads, kv_heads, size, block, torch.bfloat16)
    pools = [pool.clone() for _ in range(layers)]
    start = random(rows, hidden)
    residual = torch.empty_like(start)

    def run(after_each: Callable[[], object]) -> None:
        residual.copy_(start)
        for layer in range(layers):
            cache = CacheSlots(pools[layer][:, :, 0], pools[layer][:, :, 1], slots)
            qkv = few_rows.norm_linear(residual, gains[2 * layer], EPS, qkv_weights[layer])
            after_each()
            out = attention.few_rows_attention(qkv, cos_sin, tables, seq_lens, cache, heads, size**-0.5)
            after_each()
            few_rows.add_linear(residual, out.view(rows, -1), o_weights[layer])
            after_each()
            activated = few_rows.norm_linear_silu_mul(residual, gains[2 * layer + 1], EPS, gate_ups[layer])
            after_each()
            few_rows.add_linear(residual, activated, downs[layer])
            after_each()

    run(torch.cuda.synchronize)
    expected = residual.clone()
    assert bool(expected.isfinite().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(50):
        residual.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(residual, expected)
