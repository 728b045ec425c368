"""The control connection to one node: handshake, heartbeat, resends, and the verdict that the node is lost.

A ZMQ DEALER read by the event loop through its file descriptor, without a task. That descriptor is edge-triggered, so
everything is read until the socket is empty, and after each send the socket is looked at again.
The link lives as long as the router wants the address: a node that was lost is greeted until it answers again, over a
new connection every `peer_lost_s`. What can't be opened, or fails in a way that nobody expected, costs this link alone:
it closes, and opens again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Protocol

import zmq

from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.errors import DecodeError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.adapters import AdapterLoaded, Adapters, AdaptersKnown, LoadAdapter
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Ping, Refused, Status, Welcome
from tandem.engine.contracts.wire.operate import Drain, Lean, Story, TellStory
from tandem.engine.contracts.wire.parts import Message, NodeInfo
from tandem.engine.contracts.wire.profile import Profiled, StartProfile, StopProfile
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancel,
    Cancelled,
    Migrate,
    Migrated,
    Pooled,
    PromptLogprobs,
    RequestFailed,
    Submit,
    Tokens,
)
from tandem.engine.process.host_names import Found, look_up, needs_look_up
from tandem.engine.process.process_log import RateLimited
from tandem.router.nodes.node_socket import FAILED, NodeSocket
from tandem.router.nodes.outbox import Outbox
from tandem.router.placing.view import NodeView

logger = logging.getLogger(__name__)
repeated = RateLimited(logger)

READ_BURST_S = 0.01  # reading before other work gets its turn; a guess
SILENT_HEARTBEATS = 3  # unanswered ones, before a node gets nothing that others can take; a guess
REFUSED_HANDSHAKES = 3  # in a row, before the node's key is in doubt: a node that just ends may fail one; a guess
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # guesses: before what can't be opened is tried again
Verb = (
    Submit
    | Cancel
    | Migrate
    | StartProfile
    | StopProfile
    | LoadAdapter
    | Adapters
    | AdaptersKnown
    | Drain
    | Lean
    | TellStory
)
AboutAdapters = AdapterLoaded | Adapters | AdaptersKnown
RequestMessage = Accepted | Tokens | PromptLogprobs | Pooled | RequestFailed | Cancelled | Migrated


class LinkListener(Protocol):
    """What hears of a link's events, on the event loop. After `node_lost` nothing of that epoch is delivered."""

    def node_up(self, view: NodeView) -> None: ...

    def node_status(self, view: NodeView) -> None: ...

    def node_lost(self, view: NodeView, reason: str) -> None: ...

    def node_message(self, key: NodeKey, message: RequestMessage) -> None: ...

    def node_profiled(self, key: NodeKey, message: Profiled) -> None: ...

    def node_told(self, key: NodeKey, message: Story) -> None: ...

    def node_has_adapters(self, key: NodeKey, message: AboutAdapters) -> None: ...


class NodeLink:
    """The connection to one node. Call `open()` on a running event loop, then `tick()` at least every `heartbeat_s / 2`
    and `close()` at the end."""

    def __init__(
        self,
        address: str,
        hello: NodeInfo,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ClusterKeys,
        timeouts: Timeouts,
        listener: LinkListener,
    ) -> None:
        self.address = address
        self.view: NodeView | None = None  # None until Welcome and the first Status
        self.ping_sequence = 0
        self.refusal, self.refused_field = (
            "",
            "",
        )  # why the node refuses this router, and by which field; "": it doesn't
        self.trouble = ""  # why no connection comes about, for people
        self.outbox = Outbox(timeouts.resend_s, timeouts.connect_s)
        self.num_undecodable = 0
        self.num_failed_handshakes = 0  # of ZMQ: the keys differ, or whatever listens there speaks otherwise
        self._version = hello.version
        self._hello = codec.encode(Hello(wire_version=WIRE_VERSION, info=hello))
        self._identity = str(hello.key).encode()
        self._context, self._keys, self._timeouts, self._listener = context, keys, timeouts, listener
        self._welcomed: NodeInfo | None = None
        self._last_seen = self._next_beat = 0.0
        self._socket: NodeSocket | None = None
        self._is_closed = True
        self._next_open, self._pause_s = 0.0, FIRST_PAUSE_S
        self._num_refused_in_row = 0
        # What is said goes to finished connections only. (ZMQ's own IMMEDIATE drops, when one ends, what came over it.)
        self._is_connected = False

    @property
    def key(self) -> NodeKey | None:
        return self.view.key if self.view is not None else None

    def open(self) -> None:
        """Opens the socket, on a running event loop, once the host's name, if it is one, has been looked up. What can't
        be opened now is tried again by `tick`."""
        assert self._socket is None
        self._is_closed, self._is_connected = False, False
        if not needs_look_up(self.address):
            self._connect(self.address)
        elif self._next_open != math.inf:
            self._next_open = math.inf  # until the look-up has ended
            look_up(self.address, self._on_looked_up, asyncio.get_running_loop())

    def _on_looked_up(self, found: Found) -> None:
        self._next_open = 0.0
        if self._is_closed or self._socket is not None:
            return
        if isinstance(found, str):
            self._connect(found)
        else:
            self._cannot_open(found)

    def _connect(self, address: str) -> None:
        self._welcomed, self._last_seen, self._next_beat = None, time.monotonic(), 0.0
        try:
            self._socket = NodeSocket(
                self._context, address, self._identity, self._keys, self._read, self._read_monitor
            )
        except Exception as error:  # whatever an address may do to ZMQ, and no descriptors or sockets left
            self._cannot_open(error)
        else:
            asyncio.get_running_loop().call_soon(self._read_monitor)

    def _cannot_open(self, error: Exception) -> None:
        self._pause(time.monotonic(), f"no connection to {self.address[:200]!r} can be opened: {error}")

    def _pause(self, now: float, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            repeated.error("%s; it is tried again", trouble[:500], key=self.address)
        self._next_open = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def close(self, linger_ms: int = 200) -> None:
        """Closes the connection. `linger_ms`: how long what was said last may still go out. May be called in every
        state, and again."""
        self._is_closed, self._is_connected = True, False
        socket, self._socket = self._socket, None
        self.view, self._welcomed = None, None
        self.outbox.clear()
        if socket is not None:
            socket.close(linger_ms)

    def send(self, message: Verb, now: float) -> None:
        """Sends a verb, and, of those that are sent again, again until it is answered, the node is lost or the deadline
        passed."""
        payload = codec.encode(message)
        self._send(payload)
        if isinstance(message, Submit | Cancel):
            self.outbox.sent(message, payload, now)

    def tick(self, now: float, own_pause_s: float = 0.0) -> None:
        """Sends heartbeats, resends verbs and looks for a lost node. `own_pause_s`: how long this process itself stood
        still, during which the node's silence proves nothing."""
        self._last_seen += own_pause_s
        if self._socket is None:
            if not self._is_closed and now >= self._next_open:
                self.open()
            return
        if self.view is not None and now - self._last_seen > self._timeouts.peer_lost_s:
            self._lost(f"silent for {now - self._last_seen:.1f} s")
        elif self.view is None and now - self._last_seen > self._timeouts.peer_lost_s:
            self._is_unreachable()
            self.close()  # whatever answers no greeting: another connection may reach it
            self.open()
        if self.view is not None:
            self.view.note_silence(now - self._last_seen > SILENT_HEARTBEATS * self._timeouts.heartbeat_s)
        for payload in self.outbox.due(now):
            self._send(payload)
        if now >= self._next_beat:
            self._next_beat = now + self._timeouts.heartbeat_s
            self._beat()
        self._read()
        self._read_monitor()

    def fail(self) -> None:
        """Ends the connection after a failure that nobody expected; the link goes on after a pause."""
        now = time.monotonic()
        try:
            self._forget("an error of this router")
        finally:
            self.close(linger_ms=0)
            self._is_closed = False
            self._pause(now, f"the connection to {self.address} failed by an error of this router")

    def _is_unreachable(self) -> None:
        self.refusal, self.refused_field = "", ""  # whoever refused is gone
        if not self.trouble:
            self.trouble = f"{self.address} does not answer"
            logger.warning("no node answers at %s, which is among the nodes that this router knows", self.address)

    def _beat(self) -> None:
        if self._welcomed is None:
            self._send(self._hello)
        else:
            self.ping_sequence += 1
            self._send(codec.encode(Ping(sequence=self.ping_sequence)))

    def _send(self, payload: bytes) -> None:
        if self._socket is None or not self._is_connected:  # verbs and heartbeats are sent again
            return
        if self._socket.send(payload):
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self, burst_s: float = READ_BURST_S) -> None:
        now = time.monotonic()
        end = now + burst_s
        while now < end:
            if self._socket is None:
                return
            payload = self._socket.receive()
            if payload is None:
                return
            now = time.monotonic()
            try:
                message = codec.decode_from_node(payload)
            except DecodeError:
                self.num_undecodable += 1
                continue
            self._last_seen = now
            try:
                self._on_message(message)
            except Exception:  # of what the message is about, never of the messages after it
                repeated.exception("a %s of the node at %s failed", type(message).__name__, self.address)
        asyncio.get_running_loop().call_soon(self._read)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self._on_welcome(message.info)
        elif isinstance(message, Status):
            self._on_status(message)
        elif isinstance(message, Refused):
            self._on_refused(message)
        elif self.view is not None and isinstance(message, Profiled):
            self._listener.node_profiled(self.view.key, message)
        elif self.view is not None and isinstance(message, Story):
            self._listener.node_told(self.view.key, message)
        elif self.view is not None and isinstance(message, AboutAdapters):
            self._listener.node_has_adapters(self.view.key, message)
        elif self.view is not None and isinstance(message, RequestMessage):
            if isinstance(message, Tokens):
                for delta in message.deltas if self.outbox else ():
                    self.outbox.answered(delta)
            elif not isinstance(message, PromptLogprobs | Migrated):
                self.outbox.answered(message)
            self._listener.node_message(self.view.key, message)

    def _on_welcome(self, info: NodeInfo) -> None:
        known = self._welcomed
        if known is not None and known.key == info.key:
            return
        if self.view is not None:
            self._forget("it came back with another epoch")
        self._welcomed, self.refusal, self.refused_field = info, "", ""
        self.trouble, self._pause_s = "", FIRST_PAUSE_S
        self._beat()

    def _on_status(self, status: Status) -> None:
        info = self._welcomed
        if info is None or (status.node_id, status.epoch) != info.key:
            return  # a late answer of an older epoch; its successor refuses our pings, which ends the old one
        if self.view is not None:
            self.view.note_status(status, self._last_seen)
            self._listener.node_status(self.view)
            return
        self.view = NodeView(info, status, self._last_seen)
        other = f", of version {info.version or 'unknown'} where this router is of {self._version}"
        is_alike = info.version == self._version
        logger.info("node %s (%s) is up at %s%s", info.node_id, info.role, self.address, "" if is_alike else other)
        self._listener.node_up(self.view)

    def _on_refused(self, message: Refused) -> None:
        if message.field == "handshake":  # it doesn't know this connection (any more)
            if self._welcomed is not None:
                self._lost("it no longer knows this connection")
            return
        refusal = f"{message.field} differs (theirs {message.ours}, ours {message.theirs})"
        if message.field == "wire_version":
            refusal += "; it needs a router of its own version (docs/upgrades.md)"
        if refusal != self.refusal:
            self.refusal, self.refused_field = refusal, message.field
            logger.error("the node at %s refuses this router: %s; nothing is sent to it", self.address, refusal)

    def _read_monitor(self) -> None:
        while self._socket is not None and (event := self._socket.event()) is not None:
            self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_connected:
                self._num_refused_in_row = 0
                self._beat()
            elif event in FAILED:
                self._on_failed_handshake()
            elif self._welcomed is not None:
                # Mostly the process ended: a drained one says its last words just before. If it lives: tokens that were
                # on the way are gone, and nobody sends them again.
                self._read(math.inf)
                self._lost("the connection broke")

    def _on_failed_handshake(self) -> None:
        """ZMQ does not tell apart a wrong key, a missing one and a program that speaks otherwise."""
        self.num_failed_handshakes += 1
        self._num_refused_in_row += 1
        if self._num_refused_in_row == REFUSED_HANDSHAKES:
            self.trouble = f"{self.address} refuses our key: is --cluster-secret-file the same file there?"
            logger.error("%s (Or another program than Tandem listens there.)", self.trouble)

    def _lost(self, reason: str) -> None:
        """Closes the socket: what is still queued for a lost node must not reach a successor at its address."""
        try:
            self._forget(reason)
        finally:  # whatever the listener does
            self.close(linger_ms=0)
            self.open()

    def _forget(self, reason: str) -> None:
        view, self.view, self._welcomed = self.view, None, None
        self.outbox.clear()
        if view is not None:
            view.note_lost()
            if view.draining:
                logger.info("node %s at %s left", view.info.node_id, self.address)
            else:
                logger.warning("node %s at %s is lost: %s", view.info.node_id, self.address, reason)
            self._listener.node_lost(view, reason)
