"""Attention kernels with work to time and an error to check: what the self-test and the benchmarks run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tandem.kernels.api.backend import PagedOps, Prefill
from tandem.kernels.api.metadata import AttentionMetadataBuilder, slots_of
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.blocks.quantization import FP8_DTYPE, as_bytes
from tandem.kernels.check.sample_batches import LAYER, NUM_LAYERS, PagedBatch, random_batch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    """Attention of one layer, on one device."""

    spec: AttentionSpec
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def cache_dtype(self) -> torch.dtype:
        return FP8_DTYPE if self.spec.is_fp8 else self.dtype

    @property
    def columns(self) -> int:
        """The number of columns of a merged QKV projection."""
        return (self.spec.num_heads + 2 * self.spec.num_kv_heads) * self.spec.head_size

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class Case:
    """One kernel at one size. `work`: bytes moved or operations done by `run`. `error`: largest difference from
    float64, relative to the largest value; of exact kernels the share of wrong results."""

    name: str
    size: str
    work: float
    is_product: bool  # `work` counts operations
    run: Callable[[], object]
    error: Callable[[], float]
    tolerance: float


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return ((output.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def prefill_case(shape: Shape, ops: type[PagedOps], num_rows: int, new: int, earlier: int = 0) -> Case:
    """`new` tokens of each row over `earlier` ones in the cache."""
    spec, odd = shape.spec, shape.block_size + 1
    batch = timed_batch(shape, (new,) * num_rows, earlier)
    pairs = num_rows * (new * earlier + new * (new + 1) / 2)

    def run(batch: PagedBatch = batch) -> torch.Tensor:
        return ops.prefill(batch.prefill(), spec)

    def error() -> float:
        past = odd if earlier else 0
        small = _checked_batch(shape, (odd, 2 * odd, 2), (odd + past, 2 * odd, 2 + 3 * past))
        wide = (small.query.double(), small.key.double(), small.value.double())
        exact = NativeOps.prefill(Prefill(*wide, small.kv(), replace(small.metadata.all_rows(), scratch={})), spec)
        return relative_error(run(small), exact)

    size = f"{num_rows} x {new}" + (f" over {earlier}" if earlier else "")
    operations = 4 * spec.num_heads * spec.head_size * pairs
    name = "prefix prefill" if earlier else "prefill"
    return Case(name, size, operations, True, run, error, TOLERANCE[shape.dtype])


def decode_case(shape: Shape, ops: type[PagedOps], num_rows: int, length: int) -> Case:
    spec, block = shape.spec, shape.block_size
    batch = timed_batch(shape, (1,) * num_rows, length - 1)

    def run(batch: PagedBatch = batch) -> torch.Tensor:
        return ops.decode(batch.query, batch.kv(), batch.metadata.decode_rows(), spec)

    def error() -> float:
        small = _checked_batch(shape, (1,) * 6, (1, block - 1, block, block + 1, 5 * block, 777))
        exact = NativeOps.decode(small.query.double(), small.kv(), small.metadata.decode_rows(), spec)
        small.metadata.scratch.clear()
        return relative_error(run(small), exact)

    token_bytes = 2 * spec.num_kv_heads * spec.head_size * shape.cache_dtype.itemsize
    work = num_rows * length * token_bytes
    return Case("decode", f"{num_rows} x {length}", work, False, run, error, TOLERANCE[shape.dtype])


def timed_batch(shape: Shape, query_lens: tuple[int, ...], earlier: int) -> PagedBatch:
    """Rows of random values all over, in blocks scattered over the pool."""
    spec, block = shape.spec, shape.block_size
    lengths = [new + earlier for new in query_lens]
    counts = [-(-length // block) for length in lengths]
    sizes = (sum(counts) + 1, spec.num_kv_heads, NUM_LAYERS, 2, block, spec.head_size)
    pool = torch.empty(sizes, dtype=shape.cache_dtype, device=shape.device)
    as_bytes(pool)[:, :, LAYER] = as_bytes(torch.randn(sizes[:2] + sizes[3:], device=shape.device).to(pool.dtype))
    ids = (torch.randperm(sum(counts)) + 1).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    slots = [slots_of(table, earlier, new, block) for table, new in zip(tables, query_lens, strict=True)]
    flat = torch.cat([torch.from_numpy(row) for row in slots])
    metadata = AttentionMetadataBuilder().build(query_lens, lengths, tables, flat, shape.device)
    query = shape.random(sum(query_lens), spec.num_heads, spec.head_size)
    key, value = (shape.random(sum(query_lens), spec.num_kv_heads, spec.head_size) for _ in range(2))
    return PagedBatch(query, key, value, pool, tables, metadata)


def _checked_batch(shape: Shape, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> PagedBatch:
    """Odd lengths; NaN in every unused slot; new tokens stored."""
    batch = random_batch(
        query_lens, seq_lens, num_heads=shape.spec.num_heads, num_kv_heads=shape.spec.num_kv_heads,
        head_size=shape.spec.head_size, block_size=shape.block_size, dtype=shape.dtype,
        cache_dtype=shape.cache_dtype, device=shape.device,
    )  # fmt: skip
    NativeOps.write(batch.key, batch.value, batch.kv(), batch.metadata.slot_mapping)
    return batch
