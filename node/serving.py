"""What prefill, decode and unified nodes share: routers' requests on one scheduler. Sans-IO.

Subclasses say how an entry starts and what else must stop when it ends; everything about acceptance, cancels,
deadlines, lost routers, draining and load reports is here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef
from tandem.engine.contracts.wire.requests import Cancel, FlushBlocks, Submit
from tandem.engine.process.process_log import RateLimited
from tandem.engine.scheduling.request import EngineEvent
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.node.control.events import ControlEvent, PeerLost, PeerRefused, PeerUp, Received
from tandem.node.requests import AcceptedRequest, RequestBook

limited = RateLimited(logging.getLogger(__name__))


class ServingNode:
    """Base of the roles' logic; `info` is this node's own."""

    modes: frozenset[str] = frozenset({"full"})

    def __init__(
        self, info: NodeInfo, book: RequestBook, scheduler: Scheduler, pool: BlockPool, max_queue: int
    ) -> None:
        self.info = info
        self.book = book
        self.scheduler = scheduler
        self.pool = pool
        self.max_queue = max_queue
        self.draining = False
        self._connects: list[PeerRef] = []

    # --- for the roles --------------------------------------------------------------------------------------

    def start(self, entry: AcceptedRequest, now: float) -> None:
        """Begin an accepted entry; must call `book.accept` or `book.fail`."""
        self.scheduler.state.add(entry.request)
        self.book.accept(entry)

    def stop(self, entry: AcceptedRequest, now: float) -> None:
        """The entry has ended in the book: end whatever still works for it."""
        self.scheduler.state.abort(entry.request.key)

    def stop_samples(self, entry: AcceptedRequest, samples: Sequence[int]) -> None:
        """Some samples ended, others go on."""
        self.scheduler.state.abort(entry.request.key, tuple(samples))

    def on_peer_message(self, sender: NodeKey, message: Message, now: float) -> None:
        """A hand-off message from another node."""

    def on_peer_up(self, info: NodeInfo, now: float) -> None: ...

    def on_peer_lost(self, peer: NodeKey, is_alive: bool, now: float) -> None: ...

    def on_peer_refused(self, ref: PeerRef, reason: str, now: float) -> None: ...

    def on_transfer(self, event: object, now: float) -> None: ...

    def handoff_outbox(self) -> list[tuple[NodeKey, Message]]:
        return []

    def handoff_counters(self) -> dict[str, float]:
        return {}

    @property
    def handoff_idle(self) -> bool:
        return True

    def fetch_rates(self) -> tuple[float, dict[str, float]]:
        """Seconds a token to have a prefix from a peer, of any and by node_id; 0.0 where it is not done."""
        return 0.0, {}

    # --- events in ------------------------------------------------------------------------------------------

    def on_control(self, event: ControlEvent, now: float) -> None:
        if isinstance(event, Received):
            self._on_message(event.sender, event.message, now)
        elif isinstance(event, PeerRefused):
            self.on_peer_refused(event.ref, event.reason, now)
        elif isinstance(event, PeerUp):
            if event.info.role != "router":
                self.on_peer_up(event.info, now)
        elif isinstance(event, PeerLost):
            if event.info.role == "router":
                for entry in self.book.router_lost(event.info.key):
                    self.stop(entry, now)
            else:
                self.on_peer_lost(event.info.key, event.is_alive, now)

    def _on_message(self, sender: NodeKey, message: Message, now: float) -> None:
        if isinstance(message, Submit):
            self._submit(sender, message, now)
        elif isinstance(message, Cancel):
            entry, ended = self.book.cancel_samples(sender, message.key, message.sample_indices)
            if entry is not None and ended:
                self.stop(entry, now)
            elif entry is not None:
                self.stop_samples(entry, message.sample_indices)
        elif isinstance(message, FlushBlocks):
            self.scheduler.state.flush()
        else:
            self.on_peer_message(sender, message, now)

    def _submit(self, router: NodeKey, submit: Submit, now: float) -> None:
        if submit.mode not in self.modes:
            text = f"a {self.info.role} node does not take requests in mode {submit.mode!r}"
            self.book.refuse(router, submit, "wrong_role", text, retryable=True)
            return
        known = submit.key in self.book.entries
        if not known and self.draining:
            self.book.refuse(router, submit, "draining", "the node is draining", retryable=True)
            return
        if not known and self.scheduler.state.num_waiting >= self.max_queue:
            self.book.refuse(router, submit, "overloaded", "the node's queue is full", retryable=True)
            return
        entry = self.book.open(router, submit, now)
        if entry is not None:
            self._stop_older_attempts(submit, now)
            self._start_contained(entry, now)

    def _start_contained(self, entry: AcceptedRequest, now: float) -> None:
        """A request that can't be started, whatever nobody expected of it, ends alone."""
        try:
            self.start(entry, now)
        except Exception:
            limited.exception("request %s attempt %d can't be started", *entry.request.key, key="start")
            self.book.fail(entry.request.key, "internal_error", "the node can't start this request", retryable=True)
            self.stop(entry, now)

    def _stop_older_attempts(self, submit: Submit, now: float) -> None:
        for entry in self.book.older_attempts(submit):
            self.book.cancel_samples(entry.router, entry.request.key, ())
            self.stop(entry, now)

    def on_tick(self, now: float) -> None:
        for entry in self.book.expired(now):
            self.stop(entry, now)

    def on_engine_events(self, events: Sequence[EngineEvent]) -> None:
        self.book.on_events(events)

    # --- out ------------------------------------------------------------------------------------------------

    def launch_at(self) -> float:
        """The moment until which the next step need not be decided while one runs; the past: at once."""
        return 0.0

    def drain(self) -> None:
        self.draining = True

    @property
    def is_empty(self) -> bool:
        return not self.book.entries and self.handoff_idle and not self.scheduler.state.has_work()

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        return self.book.drain_outbox() + self.handoff_outbox()

    def drain_connects(self) -> list[PeerRef]:
        connects, self._connects = self._connects, []
        return connects

    def status(self, counters: Mapping[str, float]) -> Status:
        """`counters`: of the process around this logic."""
        all_counters = {
            "requests_accepted": float(self.book.num_accepted),
            "requests_ended": float(self.book.num_ended),
            "blocks_cached": float(self.pool.num_cached),
            "request_faults": float(self.scheduler.state.num_faults),
            "preemptions": float(self.scheduler.state.num_preemptions),
            "prompt_tokens": float(self.scheduler.state.num_prompt_tokens),
            "cached_tokens": float(self.scheduler.state.num_cached_tokens),
            **self.handoff_counters(),
            **counters,
        }
        fetch_s_per_token, fetch_s_per_token_from = self.fetch_rates()
        return Status(
            node_id=self.info.node_id,
            epoch=self.info.epoch,
            num_running=self.scheduler.state.num_running,
            num_waiting=self.scheduler.state.num_waiting,
            num_waiting_tokens=self.scheduler.state.num_waiting_tokens,
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
            block_size=self.scheduler.state.kv.block_size,
            draining=self.draining,
            prefill_s_per_token=self.scheduler.prompt_s_per_token,
            transfer_s_per_token=self._transfer_s_per_token(all_counters),
            fetch_s_per_token=fetch_s_per_token,
            fetch_s_per_token_from=fetch_s_per_token_from,
            counters=all_counters,
        )

    def _transfer_s_per_token(self, counters: dict[str, float]) -> float:
        """Seconds a token of KV took that this node pushed so far; 0 before the first."""
        layout, pushed_bytes = self.info.layout, counters.get("kv_pushed_bytes", 0.0)
        if layout is None or not pushed_bytes:
            return 0.0
        return counters["kv_push_s"] / pushed_bytes * layout.payload_bytes / layout.block_size

    def check_integrity(self) -> None:
        self.book.check_integrity()
        self.scheduler.state.check_integrity()
        self.pool.check_integrity()
