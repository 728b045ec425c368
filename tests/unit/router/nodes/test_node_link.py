"""A router's connection to one node, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from waiting import PATIENCE_S, soon

from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import Refused, Status, Welcome
from tandem.engine.contracts.wire.parts import Message, NodeInfo
from tandem.engine.contracts.wire.requests import TokenDelta, Tokens
from tandem.router.nodes.link import NodeLink

NODE = NodeInfo(node_id="d", epoch=2, role="decode")


class HandNode:
    """The node's end of the link: a ROUTER socket in the hands of a test."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def hear(self) -> bytes:
        """Who spoke."""
        await soon(lambda: self._socket.poll(0), "the router to speak")
        identity, _ = self._socket.recv_multipart()
        return identity

    def say(self, identity: bytes, *messages: Message) -> None:
        for message in messages:
            self.say_bytes(identity, codec.encode(message))

    def say_bytes(self, identity: bytes, payload: bytes) -> None:
        self._socket.send_multipart([identity, payload])

    def end(self) -> None:
        """As a process that ends: what was said goes out first."""
        self._socket.close(linger=1000)
        self._context.term()


class Heard:
    """What a link's listener is told, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def node_up(self, view: object) -> None:
        self.events.append("up")

    def node_status(self, view: object) -> None: ...

    def node_lost(self, view: object, reason: str) -> None:
        self.events.append(f"lost: {reason}")

    def node_message(self, key: object, message: object) -> None:
        assert isinstance(message, Tokens)
        self.events += [f"token {delta.output_index}" for delta in message.deltas]


@contextmanager
def linked(node: HandNode, heard: Heard) -> Iterator[NodeLink]:
    """A link that is open to `node`."""
    hello, context = NodeInfo(node_id="r", epoch=1, role="router"), zmq.Context()
    link = NodeLink(node.address, hello, context, ClusterKeys(b"", curve=False), Timeouts(), heard)  # type: ignore[arg-type]
    link.open()
    try:
        yield link
    finally:
        link.close()
        context.destroy(linger=0)


async def test_the_last_words_of_a_node_that_ends_are_heard() -> None:
    """However late the router looks: its loop stands still while the node speaks and goes."""
    node, heard = HandNode(), Heard()
    with linked(node, heard) as link:
        identity = await node.hear()
        node.say(identity, Welcome(info=NODE), Status(node_id="d", epoch=2))
        await soon(lambda: heard.events == ["up"], "the node to be up")
        node.say(identity, *(Tokens(deltas=(TokenDelta("r", 0, 0, index, (7,)),)) for index in range(300)))
        node.end()
        assert link._socket._monitor.poll(int(PATIENCE_S * 1000)), "the end of the connection was not seen"
        link._read_monitor()
        assert heard.events[1:] == [*(f"token {index}" for index in range(300)), "lost: the connection broke"]


async def test_messages_that_nobody_can_read_are_counted_and_the_link_goes_on() -> None:
    node, heard = HandNode(), Heard()
    with linked(node, heard) as link:
        identity = await node.hear()
        refused = codec.encode(Refused(field="f", ours="o", theirs="t"))
        for payload in (b"", refused[:-1] + b"\xff", refused.replace(b"Refused", b"Ref\xff\xffed")):
            node.say_bytes(identity, payload)
        node.say(identity, Welcome(info=NODE), Status(node_id="d", epoch=2))
        await soon(lambda: heard.events == ["up"], "the node to be up")
        assert link.num_undecodable == 3
    node.end()
