"""Questions to nodes that may help with a prompt: asked once they are connected, again until they answer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVPull
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef
from tandem.kv_connector.pulls.share import Share


class Invitations:
    """Who is asked to help with the shares of this node's prompts, and who is connected. The time is monotonic
    seconds."""

    def __init__(self, epoch: int, resend_s: float, is_unanswered: Callable[[AttemptKey], bool]) -> None:
        """`epoch` is this node's; `is_unanswered` says of the first chunk's hand-off whether its helper was silent."""
        self._epoch, self._resend_s, self._is_unanswered = epoch, resend_s, is_unanswered
        self._connected: set[NodeKey] = set()
        self._connects: list[PeerRef] = []
        self._outbox: list[tuple[NodeKey, Message]] = []

    def reach(self, peers: Iterable[PeerRef]) -> None:
        """Has connections made to those that have none."""
        self._connects += [peer for peer in peers if peer.key not in self._connected]

    def ask(self, share: Share, now: float) -> None:
        """Asks every helper of a prompt of this node: now, or once it is connected."""
        for place in range(1, len(share.nodes)):
            share.asked_at[place] = 0.0
            if share.nodes[place].key in self._connected:
                self._send(share, place, now)

    def peer_connected(self, info: NodeInfo, shares: Iterable[Share], now: float) -> None:
        self._connected.add(info.key)
        for share in shares:
            for place, at in share.asked_at.items():
                if share.nodes[place].key == info.key and not at:
                    self._send(share, place, now)

    def peer_lost(self, peer: NodeKey) -> None:
        self._connected.discard(peer)

    def repeat(self, share: Share, now: float) -> None:
        """Asks again who should have answered by now."""
        for place, at in share.asked_at.items():
            is_due = at and now >= at + self._resend_s and share.nodes[place].key in self._connected
            if is_due and self._is_unanswered(share.key(place, 0)):
                self._send(share, place, now)

    def _send(self, share: Share, place: int, now: float) -> None:
        share.asked_at[place] = now
        key, peer = share.key(place, 0), share.nodes[place]
        message = KVPull(
            request_id=key.request_id,
            attempt=key.attempt,
            source_epoch=peer.epoch,
            sink_epoch=self._epoch,
            first_block=0,
            block_hashes=b"",
            deadline_s=max(0.0, share.deadline - now),
            work=share.work_for(place),
        )
        self._outbox.append((peer.key, message))

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def drain_connects(self) -> list[PeerRef]:
        connects, self._connects = self._connects, []
        return connects
