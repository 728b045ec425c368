"""Block digests: equal on both sides for equal bytes, different for every change that corruption makes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kernels.blocks import digest
from tandem.kernels.blocks.digest import block_digests

KEY = 0xDEADBEEF_12345678
SHAPES = {
    torch.float32: (6, 2, 3, 2, 8, 16),
    torch.bfloat16: (6, 1, 3, 2, 7, 5),
    torch.float8_e4m3fn: (6, 1, 1, 2, 3, 5),
}


def pool_of(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPES[dtype], generator=torch.Generator().manual_seed(seed)).to(dtype)


def raw(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.uint8)


@pytest.mark.parametrize("dtype", SHAPES)
def test_copies_in_other_blocks_have_the_same_digests(dtype: torch.dtype) -> None:
    pool, other = pool_of(dtype), pool_of(dtype, seed=1)
    block_size = pool.shape[-2]
    raw(other)[[4, 0, 2]] = raw(pool)[[1, 3, 5]]
    ours = block_digests(pool, [1, 3, 5], KEY, block_size, block_size)
    assert torch.equal(ours, block_digests(other, torch.tensor([4, 0, 2]), KEY, block_size, block_size))
    assert len(set(ours.tolist())) == 3
    assert not set(ours.tolist()) & set(block_digests(pool, [1, 3, 5], KEY + 1, block_size, block_size).tolist())


@pytest.mark.parametrize("dtype", SHAPES)
def test_every_single_byte_counts(dtype: torch.dtype) -> None:
    pool = pool_of(dtype)
    block_size = pool.shape[-2]
    before = block_digests(pool, [2], KEY, block_size, block_size)
    flat = raw(pool)[2].reshape(-1)
    for index in range(0, flat.numel(), max(1, flat.numel() // 200)):
        for bit in (1, 128):
            flat[index] ^= bit
            raw(pool)[2] = flat.view(raw(pool)[2].shape)
            assert not torch.equal(block_digests(pool, [2], KEY, block_size, block_size), before)
            flat[index] ^= bit
    raw(pool)[2] = flat.view(raw(pool)[2].shape)
    assert torch.equal(block_digests(pool, [2], KEY, block_size, block_size), before)


@given(st.integers(0, 191), st.integers(0, 191), st.sampled_from([0x80000000, 1, 0x3F800000]))
@settings(max_examples=60, deadline=None)
def test_pairs_of_equal_changes_and_swaps_do_not_cancel(first: int, second: int, change: int) -> None:
    pool = pool_of(torch.float32)
    before = block_digests(pool, [0], KEY, 8, 8)
    words = pool[0].view(torch.int32).reshape(-1)
    words[first] ^= change - (1 << 32) if change >> 31 else change
    words[second] ^= change - (1 << 32) if change >> 31 else change
    assert torch.equal(block_digests(pool, [0], KEY, 8, 8), before) == (first == second)
    fresh = pool_of(torch.float32)
    words = fresh[0].view(torch.int32).reshape(-1)
    differs = words[first] != words[second]
    words[[first, second]] = words[[second, first]]
    assert torch.equal(block_digests(fresh, [0], KEY, 8, 8), before) != bool(differs)


def test_only_valid_slots_of_the_last_block_count() -> None:
    pool = pool_of(torch.bfloat16)
    before = block_digests(pool, [1, 3], KEY, 4, 7)
    pool[3, ..., 4:, :] = float("nan")
    assert torch.equal(block_digests(pool, [1, 3], KEY, 4, 7), before)
    assert block_digests(pool, [1, 3], KEY, 5, 7)[1] != before[1]
    pool[3, ..., 3, :] += 1
    after = block_digests(pool, [1, 3], KEY, 4, 7)
    assert after[0] == before[0]
    assert after[1] != before[1]
    pool[1, ..., 6, :] += 1
    assert block_digests(pool, [1, 3], KEY, 4, 7)[0] != before[0]


def test_the_place_in_the_list_counts_and_parts_can_be_checked_alone() -> None:
    pool = pool_of(torch.float32)
    whole = block_digests(pool, [0, 1, 2], KEY, 8, 8)
    assert not set(whole.tolist()) & set(block_digests(pool, [2, 0, 1], KEY, 8, 8).tolist())
    assert torch.equal(block_digests(pool, [1, 2], KEY, 8, 8, positions=[1, 2]), whole[1:])


def test_long_blocks_use_other_multipliers_in_each_segment() -> None:
    pool = torch.zeros(1, 1, 3, 2, 64, 128)  # 3 segments of words
    assert pool.numel() // 2 == 3 * digest.SEGMENT_WORDS
    digests = set()
    for segment in range(3):
        pool.zero_()
        pool.view(-1)[segment * digest.SEGMENT_WORDS * 2] = 1.0
        digests.add(block_digests(pool, [0], KEY, 64, 64).item())
    assert len(digests) == 3


def test_values_are_stable_across_versions() -> None:
    pool = torch.arange(2 * 1 * 1 * 2 * 2 * 4, dtype=torch.float32).view(2, 1, 1, 2, 2, 4)
    assert block_digests(pool, [0, 1], 7, 1, 2).tolist() == [7869733320109492977, -4364742017983172235]


@pytest.mark.parametrize("num_valid", [0, 9])
def test_impossible_lengths_are_refused(num_valid: int) -> None:
    with pytest.raises(ValueError, match="num_valid_last"):
        block_digests(pool_of(torch.float32), [0], KEY, num_valid, 8)


def test_no_blocks_no_digests() -> None:
    assert block_digests(pool_of(torch.float32), [], KEY, 8, 8).shape == (0,)
