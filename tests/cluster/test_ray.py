"""`tandem serve --ray` on a Ray cluster of several nodes on one machine: what runs where, and a host that is lost."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from parts import SteadyLoad
from waiting import PATIENCE_S, is_gone, wait_until

from real_cluster import RealCluster
from redis_process import running_redis
from tandem.deploy.launch.cluster_plan import NODES, plan_on_ray
from tandem.deploy.launch.ray_cluster import RayCluster
from tiny_models import tiny_model

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


ECHO = """
import os, time, psutil
print(os.environ["CUDA_VISIBLE_DEVICES"], psutil.Process(os.getppid()).ppid(), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    """A head without room for nodes, and two hosts of which either has room for all nodes without GPUs."""
    os.environ.update({"RAY_raylet_start_wait_time_s": "150", "RAY_USAGE_STATS_ENABLED": "0"})
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    workers = [cluster.add_node(num_cpus=4, num_gpus=3, **small) for _ in range(2)]
    yield cluster, workers
    cluster.shutdown()


def raylet_of(host: Any) -> int:
    return int(host.all_processes["raylet"][0].process.pid)


def nodes_of(raylet: int) -> set[int]:
    """The processes of our nodes on the host of a raylet."""
    found = set()
    for child in psutil.Process(raylet).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # some live for a moment only
            if any(part.startswith("--node-id=") for part in child.cmdline()):
                found.add(child.pid)
    return found


def test_gpus_of_a_node_are_one_host_s_and_pairs_are_near(hosts: Any) -> None:
    """On GPUs that Ray only counts."""
    cluster, _ = hosts
    values = {"ray": cluster.address, "model": "m", "port": 1, "prefill": 2, "decode": 2}
    values["decode_tensor_parallel_size"] = 2
    lines: dict[str, list[str]] = {}
    with RayCluster(values) as ray:
        plans = [plan for plan in plan_on_ray(values) if plan.stage == NODES]
        ray.reserve(plans)
        started = {
            plan.name: ray.start(
                replace(plan, command=("python", "-c", ECHO)),
                (),
                lambda name, line: lines.setdefault(name, []).append(line),
            )
            for plan in plans
        }

        def all_said() -> bool:
            for child in started.values():
                child.forward_output()
                assert child.exit_code() is None, child.last_words()
            return len(lines) == len(plans)

        wait_until(all_said, "every child to say where it is")
        for child in started.values():
            child.close()
    gpus, raylets = zip(
        *(lines[f"{role}-{i}"][0].split() for i in (0, 1) for role in ("prefill", "decode")), strict=True
    )
    assert [len(each.split(",")) for each in gpus] == [1, 2, 1, 2]
    assert raylets[0] == raylets[1] != raylets[2] == raylets[3]
    assert all(set(gpus[i].split(",")).isdisjoint(gpus[i + 1].split(",")) for i in (0, 2))


def test_a_pool_grows_goes_to_zero_and_comes_back(hosts: Any, tmp_path: Path) -> None:
    cluster, workers = hosts
    model = tiny_model("llama")
    secret = tmp_path / "secret"
    secret.write_text("a secret of the cluster, long enough")
    options = (
        "--elastic=1",
        "--elastic-max=2",
        "--pool-min=0",
        "--pool-idle-s=5",
        "--max-num-seqs=2",
        "--ray-routers=1",
    )
    where = (f"--cluster-secret-file={secret}", "--device=cpu", f"--ray={cluster.address}", "--node-wait-s=300")

    def num_nodes() -> int:
        return sum(len(nodes_of(raylet_of(host))) for host in workers)

    with (
        running_redis() as redis,
        RealCluster(model, *options, *where, f"--redis-url={redis.url}", start_s=4 * PATIENCE_S) as served,
    ):
        served.wait_until_ready(1, 4 * PATIENCE_S)
        with SteadyLoad(served.url, model, num_clients=12) as load:
            load.wait_for_more()
            wait_until(lambda: num_nodes() == 2, "another node", 4 * PATIENCE_S)
            served.wait_until_ready(2, 4 * PATIENCE_S)
            load.wait_for_more()
        wait_until(lambda: num_nodes() == 0, "an idle cluster to go to zero", 4 * PATIENCE_S)
        assert httpx.get(f"{served.url}/ready").status_code == 503
        body = {"model": model.name, "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        other = re.search(r"router-1 at (\S+)", served.log())
        assert other is not None
        answer = httpx.post(f"http://{other[1]}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4


def test_a_host_that_is_killed_costs_no_request(hosts: Any, tmp_path: Path) -> None:
    cluster, workers = hosts
    model = tiny_model("llama")
    secret = tmp_path / "secret"
    secret.write_text("a secret of the cluster, long enough")
    options = (
        f"--cluster-secret-file={secret}",
        "--device=cpu",
        "--prefill=1",
        "--decode=1",
        "--ray-routers=1",
        f"--ray={cluster.address}",
        "--node-wait-s=300",
    )
    with (
        running_redis() as redis,
        RealCluster(model, *options, f"--redis-url={redis.url}", "--peer-lost-s=5", start_s=4 * PATIENCE_S) as served,
    ):
        served.wait_until_ready(2, 4 * PATIENCE_S)
        where = {raylet_of(host): nodes_of(raylet_of(host)) for host in workers}
        (raylet,) = [raylet for raylet, nodes in where.items() if nodes]  # near each other
        assert len(where[raylet]) == 2
        with SteadyLoad(served.url, model, num_clients=2) as load:
            load.wait_for_more()
            psutil.Process(raylet).kill()
            for pid in where[raylet]:
                wait_until(lambda pid=pid: is_gone(pid), "the nodes of that host to end")
            load.wait_for_more()
        other = next(rest for rest in where if rest != raylet)
        wait_until(lambda: len(nodes_of(other)) == 2, "both on the other host")
        served.wait_until_ready(2)
        address = re.search(r"router-1 at (\S+)", served.log())
        assert address is not None
        wait_until(lambda: httpx.get(f"http://{address[1]}/ready").status_code == 200, "the second router")
        kept = nodes_of(other)
        served.process.terminate()
        assert served.process.wait(2 * PATIENCE_S) == 0, served.log()
        assert all(is_gone(pid) for pid in kept), "drained, and gone"
