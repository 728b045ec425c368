"""A node that takes part in hand-offs as source and as sink, whatever its role; roles say which requests it takes.

One manager a side over one pool and the same transports; pulls of prefixes, which use both, stand beside them. A
message, a transfer event or an end belongs to the side that its type names; a peer that comes or goes is told to both,
since it may be source and sink at once. Sans-IO.
"""

from __future__ import annotations

from collections import deque

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVClaim, KVDrained, KVPull, KVReady, KVRelease
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef
from tandem.engine.contracts.wire.requests import Migrate
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.effects import Effect
from tandem.kv_connector.protocol.jobs import Verified
from tandem.kv_connector.protocol.outcomes import (
    Fetched,
    HandoffCompleted,
    HandoffFailed,
    NotFetched,
    SinkOutcome,
    SourceOutcome,
    failure_code,
)
from tandem.kv_connector.protocol.peer_effects import Fenced
from tandem.kv_connector.pulls.puller import Puller
from tandem.kv_connector.pulls.server import PullServer
from tandem.kv_connector.sink.manager import SinkManager
from tandem.kv_connector.source.manager import SourceManager
from tandem.node.departures import Departures
from tandem.node.requests import AcceptedRequest, RequestBook
from tandem.node.serving import ServingNode


class HandoffNode(ServingNode):
    """Takes "full" requests; roles add to that."""

    def __init__(
        self,
        info: NodeInfo,
        book: RequestBook,
        scheduler: Scheduler,
        pool: BlockPool,
        max_queue: int,
        source: SourceManager,
        sink: SinkManager,
        asker: Puller,
        holder: PullServer,
    ) -> None:
        super().__init__(info, book, scheduler, pool, max_queue)
        self.source, self.sink = source, sink
        self.asker, self.holder = asker, holder
        self.migrations = Departures(source, scheduler, book)
        self._effects: list[Effect] = []
        self._outcomes: deque[SourceOutcome | SinkOutcome] = deque()

    # --- for the roles --------------------------------------------------------------------------------------

    def start(self, entry: AcceptedRequest, now: float) -> None:
        if entry.submit.prefix is not None:
            self.asker.want(entry.request, entry.submit.prefix)
        super().start(entry, now)

    def on_source_outcome(self, outcome: SourceOutcome, now: float) -> None:
        """How a hand-off of this node's KV ended."""
        if isinstance(outcome, HandoffCompleted):
            self.book.prompt_left(outcome.key)
        else:
            assert isinstance(outcome, HandoffFailed)
            text = f"the hand-off failed: {outcome.reason}"
            entry = self.book.fail(outcome.key, failure_code(outcome.reason), text, outcome.retryable)
            if entry is not None:
                self.stop(entry, now)

    def on_sink_outcome(self, outcome: SinkOutcome) -> None:
        """How a hand-off of others' KV ended; nothing is expected here unless a role expects it."""
        raise AssertionError(f"nobody here expects KV: {outcome}")

    # --- events in ------------------------------------------------------------------------------------------

    def on_peer_message(self, sender: NodeKey, message: Message, now: float) -> None:
        if isinstance(message, Migrate):
            if self.migrations.begin(sender, message, now):
                self._connects.append(message.peer)
        elif self.source.peers.get(sender) is None:
            self.sink.drop_foreign()  # of a router
        elif isinstance(message, KVClaim | KVReady | KVRelease | KVDrained):
            self.sink.on_message(sender, message, now)
        elif isinstance(message, KVPull):
            self.holder.on_pull(sender, message, now)
        else:
            self.source.on_message(sender, message, now)
        self._take_outcomes(now)

    def on_peer_up(self, info: NodeInfo, now: float) -> None:
        self.sink.peers.connected(info)
        self.source.peers.connected(info)
        self.asker.peer_connected(info)
        self._take_outcomes(now)

    def on_peer_lost(self, peer: NodeKey, is_alive: bool, now: float) -> None:
        if is_alive:
            self._connects += self.source.peers.forgot(peer, now)
        else:
            self.source.peers.lost(peer)
        self.sink.peers.lost(peer)
        self.holder.peer_lost(peer)
        self._take_outcomes(now)
        self.asker.peer_lost(peer)

    def on_peer_refused(self, ref: PeerRef, reason: str, now: float) -> None:
        self.source.peers.lost(ref.key, f"{outcomes.SINK_REFUSED}: {reason}")
        self._take_outcomes(now)
        self.asker.peer_lost(ref.key)

    def on_transfer(self, event: object, now: float) -> None:
        if isinstance(event, Verified | Fenced):
            self.sink.on_transfer_event(event, now)
        else:
            self.source.on_transfer_event(event, now)
        self._take_outcomes(now)

    def on_tick(self, now: float) -> None:
        self.asker.on_tick(now)
        self.holder.on_tick(now)
        self.source.on_tick(now)  # first: a deadline that passes is told to the peer as such, not as a cancel
        self.sink.on_tick(now)
        self._take_outcomes(now)
        self.migrations.advance(now)
        super().on_tick(now)

    # --- out ------------------------------------------------------------------------------------------------

    def drain_effects(self) -> list[Effect]:
        """What the managers decided since the last call, in order, but for the ends of hand-offs, which are this
        node's."""
        self._take_effects()
        effects, self._effects = self._effects, []
        return effects

    def handoff_outbox(self) -> list[tuple[NodeKey, Message]]:
        return self.asker.drain_outbox() + self.holder.drain_outbox() + self.migrations.drain_outbox()

    def drain_connects(self) -> list[PeerRef]:
        return super().drain_connects() + self.asker.drain_connects()

    def handoff_counters(self) -> dict[str, float]:
        return {
            **self.source.counters.as_dict(),
            **self.sink.counters.as_dict(),
            **self.asker.as_counters(),
            **self.migrations.counters.as_dict(),
            "pull_served_blocks": float(self.holder.num_served_blocks),
        }

    def fetch_rates(self) -> tuple[float, dict[str, float]]:
        return self.asker.fetch_rates()

    @property
    def handoff_idle(self) -> bool:
        return (
            self.source.ledger.is_idle and self.sink.ledger.is_idle and self.holder.is_idle and self.migrations.is_idle
        )

    def check_integrity(self) -> None:
        super().check_integrity()
        self.source.check_integrity()
        self.sink.check_integrity()
        self.migrations.check_integrity()

    def _take_effects(self) -> None:
        for effect in [*self.source.drain_effects(), *self.sink.drain_effects()]:
            if isinstance(effect, SourceOutcome | SinkOutcome):
                self._outcomes.append(effect)
            else:
                self._effects.append(effect)

    def _take_outcomes(self, now: float) -> None:
        self._take_effects()
        while self._outcomes:
            ended = self._outcomes.popleft()
            if isinstance(ended, Fetched | NotFetched):
                self.asker.on_outcome(ended)
            elif isinstance(ended, SinkOutcome):
                self.on_sink_outcome(ended)
            elif not self.holder.on_outcome(ended) and not self.migrations.on_outcome(ended, now):
                self.on_source_outcome(ended, now)
