"""Faults that nobody expected, and what they cost: one record, one connection, one request, never the router."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import zmq
from router_in_thread import FAST, RouterInThread, wait_until
from router_nodes import PROMPT, Nodes, addresses, output, status_of, stream_events
from slow_names import SlowNames
from waiting import PATIENCE_S

from stand_in_node import StandInNode
from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.security import ClusterKeys, load_cluster_keys
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.process.descriptors import raise_descriptor_limit
from tandem.router.nodes import link as node_link
from tandem.router.nodes.link import NodeLink
from tandem.router.nodes.node_socket import NodeSocket, new_context
from tandem.router.process.worker import Sources

BAD_ADDRESSES = [
    "garbage",
    "",
    "udp://127.0.0.1:1",
    "tcp://",
    "tcp://127.0.0.1:99999999",
    "x" * 1_000_000,
    "tcp://a\0b:1",
]
NO_ONE = "tcp://127.0.0.1:1"
IMPATIENT = Timeouts(heartbeat_s=0.05, peer_lost_s=1.0, connect_s=1.0, resend_s=0.1, request_s=600.0, drain_s=5.0)


@dataclass(frozen=True)
class Change:
    address: str
    present: bool


class Announced:
    """Discovery in the hands of a test."""

    def __init__(self, *addresses: str) -> None:
        self.changes: asyncio.Queue[Change] = asyncio.Queue()
        for address in addresses:
            self.changes.put_nowait(Change(address, True))

    async def watch(self) -> AsyncIterator[Change]:
        while True:
            yield await self.changes.get()


@pytest.mark.parametrize("bad", BAD_ADDRESSES, ids=lambda address: repr(address[:24]))
def test_an_address_that_zmq_cannot_use_costs_itself_alone(folder: Path, nodes: Nodes, bad: str) -> None:
    node, later = nodes.start(), nodes.start(node_id="later")
    discovery = Announced(bad, node.address)
    with RouterInThread(folder, (), Sources(discovery)) as router:
        router.wait_ready()
        router.call(lambda: discovery.changes.put_nowait(Change(later.address, True)))
        wait_until(lambda: len(router.worker.service.cluster.views) == 2, "a node that comes later")
        assert status_of(router)[0] == 200
        router.call(lambda: discovery.changes.put_nowait(Change(bad, False)))
        wait_until(lambda: bad not in router.worker.service.cluster._links, "the record to be forgotten")


def test_a_host_name_that_nobody_answers_for_costs_itself_alone(folder: Path, nodes: Nodes, monkeypatch) -> None:
    asked, node = SlowNames(monkeypatch), nodes.start()
    with RouterInThread(folder, ("tcp://slow.test:1", node.address.replace("127.0.0.1", "here.test"))) as router:
        router.wait_ready()
        assert status_of(router)[0] == 200
        assert asked.names == ["slow.test", "here.test"]
        asked.may_answer.set()
        links = router.worker.service.cluster._links
        wait_until(lambda: "nobody has this name" in links["tcp://slow.test:1"].trouble, "why it is not connected")
        wait_until(lambda: asked.names.count("slow.test") > 1, "another look")
        assert status_of(router)[0] == 200


def test_there_are_only_so_many_connections_to_nodes(folder: Path, nodes: Nodes, caplog) -> None:
    first, second = nodes.start(), nodes.start()
    discovery = Announced(first.address, second.address)
    with RouterInThread(folder, (), Sources(discovery), max_nodes=1, timeouts=IMPATIENT) as router:
        router.wait_ready()
        wait_until(lambda: f"{second.address} is not connected: there are 1 nodes already (--max-nodes)" in caplog.text)
        first.die()
        router.call(lambda: discovery.changes.put_nowait(Change(first.address, False)))
        wait_until(lambda: bool(second.hellos), "the one that was left out")
        wait_until(lambda: status_of(router)[0] == 200, "its answer")


def test_deadlines_hold_beside_a_connection_that_fails_at_each_tick(folder: Path, nodes: Nodes, monkeypatch) -> None:
    node = nodes.start(hold_tokens=True)
    with RouterInThread(folder, (NO_ONE, node.address), timeouts=replace(FAST, request_s=1.0)) as router:
        router.wait_ready()
        tick = NodeLink.tick

        def failing(link: NodeLink, now: float, own_pause_s: float = 0.0) -> None:
            if link.address == NO_ONE:
                raise RuntimeError("nobody expected this")
            tick(link, now, own_pause_s)

        monkeypatch.setattr(NodeLink, "tick", failing)
        status, error, _ = status_of(router)
        assert (status, error["code"]) == (504, "deadline_exceeded")
        node.hold_tokens = False
        wait_until(lambda: status_of(router)[0] == 200, "an answer, which has a second")
        link = router.worker.service.cluster._links[node.address]
        pings = link.ping_sequence
        wait_until(lambda: link.ping_sequence > pings, "a heartbeat of the connection behind the one that fails")


def test_a_request_that_fails_inside_the_router_ends_alone(folder: Path, nodes: Nodes, monkeypatch) -> None:
    node = nodes.start()
    with RouterInThread(folder, addresses(node)) as router:
        router.wait_ready()
        dispatcher = router.worker.service._dispatcher
        emit = dispatcher._emit

        def failing(generation, action):
            if generation.plan.sampling.max_tokens == 13:
                raise RuntimeError("nobody expected this")
            return emit(generation, action)

        monkeypatch.setattr(dispatcher, "_emit", failing)
        status, error, _ = status_of(router, max_tokens=13)
        assert (status, error["type"]) == (500, "server_error")
        assert stream_events(router.client, max_tokens=8) == (output(8), None)
        router.wait_idle()


def test_a_node_that_is_gone_already_leaves_the_other_one_no_work(folder: Path, nodes: Nodes, monkeypatch) -> None:
    """What the loss leads to comes after what was decided before it: never a Cancel before its Submit."""
    prefill, decode = nodes.start("prefill"), nodes.start("decode")
    with RouterInThread(folder, addresses(prefill, decode), local_tail_tokens=0) as router:
        router.wait_ready()
        cluster = router.worker.service.cluster
        send, said = cluster.send, []

        def losing(key, message, now) -> bool:
            said.append((key[0], type(message).__name__, message.attempt))
            return len(said) > 1 and send(key, message, now)

        monkeypatch.setattr(cluster, "send", losing)
        assert status_of(router, prompt=PROMPT * 8, max_tokens=4)[0] == 200
        router.wait_idle()
    first, second, third, *_ = said
    assert first[1:] == second[1:] == ("Submit", 1)
    assert first[0] != second[0]
    assert third == (second[0], "Cancel", 1)


def test_a_request_whose_end_fails_is_told_so(folder: Path, nodes: Nodes, monkeypatch) -> None:
    """The machine has ended it by then, so that no deadline would find it."""
    node = nodes.start()
    with RouterInThread(folder, addresses(node)) as router:
        router.wait_ready()
        monkeypatch.setattr("tandem.router.http.listeners.Collector._response", lambda collector: 1 / 0)
        assert status_of(router)[0] == 500
        monkeypatch.undo()
        assert status_of(router)[0] == 200
        router.wait_idle()


def test_a_thousand_nodes_fit_into_one_router(folder: Path, nodes: Nodes) -> None:
    if raise_descriptor_limit() < 6_000:
        pytest.skip("the system allows this process too few descriptors for a thousand connections")
    node = nodes.start()
    absent = tuple(f"tcp://127.1.{number // 250}.{1 + number % 250}:1" for number in range(1_000))
    with RouterInThread(folder, (*absent, node.address), timeouts=Timeouts(peer_lost_s=60.0)) as router:
        wait_until(lambda: router.client.get("/ready").status_code == 200, "the one that is there")
        links = router.worker.service.cluster._links.values()
        assert len(links) == 1_001
        assert all(link._socket is not None for link in links)
        assert stream_events(router.client, max_tokens=5) == (output(5), None)


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """Leaves this process so many descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(number: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # to look, which takes one, too
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = sorted(set(range(max(used) + number + 2)) - used)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[number], hard))  # a limit counts numbers, not descriptors

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Silent:
    """A listener of a link."""

    def node_up(self, view: object) -> None: ...

    def node_status(self, view: object) -> None: ...

    def node_lost(self, view: object, reason: str) -> None: ...

    def node_message(self, key: object, message: object) -> None: ...


@pytest.mark.parametrize("num_left", range(6))
async def test_a_connection_without_descriptors_is_opened_when_there_are_some(
    few_descriptors: Callable[[int], None], monkeypatch, num_left: int
) -> None:
    monkeypatch.setattr(node_link, "FIRST_PAUSE_S", 0.01)
    node = StandInNode().start()
    context = new_context()
    context.socket(zmq.PAIR).close()  # a context has descriptors of its own
    hello = NodeInfo(node_id="r", epoch=1, role="router")
    link = NodeLink(node.address, hello, context, ClusterKeys(b"", curve=False), FAST, Silent())  # type: ignore[arg-type]
    gc.collect()
    few_descriptors(num_left)
    link.open()
    for _ in range(3):
        link.tick(time.monotonic())
        await asyncio.sleep(0.02)
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)
    end = time.monotonic() + PATIENCE_S
    while link.view is None:
        assert time.monotonic() < end, f"never connected: {link.trouble}"
        link.tick(time.monotonic())
        await asyncio.sleep(0.02)
    link.close()
    link.close()
    context.destroy(linger=0)
    node.stop()


async def test_a_socket_that_cannot_be_made_leaves_nothing(few_descriptors: Callable[[int], None]) -> None:
    context = new_context()
    context.socket(zmq.PAIR).close()
    failures = 0
    for num_left in range(7):
        few_descriptors(num_left)
        try:
            NodeSocket(context, NO_ONE, b"r", ClusterKeys(b"", curve=False), lambda: None, lambda: None).close(0)
        except (zmq.ZMQError, OSError):
            failures += 1
    assert failures, "descriptors were never short"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with pytest.raises(zmq.ZMQError):
        NodeSocket(context, "garbage", b"r", ClusterKeys(b"", curve=False), lambda: None, lambda: None)
    # Those that ZMQ still has open; a `term` waits for them.
    left = [socket for socket in gc.get_objects() if isinstance(socket, zmq.Socket) and socket.context is context]
    assert not [socket for socket in left if not socket.closed]
    await asyncio.wait_for(asyncio.to_thread(context.term), PATIENCE_S)


def figure(metrics: str, name: str) -> float:
    line = next(line for line in metrics.splitlines() if line.startswith(f"tandem_router_{name}_total "))
    return float(line.split()[1])


def test_messages_that_nobody_can_read_are_counted(folder: Path, nodes: Nodes, monkeypatch) -> None:
    node = nodes.start()
    send = node._send

    def garbled(peer: bytes, message: object) -> None:
        node._socket.send_multipart([peer, b"\xff"])
        send(peer, message)

    monkeypatch.setattr(node, "_send", garbled)
    with RouterInThread(folder, addresses(node)) as router:
        router.wait_ready()
        assert status_of(router)[0] == 200
        assert figure(router.client.get("/metrics").text, "undecodable_messages") >= 2


def test_another_key_is_said_and_counted(folder: Path, nodes: Nodes, tmp_path: Path, caplog) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text("0123456789abcdef0123456789abcdef")
    theirs.write_text("another secret of enough length!")
    node = nodes.start(keys=load_cluster_keys(str(theirs), "0.0.0.0"))
    with RouterInThread(folder, addresses(node), cluster_secret_file=str(ours)) as router:
        wait_until(lambda: "refuses our key: is --cluster-secret-file the same file" in caplog.text, "the line")
        ready = router.client.get("/ready")
        assert ready.status_code == 503
        assert f"{node.address} refuses our key" in ready.json()["error"]["message"]
        text = router.client.get("/metrics").text
    assert figure(text, "failed_handshakes") >= 3
    assert caplog.text.count("refuses our key") == 1


def test_a_node_that_does_not_answer_is_named(folder: Path, caplog) -> None:
    with RouterInThread(folder, (NO_ONE,), timeouts=IMPATIENT) as router:
        wait_until(lambda: f"no node answers at {NO_ONE}" in caplog.text, "the line")
        assert f"{NO_ONE} does not answer" in router.client.get("/ready").json()["error"]["message"]


def test_a_node_that_drains_has_left_and_one_that_vanishes_is_lost(folder: Path, nodes: Nodes, caplog) -> None:
    caplog.set_level("INFO", "tandem")
    drained, killed = nodes.start(node_id="drained"), nodes.start(node_id="killed")
    with RouterInThread(folder, addresses(drained, killed)) as router:
        wait_until(lambda: len(router.worker.service.cluster.views) == 2, "both nodes")
        drained.draining = True
        views = {view.info.node_id: view for view in router.worker.service.cluster.views}
        wait_until(lambda: views["drained"].draining, "its Status")
        drained.stop()
        killed.die()
        wait_until(lambda: not router.worker.service.cluster.views, "both ends")
    said = {record.args[0]: record for record in caplog.records if record.args and record.args[0] in views}
    ends = [record for record in caplog.records if "left" in record.message or "is lost" in record.message]
    levels = {name: record.levelname for record in ends for name in said if name in record.message}
    assert levels == {"drained": "INFO", "killed": "WARNING"}


def test_without_a_role_the_error_names_it_and_says_when_to_come_back(folder: Path, nodes: Nodes) -> None:
    prefill, decode = nodes.start("prefill"), nodes.start("decode")
    with RouterInThread(folder, addresses(prefill, decode), timeouts=replace(FAST, connect_s=1.0)) as router:
        router.wait_ready()
        decode.die()
        wait_until(lambda: len(router.worker.service.cluster.views) == 1, "the loss")
        status, error, headers = status_of(router, prompt=PROMPT * 8)
        assert status == 503
        assert error["message"].endswith("no decode node takes requests")
        assert int(headers["retry-after"]) >= 1
