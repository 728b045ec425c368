"""The transfer thread of a node: moves KV, makes and checks digests, sends KVReady. Jobs run in the order submitted.

Contract of jobs and events: kv_connector/protocol/jobs.py. What this file adds to it:
- A grant ends at the moment its Retire is *submitted*: jobs of it that are queued are dropped, the running one stops
  between two writes. Retired is posted when the thread reaches the Retire and has flushed what was written.
- After one failed write all further jobs of that grant are skipped; PushFailed is posted once.
- No wait is without a deadline: the channels' timeouts bound each write and flush.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.handoff import KVLayers, KVReady, KVRelease
from tandem.engine.contracts.wire.parts import Message, NodeInfo
from tandem.kernels.blocks.digest import BlockSums, block_digests
from tandem.kernels.blocks.push_blocks import can_push, list_pairs, push_blocks
from tandem.kv_connector.layouts.geometry import pool_stride_bytes
from tandem.kv_connector.layouts.rank_pools import RankPools
from tandem.kv_connector.protocol.jobs import (
    BlockPush,
    Finalize,
    Flush,
    Retire,
    SumArrived,
    TransferEvent,
    TransferJob,
    Verify,
)
from tandem.kv_connector.transfer.announcer import LayerAnnouncer
from tandem.kv_connector.transfer.arrivals import Arrivals
from tandem.kv_connector.transfer.channels import Connect, PeerChannels
from tandem.kv_connector.transfer.digests import SentDigests
from tandem.kv_connector.transfer.grant_book import GrantBook
from tandem.kv_connector.transfer.layer_order import order_of
from tandem.kv_connector.transfer.pusher import OnPushed, Pusher, tell_nobody
from tandem.kv_connector.transfer.sink_checks import SinkChecks
from tandem.kv_connector.transfer.source_jobs import LayersJob, SourceJobs
from tandem.kv_connector.transfer.trace import HandoffTrace, Moment
from tandem.kv_connector.transfer.waiting_jobs import WaitingJobs
from tandem.kv_connector.transports.base import OnLost

WRITTEN_POLL_S = 0.0003  # for layers but the last, which is enqueued before it is written; a guess

_Job = TransferJob | LayersJob | NodeInfo
_Item = tuple[_Job, torch.cuda.Event | None]


class TransferWorker:
    """The transfer thread. `connect(peer, on_lost)` opens a channel (NodeTransports.connect, bound to our NodeInfo).

    `post_event` and `on_peer_lost(sink, reason)` are called from this thread or a transport's; `send`
    (sink, message) from this thread. None of the three may block.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        layout: KVLayout,
        source: NodeKey,
        connect: Connect,
        post_event: Callable[[TransferEvent], None],
        send: Callable[[NodeKey, KVReady | KVLayers], None],
        on_peer_lost: OnLost,
        fault_injection: str = "",
        with_digests: bool = True,
        trace: HandoffTrace | None = None,
        ranks: RankPools | None = None,
        on_pushed: OnPushed = tell_nobody,
    ) -> None:
        """`ranks` is for a node of several GPUs, whose blocks have only some of their heads in `pool`. `on_pushed` is
        the Pusher's."""
        self._trace = trace
        self._pool_NHLPBD, self._layout, self._ranks = pool, layout, ranks
        self._post_event = post_event
        self._channels = PeerChannels(connect, on_peer_lost, fault_injection)
        self._jobs: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._waiting: WaitingJobs[_Item] = WaitingJobs()
        self._book = GrantBook()
        # The stream of pushes, each behind the step that computes it. They come first wherever a multiprocessor has
        # room: there are few of their programs, and behind the next step's kernels, which always wait for more room
        # than there is, they would not get on.
        self._stream = torch.cuda.Stream(pool.device, priority=-1) if pool.is_cuda else None
        # The stream of work that must not wait for other requests' steps: it is short, and somebody waits for it.
        self._check_stream = torch.cuda.Stream(pool.device, priority=-1) if pool.is_cuda else None
        self._newest_step_done: torch.cuda.Event | None = None
        self.counters: dict[str, float] = dict.fromkeys(
            (
                "kv_jobs", "kv_pushed_bytes", "kv_push_s", "kv_push_failures",
                "kv_digest_passes",  # hand-offs whose digests were not made while they were pushed
                "kv_blocks_verified", "kv_blocks_bad", "kv_verify_s",
            ),
            0.0,
        )  # fmt: skip
        self.sent_digests = SentDigests(pool, layout, self.counters, with_digests)
        self._pusher = Pusher(
            pool, layout, self._channels, self._book, self.counters, self.sent_digests, trace, ranks, on_pushed
        )
        self._announcer = LayerAnnouncer(source, self._book, send, pool.device)
        self._source_jobs = SourceJobs(
            source, self._channels, self._book, self._pusher, self.sent_digests,
            post_event, send, self.counters, trace, self._stream, self._announcer,
        )  # fmt: skip
        self.arrivals = Arrivals(order_of(layout.group), pool.device)
        self.sink_checks = SinkChecks(pool, layout, ranks, self.counters)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    @property
    def pool(self) -> torch.Tensor:
        return self._pool_NHLPBD

    @property
    def is_traced(self) -> bool:
        """Whether hand-offs are traced: then events given to `submit_layers` must be made for timing."""
        return self._trace is not None

    # --- any thread -----------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compiles, before `start`, what digests and pushes by kernels need. Block 0 is written with its own bytes."""
        pool, size = self._pool_NHLPBD, self._layout.block_size
        if not pool.is_cuda:
            return
        if self._ranks is not None:
            pool = self._ranks.new_blocks(1)
            self._ranks.gather([0], None, pool)
            self._ranks.scatter(pool, [0], None, [size])
        block_digests(pool, [0], 0, size, size)
        self.sent_digests.warm_up()
        self.sink_checks.warm_up()
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
        """Opens a channel to a sink; pushes to it that are submitted later find it. A failure is reported by
        `on_peer_lost`."""
        self._jobs.put((peer, None))

    def drop_peer(self, sink: NodeKey) -> None:
        """Drops the channel to a peer that the control plane has lost. A write under way fails soon."""
        self._channels.drop(sink)

    def submit(self, job: TransferJob, written: torch.cuda.Event | None = None, waits: bool = True) -> None:
        """Queues a job. Its source blocks are complete after the device event `written`; None stands for every step
        launched so far or, with `waits` False, says that they are complete."""
        if isinstance(job, Retire):
            self._book.end(job.grant_id)
        self._jobs.put((job, (written or self._newest_step_done) if waits else None))

    def hear(self, message: Message) -> None:
        """Takes a message of the control connection ahead of the step loop, which may be busy with a launch."""
        if isinstance(message, KVLayers | KVReady | KVRelease):
            self.arrivals.hear(message)
        if isinstance(message, KVReady):
            self.submit(SumArrived(message))

    def note_step_launched(self, done: torch.cuda.Event | None) -> None:
        """Must be called by the thread that launches steps: `done` fires when that step is complete (None on CPU: it
        is)."""
        self._newest_step_done = done

    def submit_layers(
        self, push: BlockPush, layers: range, written: Sequence[torch.cuda.Event | None] = (), num_told: int = 0
    ) -> None:
        """Queues a push of these layers of `push`'s blocks. `written` has the device events after which each is
        complete. `num_told`: LayersJob has it."""
        moments = [Moment(time.monotonic(), event) for event in written] if self.is_traced else []
        self._jobs.put((LayersJob(push, layers, tuple(moments), num_told), written[-1] if written else None))

    def stop(self, deadline_s: float) -> bool:
        """Runs what is queued for at most `deadline_s`, then breaks the channels. Returns whether the thread has
        ended."""
        self._jobs.put(None)
        self._thread.join(deadline_s)
        self._channels.close()
        self._thread.join(1.0)
        return not self._thread.is_alive()

    # --- transfer thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._pool_NHLPBD.is_cuda:
            torch.cuda.set_device(self._pool_NHLPBD.device)
        with _on_stream(self._stream):
            while (item := self._next_item()) is not None:
                job, written = item
                if isinstance(job, LayersJob) and written is not None:
                    is_last = job.layers.stop == self._pool_NHLPBD.shape[2]
                    self._waiting.add(job.push.grant_id, item, written, goes_ahead=is_last)
                elif isinstance(job, BlockPush | Flush | Finalize) and self._is_held_up(job, written):
                    self._waiting.add(job.grant_id, item, written if isinstance(job, BlockPush) else None, True)
                else:
                    for before in self._waiting.take_all_of(getattr(job, "grant_id", 0)):
                        self._run_job(*before)
                    self._run_job(job, written)
            for left in self._waiting.take_all_of(None):
                self._run_job(*left)

    def _next_item(self) -> _Item | None:
        """Waits for the next item of the queue. Meanwhile layers are pushed as they are written, one at a time, so that
        an item that ends a hand-off or starts another does not wait for all of them."""
        wait_s: float | None = 0.0
        while True:
            try:
                return self._jobs.get(timeout=wait_s)
            except queue.Empty:
                written = self._waiting.take_next(may_go_ahead=not self.arrivals.are_missing)
            self._announcer.announce_arrived()
            if written is not None:
                self._run_job(*written)
                wait_s = 0.0
            else:
                wait_s = WRITTEN_POLL_S if self._waiting or self._announcer.is_waiting else None

    def _is_held_up(self, job: BlockPush | Flush | Finalize, written: torch.cuda.Event | None) -> bool:
        """Whether the job, or one of its grant before it, pushes what a step has still to write, while a step that was
        launched waits for a peer (waiting_jobs.py)."""
        if not self.arrivals.are_missing:
            return False
        is_unwritten = isinstance(job, BlockPush) and written is not None and not written.query()
        return is_unwritten or not self._waiting.are_written(job.grant_id)

    def _run_job(self, job: _Job, written: torch.cuda.Event | None) -> None:
        self.counters["kv_jobs"] += 1
        if isinstance(job, NodeInfo):
            self._channels.open(job)
        elif isinstance(job, Verify):
            self._verify(job)
        elif isinstance(job, SumArrived):
            with _on_stream(self._check_stream):
                self.sink_checks.sum_arrived(job.ready)
        elif isinstance(job, Retire):
            self._source_jobs.retire(job)
        else:
            self._source_jobs.run(job, written)

    def _verify(self, job: Verify) -> None:
        if self._trace is not None:
            self._trace.note(job.key, "verifying")
        with _on_stream(self._check_stream):
            verified = self.sink_checks.verify(job)
        if self._trace is not None:
            self._trace.note(job.key, "verified", num_bad=len(verified.bad_indices))
        self._post_event(verified)


def _on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
