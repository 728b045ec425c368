"""The queue of messages and connection orders from a node's other threads to the thread that has the sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.parts import Message, PeerRef
from tandem.engine.process.host_names import Found


class FoundPeer(NamedTuple):
    """A node to connect to whose host's name was looked up."""

    ref: PeerRef
    found: Found


Order = tuple[NodeKey, bytes] | PeerRef | FoundPeer
"""A peer and an encoded message to it, or a node to connect to."""


class Outgoing:
    """What the control plane is to send: `send` and `connect` may be called from any thread, and keep their order;
    `take` belongs to the control plane."""

    def __init__(self, wake: Callable[[], None], note: Callable[[Message], None] | None = None) -> None:
        """`wake`: makes the control plane look here. `note` is told of each message."""
        self._wake, self._note = wake, note
        self._orders: deque[Order] = deque()

    def send(self, to: NodeKey, message: Message) -> None:
        """Queues a message; to a peer that is not connected it is counted and dropped (the verb will be resent)."""
        if self._note is not None:
            self._note(message)
        self._put((to, codec.encode(message)))

    def connect(self, ref: PeerRef) -> None:
        """Connects to a node, idempotent. Answered by PeerUp, PeerRefused or, `connect_s` after its host's name was
        found, PeerRefused."""
        self._put(ref)

    def connect_to(self, ref: PeerRef, found: Found) -> None:
        """Goes on with an order to connect: `found` is the address of `ref` by number, or why there is none."""
        self._put(FoundPeer(ref, found))

    def take(self) -> Iterator[Order]:
        while self._orders:
            yield self._orders.popleft()

    def _put(self, order: Order) -> None:
        self._orders.append(order)
        self._wake()
