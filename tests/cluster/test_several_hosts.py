"""A cluster over several hosts: prefill here, decode there, one secret, KV by tcp, and a cable pulled."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from network_hosts import Network, can_make_hosts, network
from parts import Parts, SteadyLoad
from waiting import wait_until

from tandem.deploy.redis_server import find_redis_server, free_port
from tandem.router.metrics.nodes import read_nodes
from tiny_models import tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_hosts(), reason="needs the right to make network namespaces"),
]


@pytest.fixture
def net() -> Iterator[Network]:
    with network(2) as made:
        yield made


@pytest.fixture
def redis_url(net: Network) -> Iterator[str]:
    """A Redis that other hosts reach."""
    port = free_port()
    command = [find_redis_server(), "--bind", net.address, "--port", str(port), "--protected-mode", "no", "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    yield f"redis://{net.address}:{port}"
    server.kill()
    server.wait()


def secret(folder: Path, text: str) -> str:
    file = folder / text
    file.write_text(f"{text}, and long enough for a secret")
    file.chmod(0o600)
    return f"--cluster-secret-file={file}"


def test_two_hosts_serve_and_survive_a_pulled_cable(net: Network, redis_url: str, tmp_path: Path) -> None:
    model, (first, second) = tiny_model("llama"), net.hosts
    everywhere = f"--host={second.address}", "--transport=tcp"
    with Parts(model, redis_url, "--peer-lost-s=4") as cluster:
        ours = secret(tmp_path, "ours")
        prefill = cluster.start("prefill", f"--host={first.address}", "--transport=tcp", ours, prefix=first.prefix)
        by_name = "--host=0.0.0.0", f"--advertise-host={second.address}", "--transport=tcp"
        decode = cluster.start("decode", *by_name, ours, prefix=second.prefix)
        router = cluster.start("router", f"--host={net.address}", "--node-wait-s=120", ours)
        open_door = cluster.start("decode", *everywhere, prefix=second.prefix)
        assert open_door.wait_end() == 2, "without a secret nothing listens beyond loopback"
        url = f"http://{net.address}:{router.wait_ready()['port']}"
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "both hosts")
        assert prefill.wait_ready()["address"].startswith(f"tcp://{first.address}:")
        assert decode.wait_ready()["address"].startswith(f"tcp://{second.address}:")
        with SteadyLoad(url, model) as load:
            load.wait_for_more()
            second.unplug()
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503, "the loss to be noticed")
            second.plug_in()
            load.wait_for_more(9)
            stranger = cluster.start("decode", *everywhere, secret(tmp_path, "other"), prefix=second.prefix)
            wait_until(lambda: "refuses our key" in "\n".join((router.look(), router.lines)[1]), "the other key")
            load.wait_for_more()
        metrics = httpx.get(f"{url}/metrics").text
        assert sum(node.figures["sink_commits"] for node in read_nodes(metrics).values()) > 0
        assert re.search(r'tandem_node_kv_channels_total{.*"tcp".*} [1-9]', metrics)
        for part in (stranger, router, decode, prefill):
            part.terminate()
        assert [part.wait_end() for part in (stranger, router, decode, prefill)] == [0] * 4
