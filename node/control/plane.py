"""A node's control sockets: one thread owns them all, everyone else talks to it through a queue (outgoing.py).

The node binds a ROUTER socket, to which routers and other nodes connect; it connects a DEALER to each node that it
wants something of. Two nodes are one link, whoever connected; both may have. Liveness is judged here, both ways: a peer
is lost when it was silent for `peer_lost_s`, when its process is seen to exit (same host: pidfd), or when it comes back
with another epoch. Delivered events reach the step loop in the order in which they happened; after PeerLost nothing of
that epoch is delivered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import zmq

from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.errors import DecodeError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Ping, Refused, Status, Welcome
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef
from tandem.engine.process.host_names import Found, look_up, needs_look_up
from tandem.engine.process.process_log import RateLimited
from tandem.node.control.board import LoopBoard
from tandem.node.control.events import ControlCounters, ControlEvent, PeerLost, PeerRefused, PeerUp, Received
from tandem.node.control.handshake import MAX_SHOWN, Handshake
from tandem.node.control.links import ControlLinks, Peer
from tandem.node.control.outgoing import FoundPeer, Outgoing
from tandem.node.control.sockets import ControlSockets, Socket
from tandem.node.control.stall_report import TurnClock

READ_BURST = 512  # messages read from one socket before the others get their turn; a guess
STANDSTILL_S = 1.0  # a turn that takes longer is told in the log: peers may take this node for lost; a guess
logger = logging.getLogger(__name__)
limited = RateLimited(logger)


class ControlPlane:
    """The thread of a node's control sockets. `start()` it once they are bound and `board` has a status; all else is
    its thread's."""

    def __init__(
        self,
        sockets: ControlSockets,
        info: NodeInfo,
        timeouts: Timeouts,
        outgoing: Outgoing,
        board: LoopBoard,
        deliver: Callable[[ControlEvent], None],
        check_peer: Callable[[NodeInfo], None],
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`info`: this node's own. `outgoing` wakes `sockets`. `board`: while the step loop is stuck this node is
        silent. `check_peer` raises HandshakeError when a node peer must be refused. `on_beat` is called with each
        heartbeat, from the thread."""
        self.counters = ControlCounters()
        self._sockets, self._info, self._timeouts = sockets, info, timeouts
        self._outgoing, self._board = outgoing, board
        self._deliver, self._on_beat = deliver, on_beat
        self._links = ControlLinks(sockets)
        self._looked_up: set[NodeKey] = set()  # peers whose host's name is being looked up
        self._handshake = Handshake(check_peer)
        self._stopping = False
        self._next_heartbeat = 0.0
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, name="tandem-io", daemon=True)

    def start(self) -> None:
        assert self._board.status is not None, "peers are told of a status"
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Flushes what was queued (within a second) and ends the thread."""
        self._stopping = True
        self._sockets.wake()
        self._thread.join(timeout_s)

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        last_turn, clock = time.monotonic(), TurnClock(STANDSTILL_S + self._timeouts.heartbeat_s / 2)
        while not self._stopping:
            ready = self._sockets.poll(self._timeouts.heartbeat_s / 2)
            now = time.monotonic()
            if standstill := clock.turned(now):
                logger.warning("no message was read or answered: %s", standstill)
            # When this process itself stood still, the peers' silence proves nothing.
            self._links.forgive(now - last_turn - 2 * self._timeouts.heartbeat_s)
            last_turn = now
            self._carry_out_orders()
            if self._sockets.router in ready:
                self._read_router(now)
            for link in self._links.all():
                with self._contained(link):
                    self._attend(link, ready, now)
                    self._judge(link, now)
            self._heartbeat(now)
        self._close()

    def _carry_out_orders(self) -> None:
        for order in self._outgoing.take():
            if isinstance(order, PeerRef):
                self._connect_now(order)
            elif isinstance(order, FoundPeer):
                self._open(order.ref, order.found)
            else:
                self._count(self._links.send(*order))

    @contextmanager
    def _contained(self, link: Peer | None) -> Iterator[None]:
        """What goes wrong with a peer, and nobody expected, costs the link to it. Anything else that is raised on this
        thread ends it, and with it the process."""
        try:
            yield
        except Exception as error:
            self.counters.failures += 1
            peer = "a stranger" if link is None else link.key
            limited.exception("control messages of %s failed; its connection is dropped", peer)
            if link is not None:
                self._give_up(link, f"its messages failed here: {error!r}")

    def _attend(self, link: Peer, ready: set[Socket | int], now: float) -> None:
        if link.socket is not None and link.socket in ready:
            self._read_dealer(link, now)
        elif link.pidfd >= 0 and link.pidfd in ready:
            self._drop(link.key, "its process exited")

    def _read_router(self, now: float) -> None:
        for _ in range(READ_BURST):
            try:
                identity, payload = self._sockets.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                self.counters.undecodable += 1
                continue
            with self._contained(self._links.inbound(identity)):
                self._on_inbound(identity, payload, now)

    def _on_inbound(self, identity: bytes, payload: bytes, now: float) -> None:
        link = self._links.inbound(identity)
        try:
            message = codec.decode_to_node(payload)
        except DecodeError as error:
            self.counters.undecodable += 1
            if link is None:
                self._reply(identity, Refused(field="wire_version", ours=str(WIRE_VERSION), theirs=str(error)))
            return
        if isinstance(message, Hello):
            self._on_hello(identity, message, now)
        elif link is None:
            self.counters.unknown_peer += 1
            self._reply(identity, Refused(field="handshake", ours="Hello first", theirs=type(message).__name__))
        else:
            link.last_seen = now
            if isinstance(message, Ping):
                if self._board.is_stuck():
                    return
                self._reply(identity, self._board.answer(message.sequence))
            else:
                self._deliver(Received(link.key, message))

    def _on_hello(self, identity: bytes, hello: Hello, now: float) -> None:
        refusal = self._handshake.refusal(hello)
        if refusal is not None:
            self.counters.refused += 1
            self._reply(identity, refusal)
            return
        key = hello.info.key
        link = self._links.get(key)
        if link is None:
            for other in self._links.all():
                if other.socket is None and other.info and other.info.node_id == hello.info.node_id:
                    self._drop(other.key, "it came back with another epoch")
            link = Peer(key, now, hello.info, identity)
            self._links.add(link)
            self._links.watch_process(link, self._info.host_id)
            self._deliver(PeerUp(hello.info))
        else:
            # A connection that another of the same peer has replaced loses its name: the last Hello over it comes under
            # one that ZMQ made up, before or after that of the new connection.
            if link.identity != str(key).encode():
                self._links.note_inbound(link, identity)
            self._note_up(link, hello.info)
        link.last_seen = now
        self._reply(identity, Welcome(info=self._info))

    def _note_up(self, link: Peer, info: NodeInfo) -> None:
        """Notes a peer once: it is greeted over one connection; that it may be over another changes nothing."""
        if link.info is None:
            link.info = info
            self._links.watch_process(link, self._info.host_id)
            self._deliver(PeerUp(info))

    def _read_dealer(self, link: Peer, now: float) -> None:
        assert link.socket is not None
        assert link.ref is not None
        for _ in range(READ_BURST):
            if link.socket.closed:
                return
            try:
                message = codec.decode_from_node(link.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except DecodeError:
                self.counters.undecodable += 1
                continue
            link.last_seen = now
            if isinstance(message, Welcome):
                self._on_welcome(link, message.info)
            elif isinstance(message, Refused):
                self._on_refused(link, message)
            elif link.info is not None and not isinstance(message, Status):
                self._deliver(Received(link.key, message))

    def _on_welcome(self, link: Peer, info: NodeInfo) -> None:
        assert link.ref is not None
        if link.was_welcomed:
            return
        problem = self._handshake.problem(link.ref, info)
        if problem:
            self._refuse(link, problem)
            return
        link.was_welcomed = True
        self._note_up(link, info)

    def _on_refused(self, link: Peer, message: Refused) -> None:
        if message.field == "handshake" and link.info is not None:
            # The sink dropped us for silence and forgot the handshake; hand-offs under way are void there.
            self._drop(link.key, "it no longer knows this connection", is_alive=True)
            return
        self.counters.refused += 1
        self._refuse(link, f"{message.field} differs (theirs {message.ours}, ours {message.theirs})")

    def _refuse(self, link: Peer, reason: str) -> None:
        assert link.ref is not None
        self._drop(link.key, reason)  # it may have been up over its own connection to us
        self._deliver(PeerRefused(link.ref, reason))

    def _connect_now(self, ref: PeerRef) -> None:
        link = self._links.get(ref.key)
        if link is not None:
            if link.info is not None:
                self._deliver(PeerUp(link.info))
            return
        if not needs_look_up(ref.control_address):
            self._open(ref, ref.control_address)
        elif ref.key not in self._looked_up:
            self._looked_up.add(ref.key)
            look_up(ref.control_address, partial(self._outgoing.connect_to, ref))

    def _open(self, ref: PeerRef, found: Found) -> None:
        """Opens the connection. `found`: the peer's address by number, or why there is none."""
        self._looked_up.discard(ref.key)
        if self._links.get(ref.key) is not None:  # it has connected while its name was looked up
            return
        # A second connection under this node's name would take it from the first, which may be all right: `ref` may
        # name a life of that node that is over, or another node at its address.
        name = str(self._info.key).encode()
        identity = b"" if self._links.connects_to(ref) else name
        try:
            if not isinstance(found, str):
                raise found
            socket = self._sockets.open_dealer(found, identity)
        except (zmq.ZMQError, OSError) as error:  # no address, or no descriptor is left: it costs this peer, for now
            self.counters.refused += 1
            self._deliver(PeerRefused(ref, f"can't connect: {str(error)[:MAX_SHOWN]}"))
            return
        self._links.add(Peer(ref.key, time.monotonic(), socket=socket, ref=ref))
        self._next_heartbeat = 0.0

    def _heartbeat(self, now: float) -> None:
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + self._timeouts.heartbeat_s
        if self._board.is_stuck():
            return
        self._sequence += 1
        for link in self._links.all():
            if link.socket is not None:
                hello = Hello(wire_version=WIRE_VERSION, info=self._info)
                message: Message = Ping(sequence=self._sequence) if link.was_welcomed else hello
                self._links.tell(link, codec.encode(message))
        self._on_beat()

    def _judge(self, link: Peer, now: float) -> None:
        if link.info is not None and now - link.last_seen > self._timeouts.peer_lost_s:
            self._drop(link.key, f"silent for {self._timeouts.peer_lost_s:g} s")
        elif link.info is None and now - link.last_seen > self._timeouts.connect_s:
            self._refuse(link, f"no answer within {self._timeouts.connect_s:g} s")

    def _give_up(self, link: Peer, reason: str) -> None:
        if link.info is None and link.ref is not None:
            self._refuse(link, reason)
        else:
            self._drop(link.key, reason)

    def _drop(self, key: NodeKey, reason: str, is_alive: bool = False) -> None:
        link = self._links.remove(key)
        if link is not None and link.info is not None:
            self.counters.lost_peers += 1
            self._deliver(PeerLost(link.info, reason, is_alive))

    def _reply(self, identity: bytes, message: Message) -> None:
        self._count(self._sockets.reply(identity, codec.encode(message)))

    def _count(self, routed: bool) -> None:
        self.counters.unroutable += not routed

    def _close(self) -> None:
        self._carry_out_orders()
        status = self._board.status
        for link in self._links.all():
            if status is not None and status.draining and link.info is not None and link.identity:
                self._reply(link.identity, status)  # so that this end is no failure to a router
            self._links.remove(link.key)
        self._sockets.close()
