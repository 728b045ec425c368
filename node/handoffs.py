"""KV that leaves this node and KV that comes to it: one manager for each side over one pool, and pulls, which use both.

A message, a transfer event or an end belongs to the side that its type names; a peer that comes or goes is told to
both, since it may be source and sink at once. Sans-IO.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.wire.handoff import KVClaim, KVDrained, KVLayers, KVPull, KVReady, KVRelease
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef
from tandem.engine.scheduling.ports import LowerTiers
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.effects import Effect
from tandem.kv_connector.protocol.jobs import Verified
from tandem.kv_connector.protocol.outcomes import Fetched, NotFetched, SinkOutcome, SourceOutcome
from tandem.kv_connector.protocol.peer_effects import Fenced
from tandem.kv_connector.pulls.puller import Puller
from tandem.kv_connector.pulls.server import PullServer
from tandem.kv_connector.pulls.shares import SharedPrompts
from tandem.kv_connector.sink.manager import SinkManager
from tandem.kv_connector.source.manager import SourceManager

if TYPE_CHECKING:
    from tandem.engine.contracts.security import ClusterKeys


class Handoffs:
    """The hand-offs of one node. `tiers` are those below the pool, `compute_rate` measures prompt tokens, `is_settled`
    is that of NodeTransports, `whole_up_to` (tokens) is explained at PushedPrompts. After every event the owner must
    ask for `next_end` until there is none."""

    def __init__(
        self,
        info: NodeInfo,
        keys: ClusterKeys,
        pool: BlockPool,
        options: NodeOptions,
        tiers: LowerTiers,
        compute_rate: Rate,
        is_settled: Callable[[int], bool] = lambda grant_id: True,
        whole_up_to: int = 0,
    ) -> None:
        self.source = SourceManager(info, keys, pool, options, whole_up_to)
        self.sink = SinkManager(info, keys, pool, options, is_settled)
        self.puller = Puller(info, pool, self.sink, tiers, options, compute_rate)
        self.shares = SharedPrompts(info, pool, self.sink, self.source, options, compute_rate)
        self.pull_server = PullServer(info, pool, self.source, tiers, options)
        self._connects: list[PeerRef] = []
        self._effects: list[Effect] = []
        self._ends: deque[SourceOutcome | SinkOutcome] = deque()

    def connect(self, peer: PeerRef) -> None:
        """Asks for a connection to a node, to which something will go."""
        self._connects.append(peer)

    # --- events in ------------------------------------------------------------------------------------------

    def on_message(self, sender: NodeKey, message: Message, now: float) -> None:
        if self.source.peers.get(sender) is None:
            self.sink.drop_foreign()  # the sender is a router
        elif isinstance(message, KVClaim | KVReady | KVRelease | KVDrained):
            self.sink.on_message(sender, message, now)
            if isinstance(message, KVClaim):
                self.shares.on_claim(message.key)
        elif isinstance(message, KVLayers):
            self.shares.on_layers(sender, message)
        elif isinstance(message, KVPull):
            self.pull_server.on_pull(sender, message, now)
        else:
            self.source.on_message(sender, message, now)

    def peer_connected(self, info: NodeInfo) -> None:
        self.sink.peers.connected(info)
        self.source.peers.connected(info)
        self.puller.peer_connected(info)
        self.shares.peer_connected(info)

    def peer_lost(self, peer: NodeKey, is_alive: bool, now: float) -> None:
        if is_alive:
            self._connects += self.source.peers.forgot(peer, now)
        else:
            self.source.peers.lost(peer)
        self.sink.peers.lost(peer)
        self.pull_server.peer_lost(peer)
        self.puller.peer_lost(peer)
        self.shares.peer_lost(peer)

    def peer_refused(self, ref: PeerRef, reason: str) -> None:
        self.source.peers.lost(ref.key, f"{outcomes.SINK_REFUSED}: {reason}")
        self.puller.peer_lost(ref.key)

    def on_transfer(self, event: object, now: float) -> None:
        if isinstance(event, Verified | Fenced):
            self.sink.on_transfer_event(event, now)
        else:
            self.source.on_transfer_event(event, now)

    def on_tick(self, now: float) -> None:
        self.puller.on_tick(now)
        self.shares.on_tick(now)
        self.pull_server.on_tick(now)
        self.source.on_tick(now)  # first: a deadline that passes is told to the peer as such, not as a cancel
        self.sink.on_tick(now)

    # --- out ------------------------------------------------------------------------------------------------

    def next_end(self) -> SourceOutcome | SinkOutcome | None:
        """The oldest end of a hand-off that was not asked for yet; None if there is none. Ends of pulls, and
        of chunks of shared prompts, are dealt with here."""
        self._collect()
        while self._ends:
            ended = self._ends.popleft()
            if self.shares.on_outcome(ended):
                self._collect()
            elif isinstance(ended, Fetched | NotFetched):
                self.puller.on_outcome(ended)
            elif isinstance(ended, SinkOutcome) or not self.pull_server.on_outcome(ended):
                return ended
        return None

    def drain_effects(self) -> list[Effect]:
        """The effects decided on since the last call, in order, without the ends of hand-offs."""
        self._collect()
        effects, self._effects = self._effects, []
        return effects

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        return self.puller.drain_outbox() + self.shares.drain_outbox() + self.pull_server.drain_outbox()

    def drain_connects(self) -> list[PeerRef]:
        connects, self._connects = self._connects, []
        return connects + self.puller.drain_connects() + self.shares.drain_connects()

    def counters(self) -> dict[str, float]:
        return {
            **self.source.counters.as_dict(),
            **self.sink.counters.as_dict(),
            **self.puller.as_counters(),
            **self.shares.as_counters(),
            "pull_served_blocks": float(self.pull_server.num_served_blocks),
        }

    @property
    def is_idle(self) -> bool:
        is_idle = self.source.ledger.is_idle and self.sink.ledger.is_idle
        return is_idle and self.pull_server.is_idle and self.shares.is_idle

    def check_integrity(self) -> None:
        self.source.check_integrity()
        self.sink.check_integrity()
        self.shares.check_integrity()

    def _collect(self) -> None:
        for effect in [*self.source.drain_effects(), *self.sink.drain_effects()]:
            if isinstance(effect, SourceOutcome | SinkOutcome):
                self._ends.append(effect)
            else:
                self._effects.append(effect)
