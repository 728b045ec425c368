"""A client of nodes in one process goes on with the others when one has ended, and comes to its end itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zmq
from waiting import PATIENCE_S, wait_until

import in_process_cluster
from in_process_cluster import Client, Node, node_options
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import Ping
from tandem.engine.contracts.wire.parts import NodeInfo
from tiny_models import tiny_model


def ends(work: Callable[[], object]) -> bool:
    """Whether it comes to an end; what doesn't is left behind."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Client, NodeInfo, NodeInfo]]:
    """A client, which soon gives up sending, a node that it talks to, and one that ended after it had connected."""
    monkeypatch.setattr(in_process_cluster, "SEND_S", 0.1)
    living, ended = (Node(node_options("unified", tiny_model("llama"), num_blocks=16)) for _ in range(2))
    client = Client(living.info, ended.info)
    ended.stop()
    yield client, living.info, ended.info
    assert ends(client.close)
    living.stop()


def test_a_message_that_finds_no_room_ends_its_test(connected: tuple[Client, NodeInfo, NodeInfo]) -> None:
    client, _, ended = connected

    def send_on() -> None:
        with suppress(zmq.Again):
            while True:
                client.send(ended, Ping(sequence=1))

    assert ends(send_on)


def test_beats_wait_for_no_room(connected: tuple[Client, NodeInfo, NodeInfo]) -> None:
    """Others are told that the client lives."""
    client, living, ended = connected
    with client._turn:
        before = client._ping_at
        with suppress(zmq.Again):
            while True:
                client._sockets[ended.node_id].send(codec.encode(Ping(sequence=1)), zmq.NOBLOCK)
    wait_until(lambda: client._ping_at != before, "the next beat")
    client.statuses.clear()
    assert ends(lambda: client.until(lambda: living.node_id in client.statuses))
    assert living.node_id in client.statuses, "no beat was answered"
