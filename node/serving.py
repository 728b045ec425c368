"""A node's logic, whatever its role: routers' requests on one scheduler, hand-offs, sequences that leave. Sans-IO.

Roles say how an entry starts, what else must stop when it ends, and what becomes of KV that has come; everything about
acceptance, cancels, deadlines, lost routers, draining and load reports is here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.adapters import Adapters, AdaptersKnown, HeldAdapters, LoadAdapter
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.handoff import KVPull
from tandem.engine.contracts.wire.operate import Drain, Lean
from tandem.engine.contracts.wire.parts import HELP_LOST, Message, NodeInfo, PeerRef
from tandem.engine.contracts.wire.requests import Cancel, FlushBlocks, Migrate, Submit
from tandem.engine.process.process_log import RateLimited
from tandem.engine.scheduling.request import EngineEvent, Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.work.leaning import OwnLeaning
from tandem.kv_connector.protocol.outcomes import (
    HandoffCompleted,
    HandoffFailed,
    SinkOutcome,
    SourceOutcome,
    failure_code,
)
from tandem.kv_connector.pulls.helping import PromptHelper
from tandem.node.adapters import AdapterDesk, nothing_held
from tandem.node.control.events import NOTHING, ControlEvent, Found, PeerLost, PeerRefused, PeerUp, Received
from tandem.node.departures import Departures
from tandem.node.handoffs import Handoffs
from tandem.node.requests import AcceptedRequest, RequestBook

limited = RateLimited(logging.getLogger(__name__))


class ServingNode:
    """The logic of a node that takes "full" requests; roles add to that. `info` is this node's own."""

    def __init__(
        self,
        info: NodeInfo,
        book: RequestBook,
        scheduler: Scheduler,
        pool: BlockPool,
        max_queue: int,
        handoffs: Handoffs,
        precise: Scheduler | None = None,
        leaning: OwnLeaning | None = None,
        held_adapters: Callable[[], HeldAdapters] = nothing_held,
    ) -> None:
        """`precise`: the scheduler of the engine beside, which serves what asks for precise KV; None: `scheduler`
        does."""
        self.info = info
        self.book = book
        self.scheduler = scheduler
        self.pool = pool
        self.max_queue = max_queue
        self.handoffs = handoffs
        self.precise = precise
        self.num_precise = 0
        self.leaning = leaning or OwnLeaning()
        self.departures = Departures(handoffs.source, scheduler, book)
        self.helper = PromptHelper(info, handoffs.source, handoffs.shares, scheduler.state)
        self.adapters = AdapterDesk(held_adapters)
        self.draining = self._is_ending = False

    # --- for the roles --------------------------------------------------------------------------------------

    @property
    def modes(self) -> frozenset[str]:
        """The modes of requests that it takes, as in Submit."""
        return frozenset({"full"})

    def start(self, entry: AcceptedRequest, now: float) -> None:
        """Begins an accepted entry. An implementation must call `book.accept` or `book.fail`."""
        if entry.submit.is_precise and self.precise is not None:
            self.num_precise += 1
            self.precise.state.add(entry.request)
            self.book.accept(entry)
            return
        if entry.submit.mode == "prefill":
            peer = entry.submit.peer
            assert peer is not None, "who computes for another is told for whom"
            self.handoffs.source.expect(entry.request.key, peer, entry.request.num_prompt_tokens, entry.deadline)
            self.handoffs.connect(peer)
        if entry.submit.prefix is not None:
            self.handoffs.puller.want(entry.request, entry.submit.prefix)
        self.handoffs.shares.want(entry.request, entry.submit.helpers)
        self.scheduler.state.add(entry.request)
        self.book.accept(entry)

    def stop(self, entry: AcceptedRequest, now: float) -> None:
        """Ends whatever still works for an entry, which has ended in the book."""
        self._abort(entry)
        if entry.submit.mode == "prefill":
            self.handoffs.source.cancel(entry.request.key, now)

    def _abort(self, entry: AcceptedRequest, samples: tuple[int, ...] = ()) -> None:
        """Ends these samples (all when empty), in whichever engine they are."""
        scheduler = self.precise if entry.submit.is_precise and self.precise is not None else self.scheduler
        scheduler.state.abort(entry.request.key, samples)

    def on_sink_outcome(self, outcome: SinkOutcome) -> None:
        """Takes the end of a hand-off of KV to this node. Only roles that receive KV have any."""
        raise AssertionError(f"nobody here expects KV: {outcome}")

    # --- events in ------------------------------------------------------------------------------------------

    def on_control(self, event: ControlEvent, now: float) -> None:
        if isinstance(event, Received):
            self._on_message(event, now)
        elif isinstance(event, PeerRefused):
            self.handoffs.peer_refused(event.ref, event.reason)
        elif isinstance(event, PeerUp):
            if event.info.role == "router":
                self.adapters.router_up(event.info.key)
            else:
                self.handoffs.peer_connected(event.info)
        elif isinstance(event, PeerLost):
            if event.info.role == "router":
                self.adapters.router_lost(event.info.key)
                for entry in self.book.router_lost(event.info.key):
                    self.stop(entry, now)
            else:
                self.handoffs.peer_lost(event.info.key, event.is_alive, now)
        self._take_ends(now)

    def on_transfer(self, event: object, now: float) -> None:
        self.handoffs.on_transfer(event, now)
        self._take_ends(now)

    def on_tick(self, now: float) -> None:
        self.handoffs.on_tick(now)
        self.helper.on_tick(not self.draining)
        self._take_ends(now)
        self.departures.advance(now)
        for entry in self.book.expired(now):
            self.stop(entry, now)
        self._take_ends(now)

    def on_engine_events(self, events: Sequence[EngineEvent]) -> None:
        self.book.on_events(events)

    # --- routers' requests ----------------------------------------------------------------------------------

    def _on_message(self, event: Received, now: float) -> None:
        sender, message = event.sender, event.message
        if isinstance(message, Submit):
            self._submit(sender, message, event.adapter or NOTHING, now)
        elif isinstance(message, Cancel):
            entry, ended = self.book.cancel_samples(sender, message.key, message.sample_indices)
            if entry is not None and ended:
                self.stop(entry, now)
            elif entry is not None:
                self._abort(entry, tuple(message.sample_indices))
        elif isinstance(message, Drain):
            self.draining = message.on or self._is_ending
        elif isinstance(message, Lean):
            if self.info.role == "unified":  # others are what they are
                self.leaning.ask(message.leaning, now)
        elif isinstance(message, FlushBlocks):
            self.scheduler.state.flush()
        elif isinstance(message, Migrate):
            if self.departures.begin(sender, message, now):
                self.handoffs.connect(message.peer)
        elif isinstance(message, LoadAdapter):
            self.adapters.on_load(sender, message, event.adapter or NOTHING)
        elif isinstance(message, Adapters):
            self.adapters.on_names(sender, message)
        elif isinstance(message, AdaptersKnown):
            self.adapters.on_known(sender, message)
        elif isinstance(message, KVPull) and message.work is not None:
            self.helper.begin(sender, message, message.work, not self.draining, now)
        else:
            self.handoffs.on_message(sender, message, now)

    def _submit(self, router: NodeKey, submit: Submit, found: Found, now: float) -> None:
        if submit.mode not in self.modes:
            text = f"a {self.info.role} node does not take requests in mode {submit.mode!r}"
            self.book.refuse(router, submit, "wrong_role", text, retryable=True)
            return
        known = submit.key in self.book.entries
        if submit.is_precise and not self.info.most_precise_tokens:
            self.book.refuse(router, submit, "wrong_role", "this node keeps KV in fp8 alone", retryable=True)
            return
        if not known and self.draining:
            self.book.refuse(router, submit, "draining", "the node is draining", retryable=True)
            return
        if not known and len(self.scheduler.state.queues.waiting) >= self.max_queue:
            self.book.refuse(router, submit, "overloaded", "the node's queue is full", retryable=True)
            return
        if not known and submit.adapter is not None and found.adapter is None:
            self.book.refuse(router, submit, "bad_adapter", found.problem, retryable=True)
            return
        entry = self.book.open(router, submit, now, found.adapter)
        if entry is not None:
            self._stop_older_attempts(entry, now)
            self._start_contained(entry, now)

    def _start_contained(self, entry: AcceptedRequest, now: float) -> None:
        """Starts an entry; an unexpected error ends this request alone."""
        try:
            self.start(entry, now)
        except Exception:
            name = entry.request.key
            limited.exception("request %s attempt %d can't be started", *name, key="start", request_id=name.request_id)
            self.book.fail(entry.request.key, "internal_error", "the node can't start this request", retryable=True)
            self.stop(entry, now)

    def _stop_older_attempts(self, newer: AcceptedRequest, now: float) -> None:
        for entry in self.book.older_attempts(newer):
            self.book.cancel_samples(entry.router, entry.request.key, ())
            self.stop(entry, now)

    # --- ends of hand-offs ----------------------------------------------------------------------------------

    def _take_ends(self, now: float) -> None:
        while (ended := self.handoffs.next_end()) is not None:
            if isinstance(ended, SinkOutcome):
                self.on_sink_outcome(ended)
            elif not self.departures.on_outcome(ended, now):
                self._prompt_ended(ended, now)
        for request in self.handoffs.shares.drain_disproved():
            self._disprove(request, now)

    def _disprove(self, request: Request, now: float) -> None:
        """Ends a request, or a share of another node's, whose prompt other nodes were to compute, too, and did not.
        Nothing of it was told."""
        text = "a node that computed chunks of the prompt did not bring them to their end"
        entry = self.book.fail(request.key, HELP_LOST, text, retryable=True)
        if entry is not None:
            self.stop(entry, now)
        self.scheduler.state.abort(request.key)

    def _prompt_ended(self, outcome: SourceOutcome, now: float) -> None:
        if isinstance(outcome, HandoffCompleted):
            self.book.prompt_left(outcome.key)
            return
        assert isinstance(outcome, HandoffFailed)
        text = f"the hand-off failed: {outcome.reason}"
        entry = self.book.fail(outcome.key, failure_code(outcome.reason), text, outcome.retryable)
        if entry is not None:
            self.stop(entry, now)

    # --- out ------------------------------------------------------------------------------------------------

    def launch_at(self) -> float:
        """The moment (monotonic seconds) until which the next step need not be decided while one runs; in the past, it
        must be decided at once."""
        return 0.0

    def drain(self) -> None:
        """Takes nothing new from here on: the node ends when it is empty."""
        self.draining = self._is_ending = True

    @property
    def is_empty(self) -> bool:
        moves = not (self.handoffs.is_idle and self.departures.is_idle and self.helper.is_idle)
        works = any(each.state.has_work() for each in (self.scheduler, self.precise) if each is not None)
        return not (self.book.entries or moves or works)

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        return [
            *self.adapters.drain_outbox(),
            *self.book.drain_outbox(),
            *self.handoffs.drain_outbox(),
            *self.helper.drain_outbox(),
            *self.departures.drain_outbox(),
        ]

    def drain_connects(self) -> list[PeerRef]:
        return self.handoffs.drain_connects()

    def counters(self) -> dict[str, float]:
        return {
            "requests_accepted": float(self.book.num_accepted),
            "requests_ended": float(self.book.num_ended),
            "blocks_cached": float(self.pool.num_cached),
            "kv_used_share": 1 - self.pool.num_free / self.pool.num_blocks,
            "kv_fragmentation": self.scheduler.state.kv.fragmentation(self.scheduler.state.queues.running),
            "allocate_s": self.scheduler.state.kv.seconds,
            "request_faults": float(self.scheduler.state.num_faults),
            "kv_overflow_requests": float(self.scheduler.state.num_overflowed),
            "precise_kv_requests": float(self.num_precise),
            "preemptions": float(self.scheduler.state.num_preemptions),
            "prompt_tokens": float(self.scheduler.state.num_prompt_tokens),
            "cached_tokens": float(self.scheduler.state.num_cached_tokens),
            **self.scheduler.spec_counters,
            **self.scheduler.state.waits,
            **self.scheduler.state.queues.adapters.counters(),
            **self.handoffs.counters(),
            **self.departures.counters.as_dict(),
            **self.leaning.counters(),
        }

    def status(self, counters: Mapping[str, float]) -> Status:
        """The node's status. `counters` are those of the process around this logic."""
        all_counters = {**self.counters(), **counters}
        queues = self.scheduler.state.queues
        fetch_s_per_token, fetch_s_per_token_from = self.handoffs.puller.fetch_rates()
        return Status(
            node_id=self.info.node_id,
            epoch=self.info.epoch,
            num_running=len(queues.running),
            num_waiting=len(queues.waiting),
            num_waiting_tokens=queues.num_waiting_tokens,
            num_free_blocks=self.pool.windows.most(self.pool.num_free),
            num_blocks=self.pool.windows.most(self.pool.num_blocks),
            block_size=self.scheduler.state.kv.block_size,
            draining=self.draining,
            prefill_s_per_token=self.scheduler.prompt_s_per_token,
            transfer_s_per_token=self._transfer_s_per_token(all_counters),
            fetch_s_per_token=fetch_s_per_token,
            fetch_s_per_token_from=fetch_s_per_token_from,
            counters=all_counters,
            adapters=self.adapters.held(),
            work=self.scheduler.work.report(),
            leaning=self.leaning.told(self.scheduler.state.clock.now()),
        )

    def _transfer_s_per_token(self, counters: dict[str, float]) -> float:
        """How many seconds a token of KV took to push, over all that this node has pushed; 0 before the first."""
        layout, pushed_bytes = self.info.layout, counters.get("kv_pushed_bytes", 0.0)
        if layout is None or not pushed_bytes:
            return 0.0
        return counters["kv_push_s"] / pushed_bytes * layout.payload_bytes / layout.block_size

    def check_integrity(self) -> None:
        self.book.check_integrity()
        self.scheduler.state.check_integrity()
        if self.precise is not None:
            self.precise.state.check_integrity()
        self.pool.check_integrity()
        self.handoffs.check_integrity()
        self.departures.check_integrity()
