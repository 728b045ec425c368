"""Sums of a grant's blocks, taken while they are pushed, from which its digests are made if every block is covered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.kernels.blocks.digest import BlockSums, sent_form, valid_slots
from tandem.kernels.blocks.digest_pass import SumPass
from tandem.kv_connector.protocol.jobs import Finalize, digest_key
from tandem.kv_connector.transports.base import PairSums, Write


class GrantSums:
    """The sums of one grant, until its first KVReady. Writes sum what they move; a pass sums all layers of blocks that
    were pushed. A block's sum holds when each of its layers was summed exactly once; where one was not (sent again,
    started over, pushed before sums began), the digests are made anew."""

    def __init__(self, grant: KVGrant, num_layers: int, num_last: int = 1) -> None:
        """`num_last`: how many blocks at the end may be partly filled."""
        self._num_last = num_last
        self.key = digest_key(grant.key, grant.grant_id)
        self._index_of = {block_id: index for index, block_id in enumerate(grant.block_ids)}
        self._seen_NL = np.zeros((len(grant.block_ids), num_layers), dtype=bool)
        self._num_valid_N = np.zeros(len(grant.block_ids), dtype=np.int64)
        self._is_sound = True
        self._of_writes: BlockSums | None = None
        self._passes: list[tuple[list[int], SumPass]] = []

    def of_write(self, pool_NHLPBD: torch.Tensor, write: Write) -> PairSums:
        """Makes places for the sums of a write. `pool_NHLPBD` is what the write reads, shaped like the sink's pool."""
        indices = self._note([destination for _, destination in write.pairs], write.layers, write.num_valid)
        if self._of_writes is None:
            self._of_writes = BlockSums.of_none(pool_NHLPBD, len(self._num_valid_N), self.key)
        return PairSums(self._of_writes, indices)

    def add_pass(self, destination_block_ids: Sequence[int], num_valid: Sequence[int], begun: SumPass) -> None:
        """Adds a pass over all layers of the blocks that were, or are being, pushed to these destination blocks."""
        self._passes.append((self._note(destination_block_ids, None, num_valid), begun))

    def are_whole(self, job: Finalize, block_size: int) -> bool:
        """Whether the sums cover all blocks of `job`, so that `digests` can be called."""
        num_blocks = job.num_pushed_blocks
        expected = valid_slots(num_blocks, job.num_valid_last, block_size, self._num_last)
        as_pushed = np.array_equal(self._num_valid_N[:num_blocks], expected)
        return self._is_sound and as_pushed and job.digest_key == self.key and bool(self._seen_NL[:num_blocks].all())

    def digests(self, job: Finalize, block_size: int) -> np.ndarray:
        """Little-endian int64 [num_pushed_blocks], as `block_digests` would give, once; waits for passes and for the
        current stream, behind which the writes must be."""
        sums_N = np.zeros(len(self._num_valid_N), dtype=np.int64)
        if self._of_writes is not None:
            sums_N += self._of_writes.on_host().sums_N.numpy()
        passes, self._passes = self._passes, []
        for indices, each in passes:
            sums_N[indices] += each.sums()
        pushed_N, last = sums_N[: job.num_pushed_blocks], job.num_valid_last
        return sent_form(pushed_N, self.key, last, block_size, self._num_last)

    def abandon(self) -> None:
        """Gives the sums up, and returns when no pass reads a block any more."""
        for _, each in self._passes:
            each.abandon()
        self._passes.clear()

    def _note(self, destination_block_ids: Sequence[int], layers: range | None, num_valid: Sequence[int]) -> list[int]:
        indices = [self._index_of[block_id] for block_id in destination_block_ids]
        span = slice(None) if layers is None else slice(layers.start, layers.stop)
        self._is_sound &= not self._seen_NL[indices, span].any()
        self._seen_NL[indices, span] = True
        self._num_valid_N[indices] = num_valid
        return indices
