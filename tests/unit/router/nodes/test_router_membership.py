"""Nodes that join, leave and come back, and a router that stops. Over real HTTP and ZMQ."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
from router_in_thread import FAST, RouterInThread
from router_nodes import (
    LONG,
    Nodes,
    addresses,
    output,
    status_of,
    stream_events,
)
from waiting import PATIENCE_S, wait_until

from stand_in_node import IDENTITY
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.hashing import hash_blocks, root_hash
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import ModelIdentity
from tandem.engine.contracts.security import load_cluster_keys
from tandem.kv_connector.directory.mirror import Mirror
from tandem.kv_connector.directory.own_view import OwnView
from tandem.router.process.worker import Sources


def test_a_node_that_restarts_at_its_address_is_found_again(folder: Path, nodes: Nodes) -> None:
    first = nodes.start(node_id="n")
    with RouterInThread(folder, addresses(first)) as router:
        router.wait_ready()
        first.die()
        wait_until(lambda: router.client.get("/ready").status_code == 503, "the loss")
        second = nodes.start(node_id="n", port=first.port)
        router.wait_ready()
        assert stream_events(router.client, max_tokens=5) == (output(5), None)
        assert second.submits


def test_a_node_of_another_model_gets_nothing(folder: Path, nodes: Nodes) -> None:
    ours = nodes.start()
    with RouterInThread(folder, (ours.address, "tcp://127.0.0.1:1")) as router:
        router.wait_ready()
        other = nodes.start(identity=ModelIdentity(config="x", weights="x", tokenizer="x", rope="x"))
        router.call(lambda: router.worker.service.cluster.add(other.address))
        wait_until(lambda: len(router.worker.service.cluster.views) == 2, "the other node")
        assert all(status_of(router)[0] == 200 for _ in range(4))
        assert not other.submits


def test_a_node_with_another_tokenizer_gets_nothing_though_it_comes_first(folder: Path, nodes: Nodes) -> None:
    other = nodes.start(identity=ModelIdentity(config="x", weights="x", tokenizer="x", rope="x"))
    with RouterInThread(folder, (other.address,)) as router:
        wait_until(lambda: router.worker.service.cluster.views, "the other node")
        said = router.client.get("/ready")
        assert said.status_code == 503
        assert "its tokenizer.json differs" in said.json()["error"]["message"]
        ours = nodes.start()
        router.call(lambda: router.worker.service.cluster.add(ours.address))
        router.wait_ready()
        assert all(status_of(router)[0] == 200 for _ in range(4))
        assert not other.submits


def test_an_unlisted_node_is_kept_while_it_can_be_reached(folder: Path, nodes: Nodes) -> None:
    node = nodes.start()
    with RouterInThread(folder, ()) as router:
        cluster = router.worker.service.cluster
        router.call(lambda: cluster.add(node.address))
        router.wait_ready()
        router.call(lambda: cluster.remove(node.address))
        assert status_of(router)[0] == 200
        node.die()
        wait_until(lambda: not cluster._links, "the node to be forgotten")


def test_an_address_that_was_given_is_kept_whatever_discovery_says(folder: Path, nodes: Nodes) -> None:
    node = nodes.start()
    with RouterInThread(folder, (*addresses(node), "tcp://127.0.0.1:1")) as router:
        router.wait_ready()
        cluster = router.worker.service.cluster
        for address in list(cluster._links):
            router.call(lambda address=address: cluster.remove(address))
        node.die()
        wait_until(lambda: router.client.get("/ready").status_code == 503, "the loss")
        assert len(cluster._links) == 2


@dataclass(frozen=True)
class Change:
    address: str
    present: bool


class Found:
    """Discovery by hand: `changes` in order, then silence."""

    def __init__(self, *changes: Change) -> None:
        self._changes = changes

    async def watch(self) -> AsyncIterator[Change]:
        for change in self._changes:
            yield change
        await asyncio.Event().wait()


def test_discovered_nodes_and_the_directory_of_prefixes(folder: Path, nodes: Nodes) -> None:
    first, second, dead = nodes.start(), nodes.start(), "tcp://127.0.0.1:1"
    found = Found(Change(dead, True), Change(first.address, True), Change(dead, False), Change(second.address, True))
    owner, directory = NodeKey(second.node_id, second.epoch), Mirror()
    directory.adopt(owner)
    view = OwnView(owner)
    hashes = hash_blocks(np.array(LONG, dtype=np.int32), 16, root_hash(IDENTITY.key(), b""))
    view.record([BlockEvent(block_hash, stored=True) for block_hash in hashes])
    for batch in view.number(view.take()):
        directory.apply(batch)
    with RouterInThread(folder, (), Sources(found, directory)) as router:
        wait_until(lambda: len(router.worker.service.cluster.views) == 2, "both nodes")
        assert set(router.worker.service.cluster._links) == {first.address, second.address}
        for _ in range(3):
            assert status_of(router, prompt=LONG)[0] == 200
        assert [len(second.submits), len(first.submits)] == [3, 0], "the node that holds the prefix is cheapest"


def test_encrypted_control_connections(folder: Path, nodes: Nodes, tmp_path: Path) -> None:
    secret, other = tmp_path / "secret", tmp_path / "other"
    secret.write_text("0123456789abcdef0123456789abcdef")
    other.write_text("another secret of enough length!")
    node = nodes.start(keys=load_cluster_keys(str(secret), "0.0.0.0"))
    with RouterInThread(folder, addresses(node), cluster_secret_file=str(secret)) as router:
        router.wait_ready()
        assert status_of(router)[0] == 200
    num_hellos = len(node.hellos)
    with RouterInThread(folder, addresses(node), cluster_secret_file=str(other)) as router:
        time.sleep(0.3)
        assert router.client.get("/ready").status_code == 503
    assert len(node.hellos) == num_hellos


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=PATIENCE_S)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it was accepted just before
        pass
    return False


def test_stopping_finishes_streams_and_takes_no_new_ones(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(step_s=0.01, hold_after_tokens=4)
    router = RouterInThread(folder, addresses(node))
    with router:
        router.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(stream_events, httpx.Client(base_url=router.url, timeout=PATIENCE_S), max_tokens=40)
            wait_until(lambda: node.num_tokens > 3, "some tokens")
            stopper = threading.Thread(target=router.worker.stop)
            stopper.start()
            wait_until(lambda: refuses(router.url), "the router to take nothing new")
            node.go_on()
            assert result.result(PATIENCE_S) == (output(40), None)
        stopper.join()


def test_streams_that_outlive_the_drain_end_with_an_error(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(step_s=0.01, hold_after_tokens=4)
    timeouts = replace(FAST, drain_s=0.3)
    with RouterInThread(folder, addresses(node), timeouts=timeouts) as router, ThreadPoolExecutor(1) as pool:
        router.wait_ready()
        result = pool.submit(stream_events, httpx.Client(base_url=router.url, timeout=PATIENCE_S), max_tokens=400)
        wait_until(lambda: node.num_tokens > 3, "some tokens")
        router.worker.stop()
        ids, error = result.result(PATIENCE_S)
        assert error is not None
        assert (error["code"], ids) == ("unavailable", output(400)[: len(ids)])
        wait_until(lambda: bool(node.cancels), "the cancel")
