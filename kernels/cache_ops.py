"""Whole-block operations on a node's pool: copy-on-write of tails, gather and scatter for transfers and tiers.

pool: [num_blocks, heads, layers, 2, block_size, head_dim]; a block is one contiguous run, the stride between blocks may
be longer. All operations are enqueued on the current stream and never wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kernels.quantization import as_bytes


def copy_blocks(
    pool: torch.Tensor, src_ids: Sequence[int], dst_ids: Sequence[int], num_tokens: Sequence[int] | int
) -> None:
    """Copies the first `num_tokens[i]` slots of block `src_ids[i]`, all heads and layers, to `dst_ids[i]`.

    The other slots of the destination keep their content. Raises ValueError when the lists don't match, a destination
    occurs twice or is also a source (the copies run in no order), or an id or count is out of range.
    """
    counts = [num_tokens] * len(src_ids) if isinstance(num_tokens, int) else list(num_tokens)
    _check_copies(pool, src_ids, dst_ids, counts)
    if not counts:
        return
    if pool.is_cuda and _has_triton():
        from tandem.kernels.triton_kernels.copy_blocks import copy_blocks as launch

        launch(pool, src_ids, dst_ids, counts)
        return
    raw = as_bytes(pool)
    for source, destination, count in zip(src_ids, dst_ids, counts, strict=True):
        raw[destination, ..., :count, :] = raw[source, ..., :count, :]


def gather_blocks(
    pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, layer: int | None = None
) -> torch.Tensor:
    """Contiguous copy of the blocks [n, heads, layers, 2, block_size, head_dim], or of one layer, without that axis."""
    ids = torch.as_tensor(block_ids, dtype=torch.long, device=pool.device)
    return _selected(as_bytes(pool), layer).index_select(0, ids).view(pool.dtype)


def scatter_blocks(
    pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, blocks: torch.Tensor, layer: int | None = None
) -> None:
    """Writes `blocks`, shaped and typed as `gather_blocks` returns them, into the pool. Ids must not repeat."""
    ids = torch.as_tensor(block_ids, dtype=torch.long, device=pool.device)
    target = _selected(as_bytes(pool), layer)
    if blocks.dtype != pool.dtype or blocks.shape != (len(ids), *target.shape[1:]):
        raise ValueError(
            f"blocks are {blocks.dtype} {tuple(blocks.shape)}, "
            f"the pool takes {pool.dtype} {(len(ids), *target.shape[1:])}"
        )
    target.index_copy_(0, ids, as_bytes(blocks).to(pool.device))


def _selected(pool: torch.Tensor, layer: int | None) -> torch.Tensor:
    return pool if layer is None else pool[:, :, layer]


def _check_copies(pool: torch.Tensor, src_ids: Sequence[int], dst_ids: Sequence[int], counts: list[int]) -> None:
    if not len(src_ids) == len(dst_ids) == len(counts):
        raise ValueError(f"{len(src_ids)} sources, {len(dst_ids)} destinations, {len(counts)} counts")
    if len(set(dst_ids)) != len(dst_ids) or set(dst_ids) & set(src_ids):
        raise ValueError("copies run in no order: a destination may neither repeat nor be a source of the same call")
    num_blocks, block_size = pool.shape[0], pool.shape[-2]
    if any(not 0 <= block < num_blocks for block in (*src_ids, *dst_ids)):
        raise ValueError(f"block id out of range 0 … {num_blocks - 1}")
    if any(not 0 <= count <= block_size for count in counts):
        raise ValueError(f"num_tokens out of range 0 … {block_size}")


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None
