"""Blocks kept as fp8: how far what comes back may be from what was stored."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.blocks.quantization import FP8_MAX
from tandem.kv_connector.tiers import host_blocks
from tandem.kv_connector.tiers.host_blocks import Fp8Blocks, block_bytes, power_of_two_scales

SHAPE = (3, 4, 2, 8, 16)  # heads, layers, planes, block_size, head_dim
PAIRS = [(0, 2), (1, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_pool(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Heads, layers and planes of very different sizes, each with values from its largest down to nothing."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(-8, 9, (4, *shape[:3], 1, 1), generator=generator).float())
    values = torch.randn(4, *shape, generator=generator)
    return (values * sizes * torch.exp2(-20 * torch.rand(values.shape, generator=generator) ** 4)).to(dtype)


def stored_and_restored(pool: torch.Tensor) -> tuple[Fp8Blocks, torch.Tensor]:
    blocks, again = Fp8Blocks(pool, 3), torch.full_like(pool, 7)
    blocks.store(pool, PAIRS)
    blocks.restore(again, [(slot, block) for block, slot in PAIRS])
    return blocks, again


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_is_within_what_the_page_on_tiers_says(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    _, again = stored_and_restored(pool)
    assert torch.equal(again[2:], torch.full_like(again[2:], 7)), "other blocks are left alone"
    before, after = pool[:2].double(), again[:2].double()
    peaks = before.abs().amax((-2, -1), keepdim=True)
    bound = torch.maximum(before.abs() / 16, peaks / FP8_MAX / 512) * (1 + torch.finfo(dtype).eps)
    bound += torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # a half's smallest numbers are far apart
    assert bool(((after - before).abs() <= bound).all())
    assert float(((after - before).abs() / peaks).max()) > 0.01, "nothing was compressed"


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_storing_what_was_restored_loses_no_more(dtype: torch.dtype) -> None:
    blocks, again = stored_and_restored(make_pool(dtype))
    third = again.clone()
    blocks.store(again, PAIRS)
    blocks.restore(third, [(slot, block) for block, slot in PAIRS])
    assert torch.equal(third, again)


def test_pieces_are_stored_like_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(torch.float32)
    blocks, _ = stored_and_restored(pool)
    monkeypatch.setattr(host_blocks, "PIECE_BYTES", 1)
    again, _ = stored_and_restored(pool)
    assert torch.equal(again.raw, blocks.raw)


def test_what_is_not_finite_stays_in_its_head() -> None:
    pool = make_pool(torch.float32)
    wanted = stored_and_restored(pool)[1]
    pool[0, 1, 2, 0, 3, 4], pool[0, 1, 2, 1] = float("inf"), 0.0
    got = stored_and_restored(pool)[1]
    assert float(got[0, 1, 2, 0, 3, 4]) == FP8_MAX
    assert not got[0, 1, 2, 1].any()
    got[0, 1, 2] = wanted[0, 1, 2] = 0
    assert torch.equal(got, wanted)


def test_scales_are_the_least_powers_of_two_that_fit() -> None:
    peaks = torch.cat([torch.exp2(torch.arange(-60, 60).float()), 10 ** torch.linspace(-20, 20, 99)])
    for peak, scale in zip(peaks.tolist(), power_of_two_scales(peaks).tolist(), strict=True):
        assert peak / scale <= FP8_MAX < 2 * peak / scale
        assert float.hex(scale).startswith("0x1.0000000000000p")


def test_a_slot_takes_half_of_what_bfloat16_takes() -> None:
    pool = torch.zeros((1, 8, 32, 2, 64, 128), dtype=torch.bfloat16)
    assert Fp8Blocks.slot_bytes(pool) < 0.502 * block_bytes(pool)
    odd = torch.zeros((1, 1, 1, 2, 3, 5), dtype=torch.bfloat16)
    blocks = Fp8Blocks(odd, 2)
    blocks.store(odd + 1.5, [(0, 1)])
    blocks.restore(odd, [(1, 0)])
    assert bool((odd == 1.5).all())
    assert blocks.digest(1, 5) != blocks.digest(0, 5)
