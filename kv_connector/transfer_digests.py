"""Digests that the transfer thread makes: of what it sent, for the sink, and of what arrived, against the source's."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.kv_layout import KVLayout
from tandem.kernels.digest import block_digests
from tandem.kv_connector.meta import Finalize, Verify
from tandem.kv_connector.rank_pools import RankPools
from tandem.kv_connector.reshape import Reshaper

logger = logging.getLogger(__name__)


class TransferDigests:
    """Belongs to the transfer thread. `counters` are the thread's."""

    def __init__(
        self, pool_NHLPBD: torch.Tensor, layout: KVLayout, ranks: RankPools | None, counters: dict[str, float]
    ) -> None:
        """`ranks`: where blocks are, if they are not whole in `pool_NHLPBD`."""
        self._pool_NHLPBD, self._layout, self._ranks = pool_NHLPBD, layout, ranks
        self._counters = counters

    def of_source(self, job: Finalize) -> np.ndarray:
        """Little-endian int64 [n], of blocks that go as they are."""
        return self._of_blocks(job.source_block_ids, job.digest_key, job.num_valid_last)

    def of_staged(self, job: Finalize, reshaper: Reshaper) -> np.ndarray:
        """As `of_source`, of the sink's blocks: staged again, the same way as they were sent."""
        num_valid = [reshaper.geometry.block_size] * (job.num_pushed_blocks - 1) + [job.num_valid_last]
        parts = reshaper.parts(job.source_block_ids, job.first_slots, num_valid)
        return reshaper.digests(parts, job.digest_key, job.num_valid_last).cpu().numpy().astype("<i8")

    def bad_blocks(self, job: Verify) -> tuple[int, ...]:
        """Places, in the hand-off's order, of blocks that are not what the source sent; all that can't be checked."""
        expected = np.frombuffer(job.digests, dtype="<i8")
        try:
            actual = self._of_blocks(job.block_ids, job.digest_key, job.num_valid_last)
            matches = expected == actual if len(expected) == len(actual) else np.zeros(len(actual), dtype=bool)
        except Exception:  # the sink asks again or recomputes
            logger.exception("can't verify the blocks of %s", job.key)
            matches = np.zeros(len(job.block_ids), dtype=bool)
        bad = tuple(int(index) for index in np.flatnonzero(~matches))
        self._counters["kv_blocks_verified"] += len(job.block_ids)
        self._counters["kv_blocks_bad"] += len(bad)
        return bad

    def _of_blocks(self, block_ids: Sequence[int], key: int, num_valid_last: int) -> np.ndarray:
        if self._ranks is not None:
            return self._ranks.digests(block_ids, key, num_valid_last).cpu().numpy().astype("<i8")
        size = self._layout.block_size
        digests = block_digests(self._pool_NHLPBD, block_ids, key, num_valid_last, size, on_host=True)
        return digests.numpy().astype("<i8")
