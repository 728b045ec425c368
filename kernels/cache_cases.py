"""Operations on whole blocks, with work and error. Exact: the error is the share of blocks that are wrong."""

from __future__ import annotations

import torch

from tandem.kernels import cache_ops
from tandem.kernels.digest import block_digests
from tandem.kernels.kernel_cases import Case, Shape

KEY = 0x1234_5678_9ABC_DEF0
CHECKED_BLOCKS = 3


def digest_case(shape: Shape, num_blocks: int, num_layers: int) -> Case:
    pool = random_pool(shape, num_blocks, num_layers)
    block_ids = torch.randperm(num_blocks, device=shape.device)

    def run() -> torch.Tensor:
        return block_digests(pool, block_ids, KEY, shape.block_size, shape.block_size)

    def error() -> float:
        few = block_ids[:CHECKED_BLOCKS]
        on_host = cache_ops.gather_blocks(pool, few).cpu()
        expected = block_digests(on_host, range(len(few)), KEY, shape.block_size, shape.block_size)
        return (run()[: len(few)].cpu() != expected).double().mean().item()

    return Case("digest", _size(pool, num_blocks), _block_bytes(pool) * num_blocks, False, run, error, 0.0)


def copy_case(shape: Shape, num_blocks: int, num_layers: int) -> Case:
    """Copies inside the pool, as forks need them."""
    pool = random_pool(shape, 2 * num_blocks, num_layers)
    order = torch.randperm(2 * num_blocks).tolist()
    sources, targets = order[:num_blocks], order[num_blocks:]

    def run() -> None:
        cache_ops.copy_blocks(pool, sources, targets, shape.block_size)

    def error() -> float:
        run()
        return _differing(cache_ops.gather_blocks(pool, targets), cache_ops.gather_blocks(pool, sources))

    return Case("copy of blocks", _size(pool, num_blocks), 2 * _block_bytes(pool) * num_blocks, False, run, error, 0.0)


def random_pool(shape: Shape, num_blocks: int, num_layers: int) -> torch.Tensor:
    """[num_blocks, K, num_layers, 2, S, D] of random bits."""
    sizes = (num_blocks, shape.spec.num_kv_heads, num_layers, 2, shape.block_size, shape.spec.head_size)
    num_bytes = torch.Size(sizes).numel() * shape.cache_dtype.itemsize
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=shape.device)
    return raw.view(shape.cache_dtype).view(sizes)


def _differing(blocks: torch.Tensor, expected: torch.Tensor) -> float:
    raw, wanted = (part.contiguous().view(torch.uint8).flatten(1) for part in (blocks, expected))
    return (raw != wanted).any(dim=1).double().mean().item()


def _block_bytes(pool: torch.Tensor) -> int:
    return pool[0].numel() * pool.element_size()


def _size(pool: torch.Tensor, num_blocks: int) -> str:
    return f"{num_blocks} x {_block_bytes(pool) / (1 << 20):.3g} MiB"
