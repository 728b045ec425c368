"""The common part of transports between machines: an authenticated socket, their link, for each source and sink.

The sink has a listener thread, and a receiver's thread for each link, which alone decides what that source's bytes do
to the pool. A fence breaks the links of an epoch and is done when their threads have ended. Subclasses say what travels
on the link and what beside it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import ClassVar

import msgspec
import torch

from tandem.engine.contracts.errors import DecodeError, PeerLostError, TandemError, TransportError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.decoder import WireDecoder
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.process.process_log import RateLimited
from tandem.kv_connector.transports.base import OnLost, RegisteredPool
from tandem.kv_connector.transports.grants import GrantTable
from tandem.kv_connector.transports.links.door import LinkDoor
from tandem.kv_connector.transports.links.receiver import AuthenticatedSocket, LinkReceiver
from tandem.kv_connector.transports.links.tcp_channel import dial
from tandem.kv_connector.transports.links.tcp_wire import (
    MAX_PREFACE_BYTES,
    PrefaceReply,
    decode_preface,
    new_nonce,
    preface_is_genuine,
    receive_header,
    reply_mac,
    send_frame,
    send_views,
)
from tandem.kv_connector.transports.pool_channel import OpenChannels, PoolChannel

limited = RateLimited(logging.getLogger(__name__))
_WILDCARDS = ("", "0.0.0.0", "::")


class LinkExport(msgspec.Struct, frozen=True):
    """Where a node's links are to be opened."""

    host: str  # in place of a wildcard use the host of the node's control address
    port: int


_decode_export: WireDecoder[LinkExport] = WireDecoder(LinkExport)


class LinkTransport(ABC):
    """A transport over links, both halves. `timeout_s` bounds every wait for a peer's progress, on both sides."""

    name: str
    receiver_writes: bool
    receiver: ClassVar[type[LinkReceiver]]  # the sink's end of a link

    def __init__(self, keys: ClusterKeys, host: str = "127.0.0.1", timeout_s: float = 5.0) -> None:
        self.grants = GrantTable()
        self.pool: RegisteredPool | None = None
        self._key = keys.derive(self.name)
        self._host = host
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._channels = OpenChannels()
        self._receivers: dict[LinkReceiver, threading.Thread] = {}
        self._fences: list[tuple[set[LinkReceiver], Future[None]]] = []  # with the receivers each waits for
        self._door: LinkDoor | None = None
        self._closed = False

    @abstractmethod
    def is_usable(self, device: torch.device) -> tuple[bool, str]: ...

    @abstractmethod
    def _make_channel(self, sock: socket.socket, peer: NodeInfo, on_lost: OnLost) -> PoolChannel:
        """Makes the source's end of a new link, which owns `sock` unless this raises TransportError or
        PeerLostError."""

    def pool_storage(self, nbytes: int) -> memoryview | None:
        return None

    def register(self, pool: RegisteredPool) -> None:
        """Starts to listen. Raises ConfigError when the address can't be bound, OSError when no socket is left."""
        assert self.pool is None, "a pool is registered once"
        self.pool = pool
        self._door = LinkDoor(self.name, self._host, self._greet)

    def export(self) -> bytes:
        assert self._door is not None, "register the pool first"
        return msgspec.msgpack.encode(LinkExport(self._host, self._door.port))

    # --- source ---------------------------------------------------------------------------------------------

    def connect(self, peer: NodeInfo, on_lost: OnLost) -> PoolChannel:
        assert self.pool is not None, "register the pool first"
        try:
            export = _decode_export(peer.transports[self.name])
        except (KeyError, DecodeError) as error:
            raise TransportError(f"{peer.node_id} exports no pool for {self.name}") from error
        # A peer may be reached at another address than the one it listens on: its control address tells.
        host = _control_host(peer) if peer.control_address or export.host in _WILDCARDS else export.host
        sock = dial((host, export.port), self.pool.node, peer.key, self._key, self._timeout_s)
        try:
            channel = self._make_channel(sock, peer, on_lost)
        except BaseException:
            sock.close()
            raise
        self._channels.add(peer, channel)
        return channel

    # --- sink -----------------------------------------------------------------------------------------------

    def admit(self, peer: NodeInfo) -> None:
        self.grants.admit(peer.key)

    def open_grant(self, grant: KVGrant) -> None:
        self.grants.open(grant)

    def close_grant(self, grant_id: int) -> None:
        self.grants.close(grant_id)

    def is_settled(self, grant_id: int) -> bool:
        with self._lock:
            unsettled = [each for each in self._receivers if each.has_direct_writes(grant_id)]
        for receiver in unsettled:
            receiver.drop()
        return not unsettled

    def fence(self, source: NodeKey) -> Future[None]:
        """Bars the source until it is admitted again and breaks its links; done when their threads have ended."""
        self.grants.fence(source)
        fenced: Future[None] = Future()
        with self._lock:
            receivers = {each for each in self._receivers if each.source == source}
            self._fences.append((receivers, fenced))
        for receiver in receivers:
            receiver.drop()
        self._settle_fences()
        return fenced

    def close(self) -> None:
        with self._lock:
            self._closed = True
            receivers = dict(self._receivers)
        if self._door is not None:
            self._door.close()
        self._channels.close()
        for receiver, thread in receivers.items():
            receiver.drop()
            thread.join()

    def _greet(self, sock: socket.socket, address: object) -> None:
        """Runs on the thread of one connection: authenticates the other side, then serves its frames."""
        try:
            receiver = self._authenticate(sock)
        except TandemError as error:
            limited.warning("refused a KV connection from %s: %s", address, error)
            return
        except Exception:  # out of descriptors, say: it costs this connection
            limited.exception("can't serve a KV connection from %s", address)
            return
        if not self.receiver_writes:
            self._end_older_links(receiver)
        receiver.run()

    def _end_older_links(self, newest: LinkReceiver) -> None:
        """Ends older links of the same source and returns when their threads have ended. So what the source wrote by
        itself over those has landed, or never will, before it flushes this one."""
        older = []
        with self._lock:
            for receiver, thread in self._receivers.items():
                if receiver is newest:
                    break
                if receiver.source == newest.source:
                    older.append((receiver, thread))
        for receiver, thread in older:
            receiver.drop()
            thread.join()

    def _authenticate(self, sock: socket.socket) -> LinkReceiver:
        assert self.pool is not None
        assert self._door is not None
        deadline = time.monotonic() + self._timeout_s
        sock.settimeout(self._timeout_s)
        nonce = new_nonce()
        send_views(sock, [memoryview(nonce)])
        preface = decode_preface(receive_header(sock, MAX_PREFACE_BYTES, deadline))
        if not preface_is_genuine(self._key, preface, nonce):
            raise TransportError("it doesn't hold this cluster's secret")
        self._door.admit(sock)
        sock.settimeout(self._timeout_s)
        source = NodeKey(preface.node_id, preface.epoch)
        error = ""
        if (preface.sink_id, preface.sink_epoch) != self.pool.node:
            error = f"this is {self.pool.node.node_id} epoch {self.pool.node.epoch:#x}"
        link = AuthenticatedSocket(sock, source, self.pool, self.grants, self._timeout_s, self._receiver_ended)
        receiver = self.receiver(link)
        with self._lock:
            # The receiver is listed before the check of a fence: so a fence either sees it here or is seen by it.
            self._receivers[receiver] = threading.current_thread()
            closed = self._closed
        if closed or self.grants.is_fenced(source):
            error = f"{preface.node_id} epoch {preface.epoch:#x} is fenced"
        try:
            send_frame(sock, PrefaceReply(error, reply_mac(self._key, error, preface.nonce)))
            if error:
                raise TransportError(error)
        except TransportError:
            receiver.abandon()
            raise
        return receiver

    def _receiver_ended(self, receiver: LinkReceiver) -> None:
        with self._lock:
            self._receivers.pop(receiver, None)
        self._settle_fences()

    def _settle_fences(self) -> None:
        with self._lock:
            busy = self._receivers.keys()
            done = [future for receivers, future in self._fences if not receivers & busy]
            self._fences = [(receivers, future) for receivers, future in self._fences if receivers & busy]
        for future in done:
            future.set_result(None)


def _control_host(peer: NodeInfo) -> str:
    """The host of an address tcp://host:port or tcp://[host]:port."""
    host = peer.control_address.rpartition(":")[0].rpartition("/")[2].strip("[]")
    if not host:
        raise PeerLostError(f"{peer.node_id} listens on all interfaces and names no control address")
    return host
