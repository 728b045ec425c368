"""Carries out what a node's logic decided about other nodes: channels, grants, fences, transfer jobs, messages."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.engine.contracts.errors import TandemError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import (
    KVClaim,
    KVCommitted,
    KVDrained,
    KVDrainedAck,
    KVGrant,
    KVLayers,
    KVPull,
    KVReady,
    KVWait,
)
from tandem.engine.contracts.wire.parts import Message, NodeInfo
from tandem.engine.contracts.wire.requests import Submit
from tandem.engine.process.process_log import RateLimited
from tandem.kv_connector.protocol.effects import Send
from tandem.kv_connector.protocol.jobs import (
    BlockPush,
    CloseGrant,
    OpenGrant,
    ReadySent,
    Retired,
    TransportCommand,
    Verified,
)
from tandem.kv_connector.protocol.peer_effects import AdmitSource, CloseChannel, Fenced, OpenChannel, PeerEffect
from tandem.kv_connector.tiers.jobs import JobDone
from tandem.kv_connector.transfer.layer_hooks import ConnectorWorker
from tandem.kv_connector.transfer.thread import TransferWorker
from tandem.kv_connector.transports.node_transports import NodeTransports
from tandem.node.control.events import PeerUp, Received
from tandem.node.handoffs import Handoffs

logger = logging.getLogger(__name__)
limited = RateLimited(logger)
_URGENT_MESSAGES = (KVPull, KVClaim, KVWait, KVGrant, KVLayers, KVReady, KVCommitted, KVDrained, KVDrainedAck, Submit)
_URGENT_EVENTS = (PeerUp, ReadySent, Retired, Verified, JobDone)


def is_urgent(event: object) -> bool:
    """Whether an event of a node's inbox is served while a step runs. Such events are those of a hand-off's way from
    claim to commit, which is part of the time to a second token: they start, free and hand on, and none ends what is in
    a launched step. PeerUp and JobDone belong to them since they come with each request, and would hold up others."""
    if isinstance(event, Received):
        return isinstance(event.message, _URGENT_MESSAGES)
    return isinstance(event, _URGENT_EVENTS)


class Effects:
    """Carries out effects. `apply` runs on the step loop; nothing in it waits for a peer. `send` (to whom, message) is
    the control plane's, `post` puts an event into the loop's inbox."""

    def __init__(
        self,
        info: NodeInfo,
        handoffs: Handoffs,
        transports: NodeTransports,
        transfer: TransferWorker,
        worker: ConnectorWorker,
        send: Callable[[NodeKey, Message], None],
        post: Callable[[object], None],
    ) -> None:
        self._info = info
        self._handoffs = handoffs
        self._transports = transports
        self._transfer = transfer
        self._worker = worker
        self._send = send
        self._post = post

    def apply(self) -> None:
        """Carries out what was decided, in that order: a grant is open before its source hears of it."""
        for effect in self._handoffs.drain_effects():
            if isinstance(effect, Send):
                self._send(effect.to, effect.message)
            elif isinstance(effect, PeerEffect):
                self._on_peer(effect)
            elif isinstance(effect, TransportCommand):
                self._on_command(effect)
            elif isinstance(effect, BlockPush):
                self._worker.push_between_steps(effect)
            else:
                self._transfer.submit(effect)

    def _on_peer(self, effect: PeerEffect) -> None:
        if isinstance(effect, OpenChannel):
            self._transfer.connect_peer(effect.peer)
        elif isinstance(effect, CloseChannel):
            self._transfer.drop_peer(effect.node)
        elif isinstance(effect, AdmitSource):
            # If no descriptor is left to watch the source by, this node ends: a source that nobody watches could write
            # into blocks that are given to others.
            try:
                self._transports.admit(self._info, effect.peer)
            except TandemError as error:  # its export is wrong, or it is gone: only this peer is lost
                limited.warning("%s can't hand KV to this node: %r", effect.peer.node_id, error)
        else:
            fenced = Fenced(effect.node)
            self._transports.fence(effect.node).add_done_callback(lambda _: self._post(fenced))

    def _on_command(self, command: TransportCommand) -> None:
        if isinstance(command, OpenGrant):
            self._transfer.sink_checks.expect(command.grant)
            self._transfer.arrivals.expect(command.grant)
            try:
                self._transports.open_grant(command.grant)
            except TandemError as error:  # the source is gone; its loss is on the way through the control plane
                logger.warning("grant %#x is not opened: %s", command.grant.grant_id, error.message)
        else:
            assert isinstance(command, CloseGrant)
            self._transfer.sink_checks.end(command.grant_id)
            self._transfer.arrivals.end(command.grant_id)
            self._transports.close_grant(command.grant_id)
