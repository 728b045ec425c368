"""Two control planes, and raw sockets, over real ZMQ on loopback."""

from __future__ import annotations

import contextlib
import ctypes
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.errors import ConfigError, HandshakeError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.security import ClusterKeys, load_cluster_keys
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Ping, Refused, Status, Welcome
from tandem.engine.contracts.wire.handoff import KVClaim, KVWait
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef
from tandem.engine.contracts.wire.requests import Cancel
from tandem.node.control.board import LoopBoard
from tandem.node.control.events import PeerLost, PeerRefused, PeerUp, Received
from tandem.node.control.outgoing import Outgoing
from tandem.node.control.plane import ControlPlane
from tandem.node.control.sockets import ControlSockets, advertised

PATIENT = Timeouts(heartbeat_s=0.04, peer_lost_s=2.0, connect_s=PATIENCE_S)
QUICK = replace(PATIENT, peer_lost_s=0.4)  # where somebody is to be lost
HASTY = replace(PATIENT, connect_s=0.5)  # where nobody is to answer
PLAIN = ClusterKeys(b"loopback only", curve=False)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("", "tcp://0.0.0.0:7001"),
        ("10.0.0.1", "tcp://10.0.0.1:7001"),
        ("node-1.nodes", "tcp://node-1.nodes:7001"),
        ("fd00::1", "tcp://[fd00::1]:7001"),
    ],
)
def test_an_advertised_host_takes_the_place_of_the_bound_one(host: str, expected: str) -> None:
    assert advertised("tcp://0.0.0.0:7001", host) == expected


class Plane:
    """One control plane; `events` is what the step loop would get."""

    def __init__(
        self,
        node_id: str,
        epoch: int = 1,
        model: str = "m",
        keys: ClusterKeys = PLAIN,
        host_id: str = "",
        port: int = 0,
        timeouts: Timeouts = PATIENT,
    ) -> None:
        self.events: list = []
        sockets = ControlSockets(keys)
        address = sockets.bind("127.0.0.1", port)
        self.info = NodeInfo(
            node_id=node_id, epoch=epoch, role="decode", control_address=address, model_name=model, host_id=host_id
        )
        self.board, self.outgoing = LoopBoard(), Outgoing(sockets.wake)
        self.board.show(Status(node_id=node_id, epoch=epoch, num_free_blocks=5))
        self.control = ControlPlane(
            sockets, self.info, timeouts, self.outgoing, self.board, self.events.append, self._check
        )
        self.key = NodeKey(node_id, epoch)
        self.ref = PeerRef(node_id, epoch, address)
        self.control.start()

    def _check(self, theirs: NodeInfo) -> None:
        if theirs.model_name != self.info.model_name:
            raise HandshakeError("identity.config", self.info.model_name, theirs.model_name)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def stop(self) -> None:
        self.control.stop()


@pytest.fixture
def make() -> Iterator[Callable[..., Plane]]:
    planes: list[Plane] = []

    def build(*args: object, **kwargs: object) -> Plane:
        planes.append(Plane(*args, **kwargs))  # type: ignore[arg-type]
        return planes[-1]

    yield build
    for plane in planes:
        plane.stop()


@pytest.fixture
def dial() -> Iterator[Callable[[Plane], zmq.Socket]]:
    """A plain DEALER to a plane."""
    context = zmq.Context()
    sockets: list[zmq.Socket] = []

    def connect(plane: Plane, identity: bytes = b"") -> zmq.Socket:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if identity:
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(plane.info.control_address)
        sockets.append(socket)
        return socket

    yield connect
    for socket in sockets:
        socket.close()
    context.term()


def ask(socket: zmq.Socket, message: Message | bytes) -> Message:
    socket.send(message if isinstance(message, bytes) else codec.encode(message))
    assert socket.poll(int(PATIENCE_S * 1000)), "no answer"
    return codec.decode_from_node(socket.recv())


def hello(node_id: str = "router", epoch: int = 1, version: int = WIRE_VERSION) -> Hello:
    return Hello(wire_version=version, info=NodeInfo(node_id=node_id, epoch=epoch, role="router"))


def connected(make: Callable[..., Plane], timeouts: Timeouts = PATIENT) -> tuple[Plane, Plane]:
    sink, source = make("sink", timeouts=timeouts), make("source", 2, timeouts=timeouts)
    source.outgoing.connect(sink.ref)
    wait_until(lambda: source.of(PeerUp) and sink.of(PeerUp))
    return sink, source


def test_two_nodes_greet_and_talk_both_ways(make: Callable[..., Plane]) -> None:
    sink, source = connected(make)
    assert source.of(PeerUp) == [PeerUp(sink.info)]
    assert sink.of(PeerUp) == [PeerUp(source.info)]
    source.outgoing.send(sink.key, Cancel(request_id="r", attempt=0))
    wait = KVWait(request_id="r", attempt=0)
    sink.outgoing.send(source.key, wait)
    wait_until(lambda: sink.of(Received) and source.of(Received))
    assert sink.of(Received) == [Received(source.key, Cancel(request_id="r", attempt=0))]
    assert source.of(Received) == [Received(sink.key, wait)]
    time.sleep(1.25 * PATIENT.peer_lost_s)
    assert not sink.of(PeerLost), "heartbeats did not keep the connection"
    assert not source.of(PeerLost)


def test_connecting_again_is_answered_again(make: Callable[..., Plane]) -> None:
    sink, source = connected(make)
    source.outgoing.connect(sink.ref)
    wait_until(lambda: len(source.of(PeerUp)) == 2)
    assert len(sink.of(PeerUp)) == 1


def test_another_model_is_refused_by_name(make: Callable[..., Plane]) -> None:
    """A peer greets at once, and again with each heartbeat until it is answered, which here is never."""
    once = replace(PATIENT, heartbeat_s=PATIENCE_S)
    sink, source = make("sink"), make("source", 2, model="other", timeouts=once)
    source.outgoing.connect(sink.ref)
    wait_until(lambda: source.of(PeerRefused))
    (refused,) = source.of(PeerRefused)
    assert refused.ref == sink.ref
    assert "identity.config" in refused.reason
    assert sink.control.counters.refused == 1
    assert not sink.events


def test_a_sink_of_another_life_is_refused(make: Callable[..., Plane]) -> None:
    sink, source = make("sink", 5), make("source", 2)
    source.outgoing.connect(PeerRef("sink", 4, sink.info.control_address))
    wait_until(lambda: source.of(PeerRefused))
    assert "epoch" in source.of(PeerRefused)[0].reason


def test_nobody_there_is_refused_in_time(make: Callable[..., Plane]) -> None:
    source = make("source", timeouts=HASTY)
    source.outgoing.connect(PeerRef("nobody", 1, "tcp://127.0.0.1:1"))
    wait_until(lambda: source.of(PeerRefused))
    assert "no answer" in source.of(PeerRefused)[0].reason


def test_a_wrong_wire_version_is_refused(make: Callable[..., Plane], dial: Callable[[Plane], zmq.Socket]) -> None:
    node = make("node")
    answer = ask(dial(node), hello(version=WIRE_VERSION + 1))
    assert isinstance(answer, Refused)
    assert (answer.field, answer.ours, answer.theirs) == (
        "wire_version",
        str(WIRE_VERSION),
        str(WIRE_VERSION + 1),
    )
    assert not node.events


def test_bytes_that_are_no_message(make: Callable[..., Plane], dial: Callable[[Plane], zmq.Socket]) -> None:
    node = make("node")
    socket = dial(node)
    not_utf8 = codec.encode(Cancel(request_id="r", attempt=1)).replace(b"\xa1r", b"\xa1\xff")
    for number, payload in enumerate((b"", b"\xff" * 100, b"\x81\xa4type\xa4Nope", not_utf8), 1):
        assert isinstance(ask(socket, payload), Refused)
        assert node.control.counters.undecodable == number
    socket.send_multipart([b"two", b"parts"])
    assert isinstance(ask(socket, hello()), Welcome), "the node survives, and the sender may still say Hello"
    assert node.control.counters.undecodable == 5


def test_hello_comes_first(make: Callable[..., Plane], dial: Callable[[Plane], zmq.Socket]) -> None:
    node = make("node")
    socket = dial(node)
    for message in (Ping(sequence=1), Cancel(request_id="r", attempt=0)):
        answer = ask(socket, message)
        assert isinstance(answer, Refused)
        assert answer.field == "handshake"
    assert node.control.counters.unknown_peer == 2
    assert not node.events
    assert isinstance(ask(socket, hello()), Welcome)
    answer = ask(socket, Ping(sequence=9))
    assert isinstance(answer, Status)
    assert (answer.sequence, answer.num_free_blocks) == (9, 5)


def test_silence_is_loss(make: Callable[..., Plane], dial: Callable[[Plane], zmq.Socket]) -> None:
    node = make("node", timeouts=QUICK)
    socket = dial(node)
    ask(socket, hello())
    wait_until(lambda: node.of(PeerLost))
    assert "silent" in node.of(PeerLost)[0].reason
    socket.send(codec.encode(Cancel(request_id="r", attempt=0)))
    assert socket.poll(int(PATIENCE_S * 1000))
    assert isinstance(codec.decode_from_node(socket.recv()), Refused), "a lost peer must greet again"
    assert not node.of(Received), "a message of a lost peer was delivered"


def test_a_stopped_node_is_lost_to_its_source(make: Callable[..., Plane]) -> None:
    sink, source = connected(make, QUICK)
    sink.stop()
    wait_until(lambda: source.of(PeerLost))
    assert source.of(PeerLost)[0].info.key == sink.key


def test_the_last_words_of_a_drained_node_say_so(
    make: Callable[..., Plane], dial: Callable[[Plane], zmq.Socket]
) -> None:
    """Without a ping in between: nothing was left to finish, so that it ends at once."""
    node = make("node")
    socket = dial(node)
    assert isinstance(ask(socket, hello()), Welcome)
    node.board.show(Status(node_id="node", epoch=1, draining=True))
    node.stop()
    assert socket.poll(int(PATIENCE_S * 1000)), "it said nothing"
    last = codec.decode_from_node(socket.recv())
    assert isinstance(last, Status)
    assert last.draining


def test_a_new_life_ends_the_old_one(make: Callable[..., Plane], dial: Callable[[Plane], zmq.Socket]) -> None:
    node = make("node")
    old, new = dial(node), dial(node)
    ask(old, hello(epoch=1))
    ask(new, hello(epoch=2))
    wait_until(lambda: len(node.of(PeerUp)) == 2)
    kinds = [(type(event), event.info.key) for event in node.events[:3]]
    first, second = NodeKey("router", 1), NodeKey("router", 2)
    assert kinds == [(PeerUp, first), (PeerLost, first), (PeerUp, second)]
    assert "epoch" in node.of(PeerLost)[0].reason
    assert isinstance(ask(old, Cancel(request_id="r", attempt=0)), Refused)


def test_a_message_to_nobody_is_counted(make: Callable[..., Plane]) -> None:
    node = make("node")
    node.outgoing.send("nobody@0000000000000001", Cancel(request_id="r", attempt=0))
    wait_until(lambda: node.control.counters.unroutable == 1)


def test_a_taken_port_is_a_configuration_error(make: Callable[..., Plane]) -> None:
    port = int(make("node").info.control_address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="--port"):
        ControlSockets(PLAIN).bind("127.0.0.1", port)


def test_curve_lets_holders_of_the_secret_in_and_nobody_else(
    make: Callable[..., Plane], dial: Callable[[Plane], zmq.Socket], tmp_path: Path
) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).write_text(f"a secret of {name} that is long enough")
    ours = load_cluster_keys(str(tmp_path / "ours"), "127.0.0.1")
    theirs = load_cluster_keys(str(tmp_path / "theirs"), "127.0.0.1")
    sink, friend = make("sink", keys=ours), make("friend", 2, keys=ours)
    stranger = make("stranger", 3, keys=theirs, timeouts=HASTY)
    plain = dial(sink)
    with contextlib.suppress(zmq.Again):  # once its keys were refused there is no connection to send over
        plain.send(codec.encode(hello()), zmq.NOBLOCK)
    friend.outgoing.connect(sink.ref)
    stranger.outgoing.connect(sink.ref)
    wait_until(lambda: friend.of(PeerUp) and stranger.of(PeerRefused))
    assert [event.info.key for event in sink.of(PeerUp)] == [friend.key]
    assert not plain.poll(100), "a client without keys was answered"
    assert (sink.control.counters.undecodable, sink.control.counters.unknown_peer) == (0, 0)


def both_ways(first: Plane, second: Plane) -> None:
    """Messages of sources and of sinks get through either way. Who asks for a connection that there is hears of it
    again."""
    claim = KVClaim(request_id="r", attempt=0, source_id="a", source_epoch=1, sink_epoch=2, num_prompt_tokens=4)
    for sender, to in ((first, second), (second, first)):
        for message in (claim, KVWait(request_id="r", attempt=0)):
            sender.outgoing.send(to.key, message)
        wait_until(lambda to=to: len(to.of(Received)) == 2)
        assert [event.sender for event in to.of(Received)] == [sender.key] * 2
        assert len(to.of(PeerUp)) in (1, 2)
        assert not to.of(PeerLost)


def test_two_that_connect_to_each_other_are_one_link(make: Callable[..., Plane]) -> None:
    first, second = make("first"), make("second", 2)
    first.outgoing.connect(second.ref)
    second.outgoing.connect(first.ref)
    wait_until(lambda: first.of(PeerUp) and second.of(PeerUp))
    time.sleep(1.25 * PATIENT.peer_lost_s)
    both_ways(first, second)


def test_hand_offs_go_either_way_on_one_connection(make: Callable[..., Plane]) -> None:
    first, second = connected(make)
    assert second.of(PeerUp)
    both_ways(first, second)


def test_a_greeting_over_a_connection_that_was_replaced_does_not_shut_out_its_successor(make, dial) -> None:
    """When a peer connects anew, ZMQ takes its name from the older connection, and delivers what came over that under a
    name of its own."""
    node = make("d")
    older, newer = dial(node), dial(node, str(NodeKey("router", 1)).encode())
    for first, second in ((older, newer), (newer, older), (newer, newer)):
        assert isinstance(ask(first, hello()), Welcome)
        assert isinstance(ask(second, hello()), Welcome)
        assert isinstance(ask(newer, Ping(sequence=1)), Status)
    assert not node.of(PeerLost)
    assert len(node.of(PeerUp)) == 1


def test_a_node_whose_step_loop_is_stuck_counts_as_silent(make: Callable[..., Plane]) -> None:
    """Its own thread for messages lives on, and would answer for ever."""
    for stuck, other in ((0, 1), (1, 0)):
        pair = connected(make, replace(QUICK, peer_lost_s=1.0))
        assert not pair[other].of(PeerLost)
        pair[stuck].board.is_stuck = lambda: True
        wait_until(lambda other=pair[other]: other.of(PeerLost))
        assert "silent" in pair[other].of(PeerLost)[0].reason


def test_a_thread_for_messages_that_stood_still_says_what_the_others_did(
    make: Callable[..., Plane], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.node.control.plane.STANDSTILL_S", 0.2)
    make("d1")
    time.sleep(0.05)
    ctypes.PyDLL(None).usleep(500_000)  # with the interpreter, as some calls of drivers are made
    time.sleep(0.5)  # still here while that thread looks around
    told = re.compile(
        r"tandem-io stood still for \d+\.\d s \(\d+\.\d s of CPU.*MainThread in .*test_a_thread_for_messages_that"
    )
    wait_until(lambda: any(map(told.search, caplog.messages)), "the log to tell of it")
