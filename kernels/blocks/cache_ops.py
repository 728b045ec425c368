"""Whole-block operations on a node's pool: copy-on-write of tails, swaps with host memory, gather and scatter.

pool: [num_blocks, heads, layers, planes, block_size, head_dim]; a block is one contiguous run, the stride between
blocks may be longer. All operations are enqueued on the current stream and never wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kernels.blocks.move_blocks import BlockPlaces, move_blocks, why_not_words
from tandem.kernels.blocks.quantization import as_bytes

SWAP_PROGRAMS = 16  # the bus is the limit; docs/measurements.md#copies-norms-and-sampling
PACKING_PROGRAMS = 2048  # a guess; what it reaches: docs/measurements.md#copies-norms-and-sampling


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
        from tandem.kernels.triton_kernels.blocks.copy_blocks import copy_blocks as launch

        launch(pool, src_ids, dst_ids, counts)
        return
    raw = as_bytes(pool)
    for source, destination, count in zip(src_ids, dst_ids, counts, strict=True):
        raw[destination, ..., :count, :] = raw[source, ..., :count, :]


def swap_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: Sequence[tuple[int, int]],
    layers: range | None = None,
    num_tokens: Sequence[int] | int | None = None,
) -> None:
    """Copies block `pairs[i][0]` of pool `source` to block `pairs[i][1]` of pool `target`: from a GPU to pinned host
    memory, back, or within a device. `layers` (None: all) of the first `num_tokens[i]` (None: all) slots.

    Whole blocks go through the copy engines, beside all computation. A host pool must be pinned; whoever reads or
    reuses what was written or read here waits for an event recorded after this. Raises ValueError for pools that differ
    in more than their number of blocks and its stride, ids out of range, targets that repeat, or host memory not
    pinned.
    """
    block_size, num_layers = source.shape[4], source.shape[2]
    chosen = range(num_layers) if layers is None else layers
    if isinstance(num_tokens, Sequence):
        counts = list(num_tokens)
    else:
        counts = [block_size if num_tokens is None else num_tokens] * len(pairs)
    _check_swap(source, target, pairs, chosen, counts)
    device = source.device if source.is_cuda else target.device
    if len(chosen) == num_layers and all(count == block_size for count in counts):
        _copy_runs(source, target, pairs)
    elif device.type == "cuda" and _has_triton() and not (why_not_words(source) or why_not_words(target)):
        listed = torch.tensor([[s for s, _ in pairs], [t for _, t in pairs], counts], dtype=torch.int64)
        sent = listed.pin_memory().to(device, non_blocking=True)
        move_blocks(source, BlockPlaces.of(source), BlockPlaces.of(target), sent, chosen, SWAP_PROGRAMS)
    else:
        raw, place = as_bytes(source), as_bytes(target)
        part = slice(chosen.start, chosen.stop)
        for (block, other), count in zip(pairs, counts, strict=True):
            place[other, :, part, :, :count].copy_(raw[block, :, part, :, :count], non_blocking=True)


def gather_blocks(
    pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, layer: int | None = None
) -> torch.Tensor:
    """Contiguous copy of the blocks, [n, heads, layers, planes, block_size, head_dim]; of one `layer` without that
    axis."""
    ids = torch.as_tensor(block_ids, dtype=torch.long, device=pool.device)
    if not (pool.is_cuda and _has_triton()) or why_not_words(pool):
        return _selected(as_bytes(pool), layer).index_select(0, ids).view(pool.dtype)
    packed = torch.empty((len(ids), *_selected(pool, layer).shape[1:]), dtype=pool.dtype, device=pool.device)
    layers = range(pool.shape[2]) if layer is None else range(layer, layer + 1)
    rows = BlockPlaces.of(packed if layer is None else packed[:, :, None]).starting_at(-layers.start)
    order = torch.arange(len(ids), device=pool.device)
    pairs = torch.stack((ids, order, torch.full_like(order, pool.shape[4])))
    move_blocks(pool, BlockPlaces.of(pool), rows, pairs, layers, PACKING_PROGRAMS)
    return packed


def _copy_runs(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Whole blocks, one copy for each run of blocks that follow each other on both sides with nothing between them."""
    raw, place = as_bytes(source), as_bytes(target)
    can_join = raw.is_contiguous() and place.is_contiguous()
    first = 0
    for end in range(1, len(pairs) + 1):
        block, other = pairs[first]
        length = end - first
        if can_join and end < len(pairs) and pairs[end] == (block + length, other + length):
            continue
        place[other : other + length].copy_(raw[block : block + length], non_blocking=True)
        first = end


def _check_swap(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]], layers: range, counts: list[int]
) -> None:
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"pools of {source.dtype} {tuple(source.shape)} and {target.dtype} {tuple(target.shape)} differ in more "
            "than their number of blocks"
        )
    if source.is_cuda != target.is_cuda and not (target if source.is_cuda else source).is_pinned():
        raise ValueError("a host pool that a GPU swaps with must be pinned memory")
    targets = {other for _, other in pairs}
    if len(counts) != len(pairs) or len(targets) != len(pairs):
        raise ValueError(f"{len(pairs)} pairs, {len(targets)} different targets, {len(counts)} counts")
    if any(not (0 <= block < len(source) and 0 <= other < len(target)) for block, other in pairs):
        raise ValueError(f"a block id is out of range: {len(source)} and {len(target)} blocks")
    if any(not 0 <= count <= source.shape[4] for count in counts):
        raise ValueError(f"num_tokens out of range 0 … {source.shape[4]}")
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= source.shape[2]:
        raise ValueError(f"{layers} are no layers of {source.shape[2]}")


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
