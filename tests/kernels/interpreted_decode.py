"""Decode kernels under Triton's interpreter against the float64 reference: both versions, every option, new lengths.

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.kernels.api.errors import UnsupportedOptionError
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec, BlockSparse
from tandem.kernels.backends import triton_decode
from tandem.kernels.backends.triton import TritonOps
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.check.kernel_cases import Shape
from tandem.kernels.check.sample_batches import PagedBatch, random_batch
from tandem.kernels.check.self_test import describe_decode
from tandem.kernels.reference import paged
from tandem.kernels.triton_kernels.decode.decode_launch import decode_constants, paged_decode, plan_decode
from tandem.kernels.triton_kernels.decode.decode_plan import DecodePlan

ONE = torch.ones(1)
SLOPES = torch.tensor(paged.alibi_slopes(4))
SINKS = torch.tensor([0.5, -300.0, 9.0, 0.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "soft-cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "chunk-sinks": {"attention_chunk": 40, "sinks": SINKS},
    "first-hidden": {"hides_first": True},
    "all": {"sliding_window": 70, "logits_soft_cap": 2.0, "alibi_slopes": SLOPES, "sinks": SINKS},
}
PATTERNS = {
    "shared": BlockSparse(local_blocks=1, vert_stride=3, block_size=16),
    "sliding": BlockSparse(local_blocks=2, vert_stride=5, block_size=32, head_sliding_step=1, tp_rank=1),
    "kv-sliding": BlockSparse(local_blocks=1, vert_stride=4, block_size=16, head_sliding_step=-1),
}


def stored(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **sizes: Any) -> PagedBatch:
    """A batch whose new tokens are in the cache, and whose query is all its new tokens."""
    batch = random_batch(query_lens, seq_lens, **sizes)
    TritonOps.write(batch.key, batch.value, batch.kv(), batch.metadata.slot_mapping)
    return batch


def decode(
    monkeypatch: pytest.MonkeyPatch, version: str, batch: PagedBatch, spec: AttentionSpec, *scales: float
) -> torch.Tensor:
    monkeypatch.setattr(triton_decode, "choose_paged_attention_version", lambda *_: version)
    return triton_decode.decode(batch.query, batch.kv(*scales), batch.metadata.all_rows(), spec)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("version", ["V1", "V2"])
def test_options(version: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = stored((1, 1, 1), (149, 1, 16))
    spec = AttentionSpec(4, 16, 0.3, 2, **OPTIONS[options])
    output = decode(monkeypatch, version, batch, spec)
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block", "version"),
    [(3, 1, 80, 16, "V1"), (2, 2, 96, 48, "V2"), (18, 1, 32, 64, "V1"), (18, 1, 32, 64, "V2"), (4, 2, 16, 128, "V2")],
)
def test_sizes(heads: int, kv_heads: int, size: int, block: int, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = stored((1, 1), (150, 20), num_heads=heads, num_kv_heads=kv_heads, head_size=size, block_size=block)
    spec = AttentionSpec(heads, size, size**-0.5, kv_heads)
    output = decode(monkeypatch, version, batch, spec)
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("dtype", "heads", "size", "lengths", "version"),
    [
        (torch.float32, 4, 16, (64, 20), "V1"),  # nothing to split
        (torch.float32, 4, 16, (65, 20), "V2"),
        (torch.bfloat16, 4, 16, (64, 20), "V2"),  # a warp a program: never a whole row each
        (torch.bfloat16, 34, 16, (64, 20), "V1"),  # 17 query heads a KV head
        (torch.bfloat16, 34, 16, (65, 20), "V2"),
    ],
)
def test_which_version_serves(
    dtype: torch.dtype, heads: int, size: int, lengths: tuple[int, int], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(*arguments: Any, **options: Any) -> torch.Tensor:
        ran.append("V1" if options["plan"] is None else "V2")
        return paged_decode(*arguments, **options)

    monkeypatch.setattr(triton_decode, "paged_decode", run)
    batch, spec = (
        stored((1, 1), lengths, dtype=dtype, num_heads=heads, head_size=size),
        AttentionSpec(heads, size, 0.3, 2),
    )
    output = TritonOps.decode(batch.query, batch.kv(), batch.metadata.all_rows(), spec)
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=tolerance, atol=tolerance)
    assert ran[-1] == version
    shape = Shape(spec, batch.kv().block_size, dtype, torch.device("cpu"))
    assert describe_decode(shape, 2, lengths[0]).startswith(version)


@pytest.mark.parametrize(
    ("version", "dtype", "tolerance"),
    [
        ("V1", torch.float32, 3e-6),
        ("V2", torch.float32, 3e-6),
        ("V2", torch.float16, 2e-2),
        ("V2", torch.bfloat16, 2e-2),
    ],
)
def test_fp8_cache(version: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of very different magnitudes: what multiplies fp8 keys must neither overflow nor vanish.

    Layers of 16 bits with so few rows are always served by V2.
    """
    batch = random_batch((1, 1), (70, 5), dtype=dtype, cache_dtype=FP8_DTYPE)
    TritonOps.write(batch.key, batch.value, batch.kv(0.5, 0.25), batch.metadata.slot_mapping)
    batch.query[0, 0] *= 1e-4
    batch.query[1, 1] *= 300.0
    spec = AttentionSpec(4, 16, 0.3, 2, kv_cache_dtype="fp8")
    output = decode(monkeypatch, version, batch, spec, 0.5, 0.25)
    torch.testing.assert_close(output.double(), batch.expected(spec, 0.5, 0.25), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("options", "version"), [*((each, "V2") for each in OPTIONS), ("plain", "V1"), ("all", "V1")])
def test_several_new_tokens_are_causal_among_them(version: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 1 to 8 new tokens, some with nothing before them."""
    batch = stored((3, 1, 8, 2), (90, 40, 8, 66))
    spec = AttentionSpec(4, 16, 0.3, 2, **OPTIONS[options])
    output = decode(monkeypatch, version, batch, spec)
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(("name", "version"), [*((each, "V2") for each in PATTERNS), ("sliding", "V1")])
def test_block_sparse(version: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = stored((1, 1, 1), (200, 1, 97))
    spec = AttentionSpec(4, 16, 0.3, 2, blocksparse=PATTERNS[name])
    output = decode(monkeypatch, version, batch, spec)
    pattern = {key: getattr(PATTERNS[name], key) for key in (
        "local_blocks", "vert_stride", "block_size", "head_sliding_step", "tp_rank",
    )}  # fmt: skip
    expected = paged.paged_decode(
        batch.query.double(), batch.kv().key_cache, batch.kv().value_cache, batch.block_tables, (200, 1, 97), 0.3,
        sparse=pattern,
    )  # fmt: skip
    torch.testing.assert_close(output.double(), expected, rtol=3e-6, atol=3e-6)


def test_block_sparse_reads_no_hidden_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that no head of a group sees are filled with NaN: reading one would show."""
    batch = stored((1,), (200,))
    spec = AttentionSpec(4, 16, 0.3, 2, blocksparse=PATTERNS["shared"])
    before = decode(monkeypatch, "V2", batch, spec)
    for index, block in enumerate(batch.block_tables[0]):
        if (index + 1) % 3 and index != 199 // 16:
            batch.pool[block] = float("nan")
    batch.metadata.all_rows().scratch.clear()
    assert torch.equal(decode(monkeypatch, "V2", batch, spec), before)


def test_a_plan_is_filled_anew_for_other_lengths_and_empty_rows_give_zeros() -> None:
    batch = stored((1, 1, 1), (149, 70, 16))
    kv, meta, spec = batch.kv(), batch.metadata, AttentionSpec(4, 16, 0.3, 2)
    constants = decode_constants(torch.float32, 4, 2, 1, 16, 16, 0)
    lengths = meta.seq_lens.clone()
    plan = plan_decode(lengths, 2, constants)
    for wanted in ((149, 70, 16), (0, 70, 1), (149, 0, 0), (0, 0, 0), (2, 3, 16)):
        lengths.copy_(torch.tensor(wanted))
        plan.fill(lengths, 2, constants["TILE"])
        output = paged_decode(
            batch.query, kv.key_cache, kv.value_cache, meta.block_tables, lengths, 0.3, constants, plan=plan,
            k_scale=ONE, v_scale=ONE,
        )  # fmt: skip
        expected = paged.paged_decode(
            batch.query.double(), kv.key_cache, kv.value_cache, batch.block_tables, wanted, spec.scale
        )
        torch.testing.assert_close(output.double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("programs", [1, 3, 64])
def test_a_plan_gives_every_tile_to_one_program(programs: int) -> None:
    """Shares are equal, runs follow each other, each starts in the segment that holds its first tile."""
    lengths = torch.tensor([0, 1, 900, 64, 65, 0, 300], dtype=torch.int32)
    tiles = [max(1, -(-int(length) // 16)) for length in lengths for _ in range(2)]
    plan = DecodePlan.allocate(len(tiles), programs, 2, 16, torch.device("cpu"))
    plan.fill(lengths, 2, 16)
    share, total, *rest = plan.plan.tolist()
    records, starts = rest[: 4 * programs], rest[4 * programs : 4 * programs + len(tiles) + 1]
    assert starts == [sum(tiles[:index]) for index in range(len(tiles) + 1)]
    assert (total, share) == (sum(tiles), -(-sum(tiles) // programs))
    assert rest[4 * programs + len(tiles) + 1 :] == [0] * (2 * len(tiles) + programs)
    for program in range(programs):
        first, begin, end, length = records[4 * program : 4 * program + 4]
        if program * share < total:
            assert (begin, end) == (starts[first], starts[first + 1])
            assert begin <= program * share < end
            assert length == lengths[first // 2]


def test_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = stored((1,), (5,))
    rows = batch.metadata.all_rows()
    none = RowBatch(rows.query_start_loc[:1], rows.seq_lens[:0], rows.block_tables[:0], (), (), 0, 0)
    for version in ("V1", "V2"):
        monkeypatch.setattr(triton_decode, "choose_paged_attention_version", lambda *_, version=version: version)
        output = triton_decode.decode(batch.query[:0], batch.kv(), none, AttentionSpec(4, 16, 0.3, 2))
        assert output.shape == (0, 4, 16)


def test_what_decode_refuses() -> None:
    batch = stored((9,), (20,))
    spec = AttentionSpec(4, 16, 0.3, 2)
    with pytest.raises(UnsupportedOptionError, match="8 new tokens"):
        triton_decode.decode(batch.query, batch.kv(), batch.metadata.all_rows(), spec)
    two = stored((2,), (20,))
    sparse = replace(spec, blocksparse=PATTERNS["shared"])
    with pytest.raises(UnsupportedOptionError, match="one new token"):
        triton_decode.decode(two.query, two.kv(), two.metadata.all_rows(), sparse)
    one = stored((1,), (20,))
    sparse = replace(spec, blocksparse=BlockSparse(1, 2, 24))
    with pytest.raises(UnsupportedOptionError, match="multiple of 16"):
        triton_decode.decode(one.query, one.kv(), one.metadata.all_rows(), sparse)
