"""Operations on whole blocks, with work and error. Exact: the error is the share of blocks that are wrong."""

from __future__ import annotations

import torch

from tandem.kernels.blocks import cache_ops
from tandem.kernels.blocks.digest import BlockSums, block_digests
from tandem.kernels.blocks.push_blocks import push_blocks
from tandem.kernels.blocks.quantization import as_bytes
from tandem.kernels.check.kernel_cases import Case, Shape

KEY = 0x1234_5678_9ABC_DEF0  # of the digests; any
CHECKED_BLOCKS = 3  # a guess


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


def gather_case(shape: Shape, num_blocks: int, num_layers: int, layer: int | None = None) -> Case:
    """Gathers into a packed buffer: whole blocks, or one layer of them."""
    pool = random_pool(shape, 2 * num_blocks, num_layers)
    block_ids = torch.randperm(2 * num_blocks, device=shape.device)[:num_blocks]

    def run() -> torch.Tensor:
        return cache_ops.gather_blocks(pool, block_ids, layer)

    def error() -> float:
        raw = as_bytes(pool)
        return _differing(run(), (raw if layer is None else raw[:, :, layer])[block_ids])

    part = 1 if layer is None else num_layers
    name = "gather of blocks" if layer is None else "gather of a layer"
    work = 2 * _block_bytes(pool) * num_blocks / part
    return Case(name, _size(pool, num_blocks, part), work, False, run, error, 0.0)


def swap_case(shape: Shape, num_blocks: int, num_layers: int, to_host: bool, layer: int | None = None) -> Case:
    """Swaps between a GPU and pinned host memory. Its work counts each byte once: what crosses the bus."""
    pool = random_pool(shape, num_blocks, num_layers)
    host = torch.empty(pool.shape, dtype=pool.dtype, pin_memory=True)
    source, target = (pool, host) if to_host else (host, pool)
    host.copy_(pool.flip(0) if pool.element_size() > 1 else pool)
    pairs = [(block, (block + 3) % num_blocks) for block in torch.randperm(num_blocks).tolist()]
    layers = None if layer is None else range(layer, layer + 1)

    def run() -> None:
        cache_ops.swap_blocks(source, target, pairs, layers)

    def error() -> float:
        run()
        torch.cuda.synchronize(shape.device)
        blocks, others = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
        moved, wanted = (as_bytes(part.cpu())[:, :, slice(layer, None if layer is None else layer + 1)]
                         for part in (target, source))  # fmt: skip
        return _differing(moved[others], wanted[blocks])

    part = 1 if layer is None else num_layers
    name = f"swap {'out' if to_host else 'in'}" + ("" if layer is None else " of a layer")
    work = _block_bytes(pool) * num_blocks / part
    return Case(name, _size(pool, num_blocks, part), work, False, run, error, 0.0)


def push_case(shape: Shape, num_blocks: int, num_layers: int, with_sums: bool, num_programs: int) -> Case:
    """Pushes into another pool of the same GPU, with digests or without. GPUs only."""
    pool = random_pool(shape, num_blocks, num_layers)
    target = torch.zeros_like(as_bytes(pool)).view(pool.dtype)
    stride_bytes = pool.stride(0) * pool.element_size()
    pairs = [(block, place) for place, block in enumerate(torch.randperm(num_blocks).tolist())]
    valid = [shape.block_size] * num_blocks

    def run() -> BlockSums | None:
        sums = BlockSums.of_none(pool, num_blocks, KEY) if with_sums else None
        push_blocks(pool, target.data_ptr(), stride_bytes, pairs, None, valid, num_programs, sums)
        return sums

    def error() -> float:
        sums = run()
        order = [block for block, _ in pairs]
        wrong = _differing(target, as_bytes(pool)[torch.tensor(order, device=pool.device)])
        if sums is None:
            return wrong
        expected = block_digests(pool, order, KEY, shape.block_size, shape.block_size)
        digests = sums.digests(shape.block_size, shape.block_size)
        return wrong + (digests != expected).double().mean().item()

    name = "push and digest" if with_sums else "push of blocks"
    size = f"{_size(pool, num_blocks)}, {num_programs}"
    return Case(name, size, 2 * _block_bytes(pool) * num_blocks, False, run, error, 0.0)


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


def _size(pool: torch.Tensor, num_blocks: int, part: int = 1) -> str:
    return f"{num_blocks} x {_block_bytes(pool) / part / (1 << 20):.3g} MiB"
