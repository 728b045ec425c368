"""Block copies, gathers and scatters move exactly what they say."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.blocks.cache_ops import copy_blocks, gather_blocks, swap_blocks
from tandem.kernels.blocks.quantization import dequantize, quantize, scale_for
from tandem.kernels.reference import paged

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def pool_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(6, 2, 3, 2, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_takes_the_first_slots_only(dtype: torch.dtype) -> None:
    pool, expected = pool_of(dtype), pool_of(dtype)
    paged.copy_blocks(raw(expected), [0, 3, 3], [1, 4, 5], [8, 3, 0])
    copy_blocks(pool, [0, 3, 3], [1, 4, 5], [8, 3, 0])
    assert torch.equal(raw(pool), raw(expected))
    assert not torch.equal(raw(pool), raw(pool_of(dtype)))


@pytest.mark.parametrize(
    ("sources", "destinations", "counts"),
    [([0, 1], [2, 2], 4), ([0, 1], [1, 2], 4), ([0], [6], 4), ([-1], [2], 4), ([0], [2], 9), ([0], [2, 3], 4)],
)
def test_impossible_copies_are_refused(sources: list[int], destinations: list[int], counts: int) -> None:
    with pytest.raises(ValueError, match=r"order|range|sources"):
        copy_blocks(pool_of(torch.float32), sources, destinations, counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [None, 2])
def test_gathered_blocks_are_contiguous(dtype: torch.dtype, layer: int | None) -> None:
    pool = pool_of(dtype)
    blocks = gather_blocks(pool, [4, 0], layer)
    assert blocks.is_contiguous()
    for index, block in enumerate((4, 0)):
        assert torch.equal(
            raw(blocks[index]), raw(pool[block] if layer is None else pool[block, :, layer].contiguous())
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("pairs", "layers", "counts"),
    [
        ([(0, 3), (1, 4), (2, 5), (5, 0)], None, None),
        ([(4, 0), (0, 2)], range(1, 3), None),
        ([(4, 0), (0, 2), (3, 3)], None, [8, 3, 0]),
        ([(2, 1)], range(2, 3), 5),
        ([], None, None),
    ],
)
def test_swaps_move_what_they_say(
    dtype: torch.dtype, pairs: list[tuple[int, int]], layers: range | None, counts: list[int] | int | None
) -> None:
    source = pool_of(dtype)
    target = torch.zeros(7, 2, 3, 2, 8, 24, dtype=torch.float32).to(dtype)[..., :16][:6]
    expected = raw(torch.zeros(6, 2, 3, 2, 8, 16).to(dtype))
    listed = [8 if counts is None else counts] * len(pairs) if not isinstance(counts, list) else counts
    paged.move_blocks(raw(source), expected, pairs, range(3) if layers is None else layers, listed)
    swap_blocks(source, target, pairs, layers, counts)
    assert torch.equal(target.contiguous().view(torch.uint8), expected)


@pytest.mark.parametrize(
    ("shape", "pairs", "layers", "counts", "problem"),
    [
        ((6, 2, 3, 2, 8, 16), [(0, 6)], None, None, "out of range"),
        ((6, 2, 3, 2, 8, 16), [(-1, 0)], None, None, "out of range"),
        ((6, 2, 3, 2, 8, 16), [(0, 1), (2, 1)], None, None, "different targets"),
        ((6, 2, 3, 2, 8, 16), [(0, 1)], None, [1, 2], "counts"),
        ((6, 2, 3, 2, 8, 16), [(0, 1)], None, 9, "num_tokens"),
        ((6, 2, 3, 2, 8, 16), [(0, 1)], range(2, 4), None, "no layers"),
        ((6, 2, 3, 2, 4, 16), [(0, 1)], None, None, "differ"),
    ],
)
def test_impossible_swaps_are_refused(
    shape: tuple[int, ...], pairs: list[tuple[int, int]], layers: range | None, counts: list[int] | None, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        swap_blocks(pool_of(torch.float32), torch.zeros(shape), pairs, layers, counts)


def test_a_scale_a_layer_serves_unlike_heads() -> None:
    """Heads of very unlike sizes lose no more in fp8 with their layer's scale than with scales of their own."""
    large = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))

    def lost(head: torch.Tensor, scale: float) -> float:
        kept = dequantize(quantize(head, scale, counts=False), scale, torch.float32)
        return float((kept - head).norm() / head.norm())

    for smaller in (10, 100, 1000):
        head = large.roll(1) / smaller
        assert lost(head, float(scale_for(large))) == pytest.approx(lost(head, float(scale_for(head))), rel=0.03)
