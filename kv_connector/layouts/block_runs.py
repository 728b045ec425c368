"""The byte runs that copy engines are given to move layers of whole blocks from one pool into another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.kernels.blocks.move_blocks import BlockPlaces


def block_runs(
    source: BlockPlaces, target: BlockPlaces, pairs: Sequence[tuple[int, int]], heads: range, layers: range
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists the copies that take `layers` of `heads` of block `pairs[i][0]` of `source` into block `pairs[i][1]` of
    `target`.

    Returns (destination addresses, source addresses, lengths in bytes), each uint64 [pairs * heads]. Both sides must
    hold the layers of a head one after the other."""
    assert source.layer_bytes == target.layer_bytes, "a layer is as long on both sides"
    ids_2N = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    chosen = np.arange(heads.start, heads.stop)
    to, origin = (
        (ids[:, None] * pool.block_bytes + chosen * pool.head_bytes).ravel()
        + (pool.address + layers.start * pool.layer_bytes)
        for ids, pool in ((ids_2N[1], target), (ids_2N[0], source))
    )
    nbytes = np.full(len(to), len(layers) * source.layer_bytes)
    return to.astype(np.uint64), origin.astype(np.uint64), nbytes.astype(np.uint64)
