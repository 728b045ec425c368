"""The transfer thread's work for sources: pushes, flushes, the end of a hand-off, the end of a grant."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tandem.engine.contracts.errors import TandemError
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVReady
from tandem.kernels.blocks.digest import valid_slots
from tandem.kv_connector.layouts.reshape import Reshaper
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.jobs import (
    BlockPush,
    Finalize,
    Flush,
    Flushed,
    PushFailed,
    ReadySent,
    Retire,
    Retired,
    TransferEvent,
)
from tandem.kv_connector.transfer.announcer import LayerAnnouncer
from tandem.kv_connector.transfer.channels import PeerChannels
from tandem.kv_connector.transfer.digests import SentDigests
from tandem.kv_connector.transfer.grant_book import GrantBook
from tandem.kv_connector.transfer.pusher import Pusher
from tandem.kv_connector.transfer.trace import HandoffTrace, Moment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayersJob:
    """Asks to push these layers of `push`'s blocks. `written`: when each of them is complete, if traced. `num_told`: of
    how many of the model's first layers all is pushed then; 0: of no more than before."""

    push: BlockPush
    layers: range
    written: tuple[Moment, ...]
    num_told: int = 0


SourceWork = BlockPush | LayersJob | Flush | Finalize


class SourceJobs:
    """Runs a source's jobs on the transfer thread; on CUDA in its stream of pushes. `counters`, `post_event` and
    `send` are TransferWorker's; `source` is this node."""

    def __init__(
        self,
        source: NodeKey,
        channels: PeerChannels,
        book: GrantBook,
        pusher: Pusher,
        digests: SentDigests,
        post_event: Callable[[TransferEvent], None],
        send: Callable[[NodeKey, KVReady], None],
        counters: dict[str, float],
        trace: HandoffTrace | None,
        stream: torch.cuda.Stream | None,
        announcer: LayerAnnouncer,
    ) -> None:
        self._source = source
        self._channels, self._book, self._pusher, self._digests = channels, book, pusher, digests
        self._post_event, self._send = post_event, send
        self._counters, self._trace, self._stream = counters, trace, stream
        self._announcer = announcer

    def run(self, job: SourceWork, written: torch.cuda.Event | None) -> None:
        """Runs one job. A push waits on the device for the event `written`. A job of a grant that is over is
        dropped."""
        subject = job.push if isinstance(job, LayersJob) else job
        if self._book.is_over(subject.grant_id):
            return
        try:
            if isinstance(job, Finalize):
                self._finalize(job)
            elif isinstance(job, Flush):
                self._flush(job)
            elif isinstance(job, LayersJob):
                self._push(job.push, job.layers, job.written, written)
                if job.push.is_awaited and job.num_told:
                    self._announcer.pushed(job.push.grant, job.num_told, self._channels.of(job.push.grant).channel)
            else:
                self._push(job, None, (), written)
        except TandemError as error:
            self._fail(subject.key, subject.grant_id, error.message)
        except Exception as error:  # a fault of ours must end this hand-off, not the thread
            logger.exception("transfer job of %s failed", subject.key)
            self._fail(subject.key, subject.grant_id, repr(error))

    def retire(self, job: Retire) -> None:
        grant = job.grant
        is_flushed = grant.grant_id not in self._book.failed
        if grant.grant_id in self._book.unflushed:
            try:
                self._channels.of(grant).channel.flush(grant)
            except TandemError as error:  # refused or lost: either way nothing more is sent under this grant
                logger.debug("grant %#x retired without a flush: %s", grant.grant_id, error)
                is_flushed = False
        if self._stream is not None and not is_flushed:  # writes begun may still read; this waits for others' steps too
            self._stream.synchronize()
        self._digests.forget(grant.grant_id)
        self._book.forget(grant.grant_id)
        self._post_event(Retired(job.key, grant.grant_id))

    def _fail(self, key: AttemptKey, grant_id: int, reason: str) -> None:
        self._book.failed.add(grant_id)
        self._counters["kv_push_failures"] += 1
        self._post_event(PushFailed(key, grant_id, reason))

    def _push(
        self,
        push: BlockPush,
        layers: range | None,
        moments: Sequence[Moment],
        written: torch.cuda.Event | None,
    ) -> None:
        if written is not None and self._stream is not None:
            self._stream.wait_event(written)
        self._pusher.push(push, layers, moments)
        way = self._channels.of(push.grant)
        if self._pusher.reshaper_to(way.layout) is None and not self._book.is_over(push.grant_id):
            self._digests.pushed(push, way.channel, layers, written)

    def _flush(self, job: Flush) -> None:
        self._channels.of(job.grant).channel.flush(job.grant)
        self._book.unflushed.discard(job.grant_id)
        self._post_event(Flushed(job.key, job.grant_id))

    @staticmethod
    def _saturates(job: Finalize, reshaper: Reshaper | None) -> bool:
        """Whether something saturated on its way into the sink's pool. Blocks that go as they are have been looked at
        where they were computed."""
        if reshaper is None:
            return False
        size, num_last = reshaper.geometry.block_size, reshaper.num_last
        num_valid = valid_slots(job.num_pushed_blocks, job.num_valid_last, size, num_last)
        return reshaper.saturates(reshaper.parts(job.source_block_ids, job.first_slots, num_valid), num_valid)

    def _finalize(self, job: Finalize) -> None:
        """Ends a hand-off. It runs behind its own pushes, which have waited for their steps, so it waits for no newer
        one."""
        if self._trace is not None:
            self._trace.note(job.key, "ending")
        grant = job.grant
        way = self._channels.of(grant)
        if way.raises_precision and self._saturates(job, self._pusher.reshaper_to(way.layout)):
            self._fail(job.key, grant.grant_id, outcomes.KV_OVERFLOW)
            return
        digests, sums = b"", self._digests.whole_sums(job, way.layout)
        if job.with_digests and sums is None:  # while the last bytes are still on their way
            digests = self._digests.anew(job, self._pusher.reshaper_to(way.layout)).tobytes()
        way.channel.flush(grant)
        self._book.unflushed.discard(grant.grant_id)
        if sums is not None:
            digests = sums.digests(job, way.layout.block_size).tobytes()
            self._digests.forget(grant.grant_id)
        ready = KVReady(
            request_id=grant.request_id,
            attempt=grant.attempt,
            grant_id=grant.grant_id,
            grant_signature=grant.signature,
            source_id=self._source.node_id,
            source_epoch=self._source.epoch,
            sink_epoch=grant.sink_epoch,
            first_tokens=job.first_tokens,
            digests=digests,
            round=job.round,
            continuation=job.continuation,
        )
        if self._book.is_over(grant.grant_id):
            return
        self._send(grant.sink, ready)
        self._post_event(ReadySent(job.key, grant.grant_id, ready))
        if self._trace is not None:
            self._trace.end_of_pushes(job.key, self._stream is not None)
