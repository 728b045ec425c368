"""The sinks to which a source hands KV, and the channels that they need. Pure."""

from __future__ import annotations

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import NodeInfo, PeerRef
from tandem.kv_connector.layouts.plan import BlockSizes
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.effects import SourceEffect
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.protocol.peer_effects import CloseChannel, OpenChannel
from tandem.kv_connector.protocol.source_table import SourceEvent as E
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.source.actions import SourceActions
from tandem.kv_connector.source.ledger import SourceLedger
from tandem.kv_connector.source.record import OVER, SourceRecord

CLAIMED = (S.CLAIMING, S.PARKED, S.PARKED_DONE)  # states with a claim and no grant


class SourcePeers:
    """Knows the greeted nodes, and opens channels to those of them that get KV."""

    def __init__(self, ledger: SourceLedger, actions: SourceActions, effects: list[SourceEffect]) -> None:
        self._ledger, self._actions, self._effects = ledger, actions, effects
        self._peers: dict[NodeKey, NodeInfo] = {}
        self._open: set[NodeKey] = set()  # a channel was asked for and is not known to be broken

    def get(self, node: NodeKey) -> NodeInfo | None:
        """The node's own description from its greeting; None if it was not greeted, or is lost."""
        return self._peers.get(node)

    def knows(self, ref: PeerRef) -> bool:
        return ref.key in self._peers

    def channel_failed(self, sink: NodeKey) -> None:
        """Forgets a broken channel, which is opened again when a sink behind it grants."""
        self._open.discard(sink)

    def claim_offer(self, record: SourceRecord) -> None:
        """Claims as if for a prompt that was computed, or is being computed, without waiting for its grant."""
        self.note_block_sizes(record)
        for event in (E.CLAIM, E.START, E.COMPUTED) if record.kind is HandoffKind.PULL else (E.CLAIM, E.START):
            self._actions.run(record, record.machine.on(event))

    def note_block_sizes(self, record: SourceRecord) -> None:
        own, layout = self._ledger.block_size, self._peers[record.peer.key].layout
        record.block_sizes = BlockSizes(own, layout.block_size if layout else own)

    def connected(self, info: NodeInfo) -> None:
        """Notes that a node was greeted (again). A channel to it is opened as soon as there is something to hand
        over."""
        if info.key in self._peers:
            return
        self._peers[info.key] = info
        for record in self._ledger.of_sink(info.key):
            if record.machine.state not in OVER:
                self.open_channel(record.peer)
            if record.machine.state is S.IDLE and record.kind is not HandoffKind.PROMPT:
                self.claim_offer(record)
            elif record.machine.state in CLAIMED:  # one that has greeted again after it forgot this node
                self._actions.run(record, record.machine.on(E.TIMER))

    def lost(self, sink: NodeKey, reason: str = outcomes.SINK_LOST) -> None:
        """Ends the hand-offs to a sink that is gone or refused; the router is told `reason`."""
        for record in self._forget(sink):
            record.reason = reason
            self._actions.run(record, record.machine.on_sink_lost(sink.epoch))

    def forgot(self, sink: NodeKey, now: float) -> list[PeerRef]:
        """Reacts to a living sink that took this node for lost. What the sink had granted is void there. Hand-offs that
        it had not granted go on when it is greeted again: it may never have heard of them, and refuses those that it
        knew. Returns whom to greet, if anybody."""
        self._ledger.at(now)
        again = []
        for record in self._forget(sink):
            if record.machine.state is S.IDLE or record.machine.state in CLAIMED:
                again.append(record.peer)
            else:
                record.reason = outcomes.SINK_LOST
                self._actions.run(record, record.machine.on_sink_lost(sink.epoch))
        return again[:1]

    def _forget(self, sink: NodeKey) -> list[SourceRecord]:
        """Closes the channel to this sink and returns its records."""
        self._peers.pop(sink, None)
        if sink in self._open:
            self._open.remove(sink)
            self._effects.append(CloseChannel(sink))
        return self._ledger.of_sink(sink)

    def open_channel(self, peer: PeerRef) -> None:
        """Asks for a channel unless there is one, or nobody to open it to yet."""
        if peer.key in self._peers and peer.key not in self._open:
            self._open.add(peer.key)
            self._effects.append(OpenChannel(self._peers[peer.key]))
