"""The transfer thread's work for sinks: checks received blocks against the digests of their source."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.durations import note_duration
from tandem.engine.contracts.wire.handoff import KVGrant, KVReady
from tandem.kernels.blocks.digest import sent_form, valid_slots
from tandem.kernels.blocks.digest_pass import SumPass, SumPasses
from tandem.kv_connector.layouts.rank_pools import RankPools
from tandem.kv_connector.protocol.jobs import Verified, Verify, digest_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Sums that were begun when a KVReady of this round came."""

    round: int
    block_ids: tuple[int, ...]
    num_valid_last: int
    key: int
    begun: SumPass

    def fits(self, job: Verify) -> bool:
        asked = job.round, job.block_ids, job.num_valid_last, job.digest_key
        return (self.round, self.block_ids, self.num_valid_last, self.key) == asked


class SinkChecks:
    """Compares digests on the transfer thread, `expect` and `end` aside; on CUDA in its current stream. `counters` are
    the thread's."""

    def __init__(
        self, pool_NHLPBD: torch.Tensor, layout: KVLayout, ranks: RankPools | None, counters: dict[str, float]
    ) -> None:
        """`ranks` has the blocks if they are not whole in `pool_NHLPBD`."""
        self._ranks, self._block_size, self._num_last = ranks, layout.block_size, layout.group.blocks_each
        self._passes = SumPasses(pool_NHLPBD)
        self._counters = counters
        self._open: dict[int, KVGrant] = {}  # grants for which a KVReady may come
        self._arrived: dict[int, _Arrived] = {}  # by grant, until its Verify

    def warm_up(self) -> None:
        """Compiles the kernels. Must be called before the first step."""
        self._passes.warm_up()

    def expect(self, grant: KVGrant) -> None:
        """Notes a grant, from any thread, before the source hears of it."""
        self._open[grant.grant_id] = grant

    def end(self, grant_id: int) -> None:
        """Forgets a grant, from any thread: nothing of it will be asked for any more."""
        self._open.pop(grant_id, None)

    def sum_arrived(self, ready: KVReady) -> None:
        """Begins the sums of the blocks that a KVReady names. Everything of its round has been written by then, so they
        are as good as those that its Verify would begin; no other Verify gets them. A KVReady of no open grant, or of
        one that is not checked like a prompt, is ignored."""
        self._drop([grant_id for grant_id in self._arrived if grant_id not in self._open])
        grant, size = self._open.get(ready.grant_id), self._block_size
        if grant is None or ready.grant_signature != grant.signature or not ready.digests or self._ranks is not None:
            return
        if ready.continuation is not None or not grant.num_prompt_tokens or not grant.block_ids:
            return
        self._drop([grant.grant_id])
        key, valid_last = digest_key(grant.key, grant.grant_id), (grant.num_prompt_tokens - 1) % size + 1
        num_valid = valid_slots(len(grant.block_ids), valid_last, size, self._num_last)
        try:
            begun = self._passes.begin(grant.block_ids, key, num_valid)
        except Exception:  # its Verify will fail in the same way, and say so
            logger.exception("can't sum what arrived of %s", grant.request_id)
            return
        self._arrived[grant.grant_id] = _Arrived(ready.round, grant.block_ids, valid_last, key, begun)

    @property
    def num_arrived(self) -> int:
        """The number of grants whose sums wait for their Verify."""
        return len(self._arrived)

    def verify(self, job: Verify) -> Verified:
        """Compares digests. The answer has the places, in the hand-off's order, of blocks that differ from what the
        source sent, or that can't be checked."""
        began = time.monotonic()
        try:
            expected = np.frombuffer(job.digests, dtype="<i8")
            actual = self._digests(job)
            matches = expected == actual if len(expected) == len(actual) else np.zeros(len(actual), dtype=bool)
        except Exception:  # the sink asks again or recomputes
            logger.exception("can't verify the blocks of %s", job.key)
            matches = np.zeros(len(job.block_ids), dtype=bool)
        bad = tuple(int(index) for index in np.flatnonzero(~matches))
        self._counters["kv_blocks_verified"] += len(job.block_ids)
        self._counters["kv_blocks_bad"] += len(bad)
        note_duration(self._counters, "kv_verify_s", time.monotonic() - began)
        return Verified(job.key, job.grant_id, job.round, bad)

    def _digests(self, job: Verify) -> np.ndarray:
        if self._ranks is not None:
            digests = self._ranks.digests(job.block_ids, job.digest_key, job.num_valid_last)
            return digests.cpu().numpy().astype("<i8")
        arrived = self._arrived.get(job.grant_id)
        if arrived is not None and arrived.fits(job):
            begun = arrived.begun
            del self._arrived[job.grant_id]
        else:
            num_valid = valid_slots(len(job.block_ids), job.num_valid_last, self._block_size, self._num_last)
            begun = self._passes.begin(job.block_ids, job.digest_key, num_valid)
        return sent_form(begun.sums(), job.digest_key, job.num_valid_last, self._block_size, self._num_last)

    def _drop(self, grant_ids: list[int]) -> None:
        for grant_id in grant_ids:
            arrived = self._arrived.pop(grant_id, None)
            if arrived is not None:
                arrived.begun.abandon()
