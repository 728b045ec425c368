"""Block operations on a GPU against their twins: swaps with pinned memory, gathers, scatters, pushes that digest."""

from __future__ import annotations

import random

import pytest
import torch

from tandem.kernels.blocks.cache_ops import gather_blocks, swap_blocks
from tandem.kernels.blocks.digest import BlockSums, block_digests
from tandem.kernels.blocks.push_blocks import push_blocks
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.reference import paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float32, FP8_DTYPE]
SHAPE = (12, 3, 4, 2, 16, 80)
KEY = 0xFEDCBA98_76543210


def pool_of(dtype: torch.dtype, device: str = "cuda", padding: int = 512) -> torch.Tensor:
    """Random bits, with a gap of `padding` bytes between blocks."""
    num_blocks, payload = SHAPE[0], torch.Size(SHAPE[1:]).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (num_blocks, payload + padding), dtype=torch.uint8)
    raw = raw.pin_memory() if device == "pinned" else raw.to(device)
    return raw.view(dtype)[:, : payload // dtype.itemsize].unflatten(1, SHAPE[1:])


def on_host(pool: torch.Tensor) -> torch.Tensor:
    raw = torch.empty(SHAPE, dtype=pool.dtype)
    for block in range(len(pool)):
        raw.view(torch.uint8)[block] = pool[block].contiguous().view(torch.uint8).cpu()
    return raw.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("source_at", "target_at"), [("cuda", "pinned"), ("pinned", "cuda"), ("cuda", "cuda")])
@pytest.mark.parametrize(
    ("layers", "counts"), [(None, None), (range(1, 3), None), (None, [16, 1, 7, 0, 15]), (range(3, 4), 9)]
)
def test_swaps(
    dtype: torch.dtype, source_at: str, target_at: str, layers: range | None, counts: list[int] | int | None
) -> None:
    source, target = pool_of(dtype, source_at), pool_of(dtype, target_at, padding=0)
    pairs = [(3, 0), (4, 1), (5, 2), (0, 9), (11, 7)]
    expected = on_host(target)
    listed = counts if isinstance(counts, list) else [16 if counts is None else counts] * 5
    paged.move_blocks(on_host(source), expected, pairs, layers or range(4), listed)
    swap_blocks(source, target, pairs, layers, counts)
    torch.cuda.synchronize()
    assert torch.equal(on_host(target), expected)


def test_a_swap_needs_pinned_memory() -> None:
    with pytest.raises(ValueError, match="pinned"):
        swap_blocks(pool_of(torch.bfloat16), pool_of(torch.bfloat16, "cpu"), [(0, 0)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [None, 0, 3])
def test_gather(dtype: torch.dtype, layer: int | None) -> None:
    pool, ids = pool_of(dtype), torch.tensor([5, 0, 11, 2], device="cuda")
    packed = gather_blocks(pool, ids, layer)
    expected = gather_blocks(on_host(pool), ids.cpu(), layer)
    assert torch.equal(packed.view(torch.uint8).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pushed_bytes_are_digested(dtype: torch.dtype) -> None:
    chance = random.Random(3)
    for num_programs in (1, 16, 64):
        source, target = pool_of(dtype), pool_of(dtype, padding=64)
        pairs = list(zip(chance.sample(range(12), 6), chance.sample(range(12), 6), strict=True))
        num_valid = chance.randint(1, 16)
        slots = [16] * 5 + [num_valid]
        expected = on_host(target)
        paged.move_blocks(on_host(source), expected, pairs, range(4), slots)
        sums = BlockSums.of_none(source, 6, KEY)
        stride = target.stride(0) * target.element_size()
        for layers in (range(2, 4), range(2)):
            push_blocks(source, target.data_ptr(), stride, pairs, layers, slots, num_programs, sums)
        assert torch.equal(on_host(target), expected)
        wanted = block_digests(source, [block for block, _ in pairs], KEY, num_valid, 16)
        assert torch.equal(sums.digests(num_valid, 16), wanted)
        assert torch.equal(block_digests(target, [block for _, block in pairs], KEY, num_valid, 16), wanted)


def test_blocks_beyond_2_to_the_31_elements() -> None:
    block = (8, 32, 2, 64, 128)
    num_blocks = (1 << 31) // torch.Size(block).numel() + 3
    pool = torch.zeros((num_blocks, *block), dtype=torch.bfloat16, device="cuda")
    pool[-1].normal_()
    packed = gather_blocks(pool, [num_blocks - 1])
    assert torch.equal(packed[0], pool[-1])
    stride = pool.stride(0) * 2
    push_blocks(pool, pool.data_ptr(), stride, [(num_blocks - 1, num_blocks - 2)], None, [64])
    push_blocks(pool, pool.data_ptr(), stride, [(num_blocks - 1, num_blocks - 3)], range(31, 32), [63])
    assert torch.equal(pool[-2], pool[-1])
    assert torch.equal(pool[-3, :, 31, :, :63], pool[-1, :, 31, :, :63])
    assert pool[-3].count_nonzero() == pool[-1, :, 31, :, :63].count_nonzero()
    digests = block_digests(pool, [num_blocks - 1, num_blocks - 2, 0], KEY, 64, 64, positions=[0, 0, 0])
    assert digests[0] == digests[1] != digests[2]
    host = torch.empty(2, *block, dtype=torch.bfloat16, pin_memory=True)
    swap_blocks(pool, host, [(num_blocks - 1, 1)])
    swap_blocks(pool, host, [(num_blocks - 2, 0)], range(5, 6))
    torch.cuda.synchronize()
    assert torch.equal(host[1], pool[-1].cpu())
    assert torch.equal(host[0, :, 5], pool[-1, :, 5].cpu())
