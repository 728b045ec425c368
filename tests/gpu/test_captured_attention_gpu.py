"""Attention of steps with prompts in a captured graph on a GPU: replayed for steps of any lengths, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_checks import ON_HOPPER, exact, relative_error

from tandem.kernels.api.attention import Attention
from tandem.kernels.backends.triton import TritonOps, why_not_captured
from tandem.kernels.check.sample_batches import PagedBatch, random_batch
from tandem.kernels.reference import paged

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]

HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 128, 64
ROWS, TOKENS, LENGTH = 64, 640, 4096
TOLERANCE = 1e-2
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 200},
    "soft-cap": {"logits_soft_cap": 5.0},
    "alibi": {"alibi_slopes": torch.tensor(paged.alibi_slopes(HEADS))},
    "sinks": {"sinks": torch.linspace(-2, 2, HEADS)},
}
STEPS: list[tuple[Sequence[int], Sequence[int]]] = [
    ((1,) * 5 + (63, 128, 129, 300), (40, 1, 1000, 4096, 65, 63, 900, 2000, 300)),
    ((640,), (4096,)),
    ((1,) * ROWS + (2, 3), (*range(1, 60 * ROWS, 60), 2, 1000)),
    ((1,), (3000,)),
    ((2,) * 16, tuple(range(2, 34, 2))),
]


def batch_of(query_lens: Sequence[int], seq_lens: Sequence[int], dtype: torch.dtype, seed: int) -> PagedBatch:
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "block_size": BLOCK}
    return random_batch(query_lens, seq_lens, seed=seed, dtype=dtype, device="cuda", **sizes)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_graph_serves_steps_of_any_lengths(options: str, dtype: torch.dtype) -> None:
    batches = [batch_of(*lengths, dtype, seed) for seed, lengths in enumerate(STEPS)]
    pool = torch.zeros_like(max((each.pool for each in batches), key=len))
    layer = Attention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, attn_backend="TRITON", **OPTIONS[options])
    layer.bind(pool[:, :, 1])
    assert why_not_captured([layer]) is None
    captured = layer.first_backend().capture([layer], ROWS, TOKENS, LENGTH)
    assert captured is not None
    query, key, value = (
        torch.full((TOKENS, heads, SIZE), float("nan"), dtype=dtype, device="cuda")
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    anywhere = batches[0].metadata  # keys and values are stored already

    def two_layers() -> tuple[torch.Tensor, torch.Tensor]:
        captured.begin()
        first = captured.attend(layer, query, key, value, anywhere, True)
        return first, captured.attend(layer, query, key, value, anywhere, True)

    two_layers()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = two_layers()
    for batch in (*batches, *batches[::-1]):
        pool[: len(batch.pool)] = batch.pool
        meta = batch.metadata
        TritonOps.write(batch.key, batch.value, replace(batch, pool=pool).kv(), meta.slot_mapping)
        for room, tensor in ((query, batch.query), (key, batch.key), (value, batch.value)):
            room[: meta.num_tokens] = tensor
        tables = torch.zeros((meta.num_rows, LENGTH // BLOCK), dtype=torch.int32, device="cuda")
        tables[:, : meta.block_tables.shape[1]] = meta.block_tables
        assert captured.takes(meta)
        captured.fill(replace(meta, block_tables=tables))
        graph.replay()
        expected = exact(batch, layer.spec)
        for out in outputs:
            found = out[: meta.num_tokens]
            assert found.isfinite().all()
            assert relative_error(found, expected) < TOLERANCE, meta.query_lens_cpu


def test_caches_of_8_bits_are_not_captured() -> None:
    layer = Attention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, kv_cache_dtype="fp8", attn_backend="TRITON")
    layer.bind(torch.zeros((4, KV_HEADS, 2, BLOCK, SIZE), dtype=torch.float8_e4m3fn, device="cuda"))
    assert why_not_captured([layer]) is not None
    assert layer.first_backend().capture([layer], ROWS, TOKENS, LENGTH) is None
