"""The transfer thread of a node: moves KV, makes and checks digests, sends KVReady. Jobs run in the order submitted.

Contract of jobs and events: meta.py. What this file adds to it:
- A grant ends at the moment its Retire is *submitted*: jobs of it that are queued are dropped, the running one stops
  between two writes. Retired is posted when the thread reaches the Retire and has flushed what was written.
- After one failed write all further jobs of that grant are skipped; PushFailed is posted once.
- No wait is without a deadline: the channels' timeouts bound each write and flush.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tandem.engine.errors import TandemError
from tandem.engine.kv_layout import KVLayout
from tandem.engine.messages import KVLayers, KVReady, NodeInfo
from tandem.kernels.digest import BlockSums, block_digests
from tandem.kernels.push_blocks import can_push, list_pairs, push_blocks
from tandem.kv_connector.grant_book import GrantBook
from tandem.kv_connector.grant_sums import GrantSums
from tandem.kv_connector.handoff_trace import HandoffTrace, Moment
from tandem.kv_connector.layer_gates import LayerGates
from tandem.kv_connector.layered_push import can_push_by_layer, push_by_layer
from tandem.kv_connector.meta import (
    Finalize,
    Flush,
    Flushed,
    HandoffKey,
    LayerPush,
    PushFailed,
    ReadySent,
    Retire,
    Retired,
    TransferEvent,
    TransferJob,
    Verified,
    Verify,
    VerifyLayers,
    WholePush,
)
from tandem.kv_connector.peer_channels import Connect, PeerChannels
from tandem.kv_connector.pusher import Pusher
from tandem.kv_connector.rank_pools import RankPools
from tandem.kv_connector.transfer_digests import TransferDigests
from tandem.kv_connector.transports.base import OnLost
from tandem.kv_connector.transports.geometry import pool_stride_bytes
from tandem.kv_connector.waiting_layers import WaitingLayers

logger = logging.getLogger(__name__)
WRITTEN_POLL_S = 0.0003  # layers but the last, which is enqueued before it is written


@dataclass(frozen=True, slots=True)
class _LayerJob:
    push: LayerPush
    layers: range
    written: tuple[Moment, ...]  # each of them, when traced


_Job = TransferJob | _LayerJob | NodeInfo
_Item = tuple[_Job, torch.cuda.Event | None]


class TransferWorker:
    """`connect(peer, on_lost)` opens a channel (NodeTransports.connect, bound to our NodeInfo).

    `post_event` and `on_peer_lost(node_id, epoch, reason)` are called from this thread or a transport's; `send_ready`
    (sink's node_id, message) from this thread. None of the three may block.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        layout: KVLayout,
        source: tuple[str, int],
        connect: Connect,
        post_event: Callable[[TransferEvent], None],
        send_ready: Callable[[str, KVReady | KVLayers], None],
        on_peer_lost: OnLost,
        fault_injection: str = "",
        with_digests: bool = True,
        trace: HandoffTrace | None = None,
        ranks: RankPools | None = None,
    ) -> None:
        """`ranks`: of a node of several GPUs, whose blocks have only some of their heads in `pool`."""
        self._trace = trace
        self._pool_NHLPBD, self._layout, self._ranks = pool, layout, ranks
        self._source_id, self._source_epoch = source
        self._post_event, self._send_ready = post_event, send_ready
        self._channels = PeerChannels(connect, on_peer_lost, fault_injection)
        self._jobs: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._waiting: WaitingLayers[_Item] = WaitingLayers()
        self._book = GrantBook()
        self._stream: torch.cuda.Stream | None = None  # of pushes, each behind the step that computes it
        self._digest_stream: torch.cuda.Stream | None = None  # of what must not wait for other requests' steps
        self._newest_step_done: torch.cuda.Event | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self.gates = LayerGates(pool.shape[2])
        self._can_push_by_layer = ranks is None and can_push_by_layer(pool)
        self.counters: dict[str, float] = dict.fromkeys(
            (
                "kv_jobs", "kv_pushed_bytes", "kv_push_s", "kv_push_failures",
                "kv_digest_passes",  # hand-offs whose digests were not made while they were pushed
                "kv_blocks_verified", "kv_blocks_bad",
            ),
            0.0,
        )  # fmt: skip
        self.pusher = Pusher(pool, layout, self._channels, self._book, self.counters, with_digests, trace, ranks)
        self._digests = TransferDigests(pool, layout, ranks, self.counters)

    @property
    def pool(self) -> torch.Tensor:
        return self._pool_NHLPBD

    @property
    def is_traced(self) -> bool:
        """Events given to `submit_layers` are then to be made for timing."""
        return self._trace is not None

    # --- any thread -----------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Before `start`: compiles what digests and pushes by kernels need. Block 0 is written with its own bytes."""
        pool, size = self._pool_NHLPBD, self._layout.block_size
        if not pool.is_cuda:
            return
        if self._ranks is not None:
            pool = self._ranks.new_blocks(1)
            self._ranks.gather([0], None, pool)
            self._ranks.scatter(pool, [0], None, [size])
        for num_valid in {1, size}:
            block_digests(pool, [0], 0, num_valid, size)
        if can_push(pool):
            return
        sums = BlockSums.of_none(pool, 1, 0)
        for each in (None, sums):
            push_blocks(pool, pool.data_ptr(), pool_stride_bytes(pool), [(0, 0)], range(1), [size], 1, each)
        sums.add_layers(pool, list_pairs([(0, 0)], [size], (), pool.device), range(1))
        torch.cuda.synchronize(pool.device)

    def start(self) -> None:
        self._thread.start()

    def connect_peer(self, peer: NodeInfo) -> None:
        """Opens a channel to a sink; pushes to it that are submitted later find it. Failure: `on_peer_lost`."""
        self._jobs.put((peer, None))

    def drop_peer(self, node_id: str, epoch: int) -> None:
        """The control plane has lost this peer: a write to it that is under way fails soon."""
        self._channels.drop(node_id, epoch)

    def submit(self, job: TransferJob, written: torch.cuda.Event | None = None, waits: bool = True) -> None:
        """`written`: device event after which its source blocks are complete; None: every step launched so far, or,
        if it does not wait at all, they are."""
        if isinstance(job, Retire):
            self._book.end(job.grant_id)
        self._jobs.put((job, (written or self._newest_step_done) if waits else None))

    def note_step_launched(self, done: torch.cuda.Event | None) -> None:
        """From the thread that launches steps: `done` fires when that step is complete (None on CPU: it is)."""
        self._newest_step_done = done

    def submit_layers(self, push: LayerPush, layers: range, written: Sequence[torch.cuda.Event | None] = ()) -> None:
        """Push of these layers of `push`'s blocks. `written`: device events after which each of them is complete."""
        moments = [Moment(time.monotonic(), event) for event in written] if self.is_traced else []
        self._jobs.put((_LayerJob(push, layers, tuple(moments)), written[-1] if written else None))

    def stop(self, deadline_s: float) -> bool:
        """Runs what is queued for at most `deadline_s`, then breaks the channels. Whether the thread has ended."""
        self._jobs.put(None)
        self._thread.join(deadline_s)
        self._channels.close()
        self._thread.join(1.0)
        return not self._thread.is_alive()

    # --- transfer thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._pool_NHLPBD.is_cuda:
            torch.cuda.set_device(self._pool_NHLPBD.device)
            # Pushes come first wherever a multiprocessor has room: there are few of their programs, and behind the
            # next step's kernels, which always wait for more room than there is, they would not get on.
            self._stream = torch.cuda.Stream(self._pool_NHLPBD.device, priority=-1)
            # Somebody waits for each of them, and they are short.
            self._digest_stream = torch.cuda.Stream(self._pool_NHLPBD.device, priority=-1)
        with _on_stream(self._stream):
            while (item := self._next_item()) is not None:
                job, written = item
                if isinstance(job, _LayerJob) and written is not None:
                    is_last = job.layers.stop == self._pool_NHLPBD.shape[2]
                    self._waiting.add(job.push.grant_id, item, written, goes_ahead=is_last)
                    continue
                for before in self._waiting.take_all_of(getattr(job, "grant_id", 0)):
                    self._run_job(*before)
                self._run_job(job, written)
            for left in self._waiting.take_all_of(None):
                self._run_job(*left)

    def _next_item(self) -> _Item | None:
        """Meanwhile layers are pushed as they are written."""
        while True:
            for item in self._waiting.take_written():
                self._run_job(*item)
            try:
                return self._jobs.get(timeout=WRITTEN_POLL_S if self._waiting else None)
            except queue.Empty:
                continue

    def _run_job(self, job: _Job, written: torch.cuda.Event | None) -> None:
        self.counters["kv_jobs"] += 1
        if isinstance(job, NodeInfo):
            self._channels.open(job)
        elif isinstance(job, Verify):
            with _on_stream(self._digest_stream):
                self._verify(job)
        elif isinstance(job, VerifyLayers):
            with _on_stream(self._digest_stream):
                self._verify_layers(job)
        elif isinstance(job, Retire):
            self._retire(job)
        else:
            self._run_source_job(job, written)

    def _run_source_job(self, job: WholePush | Flush | Finalize | _LayerJob, written: torch.cuda.Event | None) -> None:
        subject = job.push if isinstance(job, _LayerJob) else job
        if self._book.is_over(subject.grant_id):
            return
        # A Finalize comes behind its own pushes, which have waited; the newest step launched is none of its business.
        if written is not None and self._stream is not None and not isinstance(job, Flush | Finalize):
            self._stream.wait_event(written)
        try:
            if isinstance(job, Finalize):
                self._finalize(job)
            elif isinstance(job, Flush):
                self._flush(job)
            elif isinstance(job, WholePush) and job.by_layer and self._can_push_by_layer:
                self._push_by_layer(job)
            else:
                layers, moments = (job.layers, job.written) if isinstance(job, _LayerJob) else (None, ())
                self.pusher.push(subject, layers, moments)  # type: ignore[arg-type]
        except TandemError as error:
            self._fail(subject.key, subject.grant_id, error.message)
        except Exception as error:  # a fault of ours must end this hand-off, not the thread
            logger.exception("transfer job of %s failed", subject.key)
            self._fail(subject.key, subject.grant_id, repr(error))

    def _fail(self, key: HandoffKey, grant_id: int, reason: str) -> None:
        self._book.failed.add(grant_id)
        self.counters["kv_push_failures"] += 1
        self._post_event(PushFailed(key, grant_id, reason))

    def _flush(self, job: Flush) -> None:
        self._channels.of(job.grant).channel.flush(job.grant)
        self._book.unflushed.discard(job.grant_id)
        self._post_event(Flushed(job.key, job.grant_id))

    def _push_by_layer(self, job: WholePush) -> None:
        flush = partial(self._channels.of(job.grant).channel.flush, job.grant)
        is_over = partial(self._book.is_over, job.grant_id)
        for layers in push_by_layer(self._pool_NHLPBD, job, self.pusher, flush, is_over):
            self._book.unflushed.discard(job.grant_id)
            self._send_ready(job.grant.sink_id, layers)

    def _finalize(self, job: Finalize) -> None:
        grant = job.grant
        way = self._channels.of(grant)
        digests, sums = b"", self._book.sums.pop(grant.grant_id, None)
        if job.with_digests and sums is None:  # while the last bytes are still on their way
            digests = self._digests_as_sent(job, way.layout, None).tobytes()
        way.channel.flush(grant)
        self._book.unflushed.discard(grant.grant_id)
        if job.with_digests and sums is not None:
            digests = self._digests_as_sent(job, way.layout, sums).tobytes()
        ready = KVReady(
            request_id=grant.request_id,
            attempt=grant.attempt,
            grant_id=grant.grant_id,
            grant_signature=grant.signature,
            source_id=self._source_id,
            source_epoch=self._source_epoch,
            sink_epoch=grant.sink_epoch,
            first_tokens=job.first_tokens,
            digests=digests,
            round=job.round,
            continuation=job.continuation,
        )
        if self._book.is_over(grant.grant_id):
            return
        self._send_ready(grant.sink_id, ready)
        self._post_event(ReadySent(job.key, grant.grant_id, ready))
        if self._trace is not None:
            self._trace.end_of_pushes(job.key, self._stream is not None)

    def _retire(self, job: Retire) -> None:
        grant = job.grant
        is_flushed = grant.grant_id not in self._book.failed
        if grant.grant_id in self._book.unflushed:
            try:
                self._channels.of(grant).channel.flush(grant)
            except TandemError as error:  # refused or lost: either way nothing more is sent under this grant
                logger.debug("grant %#x retired without a flush: %s", grant.grant_id, error)
                is_flushed = False
        if self._stream is not None and not is_flushed:  # what was begun may still read; waits for others' steps too
            self._stream.synchronize()
        self._book.forget(grant.grant_id)
        self._post_event(Retired(job.key, grant.grant_id))

    def _verify(self, job: Verify) -> None:
        bad = self._digests.bad_blocks(job)
        if self._trace is not None:
            self._trace.note(job.key, "verified", num_bad=len(bad))
        self._post_event(Verified(job.key, job.grant_id, job.round, bad))

    def _verify_layers(self, job: VerifyLayers) -> None:
        arrivals = self.gates.of(job.layers.grant_id)
        if arrivals is None:
            return
        try:
            arrivals.check(self._pool_NHLPBD, job.layers)
        except Exception:  # what can't be checked is not computed with
            logger.exception("can't verify layers of %s", job.layers.request_id)
            arrivals.fail()

    def _digests_as_sent(self, job: Finalize, sink: KVLayout, sums: GrantSums | None) -> np.ndarray:
        """Of the sink's blocks, little-endian int64: those summed while they were pushed, else in a pass of its own."""
        with _on_stream(self._digest_stream):
            summed = sums and sums.digests(job.digest_key, job.num_valid_last, sink.block_size, job.num_pushed_blocks)
            if isinstance(summed, np.ndarray):
                return summed
            self.counters["kv_digest_passes"] += 1
            reshaper = self.pusher.reshaper_to(sink)
            if reshaper is None:
                return self._digests.of_source(job)
        return self._digests.of_staged(job, reshaper)


def _on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
