"""Digests of a grant's blocks taken up while they are pushed: which are summed, and whether that makes the whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.messages import KVGrant
from tandem.kernels.digest import BlockSums
from tandem.kv_connector.meta import digest_key
from tandem.kv_connector.transports.base import PairSums


class GrantSums:
    """Of one grant, until its first KVReady. A block's sum holds when each of its layers was pushed exactly once; where
    one was not (sent again, started over, pushed before sums began), the digests are made in a pass of their own."""

    def __init__(self, grant: KVGrant, pool_NHLPBD: torch.Tensor) -> None:
        """`pool_NHLPBD`: what is pushed from, shaped like the sink's pool."""
        key = digest_key(grant.request_id, grant.attempt, grant.grant_id)
        self._sums = BlockSums.of_none(pool_NHLPBD, len(grant.block_ids), key)
        self._index_of = {block_id: index for index, block_id in enumerate(grant.block_ids)}
        self._seen_NL = np.zeros((len(grant.block_ids), pool_NHLPBD.shape[2]), dtype=bool)
        self._is_sound = True

    def of_write(self, destination_block_ids: Sequence[int], layers: range | None) -> PairSums:
        """For a write of `layers` (None: all) of these blocks, which is about to be made."""
        indices = [self._index_of[block_id] for block_id in destination_block_ids]
        span = slice(None) if layers is None else slice(layers.start, layers.stop)
        self._is_sound &= not self._seen_NL[indices, span].any()
        self._seen_NL[indices, span] = True
        return PairSums(self._sums, indices)

    def digests(self, key: int, num_valid_last: int, block_size: int, num_blocks: int) -> np.ndarray | None:
        """Little-endian int64 [num_blocks], of the grant's leading blocks, as `block_digests` would give; waits for the
        current stream's pushes. None: the sums don't make a whole, or are of another key."""
        if not self._is_sound or not self._seen_NL[:num_blocks].all() or key != self._sums.key:
            return None
        sums = self._sums.on_host()
        return sums.digests(num_valid_last, block_size, positions=range(num_blocks)).numpy().astype("<i8")
