"""Decode attention on a GPU against float64: lengths that are hard, shared prefixes, graphs over groups that change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tandem.deploy
from tandem.engine.contracts.config import ModelOptions, SchedulerOptions
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.models.loader import load_model
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.running.graphs.decode_graphs import DecodeGraphs
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import NewSlot, SampleRow, ScheduledRow, SchedulerOutput
from tandem.kernels.api.backend import PagedKV, Prefill
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.backends.triton import TritonOps
from tandem.kernels.blocks.quantization import FP8_DTYPE, dequantize, quantize
from tandem.kernels.check.sample_batches import PagedBatch, random_batch, share_prefix
from tandem.kernels.prefixes import prefix_groups
from tandem.kernels.prefixes.prefix_groups import PrefixGroup
from tandem.kernels.prefixes.shared_prefix import PrefixBuffers, SharedPrefixes
from tandem.kernels.products.fused_ops import CacheSlots, rope_and_store
from tandem.kernels.reference import paged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SIZES: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 64, "device": "cuda"}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SPEC = AttentionSpec(32, 128, 128**-0.5, 8)
LENGTHS = (1088, 1030, 1025, 700, 513, 2000, 1, 64, 600, 577)
GROUPS = (((0, 1, 2), 16), ((3, 4), 8), ((8, 9), 9))  # rows, shared blocks
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft-cap": {"logits_soft_cap": 5.0},
    "alibi": {"alibi_slopes": torch.tensor(paged.alibi_slopes(32))},
}


def stored(lengths: Sequence[int], scales: tuple[float, ...] = (), **sizes: Any) -> PagedBatch:
    batch = random_batch((1,) * len(lengths), lengths, **{**SIZES, "dtype": torch.bfloat16, **sizes})
    return write(batch, *scales)


def write(batch: PagedBatch, *scales: float) -> PagedBatch:
    TritonOps.write(batch.key, batch.value, batch.kv(*scales), batch.metadata.slot_mapping)
    return batch


def exact(batch: PagedBatch, spec: AttentionSpec, *scales: float) -> torch.Tensor:
    """float64 by the native backend, which the CPU tests hold to the reference."""
    return NativeOps.decode(batch.query.double(), batch.kv(*scales), batch.metadata.all_rows(), spec)


def rows_of(batch: PagedBatch, prefixes: SharedPrefixes | None = None) -> RowBatch:
    return replace(batch.metadata.all_rows(), shared_prefixes=prefixes, scratch={})


def groups_of(entries: Sequence[tuple[Sequence[int], int]]) -> list[PrefixGroup]:
    return [PrefixGroup(np.array(rows), num_blocks) for rows, num_blocks in entries]


def sharing_batch(scales: tuple[float, ...] = (), **sizes: Any) -> PagedBatch:
    batch = random_batch((1,) * len(LENGTHS), LENGTHS, **{**SIZES, "dtype": torch.bfloat16, **sizes})
    for rows, num_blocks in GROUPS:
        share_prefix(batch, rows, num_blocks)
    return write(batch, *scales)


def check(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Leaves NaN behind: the next output lies where this one did, and what is not written there shows."""
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    output.fill_(float("nan"))


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("lengths", [(1, 63, 64, 65, 127, 4097), (1,), (2048,) * 3 + (1,) * 60, (131072, 3)])
def test_lengths(lengths: tuple[int, ...], cache: str) -> None:
    scales = (0.5, 0.25) if cache == "fp8" else ()
    sizes = {"num_heads": 8, "num_kv_heads": 2, "cache_dtype": FP8_DTYPE if cache == "fp8" else None}
    batch = stored(lengths, scales, **sizes)
    spec = AttentionSpec(8, 128, 128**-0.5, 2, kv_cache_dtype=cache)
    output = TritonOps.decode(batch.query, batch.kv(*scales), rows_of(batch), spec)
    check(output, exact(batch, spec, *scales), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("every_option", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "block", "new"), [
    (8, 8, 64, 16, 1), (16, 1, 80, 32, 1), (8, 2, 96, 48, 2), (32, 8, 128, 64, 4), (8, 1, 128, 64, 8),
    (4, 2, 256, 64, 1),
])  # fmt: skip
def test_fp8_of_other_shapes(heads: int, kv_heads: int, size: int, block: int, new: int, every_option: bool) -> None:
    """One warp or four, 8 or 16 query rows of it, heads and blocks that tiles don't divide, up to 8 new tokens."""
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "block_size": block, "device": "cuda"}
    lengths = (new, new + 1, 63 + new, 300, 700, 1500)
    batch = random_batch((new,) * len(lengths), lengths, dtype=torch.bfloat16, cache_dtype=FP8_DTYPE, **sizes)
    for tensor in (batch.key, batch.value):  # what the cache can hold
        tensor.copy_(dequantize(quantize(tensor, 0.5), 0.5, tensor.dtype))
    write(batch, 0.5, 0.5)
    spec = AttentionSpec(heads, size, size**-0.5, kv_heads, kv_cache_dtype="fp8")
    if every_option:
        slopes = torch.tensor(paged.alibi_slopes(heads))
        spec = replace(spec, alibi_slopes=slopes, sliding_window=400, logits_soft_cap=5.0)
    tensors = batch.query.double(), batch.key.double(), batch.value.double()
    expected = NativeOps.prefill(Prefill(*tensors, batch.kv(0.5, 0.5), batch.metadata.all_rows()), spec)
    for _ in range(2):  # the first call runs the other kernels, too
        output = TritonOps.decode(batch.query, batch.kv(0.5, 0.5), rows_of(batch), spec)
        check(output, expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS)
def test_shared_prefixes(options: str, dtype: torch.dtype) -> None:
    batch = sharing_batch(dtype=dtype)
    spec = replace(SPEC, **OPTIONS[options])
    expected = exact(batch, spec)
    buffers = PrefixBuffers(16, 16, CUDA)
    buffers.load(groups_of(GROUPS), 64)
    rows = rows_of(batch, buffers.prefixes.first(len(LENGTHS)))
    TritonOps.decode(batch.query, batch.kv(), rows, spec)  # the first call runs the other kernels, too
    for members, num_blocks in GROUPS:
        batch.metadata.block_tables[list(members[1:]), :num_blocks] = 0x7FFFFFFF  # only the first row's table is read
    output = TritonOps.decode(batch.query, batch.kv(), rows, spec)
    check(output, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("size", [64, 80, 256])
def test_shared_prefixes_of_other_sizes_and_many_rows(size: int) -> None:
    """A group of three chunks, in blocks smaller than a tile."""
    lengths = tuple(530 + 3 * row for row in range(40))
    sizes = {**SIZES, "num_heads": 6, "num_kv_heads": 2, "head_size": size, "block_size": 16}
    batch = random_batch((1,) * 40, lengths, dtype=torch.bfloat16, **sizes)
    share_prefix(batch, range(39), 32)
    write(batch)
    spec = AttentionSpec(6, size, size**-0.5, 2)
    buffers = PrefixBuffers(40, prefix_groups.chunk_members(3), CUDA)
    buffers.load(groups_of([(range(39), 32)]), 16)
    output = TritonOps.decode(batch.query, batch.kv(), rows_of(batch, buffers.prefixes), spec)
    check(output, exact(batch, spec), TOLERANCE[torch.bfloat16])


def test_shared_prefixes_in_fp8() -> None:
    batch = sharing_batch((0.5, 0.25), cache_dtype=FP8_DTYPE)
    spec = replace(SPEC, kv_cache_dtype="fp8")
    buffers = PrefixBuffers(len(LENGTHS), 16, CUDA)
    buffers.load(groups_of(GROUPS), 64)
    output = TritonOps.decode(batch.query, batch.kv(0.5, 0.25), rows_of(batch, buffers.prefixes), spec)
    check(output, exact(batch, spec, 0.5, 0.25), TOLERANCE[torch.bfloat16])


def test_a_graph_follows_groups_and_lengths() -> None:
    """One capture, replayed over other groups, over none and over shorter rows; outputs are poisoned in between."""
    batch = sharing_batch()
    buffers = PrefixBuffers(len(LENGTHS), 16, CUDA)
    rows = rows_of(batch, buffers.prefixes)
    TritonOps.decode(batch.query, batch.kv(), rows, SPEC)
    rows.scratch.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = TritonOps.decode(batch.query, batch.kv(), rows, SPEC)
    shorter = tuple(length - 1 for length in LENGTHS)
    for entries in (GROUPS, (), GROUPS[1:], (((1, 2), 16), ((4, 3), 8)), ()):
        buffers.load(groups_of(entries), 64)
        output.fill_(float("nan"))
        graph.replay()
        check(output, exact(batch, SPEC), TOLERANCE[torch.bfloat16])
    rows.seq_lens.copy_(torch.tensor(shorter))
    buffers.load(groups_of(GROUPS[:2]), 64)
    graph.replay()
    fewer = replace(rows, seq_lens_cpu=shorter, shared_prefixes=None, scratch={})
    check(output, NativeOps.decode(batch.query.double(), batch.kv(), fewer, SPEC), TOLERANCE[torch.bfloat16])


@dataclass
class LayersGraph:
    graph: torch.cuda.CUDAGraph
    outputs: list[torch.Tensor]  # each layer's, of the last replay
    reads: tuple[torch.Tensor, ...]  # which must live as long as the graph: it knows their addresses alone


def graph_of_layers(
    source_LTCD: torch.Tensor,
    qkv_LTCD: torch.Tensor,
    layers: Sequence[PagedKV],
    rows: Callable[[], RowBatch],
    slots_of: Callable[[PagedKV], CacheSlots],
    spec: AttentionSpec,
) -> LayersGraph:
    """A step's attention, without rotation: each layer stores what `source_LTCD` has of it, then attends to its
    cache."""
    positions = torch.zeros(qkv_LTCD.shape[1], dtype=torch.int64, device="cuda")
    unturned = torch.cat((torch.ones(1, 64), torch.zeros(1, 64)), dim=1).cuda()

    def run() -> list[torch.Tensor]:
        step, outputs = rows(), []
        qkv_LTCD.copy_(source_LTCD)
        for layer, kv in zip(qkv_LTCD, layers, strict=True):
            rope_and_store(layer.flatten(1), positions, unturned, 32, 8, None, slots_of(kv))
            outputs.append(TritonOps.decode(layer[:, :32], kv, step, spec))
        return outputs

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return LayersGraph(graph, outputs, (positions, unturned))


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("case", ["auto", "fp8", "window", "shared"])
def test_a_graph_of_layers_sees_tokens_stored_just_before(case: str, new: int) -> None:
    """Launches overlap: what the one before stores, in a program's first tile or in its last, is read all the same."""
    if case == "shared" and new > 1:
        pytest.skip("rows share prefixes with one new token each")
    lengths = (*LENGTHS[:6], 4 + new, 64, 600, 9000)
    scales = (0.5, 0.5) if case == "fp8" else ()
    spec = replace(SPEC, kv_cache_dtype="fp8") if case == "fp8" else SPEC
    if case == "window":
        spec = replace(spec, sliding_window=300)
    sizes = {**SIZES, "dtype": torch.bfloat16, "cache_dtype": FP8_DTYPE if case == "fp8" else None}
    batch = random_batch((new,) * len(lengths), lengths, **sizes)
    buffers = PrefixBuffers(len(lengths), 16, CUDA)
    if case == "shared":
        for rows, num_blocks in GROUPS[:2]:
            share_prefix(batch, rows, num_blocks)
        buffers.load(groups_of(GROUPS[:2]), 64)
    write(batch, *scales)
    prefixes = buffers.prefixes if case == "shared" else None
    tokens = len(lengths) * new
    source, qkv = (torch.zeros(6, tokens, 48, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    layers = [replace(batch, pool=batch.pool.clone()).kv(*scales) for _ in range(6)]
    numbers = (torch.tensor([0.5], device="cuda"),) * 2 + (torch.zeros(1, dtype=torch.int64, device="cuda"),)

    def slots_of(kv: PagedKV) -> CacheSlots:
        own = numbers if case == "fp8" else None
        return CacheSlots(kv.key_cache, kv.value_cache, batch.metadata.slot_mapping, own)

    captured = graph_of_layers(source, qkv, layers, lambda: rows_of(batch, prefixes), slots_of, spec)
    for _ in range(3):
        source.normal_()
        source.copy_(dequantize(quantize(source, 0.5), 0.5, source.dtype))  # what the fp8 cache can hold
        captured.graph.replay()
        for layer, kv, output in zip(source.double(), layers, captured.outputs, strict=True):
            expected = NativeOps.prefill(Prefill(*layer.split((32, 8, 8), 1), kv, batch.metadata.all_rows()), spec)
            check(output, expected, TOLERANCE[torch.bfloat16])


def test_tokens_of_one_prompt_as_rows_see_each_other() -> None:
    """As short prompts run in decode graphs: what a launch stores for one row, the next reads for those after it."""
    new, total = 40, 3000
    batch = random_batch((new,), (total,), **{**SIZES, "dtype": torch.bfloat16})
    starts = torch.arange(new + 1, dtype=torch.int32, device="cuda")
    lengths = tuple(range(total - new + 1, total + 1))
    tables = batch.metadata.block_tables.expand(new, -1).contiguous()
    rows = RowBatch(starts, torch.tensor(lengths, dtype=torch.int32).cuda(), tables, (1,) * new, lengths, 1, total)
    source, qkv = (torch.randn(6, new, 48, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    layers = [replace(batch, pool=batch.pool.clone()).kv() for _ in range(6)]

    def slots_of(kv: PagedKV) -> CacheSlots:
        return CacheSlots(kv.key_cache, kv.value_cache, batch.metadata.slot_mapping)

    captured = graph_of_layers(source, qkv, layers, lambda: replace(rows, scratch={}), slots_of, SPEC)
    for _ in range(3):
        source.normal_()
        captured.graph.replay()
        for layer, kv, output in zip(source.double(), layers, captured.outputs, strict=True):
            expected = NativeOps.prefill(Prefill(*layer.split((32, 8, 8), 1), kv, batch.metadata.all_rows()), SPEC)
            check(output, expected, TOLERANCE[torch.bfloat16])


def test_an_engine_step_shares_what_its_slots_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured step over shared prefixes gives the logits of the plain one, while slots come and go."""
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_ROW", 0)
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_LAUNCHES", 0)
    folder = Path(tandem.deploy.__file__).parent / "demo_model"
    config = load_model_config(folder)
    model = load_model(folder, config, ModelOptions(str(folder)), CUDA, torch.float32)
    pool = torch.zeros(64, config.num_kv_heads, config.num_layers, 2, 16, config.head_dim, device=CUDA)
    runner = ModelRunner(model, pool, SchedulerOptions(16, 2048, share_prefixes=True), 16, 256, ())
    assert runner.sharing is not None
    runner.warmup()
    plain = DecodeGraphs(DecodeBatch(model, runner.state, 16, 256))
    plain.capture()
    shared = DecodeGraphs(DecodeBatch(model, runner.state, 16, 256), runner.sharing)
    shared.capture()
    tokens = np.random.default_rng(0).integers(10, 2000, 150).astype(np.int32)
    start = {slot: start_slot(runner, slot, tokens, (*range(8), 8 + 2 * slot, 9 + 2 * slot)) for slot in range(6)}
    replaced = start_slot(runner, 6, tokens[::-1].copy(), range(40, 50))
    for slots in ((0, 1, 2, 3, 4, 5), (6, 5, 3), (6,), (2, 6, 0, 1)):
        rows = [ScheduledRow(slot, replaced if slot == 6 else start[slot], 1) for slot in slots]
        expected = plain.run(rows).clone()
        output = shared.run(rows)
        assert (runner.sharing.of_rows(rows) is None) == (len(slots) == 1)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def start_slot(runner: ModelRunner, slot: int, tokens: np.ndarray, blocks: Sequence[int]) -> int:
    """Computes a prompt of all but `slot` of the tokens; -> the position of the token to compute next."""
    length = len(tokens) - slot
    new = NewSlot(slot, tokens[:length], length, tuple(blocks), SamplingParams(temperature=0.0), 0)
    rows = (ScheduledRow(slot, 0, length),)
    runner.execute(SchedulerOutput(slot, rows, (SampleRow(0, slot, length, 0, 0),), (new,))).result()
    return length
