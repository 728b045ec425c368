"""What one peer gets wrong, or one shortage of the machine, costs that peer's link and no other."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from slow_names import SlowNames
from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.security import ClusterKeys, load_cluster_keys
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Refused, Status, Welcome
from tandem.engine.contracts.wire.handoff import KVWait
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef
from tandem.engine.process import watched
from tandem.node.control.board import LoopBoard
from tandem.node.control.events import PeerLost, PeerRefused, PeerUp, Received
from tandem.node.control.outgoing import Outgoing
from tandem.node.control.plane import ControlPlane
from tandem.node.control.sockets import ControlSockets

QUICK = Timeouts(heartbeat_s=0.04, peer_lost_s=PATIENCE_S, connect_s=PATIENCE_S)
PLAIN = ClusterKeys(b"loopback only", curve=False)


class Plane:
    """A control plane; `events` is what its step loop would get, `fails_on` an event for which that fails."""

    def __init__(self, node_id: str, epoch: int = 1, keys: ClusterKeys = PLAIN, port: int = 0) -> None:
        self.events: list = []
        self.fails_on: Callable[[object], bool] = lambda event: False
        sockets, board = ControlSockets(keys), LoopBoard()
        address = sockets.bind("127.0.0.1", port)
        self.info = NodeInfo(node_id=node_id, epoch=epoch, role="decode", control_address=address, host_id="here")
        board.show(Status(node_id=node_id, epoch=epoch))
        self.outgoing = Outgoing(sockets.wake)
        self.control = ControlPlane(sockets, self.info, QUICK, self.outgoing, board, self._deliver, self._check)
        self.ref, self.key = PeerRef(node_id, epoch, address), NodeKey(node_id, epoch)
        self.control.start()

    def _deliver(self, event: object) -> None:
        self.events.append(event)
        if self.fails_on(event):
            raise KeyError("nobody expected this")

    def _check(self, theirs: NodeInfo) -> None:
        if theirs.model_name == "absurd":
            raise TypeError("no layout at all")

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def make() -> Iterator[Callable[..., Plane]]:
    planes: list[Plane] = []

    def build(*args: object, **kwargs: object) -> Plane:
        planes.append(Plane(*args, **kwargs))  # type: ignore[arg-type]
        return planes[-1]

    yield build
    for plane in planes:
        plane.control.stop()
        assert not plane.control._thread.is_alive(), "it did not end, or ended before"


@pytest.fixture
def dealer() -> Iterator[Callable[..., zmq.Socket]]:
    context = zmq.Context()
    sockets: list[zmq.Socket] = []

    def connect(plane: Plane, keys: ClusterKeys | None = None, own: bytes = b"client") -> zmq.Socket:
        """With `keys`: one that knows the server's public key, and has the pair `own` of them, or one of its own."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            pair = keys.curve_keypair(own.decode()) if own else zmq.curve_keypair()
            socket.curve_publickey, socket.curve_secretkey = pair
            socket.curve_serverkey = keys.curve_keypair("server")[0]
        socket.connect(plane.info.control_address)
        sockets.append(socket)
        return socket

    yield connect
    for socket in sockets:
        socket.close()
    context.term()


def ask(socket: zmq.Socket, message: Message) -> Message:
    socket.send(codec.encode(message))
    assert socket.poll(int(PATIENCE_S * 1000)), "no answer"
    return codec.decode_from_node(socket.recv())


def offer(socket: zmq.Socket, message: Message) -> None:
    """Sends while there is a connection: ZMQ makes no other once keys were refused, and a send would wait forever."""
    with contextlib.suppress(zmq.Again):
        socket.send(codec.encode(message), zmq.NOBLOCK)


def hello(**changes: object) -> Hello:
    info = msgspec.structs.replace(NodeInfo(node_id="router", epoch=1, role="router"), **changes)
    return Hello(wire_version=WIRE_VERSION, info=info)


def still_connects(node: Plane, other: Plane) -> None:
    node.outgoing.connect(other.ref)
    wait_until(lambda: any(event.info.key == other.key for event in node.of(PeerUp)))


def talk(*planes: Plane) -> None:
    """Two that are linked say something to each other."""
    for sender, receiver in (planes, planes[::-1]):
        sender.outgoing.send(receiver.key, KVWait(request_id="r", attempt=0))
        wait_until(lambda receiver=receiver: receiver.of(Received))


@pytest.mark.parametrize("address", ["garbage", "", "udp://127.0.0.1:1", "tcp://nowhere:x", "tcp://" + "x" * 100_000])
def test_a_peer_whose_address_is_none_is_refused_alone(make, address):
    node, other = make("node"), make("other", 2)
    node.outgoing.connect(PeerRef("wrong", 3, address))
    wait_until(lambda: node.of(PeerRefused))
    (refused,) = node.of(PeerRefused)
    assert refused.ref.node_id == "wrong"
    assert "can't connect" in refused.reason
    assert len(refused.reason) < 1000
    still_connects(node, other)


def test_a_peer_that_finds_no_descriptor_is_refused_and_may_be_asked_again(make, monkeypatch):
    node, other = make("node"), make("other", 2)

    def none_left(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(node.control._sockets._context, "socket", none_left)
        node.outgoing.connect(other.ref)
        wait_until(lambda: node.of(PeerRefused))
    still_connects(node, other)


@pytest.mark.parametrize("wrong", [{"epoch": 7}, {"node_id": "nobody"}])
def test_a_reference_to_no_life_of_a_peer_leaves_the_link_to_it_alone(make, wrong):
    node, other = make("node"), make("other", 2)
    still_connects(node, other)
    node.outgoing.connect(msgspec.structs.replace(other.ref, **wrong))
    wait_until(lambda: node.of(PeerRefused))
    assert "epoch differs" in node.of(PeerRefused)[0].reason
    talk(node, other)
    assert not node.of(PeerLost)
    assert not other.of(PeerLost)


def test_a_peer_that_came_back_at_its_address_is_connected_to_at_once(make):
    """Though the connection to its former life has not been given up."""
    node, other = make("node"), make("other", 2)
    still_connects(node, other)
    other.control.stop()
    successor = make("other", 3, port=int(other.ref.control_address.rpartition(":")[2]))
    still_connects(node, successor)
    talk(node, successor)


def test_a_host_name_that_nobody_answers_for_costs_its_peer_alone(make, monkeypatch):
    asked = SlowNames(monkeypatch)
    node, other = make("a"), make("b")
    node.outgoing.connect(PeerRef("c", 1, "tcp://slow.test:1"))
    node.outgoing.connect(PeerRef("c", 1, "tcp://slow.test:1"))
    wait_until(lambda: asked.names == ["slow.test"], "the look-up")
    node.outgoing.connect(PeerRef("b", 1, other.ref.control_address.replace("127.0.0.1", "here.test")))
    wait_until(lambda: node.of(PeerUp), "a peer by its name")
    talk(node, other)
    assert asked.names == ["slow.test", "here.test"]
    assert not node.of(PeerRefused)
    asked.may_answer.set()
    wait_until(lambda: node.of(PeerRefused), "the answer")
    (refused,) = node.of(PeerRefused)
    assert (refused.ref.node_id, "nobody has this name" in refused.reason) == ("c", True)


def test_a_hello_that_makes_no_sense_is_refused(make, dealer):
    node = make("node")
    socket = dealer(node)
    answer = ask(socket, hello(role="decode", model_name="absurd"))
    assert isinstance(answer, Refused)
    assert "no layout at all" in answer.theirs
    for pid in (1 << 40, -1, 1 << 31):  # numbers of no process
        assert isinstance(ask(socket, hello(pid=pid, host_id="here", epoch=pid & 255)), Welcome)


def test_what_fails_with_one_peers_messages_costs_its_link_alone(make):
    node, wrong, other = make("node"), make("wrong", 2), make("other", 3)
    still_connects(wrong, node)
    still_connects(node, other)
    node.fails_on = lambda event: isinstance(event, Received) and event.message.request_id == "bad"
    for sender in (wrong, other):  # over a connection that it made, and over one that the node made
        sender.outgoing.send(node.key, KVWait(request_id="bad", attempt=0))
        wait_until(lambda sender=sender: any(lost.info.key == sender.key for lost in node.of(PeerLost)))
        assert "nobody expected this" in node.of(PeerLost)[-1].reason
    assert len(node.of(PeerLost)) == node.control.counters.failures == 2
    node.events.clear()
    still_connects(node, other)


def test_a_process_that_stood_still_takes_nobody_for_lost(make, monkeypatch):
    """Its own pause is no silence of others: as when it was stopped, no message was read meanwhile."""
    monkeypatch.setattr(sys.modules[__name__], "QUICK", replace(QUICK, peer_lost_s=2.0))
    node, other = make("node"), make("other", 2)
    still_connects(node, other)
    ctypes.PyDLL(None).usleep(3_000_000)  # with the interpreter: no thread of this process runs
    node.outgoing.send(other.key, KVWait(request_id="r", attempt=0))
    wait_until(lambda: other.of(Received))
    assert not node.of(PeerLost)
    assert not other.of(PeerLost)


def test_a_client_needs_the_key_of_the_cluster_and_not_only_the_servers(make, dealer, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("a secret that is long enough")
    secret.chmod(0o600)
    keys = load_cluster_keys(str(secret), "127.0.0.1")
    node = make("node", keys=keys)
    own = dealer(node, keys, b"")
    offer(own, hello())
    assert isinstance(ask(dealer(node, keys), hello(epoch=2)), Welcome)
    refused = node.control._sockets._client_keys
    wait_until(lambda: refused.num_refused >= 1)  # ZMQ may try again
    assert not own.poll(200), "a client with a key of its own was answered"
    assert [event.info.key for event in node.of(PeerUp)] == [NodeKey("router", 2)]
    own.close(0)
    before = refused.num_refused
    own_server = dealer(node, keys, b"server")  # a pair of the cluster, but not that of clients
    offer(own_server, hello(epoch=3))
    wait_until(lambda: refused.num_refused > before)


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_secret_that_others_can_read_is_told(tmp_path, caplog, mode, is_told):
    secret = tmp_path / "secret"
    secret.write_text("a secret that is long enough")
    secret.chmod(mode)
    assert load_cluster_keys(str(secret), "0.0.0.0").curve
    assert any("chmod 600" in message for message in caplog.messages) == is_told


def test_an_exception_that_leaves_a_thread_ends_the_process():
    program = (
        "import sys, threading, time; sys.path.remove('')\n"
        "from tandem.engine.process.watched import end_with_any_thread\n"
        "end_with_any_thread()\n"
        "threading.Thread(target=lambda: [][1], name='t-one', daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == watched.EXIT_FAULT
    assert "thread t-one failed" in ended.stderr
    assert "IndexError" in ended.stderr


@pytest.mark.parametrize(
    ("fails", "is_told"),
    [
        ("control.plane import ControlPlane as it\nit._heartbeat", "thread tandem-io failed"),
        ("loop import NodeLoop as it\nit._step", "the engine failed; this process ends"),
    ],
)
def test_a_node_ends_when_a_thread_fails(fails: str, is_told: str):
    """Although another one, that is no daemon, would go on for ever."""
    from tiny_models import tiny_model

    program = (
        "import sys; sys.path.remove('')\n"
        "from dataclasses import replace\n"
        "from in_process_cluster import node_options\n"
        "from tandem.decode_node.main import run_node\n"
        "import threading, time\n"
        f"from tandem.node.{fails} = lambda *_: [][1]\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        f"sys.exit(run_node(node_options('unified', {str(tiny_model('llama'))!r})))\n"
    )
    fakes = str(Path(__file__).parents[3] / "fakes")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": fakes}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False, env=environment
    )
    assert ended.returncode == watched.EXIT_FAULT, ended.stderr
    assert is_told in ended.stderr


def test_a_thread_that_exits_on_purpose_ends_nothing(monkeypatch):
    monkeypatch.setattr(watched, "end_process", lambda reason: pytest.fail(reason))
    watched._on_thread_exception(threading.ExceptHookArgs((SystemExit, SystemExit(), None, None)))
