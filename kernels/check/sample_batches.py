"""Random paged batches for tests and benchmarks: a pool with scattered blocks whose unused slots all hold NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandem.kernels.api.backend import PagedKV, Prefill
from tandem.kernels.api.metadata import AttentionMetadata, AttentionMetadataBuilder, slots_of
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.reference import paged

NUM_LAYERS = 2  # of the pool; one is read, and what lies beside it must not be
LAYER = 1  # the one that is read


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """One step's input. The cache holds every row's earlier tokens; the new tokens' slots are still unwritten."""

    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [T, K, D]
    value: torch.Tensor  # [T, K, D]
    pool: torch.Tensor  # [num_blocks, K, NUM_LAYERS, 2, S, D]
    block_tables: list[list[int]]
    metadata: AttentionMetadata

    @property
    def kv_layer(self) -> torch.Tensor:
        """[num_blocks, K, 2, S, D], a strided view of the pool."""
        return self.pool[:, :, LAYER]

    def kv(self, k_scale: float = 1.0, v_scale: float = 1.0) -> PagedKV:
        return PagedKV.of_layer(self.kv_layer, k_scale, v_scale)

    def prefill(self, k_scale: float = 1.0, v_scale: float = 1.0) -> Prefill:
        """Every row's new tokens."""
        return Prefill(self.query, self.key, self.value, self.kv(k_scale, v_scale), self.metadata.all_rows())

    def expected(self, spec: AttentionSpec, k_scale: float = 1.0, v_scale: float = 1.0) -> torch.Tensor:
        """float64 [T, H, D] by the reference, once the new tokens are stored. Slow: small batches only."""
        meta, kv = self.metadata, self.kv()
        query, key, value = (x.to("cpu", torch.float64) for x in (self.query, self.key, self.value))
        caches = (kv.key_cache.cpu(), kv.value_cache.cpu())
        slopes = None if spec.alibi_slopes is None else spec.alibi_slopes.tolist()
        options: dict[str, Any] = {
            "k_scale": k_scale,
            "v_scale": v_scale,
            "slopes": slopes,
            "window": spec.sliding_window,
            "soft_cap": spec.logits_soft_cap,
            "chunk": spec.attention_chunk,
            "first_seen": int(spec.hides_first),
            "sinks": None if spec.sinks is None else spec.sinks.tolist(),
        }
        split = meta.num_decode_rows
        decoded = paged.paged_decode(
            query[:split], *caches, self.block_tables[:split], meta.seq_lens_cpu[:split], spec.scale, **options
        )
        prefilled = paged.paged_prefill(
            query[split:], key[split:], value[split:], *caches, self.block_tables[split:],
            meta.query_lens_cpu[split:], meta.seq_lens_cpu[split:], spec.scale, **options,
        )  # fmt: skip
        return torch.cat((decoded, prefilled))


def random_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    first_block: int = 0,
    seed: int = 0,
) -> PagedBatch:
    """Rows as given (rows with one new token first). Block ids are a random permutation from `first_block` on."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = first_block + sum(counts) + 2
    shape = (num_blocks, num_kv_heads, NUM_LAYERS, 2, block_size, head_size)
    pool = _nan_pool(shape, cache_dtype or dtype, torch.device(device))
    ids = (torch.randperm(sum(counts) + 2, generator=generator) + first_block).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    new_slots, old_slots = [], []
    for table, new, total in zip(tables, query_lens, seq_lens, strict=True):
        old_slots.append(slots_of(table, 0, total - new, block_size))
        new_slots.append(slots_of(table, total - new, new, block_size))
    _fill(pool[:, :, LAYER], np.concatenate(old_slots), generator)
    num_tokens = sum(query_lens)

    def tokens(heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, heads, head_size, generator=generator, dtype=torch.float32).to(device, dtype)

    metadata = AttentionMetadataBuilder().build(
        query_lens, seq_lens, tables, np.concatenate(new_slots), torch.device(device)
    )
    return PagedBatch(tokens(num_heads), tokens(num_kv_heads), tokens(num_kv_heads), pool, tables, metadata)


def share_prefix(batch: PagedBatch, rows: Sequence[int], num_blocks: int) -> None:
    """Makes the rows begin with the first row's first `num_blocks` blocks; the blocks that they had there hold NaN."""
    shared = batch.block_tables[rows[0]][:num_blocks]
    for row in rows[1:]:
        batch.pool[batch.block_tables[row][:num_blocks]] = torch.full((), float("nan")).to(batch.pool)
        batch.block_tables[row][:num_blocks] = shared
        batch.metadata.block_tables[row, :num_blocks] = torch.tensor(shared).to(batch.metadata.block_tables)


def _nan_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype == FP8_DTYPE:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(FP8_DTYPE)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _fill(kv_layer: torch.Tensor, slots: np.ndarray, generator: torch.Generator) -> None:
    """Random keys and values at `slots`, all heads."""
    num_heads, head_size, block_size = kv_layer.shape[1], kv_layer.shape[4], kv_layer.shape[3]
    values = torch.randn(len(slots), num_heads, 2, head_size, generator=generator)
    index = torch.from_numpy(slots).to(kv_layer.device)
    raw = kv_layer.view(torch.uint8) if kv_layer.dtype == FP8_DTYPE else kv_layer
    stored = values.to(kv_layer.device, kv_layer.dtype)
    raw[index // block_size, :, :, index % block_size] = stored.view(raw.dtype)
