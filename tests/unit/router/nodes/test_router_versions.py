"""Nodes of other versions, of another protocol, of another model, and none at all: what a router says and does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from router_in_thread import RouterInThread
from router_nodes import LONG, Nodes, status_of
from waiting import PATIENCE_S, wait_until

from tandem.deploy.cluster_status import as_text
from tandem.engine.contracts.kv_layout import ModelIdentity
from tandem.engine.contracts.wire.connection import WIRE_VERSION

OTHER_MODEL = ModelIdentity(config="c", weights="other", tokenizer="", rope="r", hash_block_size=16)


def figure(router: RouterInThread, name: str) -> float:
    lines = router.client.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"tandem_router_{name} "))


def add(router: RouterInThread, *addresses: str) -> None:
    for address in addresses:
        router.call(lambda address=address: router.worker.service.cluster.add(address))


def test_nodes_that_differ_are_told_apart(folder: Path, nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """Another version is used and named; another protocol or model is named and gets nothing."""
    caplog.set_level("INFO")
    newer, wire = nodes.start(version="99.1"), nodes.start(wire_version=WIRE_VERSION + 1)
    other = nodes.start(identity=OTHER_MODEL)
    with RouterInThread(folder, (newer.address,)) as router:
        router.wait_ready()
        add(router, wire.address, other.address)
        names = "nodes_other_version", "nodes_other_wire", "nodes_other_model"
        wait_until(lambda: [figure(router, name) for name in names] == [2, 1, 1], "each to be counted")
        assert all(status_of(router)[0] == 200 for _ in range(4))
        assert newer.submits
        assert not wire.submits + other.submits
        said = router.client.get("/status").json()
        shown = as_text(router.url, said)
        assert {node["version"] for node in said["nodes"]} == {"99.1", ""}
        assert set(said["unused"]) == {wire.address, other.address}
    assert f"wire_version differs (theirs {WIRE_VERSION + 1}, ours {WIRE_VERSION})" in shown
    assert f"not used: {other.address}: weights differs (theirs other, ours w)" in shown
    assert f"{newer.address}, of version 99.1 where this router is of" in caplog.text
    assert "it needs a router of its own version" in caplog.text


@pytest.mark.parametrize("roles", [("unified",), ("prefill", "decode")])
def test_requests_wait_for_nodes_that_come_back_from_zero(folder: Path, nodes: Nodes, roles: tuple[str, ...]) -> None:
    """Twice: before any node was there, and after the last one has gone."""
    with RouterInThread(folder, (), node_wait_s=PATIENCE_S) as router, ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            answers = [pool.submit(status_of, router, prompt=LONG, return_token_ids=True) for _ in range(3)]
            wait_until(lambda: figure(router, "waiting_prompts") == 3, "the requests to wait")
            started = [nodes.start(role) for role in roles]
            add(router, *(node.address for node in started))
            assert [answer.result(PATIENCE_S)[0] for answer in answers] == [200] * 3
            assert any(node.submits for node in started)  # not all: a decode node that comes first does it alone
            for node in started:
                node.die()
            wait_until(lambda: router.client.get("/ready").status_code == 503, "the loss")


def test_a_wait_for_nodes_ends_with_503_and_when_to_come_back(folder: Path, nodes: Nodes) -> None:
    node = nodes.start()
    with RouterInThread(folder, (node.address,), node_wait_s=0.05) as router:
        router.wait_ready()
        node.die()
        wait_until(lambda: router.client.get("/ready").status_code == 503, "the loss")
        code, error, headers = status_of(router)
    assert code == 503
    assert "no node could take the request within 0.05 s" in error["message"]
    assert int(headers["retry-after"]) >= 1
