"""The fused kernels under Triton's interpreter, against their eager twins. Run by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tandem.kernels.blocks import digest
from tandem.kernels.blocks.move_blocks import BlockPlaces, move_blocks
from tandem.kernels.products import fused_ops
from tandem.kernels.products.fused_ops import HeadNorms, rotate_heads
from tandem.kernels.reference import paged
from tandem.kernels.sampling.decode_buffers import DecodeInputs
from tandem.kernels.sampling.decode_inputs import gather_decode_inputs, store_most_likely, store_tokens
from tandem.kernels.triton_kernels.decode.decode_inputs import gather_decode_inputs_triton, store_tokens_triton
from tandem.kernels.triton_kernels.products.fused import rms_norm_triton, silu_mul_triton
from tandem.kernels.triton_kernels.products.rotation import rope_and_store_triton, rotate_halves_triton
from tandem.kernels.triton_kernels.sampling.argmax import argmax_triton, store_argmax_triton

EPS = 1e-5


@pytest.mark.parametrize("size", [64, 80, 257])
def test_norms(size: int) -> None:
    x, residual, weight = torch.randn(5, size), torch.randn(5, size), torch.randn(size)
    torch.testing.assert_close(rms_norm_triton(x, None, weight, EPS), fused_ops.rms_norm(x, weight, EPS))
    stream, twin = residual.clone(), residual.clone()
    normed = rms_norm_triton(x, stream, weight, EPS)
    torch.testing.assert_close(normed, fused_ops.add_rms_norm(x, twin, weight, EPS))
    assert torch.equal(stream, twin)


def test_norms_of_strided_rows() -> None:
    wide = torch.randn(4, 96)
    x, weight = wide[:, :64], torch.randn(64)
    torch.testing.assert_close(rms_norm_triton(x, None, weight, EPS), fused_ops.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("size", [32, 100, 2050])
def test_silu_mul(size: int) -> None:
    gate_up = torch.randn(3, 2 * size)
    expected = fused_ops.silu_mul(gate_up)
    torch.testing.assert_close(silu_mul_triton(gate_up), expected)
    group = 2 if size % 8 else 8
    grouped = gate_up.view(3, 2, -1, group).transpose(1, 2).reshape(3, -1)
    torch.testing.assert_close(silu_mul_triton(grouped, group), expected)
    torch.testing.assert_close(fused_ops.silu_mul(grouped, group), expected)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (33, 1, 20)])
def test_halves_are_rotated_as_transformers_does(heads: int, kv_heads: int, size: int, wide: bool) -> None:
    query, key = torch.randn(heads, 5, size).transpose(0, 1), torch.randn(5, kv_heads, size)
    width = size if wide else size // 2
    cos, sin = torch.randn(5, width), torch.randn(width, 5).t()  # both ways in which they come
    made = rotate_halves_triton(query, key, cos, sin)
    whole = (cos, sin) if wide else (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    for ours, own in zip(made, apply_rotary_pos_emb(query, key, *whole, unsqueeze_dim=1), strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, own)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 20), (0, 2, 16), (4, 0, 16)])
def test_rope_and_store(heads: int, kv_heads: int, size: int, with_norms: bool) -> None:
    num_tokens, block_size, num_blocks = 6, 8, 4
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * size)
    positions = torch.tensor([0, 3, 9, 1, 30, 2])
    angles = torch.rand(32, size // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = HeadNorms(torch.randn(size), torch.randn(size), EPS) if with_norms else None
    query, key, value = rotate_heads(qkv.clone(), positions, table, heads, kv_heads, norms)
    pool = torch.full((num_blocks, max(kv_heads, 1), 2, block_size, size), 7.0)
    slots = torch.tensor([3, -1, 17, 31, 0, -1])
    caches = (pool[:, :, 0], pool[:, :, 1], slots) if kv_heads else None
    parts = None if norms is None else (norms.q_weight, norms.k_weight, norms.eps)
    rope_and_store_triton(qkv, positions, table, heads, kv_heads, parts, caches, None)
    rotated = qkv.view(num_tokens, -1, size)
    torch.testing.assert_close(rotated[:, :heads], query)
    torch.testing.assert_close(rotated[:, heads : heads + kv_heads], key)
    expected = torch.full_like(pool, 7.0)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0 and kv_heads:
            expected[slot // block_size, :, 0, slot % block_size] = key[token]
            expected[slot // block_size, :, 1, slot % block_size] = value[token]
    torch.testing.assert_close(pool, expected)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_argmax_takes_the_first_of_equals(num_rows: int) -> None:
    logits = torch.randn(num_rows, 9001)
    logits[0, [17, 4000, 8999]] = 50.0
    assert argmax_triton(logits).tolist() == logits.argmax(-1).tolist()
    assert argmax_triton(logits)[0] == 17
    assert argmax_triton(torch.full((1, 300), float("-inf")))[0] == 0


def test_decode_inputs_and_stored_tokens() -> None:
    tokens = torch.randint(0, 99, (5, 70), dtype=torch.int32)
    tables = torch.randint(0, 9, (5, 9), dtype=torch.int32)
    slots, positions = torch.tensor([3, -1, 0, 4]), torch.tensor([64, 0, 7, 8])
    ours, twin = (DecodeInputs.allocate(4, 9, torch.device("cpu")) for _ in range(2))
    gather_decode_inputs_triton(slots, positions, tokens, tables, 8, ours)
    gather_decode_inputs(slots, positions, tokens, tables, 8, twin)
    for name in ("input_ids_R", "seq_lens_R", "slot_mapping_R"):
        assert torch.equal(getattr(ours, name), getattr(twin, name)), name
    for row, length in enumerate(ours.seq_lens_R.tolist()):
        used = -(-length // 8)
        assert torch.equal(ours.block_tables_RB[row, :used], twin.block_tables_RB[row, :used])
    made = torch.tensor([11, 12, 13, 14])
    other = tokens.clone()
    store_tokens_triton(slots, positions, made, tokens)
    store_tokens(slots, positions, made, other)
    assert torch.equal(tokens, other)


def test_what_is_most_likely_is_stored_and_where_the_next_step_begins() -> None:
    logits, slots = torch.randn(4, 9001), torch.tensor([3, -1, 0, 4])
    tokens = torch.randint(0, 99, (5, 70), dtype=torch.int32)
    other, made, twin = tokens.clone(), torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int64)
    positions = torch.tensor([64, 0, 7, 8])
    beside = positions.clone()
    store_argmax_triton(logits, slots, positions, tokens, made)
    store_most_likely(logits, slots, beside, other, twin)
    assert torch.equal(tokens, other)
    assert made.tolist() == twin.tolist() == logits.argmax(-1).tolist()
    assert positions.tolist() == beside.tolist() == [65, 0, 8, 9]
    assert [int(tokens[slot, place]) for slot, place in ((3, 65), (0, 8), (4, 9))] == made[[0, 2, 3]].tolist()


@pytest.mark.parametrize("layers", [range(3), range(1, 3)])
def test_moved_blocks_reach_the_named_address(layers: range) -> None:
    source, target = torch.randn(4, 2, 3, 2, 8, 4), torch.zeros(4, 2, 3, 2, 8, 4)
    expected = torch.zeros_like(target)
    paged.move_blocks(source, expected, [(0, 2), (3, 1)], layers, [8, 5])
    pairs = torch.tensor([[0, 3], [2, 1], [8, 5]])
    move_blocks(source, BlockPlaces.of(source), BlockPlaces.of(target), pairs, layers, 3)
    assert torch.equal(target, expected)
    packed = torch.zeros(2, 2, len(layers), 2, 8, 4)
    rows = BlockPlaces.of(packed).starting_at(-layers.start)
    move_blocks(source, BlockPlaces.of(source), rows, torch.tensor([[0, 3], [0, 1], [8, 8]]), layers, 64)
    assert torch.equal(packed, source[[0, 3], :, layers.start :])


@pytest.mark.parametrize("head_size", [4, 128])
@pytest.mark.parametrize("num_valid", [1, 5, 8])
def test_what_is_moved_is_summed(num_valid: int, head_size: int) -> None:
    source = torch.randn(4, 2, 3, 2, 8, head_size)
    target = torch.zeros_like(source)
    expected = digest.block_digests(source, [2, 0, 3], 1234, num_valid, 8, positions=[7, 8, 9])
    pairs = torch.tensor([[3, 2, 0], [2, 1, 0], [num_valid, 8, 8], [2, 0, 1]])  # summed in another order than moved
    for steps in ([range(3)], [range(1, 3), range(1)]):
        sums = digest.BlockSums.of_none(source, 3, 1234)
        for layers in steps:
            move_blocks(source, BlockPlaces.of(source), BlockPlaces.of(target), pairs, layers, 5, sums)
        assert torch.equal(sums.digests(num_valid, 8, positions=[7, 8, 9]), expected)
    assert torch.equal(target[[1, 0]], source[[2, 0]])


@pytest.mark.parametrize("num_valid", [5, 8])
def test_heads_that_lie_apart_are_moved(num_valid: int) -> None:
    source = torch.randn(4, 3, 2, 2, 8, 4)
    parts = {range(1): torch.zeros(4, 1, 2, 2, 8, 4), range(1, 3): torch.zeros(4, 2, 2, 2, 8, 4)}
    pairs = torch.tensor([[3, 2], [2, 1], [8, num_valid]])
    for heads, part in parts.items():
        some = source[:, heads.start : heads.stop]
        move_blocks(some, BlockPlaces.of(some), BlockPlaces.of(part), pairs, None, 5)
    expected = torch.zeros_like(source)
    paged.move_blocks(source, expected, [(3, 2), (2, 1)], range(2), [8, num_valid])
    assert torch.equal(torch.cat(tuple(parts.values()), 1), expected)


def test_more_pairs_than_a_program_takes_at_once() -> None:
    source, target = torch.randn(12, 2, 3, 2, 8, 4), torch.zeros(12, 2, 3, 2, 8, 4)
    order, num_valid = [5, 0, 11, 3, 9, 7, 1, 10, 2, 8, 6], [8] * 4 + [3] + [8] * 4 + [1, 8]
    expected = torch.zeros_like(target)
    paged.move_blocks(source, expected, list(zip(order, range(11), strict=True)), range(1, 3), num_valid)
    pairs = torch.tensor([order, list(range(11)), num_valid])
    move_blocks(source, BlockPlaces.of(source), BlockPlaces.of(target), pairs, range(1, 3), 5)
    assert torch.equal(target, expected)
    sums = digest.BlockSums.of_none(source, 11, 77)
    pairs = torch.tensor([order, list(range(11)), [8] * 11, list(range(10, -1, -1))])
    move_blocks(source, BlockPlaces.of(source), BlockPlaces.of(target), pairs, None, 5, sums)
    assert torch.equal(sums.digests(8, 8), digest.block_digests(source, order[::-1], 77, 8, 8))


@pytest.mark.parametrize("head_size", [4, 160])
def test_layers_of_whole_blocks_are_summed_without_being_moved(head_size: int) -> None:
    source = torch.randn(12, 2, 3, 2, 8, head_size)
    order = [5, 0, 11, 3, 9, 7, 1, 10, 2, 8]
    listed = torch.tensor([order, [0] * 10, [8] * 10, list(range(9, -1, -1))])
    sums = digest.BlockSums.of_none(source, 10, 77)
    for layers in (range(1, 3), range(1)):
        sums.add_layers(source, listed, layers)
    assert torch.equal(sums.digests(8, 8), digest.block_digests(source, order[::-1], 77, 8, 8))


@pytest.mark.parametrize("head_size", [4, 500])
def test_block_sums_equal_the_eager_ones(head_size: int) -> None:
    pool = torch.randn(4, 2, 3, 2, 7, head_size)  # up to 21000 words a block: three segments
    ids, num_valid = [2, 0, 3, 1], [7, 3, 7, 1]
    runs = digest.BlockRuns.of(pool)
    assert runs is not None
    job = torch.from_numpy(runs.job(ids, 77, num_valid))
    runs.enqueue(job, len(ids))
    assert torch.equal(job[: len(ids)], digest.multilinear_sums(pool, ids, 77, num_valid))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (6, 2, 3, 2, 8, 16)),
        (torch.bfloat16, (6, 1, 3, 2, 7, 5)),
        (torch.float8_e4m3fn, (6, 1, 1, 2, 3, 5)),
    ],
)
def test_digests_of_whole_and_partial_blocks(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, block_size = torch.randn(shape).to(dtype), shape[-2]
    expected = digest.block_digests(pool, [5, 0, 2], 99, block_size - 1, block_size)
    monkeypatch.setattr(digest, "_sums_in_place", digest._sums_of_packed)
    assert torch.equal(digest.block_digests(pool, [5, 0, 2], 99, block_size - 1, block_size), expected)
