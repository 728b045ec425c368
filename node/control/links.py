"""The peers of a control plane, and the connections and process handles that belong to them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import zmq

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import NodeInfo, PeerRef
from tandem.node.control.sockets import ControlSockets, Socket


@dataclass(slots=True)
class Peer:
    """One peer. `socket`: a DEALER of its own, if this node connected to it; `identity`: its name behind the ROUTER, if
    it connected to this node. Both, when each connected to the other."""

    key: NodeKey
    last_seen: float
    info: NodeInfo | None = None
    identity: bytes = b""
    socket: Socket | None = None
    ref: PeerRef | None = None
    was_welcomed: bool = False  # over `socket`
    pidfd: int = -1


class ControlLinks:
    """The peers of a node by key and by connection, with the sockets and process handles that close with them."""

    def __init__(self, sockets: ControlSockets) -> None:
        self._sockets = sockets
        self._by_key: dict[NodeKey, Peer] = {}
        self._inbound: dict[bytes, Peer] = {}

    def all(self) -> list[Peer]:
        return list(self._by_key.values())

    def get(self, key: NodeKey) -> Peer | None:
        return self._by_key.get(key)

    def inbound(self, identity: bytes) -> Peer | None:
        """The peer that said Hello over this connection of the ROUTER socket."""
        return self._inbound.get(identity)

    def add(self, link: Peer) -> None:
        self._by_key[link.key] = link
        if link.identity:
            self._inbound[link.identity] = link

    def note_inbound(self, link: Peer, identity: bytes) -> None:
        """Notes that a peer to which this node connects has connected as well, or that one which had connected does so
        anew."""
        self._inbound.pop(link.identity, None)
        link.identity = identity
        self._inbound[identity] = link

    def remove(self, key: NodeKey) -> Peer | None:
        """Removes a peer and closes what belongs to it; returns None when there is no such peer."""
        link = self._by_key.pop(key, None)
        if link is None:
            return None
        if link.socket is not None:
            self._sockets.unwatch(link.socket)
            link.socket.close(linger=200)
        if link.identity:
            self._inbound.pop(link.identity, None)
        if link.pidfd >= 0:
            self._sockets.unwatch(link.pidfd)
            os.close(link.pidfd)
        return link

    def connects_to(self, ref: PeerRef) -> bool:
        """Whether a connection of this node's own leads to that node, in whichever life, or to its address."""
        refs = [link.ref for link in self._by_key.values() if link.ref is not None]
        return any(other.node_id == ref.node_id or other.control_address == ref.control_address for other in refs)

    def forgive(self, silence_s: float) -> None:
        """Shortens every peer's silence by `silence_s`, if that is positive."""
        if silence_s > 0:
            for link in self._by_key.values():
                link.last_seen += silence_s

    def watch_process(self, link: Peer, own_host_id: str) -> None:
        """Sees to it that the exit of the peer's process is noticed at once, if it is on the same host."""
        assert link.info is not None
        if link.info.pid and link.info.host_id and link.info.host_id == own_host_id:
            try:
                link.pidfd = os.pidfd_open(link.info.pid)
            except (OSError, OverflowError, AttributeError):  # gone, no number of a process, or an old Python
                return
            self._sockets.watch(link.pidfd)

    def send(self, to: NodeKey, payload: bytes) -> bool:
        """Sends a message to a peer; False if it is not connected."""
        link = self._by_key.get(to)
        if link is None or link.info is None:
            return False
        return self._sockets.reply(link.identity, payload) if link.socket is None else self.tell(link, payload)

    def tell(self, link: Peer, payload: bytes) -> bool:
        """Sends over the link's own socket. False: it takes nothing, as when the other side refused its keys; silence
        will tell."""
        assert link.socket is not None
        try:
            link.socket.send(payload, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
