"""Adapters on a GPU: both kernels against float64 in 16 bit, and replayed steps that make merged weights' tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gpu_checks import relative_error
from handmade_steps import decode_step, new_slot
from tiny_adapters import merged_greedy, tiny_adapter

from tandem.engine.adapters.node_adapters import NodeAdapters
from tandem.engine.contracts.config import LoraOptions, ModelOptions, SchedulerOptions
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.models.loader import load_model
from tandem.engine.running.runner import ModelRunner
from tandem.engine.running.step_inputs import adapter_rows
from tandem.engine.scheduling.step import AdapterLoad, SampleRow, ScheduledRow, SchedulerOutput
from tandem.kernels.products import matmul
from tandem.kernels.products.adapter_rows import AdapterRows, AdapterStack, UnaddedProduct, padded_rank
from tandem.kernels.products.adapters import (
    added,
    expand,
    expand_silu_mul,
    linear_and_low,
    norm_adds,
    rotation_adds,
    shrink,
)
from tandem.kernels.products.fused_ops import CacheSlots, add_rms_norm, rope_and_store
from tandem.kernels.products.matmul import group_gate_up
from tiny_models import random_prompt, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("parts", "size"), [((4096, 1024, 1024), 4096), ((3584, 3584), 4096), ((4096,), 14336)])
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("lengths", [[1] * 64, [1, 1, 700, 35]])
def test_products(lengths: list[int], rank: int, parts: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    padded, slots, num_rows = padded_rank(rank), 9, sum(lengths)
    a = (torch.randn(slots, len(parts) * padded, size, device=CUDA) / size**0.5).to(dtype)
    b = (torch.randn(slots, sum(parts), padded, device=CUDA) / rank**0.5).to(dtype)
    stack = AdapterStack(a, b, torch.full((slots, len(parts)), rank, dtype=torch.int32, device=CUDA), parts)
    x, base = torch.randn(num_rows, size, device=CUDA).to(dtype), torch.randn(num_rows, sum(parts), device=CUDA)
    base = base.to(dtype)
    adapter_R = np.arange(len(lengths)) % (slots + 1)
    rows = adapter_rows(adapter_R, np.array(lengths), CUDA)
    assert rows is not None
    expected, first = base.double(), 0
    for adapter, length in zip(adapter_R.tolist(), lengths, strict=True):
        begin = 0
        for part, outputs in enumerate(parts if adapter else ()):
            a_RK = a[adapter - 1, part * padded : part * padded + rank].double()
            b_NR = b[adapter - 1, begin : begin + outputs, :rank].double()
            added = x[first : first + length].double() @ a_RK.t() @ b_NR.t()
            expected[first : first + length, begin : begin + outputs] += added
            begin += outputs
        first += length
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]
    out, low = base.clone(), shrink(x, stack, rows)
    expand(out, low, stack, rows)
    assert relative_error(out, expected) < tolerance
    if len(parts) == 2:
        activated = torch.nn.functional.silu(expected[:, : parts[0]]) * expected[:, parts[0] :]
        for group, gate_up in ((0, base), (8, group_gate_up(base.t()).t().contiguous())):
            made = expand_silu_mul(gate_up, low, stack, rows, group)
            assert relative_error(made, activated) < tolerance


@pytest.mark.parametrize("rank", [8, 16, 64])
def test_what_a_row_gets_does_not_depend_on_the_rows_beside_it(rank: int) -> None:
    """A row whose tile takes one adapter, and the same row among others, of a batch of other size, too."""
    torch.manual_seed(rank)
    padded, size, inner = padded_rank(rank), 4096, 14336
    a, b = (torch.randn(9, *shape, device=CUDA).bfloat16() for shape in ((2 * padded, size), (2 * inner, padded)))
    stack = AdapterStack(0.02 * a, b, torch.full((9, 2), rank, dtype=torch.int32, device=CUDA), (inner, inner))
    x, gate_up = (torch.randn(64, columns, device=CUDA).bfloat16() for columns in (size, 2 * inner))

    def made(adapters: list[int]) -> torch.Tensor:
        number = len(adapters)
        rows = adapter_rows(np.array(adapters), np.ones(number, np.int64), CUDA)
        assert rows is not None
        return expand_silu_mul(gate_up[:number], shrink(x[:number], stack, rows), stack, rows, 8)

    alone = made([3] * 5)
    assert torch.equal(made([3] * 64)[:5], alone)
    assert torch.equal(made([3] * 5 + [slot % 10 for slot in range(59)])[:5], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [8, 16])
def test_a_norm_and_a_rotation_add_what_expand_adds(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    rows = adapter_rows(np.arange(64) % 10, np.ones(64, np.int64), CUDA)
    assert rows is not None
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]
    x, gain, residual = (torch.randn(*shape, device=CUDA).to(dtype) for shape in ((64, 4096), (4096,), (64, 4096)))
    table, positions = torch.rand(64, 128, device=CUDA), torch.arange(64, device=CUDA)

    def product_of(parts: tuple[int, ...]) -> tuple[UnaddedProduct, torch.Tensor]:
        a = torch.randn(9, padded_rank(rank) * len(parts), 4096, device=CUDA) / 64
        b = torch.randn(9, sum(parts), padded_rank(rank), device=CUDA) / 4
        ranks = torch.full((9, len(parts)), rank, dtype=torch.int32, device=CUDA)
        ranks[4, 0] = 0  # an adapter that leaves a part alone
        stack = AdapterStack(a.to(dtype), b.to(dtype), ranks, parts)
        product = UnaddedProduct(
            torch.randn(64, sum(parts), device=CUDA).to(dtype), shrink(x, stack, rows), stack, rows
        )
        return product, added(replace(product, out=product.out.clone()))

    product, whole = product_of((4096,))
    assert norm_adds(product)
    stream, twin = residual.clone(), residual.clone()
    made, expected = add_rms_norm(product, stream, gain, 1e-5), add_rms_norm(whole, twin, gain, 1e-5)
    assert relative_error(made, expected.double()) < tolerance
    assert relative_error(stream, twin.double()) < tolerance
    product, whole = product_of((4096, 1024, 1024))
    assert rotation_adds(product)
    pools = torch.zeros(2, 8, 8, 2, 16, 128, device=CUDA, dtype=dtype)
    for each, pool in ((product, pools[0]), (whole, pools[1])):
        rope_and_store(each, positions, table, 32, 8, None, CacheSlots(pool[:, :, 0], pool[:, :, 1], 2 * positions))
    assert relative_error(product.out, whole.double()) < tolerance
    assert relative_error(pools[0], pools[1].double()) < tolerance


@pytest.mark.parametrize("num_adapters", [1, 9])
def test_graphs_repeat_what_they_made(num_adapters: int) -> None:
    """Products of our own, shrink beside them and expand overlap: the sums are those of kernels that wait."""
    torch.manual_seed(num_adapters)
    of_sizes = [((4096, 1024, 1024), 4096), ((4096,), 4096), ((14336, 14336), 4096), ((4096,), 14336)]
    blocks = [(sum(parts), size, stack_of(parts, size)) for parts, size in of_sizes]
    weights = [torch.randn(outputs, size, device=CUDA).bfloat16() / size**0.5 for outputs, size, _ in blocks]
    x = torch.randn(64, 4096, device=CUDA).bfloat16()
    rows = adapter_rows(1 + np.arange(64) % num_adapters, np.ones(64, np.int64), CUDA)
    assert rows is not None
    matmul.prepare(CUDA)
    assert all(
        matmul.can_start_late(x.new_empty(64, size), weight)
        for weight, (_, size, _) in zip(weights, blocks, strict=True)
    )
    ones, residual = torch.ones(4096, device=CUDA, dtype=torch.bfloat16), torch.zeros_like(x)
    table, positions = torch.rand(64, 128, device=CUDA), torch.arange(64, device=CUDA)

    def chain(products: Callable[..., tuple[torch.Tensor, torch.Tensor]], wait: Callable[[], None]) -> torch.Tensor:
        at: torch.Tensor | UnaddedProduct = x
        residual.zero_()
        for _ in range(3):
            for weight, (outputs, size, stack) in zip(weights, blocks, strict=True):
                wait()
                if size == 4096:
                    at = add_rms_norm(at, residual, ones, 1e-5)
                wait()
                product = UnaddedProduct(*products(at, weight, None, stack, rows), stack, rows)
                wait()
                if outputs == 28672:
                    at = expand_silu_mul(product.out, product.low, stack, rows, 8)
                elif outputs == 4096:
                    assert norm_adds(product)
                    at = product
                else:
                    assert rotation_adds(product)
                    rope_and_store(product, positions, table, 32, 8)
                    at = product.out[:, :4096].contiguous()
        return added(at)

    def apart(x: torch.Tensor, weight: torch.Tensor, bias: None, stack: AdapterStack, rows: AdapterRows) -> Any:
        low = shrink(x, stack, rows)
        torch.cuda.synchronize()
        return matmul.linear(x, weight, bias), low

    expected = chain(apart, torch.cuda.synchronize)
    assert torch.equal(chain(linear_and_low, torch.cuda.synchronize), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = chain(linear_and_low, lambda: None)
    for _ in range(50):
        graph.replay()
        assert torch.equal(made, expected)


def stack_of(parts: tuple[int, ...], size: int) -> AdapterStack:
    """Nine adapters of rank 16 whose share is about as large as the product's own."""
    a = torch.randn(9, 16 * len(parts), size, device=CUDA).bfloat16() / size**0.5
    b = torch.randn(9, sum(parts), 16, device=CUDA).bfloat16() / 4
    return AdapterStack(a, b, torch.full((9, len(parts)), 16, dtype=torch.int32, device=CUDA), parts)


@pytest.mark.parametrize("replayed", [False, True])
def test_each_row_takes_its_own_adapter(replayed: bool, tmp_path: Path) -> None:
    base, config = tiny_model("llama"), load_model_config(tiny_model("llama"))
    folders = {slot: tiny_adapter(tmp_path / str(slot), base, seed=slot, rank=2 + slot) for slot in (1, 2)}
    model = load_model(base, config, ModelOptions(str(base)), CUDA, torch.float32)
    adapters = NodeAdapters(model.adapter_sites(), LoraOptions(True, max_loras=2, max_lora_rank=8), torch.float32, CUDA)
    model.take_adapters(adapters.stacks)
    pool = torch.zeros(32, config.num_kv_heads, config.num_layers, 2, 16, config.head_dim, device=CUDA)
    runner = ModelRunner(model, pool, SchedulerOptions(8, 128), 16, 128, (), adapters=adapters)
    runner.warmup()
    if replayed:
        runner.capture_decode_steps()
    refs = {slot: AdapterRef(str(folder), adapters.store.read(str(folder)).digest) for slot, folder in folders.items()}
    prompts = {slot: random_prompt(9 + 5 * slot, seed=slot) for slot in range(5)}
    of_slot = {slot: slot % 3 for slot in prompts}
    entering = [new_slot(slot, prompt, tuple(range(4 * slot, 4 * slot + 4))) for slot, prompt in prompts.items()]
    step = SchedulerOutput(
        0,
        tuple(ScheduledRow(slot, 0, len(prompt)) for slot, prompt in prompts.items()),
        tuple(SampleRow(i, slot, len(prompt), 0, 0) for i, (slot, prompt) in enumerate(prompts.items())),
        new_slots=tuple(msgspec.structs.replace(new, adapter=of_slot[new.slot]) for new in entering),
        adapter_loads=tuple(AdapterLoad(slot, ref) for slot, ref in refs.items()),
    )
    made = [runner.execute(step).result().token_ids.tolist()]
    for index in range(1, 8):
        positions = {slot: len(prompt) + index - 1 for slot, prompt in prompts.items()}
        made.append(runner.execute(decode_step(index, positions)).result().token_ids.tolist())
    for slot, prompt in prompts.items():
        number = of_slot[slot]
        merged = tmp_path / f"merged {number}" if number else base
        expected = merged_greedy(merged, base, folders.get(number, base), prompt, 8).token_ids
        assert [tokens[slot] for tokens in made] == expected
