"""Attention of few decode rows under Triton's interpreter, against its eager twin in float64. Run by
test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.products import few_rows_attention as few_rows
from tandem.kernels.products import few_rows_scratch
from tandem.kernels.products.fused_ops import CacheSlots, HeadNorms
from tandem.kernels.reference import few_rows as reference
from tandem.kernels.triton_kernels.products import few_rows_launch

EPS = 1e-5


def case(
    lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, block_size: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(qkv, cos_sin, block tables, lengths, pool [blocks, K, 2, S, D], slots): slots of the new tokens and all after
    them are NaN, the last row's token isn't stored."""
    columns = max(lengths) // block_size + 1
    tables = torch.randperm(len(lengths) * columns).view(len(lengths), columns).to(torch.int32)
    pool = torch.randn(len(lengths) * columns, kv_heads, 2, block_size, size).to(dtype)
    slots = []
    for row, length in enumerate(lengths):
        for position in range(max(length - 1, 0), columns * block_size):
            pool[tables[row, position // block_size], :, :, position % block_size] = float("nan")
        newest = max(length - 1, 0)
        block = int(tables[row, newest // block_size])
        slots.append(block * block_size + newest % block_size if length and row < len(lengths) - 1 else -1)
    angles = torch.rand(max(lengths) + 1, size // 2) * 6
    qkv = torch.randn(len(lengths), (heads + 2 * kv_heads) * size).to(dtype)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    return qkv, cos_sin, tables, torch.tensor(lengths, dtype=torch.int32), pool, torch.tensor(slots)


@pytest.mark.parametrize("most_mergers", [0, 1000])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "size", "block_size", "with_norms"),
    [
        ((1, 16, 17, 100), 4, 2, 16, 16, False),
        ((65, 0, 200), 3, 1, 32, 64, False),
        ((65, 0, 200), 3, 1, 32, 64, True),
        ((40, 130), 8, 8, 16, 48, True),
        ((300, 1000, 129), 4, 2, 16, 64, False),
        ((257, 520), 2, 1, 16, 256, False),
    ],
)
def test_attention(
    lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, block_size: int, with_norms: bool,
    most_mergers: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(few_rows_scratch, "PROGRAMS", 7)
    monkeypatch.setattr(few_rows_launch, "MOST_MERGERS", most_mergers)
    few_rows_scratch.scratch_for.cache_clear()
    qkv, cos_sin, tables, seq_lens, pool, slots = case(lengths, heads, kv_heads, size, block_size)
    norms = HeadNorms(torch.randn(size), torch.randn(size), EPS) if with_norms else None
    expected, stored = reference.attention(
        qkv, cos_sin, tables.tolist(), lengths, pool[:, :, 0], pool[:, :, 1], heads, 0.3, norms
    )
    cache = CacheSlots(pool[:, :, 0], pool[:, :, 1], slots)
    before = pool.clone()
    for _ in range(2):  # nothing is left behind for the next launch
        output = few_rows.few_rows_attention(qkv, cos_sin, tables, seq_lens, cache, heads, 0.3, norms)
        torch.testing.assert_close(output.double(), expected, rtol=3e-6, atol=3e-6)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(
                pool[slot // block_size, :, :, slot % block_size].double(), stored[row], rtol=3e-6, atol=3e-6
            )
            pool[slot // block_size, :, :, slot % block_size] = before[slot // block_size, :, :, slot % block_size]
    assert torch.equal(pool.isnan(), before.isnan())
    assert torch.equal(pool.nan_to_num(), before.nan_to_num())
    few_rows_scratch.scratch_for(len(lengths) * kv_heads, heads // kv_heads, size, qkv.device).check_integrity()
