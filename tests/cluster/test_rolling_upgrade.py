"""A cluster goes from one build to another while clients ask: no request is lost, and strangers get no work."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from parts import Part, Parts, SteadyLoad, build_of
from waiting import wait_until

from redis_process import running_redis
from tandem.engine.contracts.wire.connection import WIRE_VERSION
from tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def url_of(router: Part) -> str:
    return f"http://127.0.0.1:{router.wait_ready()['port']}"


def versions(url: str) -> list[str]:
    """The versions of the nodes that the router is connected to and that are not about to leave."""
    nodes = httpx.get(f"{url}/status").json()["nodes"]
    return sorted(node["version"] for node in nodes if node["state"] == "serving")


def figure(url: str, name: str) -> float:
    found = re.search(rf"^tandem_router_{name} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def drained(*parts: Part) -> None:
    for part in parts:
        part.terminate()
    assert [part.wait_end() for part in parts] == [0] * len(parts)


def test_nodes_then_routers_are_replaced_under_load(tmp_path: Path) -> None:
    new, alien = build_of(tmp_path / "new", "99.1.0"), build_of(tmp_path / "alien", "99.2.0", WIRE_VERSION + 1)
    model = tiny_model("llama")
    with running_redis() as redis, Parts(model, redis.url) as cluster:
        old = [cluster.start(role) for role in ("prefill", "decode")]
        old_router = cluster.start("router")
        url = url_of(old_router)
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "the old ones")
        (ours,) = set(versions(url))
        with SteadyLoad(url, model) as load:
            load.wait_for_more()
            newer = [cluster.start(role, environment=new) for role in ("prefill", "decode")]
            wait_until(lambda: versions(url) == [ours, ours, "99.1.0", "99.1.0"], "the new ones beside the old")
            load.wait_for_more()
            drained(old[0])  # a while with one prefill node of the new and decode nodes of both
            load.wait_for_more()
            drained(old[1])
            wait_until(lambda: versions(url) == ["99.1.0", "99.1.0"], "the old ones to be forgotten")
            wait_until(lambda: figure(url, "nodes_other_version") == 2, "the new ones to be counted")
            load.wait_for_more()

            stranger = cluster.start("decode", environment=alien)
            wait_until(lambda: figure(url, "nodes_other_wire") == 1, "the other protocol to be noticed")
            load.wait_for_more()
            (why,) = httpx.get(f"{url}/status").json()["unused"].values()
            assert f"wire_version differs (theirs {WIRE_VERSION + 1}, ours {WIRE_VERSION})" in why
            drained(stranger)
            wait_until(lambda: figure(url, "nodes_other_wire") == 0, "it to be forgotten")

            new_router = cluster.start("router", environment=new)
            new_url = url_of(new_router)
            wait_until(lambda: versions(new_url) == ["99.1.0", "99.1.0"], "the new router to know them")
            load.url = new_url
            load.wait_for_more()
            drained(old_router)
            load.wait_for_more()
        assert figure(new_url, "nodes_other_version") == 0
        assert "of version 99.1.0 where this router is of" in "\n".join(old_router.lines)
        drained(*newer, new_router)
