"""A node's control sockets: one thread owns them all, everyone else talks to it through queues.

The node binds a ROUTER socket, to which routers and hand-off sources connect; it connects a DEALER to each sink it
hands KV to. Liveness is judged here, both ways: a peer is lost when it was silent for `peer_lost_s`, when its process
is seen to exit (same host: pidfd), or when it comes back with another epoch. Delivered events reach the step loop in
the order in which they happened; after PeerLost nothing of that epoch is delivered.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from tandem.engine import messages as wire
from tandem.engine.config import Timeouts
from tandem.engine.errors import ConfigError, HandshakeError
from tandem.engine.messages import Hello, Message, NodeInfo, PeerRef, Ping, Refused, Status, Welcome, peer_id_of
from tandem.engine.security import ClusterKeys

READ_BURST = 512  # messages read from one socket before the others get their turn


@dataclass(frozen=True, slots=True)
class Received:
    peer_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class PeerUp:
    peer_id: str
    info: NodeInfo


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer_id: str
    info: NodeInfo
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A sink did not take our Hello, or answered as somebody else; hand-offs to `ref` can't happen."""

    ref: PeerRef
    reason: str


ControlEvent = Received | PeerUp | PeerLost | PeerRefused


@dataclass(slots=True)
class _Link:
    """One peer: `socket` is a DEALER of its own (outbound) or None (inbound, behind the ROUTER as `identity`)."""

    peer_id: str
    last_seen: float
    info: NodeInfo | None = None
    identity: bytes = b""
    socket: zmq.Socket | None = None
    ref: PeerRef | None = None
    last_hello: float = 0.0
    pidfd: int = -1


@dataclass
class ControlCounters:
    undecodable: int = 0
    unknown_peer: int = 0
    refused: int = 0
    lost_peers: int = 0
    unroutable: int = 0

    def as_dict(self) -> dict[str, float]:
        return {f"control_{name}": float(value) for name, value in vars(self).items()}


@dataclass
class ControlPlane:
    """Create, `bind()`, set `info`, `start()`. `send`, `connect` and `disconnect` may be called from any thread."""

    keys: ClusterKeys
    timeouts: Timeouts
    deliver: Callable[[ControlEvent], None]
    check_peer: Callable[[NodeInfo], None]  # raises HandshakeError when a node peer must be refused
    launcher_address: str = ""
    info: NodeInfo | None = None
    status: Status | None = None  # replaced as a whole by the step loop
    counters: ControlCounters = field(default_factory=ControlCounters)

    def __post_init__(self) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._inbound: dict[bytes, _Link] = {}
        self._links: dict[str, _Link] = {}
        self._stopping = False
        self._launcher: zmq.Socket | None = None
        self._next_heartbeat = 0.0
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, name="tandem-io", daemon=True)

    def bind(self, host: str, port: int) -> str:
        """Binds the ROUTER socket and returns its address; raises ConfigError when the port is taken."""
        self._configure(self._router, server=True)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"can't bind the control socket to {host}:{port}: {error}; choose another --port"
            ) from error
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        assert self.info is not None, "info is set before start()"
        assert self.status is not None, "status is set before start()"
        self._thread.start()

    def send(self, peer_id: str, message: Message) -> None:
        """Queues a message; to a peer that is not connected it is counted and dropped (the verb will be resent)."""
        payload = wire.encode(message)
        self._command(lambda: self._send_now(peer_id, payload))

    def connect(self, ref: PeerRef) -> None:
        """Connects to a sink, idempotent. Answered by PeerUp, PeerRefused or, after `connect_s`, PeerRefused."""
        self._command(lambda: self._connect_now(ref))

    def disconnect(self, peer_id: str) -> None:
        self._command(lambda: self._drop(peer_id, reason="", deliver=False))

    def stop(self, timeout_s: float = 5.0) -> None:
        """Flushes what was queued (within a second) and ends the thread."""
        self._command(lambda: setattr(self, "_stopping", True))
        self._thread.join(timeout_s)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it is woken already, or has stopped
            os.write(self._wake_write, b"\0")

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        if self.launcher_address:
            self._launcher = self._context.socket(zmq.PUSH)
            self._launcher.setsockopt(zmq.LINGER, 0)
            self._launcher.setsockopt(zmq.SNDHWM, 4)
            self._launcher.connect(self.launcher_address)
        last_turn = time.monotonic()
        while not self._stopping:
            ready = dict(self._poller.poll(int(self.timeouts.heartbeat_s * 500)))
            now = time.monotonic()
            self._forgive_own_pause(now - last_turn)
            last_turn = now
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            while self._commands:
                self._commands.popleft()()
            if self._router in ready:
                self._read_router(now)
            for link in list(self._links.values()):
                if link.socket is not None and link.socket in ready:
                    self._read_dealer(link, now)
                elif link.pidfd >= 0 and link.pidfd in ready:
                    self._drop(link.peer_id, "its process exited")
            self._heartbeat(now)
            self._judge(now)
        self._close()

    def _forgive_own_pause(self, gap: float) -> None:
        """When this process itself stood still, the peers' silence proves nothing."""
        pause = gap - 2 * self.timeouts.heartbeat_s
        if pause > 0:
            for link in self._links.values():
                link.last_seen += pause

    def _read_router(self, now: float) -> None:
        for _ in range(READ_BURST):
            try:
                identity, payload = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                self.counters.undecodable += 1
                continue
            self._on_inbound(identity, payload, now)

    def _on_inbound(self, identity: bytes, payload: bytes, now: float) -> None:
        link = self._inbound.get(identity)
        try:
            message = wire.decode_to_node(payload)
        except msgspec.DecodeError as error:
            self.counters.undecodable += 1
            if link is None:
                self._reply(identity, Refused(field="wire_version", ours=str(wire.WIRE_VERSION), theirs=str(error)))
            return
        if isinstance(message, Hello):
            self._on_hello(identity, message, now)
        elif link is None:
            self.counters.unknown_peer += 1
            self._reply(identity, Refused(field="handshake", ours="Hello first", theirs=type(message).__name__))
        else:
            link.last_seen = now
            if isinstance(message, Ping):
                assert self.status is not None
                self._reply(identity, msgspec.structs.replace(self.status, sequence=message.sequence))
            else:
                self.deliver(Received(link.peer_id, message))

    def _on_hello(self, identity: bytes, hello: Hello, now: float) -> None:
        assert self.info is not None
        try:
            if hello.wire_version != wire.WIRE_VERSION:
                raise HandshakeError("wire_version", wire.WIRE_VERSION, hello.wire_version)
            if hello.info.role != "router":
                self.check_peer(hello.info)
        except HandshakeError as error:
            self.counters.refused += 1
            self._reply(identity, Refused(field=error.field, ours=str(error.ours), theirs=str(error.theirs)))
            return
        peer_id = peer_id_of(hello.info.node_id, hello.info.epoch)
        if peer_id not in self._links:
            for other in [o for o in self._links.values() if o.info and o.info.node_id == hello.info.node_id]:
                if other.socket is None:
                    self._drop(other.peer_id, "it came back with another epoch")
            link = _Link(peer_id, now, hello.info, identity)
            self._links[peer_id] = self._inbound[identity] = link
            self._watch_process(link)
            self.deliver(PeerUp(peer_id, hello.info))
        self._links[peer_id].last_seen = now
        self._reply(identity, Welcome(info=self.info))

    def _read_dealer(self, link: _Link, now: float) -> None:
        assert link.socket is not None
        assert link.ref is not None
        for _ in range(READ_BURST):
            if link.socket.closed:
                return
            try:
                message = wire.decode_from_node(link.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except msgspec.DecodeError:
                self.counters.undecodable += 1
                continue
            link.last_seen = now
            if isinstance(message, Welcome):
                self._on_welcome(link, message.info)
            elif isinstance(message, Refused):
                self._on_refused(link, message)
            elif link.info is not None and not isinstance(message, Status):
                self.deliver(Received(link.peer_id, message))

    def _on_welcome(self, link: _Link, info: NodeInfo) -> None:
        assert link.ref is not None
        if link.info is not None:
            return
        if info.epoch != link.ref.epoch or info.node_id != link.ref.node_id:
            ours, theirs = peer_id_of(link.ref.node_id, link.ref.epoch), peer_id_of(info.node_id, info.epoch)
            self._refuse(link, f"epoch differs (expected {ours}, found {theirs})")
            return
        try:
            self.check_peer(info)
        except HandshakeError as error:
            self._refuse(link, error.message)
            return
        link.info = info
        self._watch_process(link)
        self.deliver(PeerUp(link.peer_id, info))

    def _on_refused(self, link: _Link, message: Refused) -> None:
        if message.field == "handshake" and link.info is not None:
            # The sink dropped us for silence and forgot the handshake; hand-offs under way are void there.
            self._drop(link.peer_id, "it no longer knows this connection")
            return
        self.counters.refused += 1
        self._refuse(link, f"{message.field} differs (theirs {message.ours}, ours {message.theirs})")

    def _refuse(self, link: _Link, reason: str) -> None:
        assert link.ref is not None
        self._drop(link.peer_id, reason, deliver=False)
        self.deliver(PeerRefused(link.ref, reason))

    def _watch_process(self, link: _Link) -> None:
        assert self.info is not None
        assert link.info is not None
        if link.info.pid and link.info.host_id and link.info.host_id == self.info.host_id:
            try:
                link.pidfd = os.pidfd_open(link.info.pid)
            except (OSError, AttributeError):
                return
            self._poller.register(link.pidfd, zmq.POLLIN)

    def _connect_now(self, ref: PeerRef) -> None:
        peer_id = peer_id_of(ref.node_id, ref.epoch)
        link = self._links.get(peer_id)
        if link is not None:
            if link.info is not None:
                self.deliver(PeerUp(peer_id, link.info))
            return
        assert self.info is not None
        socket = self._context.socket(zmq.DEALER)
        self._configure(socket, server=False)
        socket.setsockopt(zmq.IDENTITY, peer_id_of(self.info.node_id, self.info.epoch).encode())
        socket.connect(ref.control_address)
        self._poller.register(socket, zmq.POLLIN)
        self._links[peer_id] = _Link(peer_id, time.monotonic(), socket=socket, ref=ref)
        self._next_heartbeat = 0.0

    def _heartbeat(self, now: float) -> None:
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + self.timeouts.heartbeat_s
        assert self.info is not None
        self._sequence += 1
        for link in self._links.values():
            if link.socket is not None:
                hello = Hello(wire_version=wire.WIRE_VERSION, info=self.info)
                message: Message = Ping(sequence=self._sequence) if link.info is not None else hello
                link.socket.send(wire.encode(message), zmq.NOBLOCK)
        if self._launcher is not None:
            beat = {"id": self.info.node_id, "pid": os.getpid(), "kind": self.info.role}
            with contextlib.suppress(zmq.Again):
                self._launcher.send(msgspec.msgpack.encode(beat), zmq.NOBLOCK)

    def _judge(self, now: float) -> None:
        for link in list(self._links.values()):
            if link.info is not None and now - link.last_seen > self.timeouts.peer_lost_s:
                self._drop(link.peer_id, f"silent for {self.timeouts.peer_lost_s:g} s")
            elif link.info is None and now - link.last_seen > self.timeouts.connect_s:
                self._refuse(link, f"no answer within {self.timeouts.connect_s:g} s")

    def _drop(self, peer_id: str, reason: str, deliver: bool = True) -> None:
        link = self._links.pop(peer_id, None)
        if link is None:
            return
        if link.socket is not None:
            self._poller.unregister(link.socket)
            link.socket.close(linger=200)
        else:
            self._inbound.pop(link.identity, None)
        if link.pidfd >= 0:
            self._poller.unregister(link.pidfd)
            os.close(link.pidfd)
        if deliver and link.info is not None:
            self.counters.lost_peers += 1
            self.deliver(PeerLost(peer_id, link.info, reason))

    def _send_now(self, peer_id: str, payload: bytes) -> None:
        link = self._links.get(peer_id)
        if link is None or link.info is None:
            self.counters.unroutable += 1
        elif link.socket is not None:
            link.socket.send(payload, zmq.NOBLOCK)
        else:
            self._reply_bytes(link.identity, payload)

    def _reply(self, identity: bytes, message: Message) -> None:
        self._reply_bytes(identity, wire.encode(message))

    def _reply_bytes(self, identity: bytes, payload: bytes) -> None:
        try:
            self._router.send_multipart([identity, payload], zmq.NOBLOCK)
        except zmq.ZMQError:  # EHOSTUNREACH: the connection is gone; silence will tell
            self.counters.unroutable += 1

    def _configure(self, socket: zmq.Socket, server: bool) -> None:
        """No high-water mark: memory is bounded by judging silent peers, a full queue would drop or hang."""
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.MAXMSGSIZE, 256 << 20)
        if not self.keys.curve:
            return
        if server:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self.keys.curve_keypair("server")
        else:
            socket.curve_publickey, socket.curve_secretkey = self.keys.curve_keypair("client")
            socket.curve_serverkey = self.keys.curve_keypair("server")[0]

    def _close(self) -> None:
        while self._commands:
            self._commands.popleft()()
        for link in list(self._links.values()):
            self._drop(link.peer_id, "", deliver=False)
        self._router.close(linger=500)
        if self._launcher is not None:
            self._launcher.close(linger=0)
        self._context.term()
        os.close(self._wake_read)
