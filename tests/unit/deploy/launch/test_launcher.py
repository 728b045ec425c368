"""The launcher as a process, with dummy children: start order, restarts, kills, draining, nobody left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import dummy_child
import psutil
import pytest
import redis
from waiting import PATIENCE_S, is_gone, wait_until

from tandem.deploy.launch.cluster_plan import PROGRAM, plan_cluster, plan_on_ray, plan_single_node, share_of_machine
from tandem.deploy.launch.launcher import serve
from tandem.deploy.redis_server import PORTS, RedisServer, answers
from tandem.engine.contracts.errors import ConfigError

DEMO = Path(__file__).resolve().parents[4] / "deploy" / "demo_model"
SCRIPT = """
import json, sys
from tandem.deploy.launch.cluster_plan import ChildPlan
from tandem.deploy.launch.launcher import Launcher
from tandem.deploy.launch.console import LINE_EVERY_S, Console
from tandem.deploy.redis_server import RedisServer
from tandem.deploy.launch import console, launcher
plans, values, with_redis = json.loads(sys.argv[1])
launcher.PROBE_S = 60.0  # the router is asked on a busy machine
console.LINE_EVERY_S = values.pop("progress_every_s", console.LINE_EVERY_S)
redis = RedisServer() if with_redis else None
if redis:
    redis.start()
    print(redis.pid, redis.port, flush=True)
plans = [ChildPlan(p[0], p[1], tuple(p[2]), (), connects_to=tuple(p[3])) for p in plans]
sys.exit(Launcher(plans, {"model": "m", **values}, redis).run())
"""


class LauncherProcess:
    """A launcher over dummy children: `modes` by name; the router comes last and connects to `node`."""

    def __init__(self, folder: Path, modes: dict[str, str], with_redis: bool = False, **values: float) -> None:
        self.folder = folder
        plans = []
        for name, mode in modes.items():
            command = [sys.executable, str(Path(dummy_child.__file__)), name, mode, str(folder)]
            plans.append((name, int(name == "router"), command, ["node"] if name == "router" else []))
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps([plans, values, with_redis])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},  # as most start it
        )

    def lives(self, name: str) -> list[list[str]]:
        """One entry a life of the child: [pid, port flag, node flag]."""
        return [line.split()[1:] for line in self._log(name) if line.startswith("start")]

    def terminated_at(self, name: str) -> float:
        return next(float(line.split()[1]) for line in self._log(name) if line.startswith("term"))

    def _log(self, name: str) -> list[str]:
        path = self.folder / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []

    def first_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> tuple[int, str]:
        """SIGTERM; the exit code and what was written to stderr."""
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=2 * PATIENCE_S)
        return self.process.returncode, errors


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., LauncherProcess]]:
    started: list[LauncherProcess] = []

    def start(modes: dict[str, str], **values: float) -> LauncherProcess:
        started.append(LauncherProcess(tmp_path, modes, **values))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.communicate()


def test_children_start_in_order_are_announced_and_drain_router_first(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"node": "serve", "router": "serve"})
    assert re.fullmatch(r"serving m on http://127\.0\.0\.1:\d+", launcher.first_line())
    assert launcher.lives("router")[0][2].startswith("tcp://127.0.0.1:")
    assert int(launcher.lives("node")[0][1]) in PORTS, "a port that no connection takes while the node is down"
    code, errors = launcher.stop()
    assert code == 0
    assert "[node] node speaks" in errors
    assert launcher.terminated_at("router") < launcher.terminated_at("node")


def test_a_killed_child_comes_back_at_its_address(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"node": "serve", "router": "serve"})
    launcher.first_line()
    os.kill(int(launcher.lives("node")[0][0]), signal.SIGKILL)
    wait_until(lambda: len(launcher.lives("node")) >= 2)
    assert launcher.lives("node")[1][1] == launcher.lives("router")[0][2].rpartition(":")[2]
    assert len(launcher.lives("router")) == 1
    code, errors = launcher.stop()
    assert code == 0
    assert "node ended (signal 9); starting it again" in errors


def test_a_stopped_child_is_killed_and_comes_back(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"node": "serve", "router": "serve"}, peer_lost_s=1.0)
    launcher.first_line()
    pid = int(launcher.lives("node")[0][0])
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: len(launcher.lives("node")) >= 2)
    assert is_gone(pid)
    assert "killing node: silent for 1 s" in launcher.stop()[1]


def test_a_child_without_heartbeats_is_killed(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"node": "mute", "router": "serve"}, peer_lost_s=0.5)
    wait_until(lambda: len(launcher.lives("node")) >= 2)
    launcher.stop()


def test_a_bad_configuration_ends_it_all_with_the_childs_words(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"other": "serve", "node": "bad-config", "router": "serve"})
    code, errors = launcher.end()
    assert code == 2
    assert errors.count("tandem: bad folder") == 1, "said once"
    assert len(launcher.lives("node")) == 1
    assert launcher.lives("router") == []


def test_what_can_not_be_read_from_a_child_costs_nothing(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"node": "babbling", "router": "serve"})
    assert launcher.first_line().startswith("serving m on ")
    assert len(launcher.lives("node")) == 1
    assert launcher.stop()[0] == 0


def test_the_launcher_listens_nowhere(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"node": "serve", "router": "serve"})
    launcher.first_line()
    open_now = psutil.Process(launcher.process.pid).net_connections()  # it asks the router how many requests there are
    assert [each for each in open_now if each.status == psutil.CONN_LISTEN] == []
    assert launcher.stop()[0] == 0


def test_an_exception_before_a_child_serves_ends_it_all(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"other": "serve", "node": "fails", "router": "serve"})
    code, errors = launcher.end()
    assert code == 1
    assert "node ended (exit code 1) before it served" in errors
    assert "no such luck" in errors
    assert len(launcher.lives("node")) == 1


# README says: "`tandem serve` drains on Ctrl-C, SIGTERM and SIGHUP"
def test_a_closed_terminal_drains(launch: Callable[..., LauncherProcess]) -> None:
    as_it_was = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what nohup started ignores it, and all that starts
    try:
        launcher = launch({"node": "serve", "router": "serve"})
    finally:
        signal.signal(signal.SIGHUP, as_it_was)
    launcher.first_line()
    assert launcher.process.stderr is not None
    launcher.process.stderr.close()  # what it writes from now on fails
    launcher.process.send_signal(signal.SIGHUP)
    assert launcher.process.wait(PATIENCE_S) == 0
    assert launcher.terminated_at("router") < launcher.terminated_at("node")


# README says: "says how many requests it waits for"
def test_it_says_what_it_drains(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"node": "serve", "router": "serve"})
    launcher.first_line()
    launcher.process.send_signal(signal.SIGINT)
    code, errors = launcher.end()
    assert code == 0
    assert "tandem: draining 3 requests; stop again to kill" in errors


def test_progress_reaches_the_launcher(launch: Callable[..., LauncherProcess], tmp_path: Path) -> None:
    launcher = launch({"node": "loading", "router": "serve"}, progress_every_s=0.1)
    assert launcher.process.stderr is not None
    said = iter(launcher.process.stderr.readline, "")
    assert any("tandem: node: loading weights 50%" in line for line in said)
    (tmp_path / "go").touch()
    assert launcher.first_line().startswith("serving")
    assert launcher.stop()[0] == 0


def test_who_ignores_the_drain_is_killed_by_a_second_signal(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"node": "stubborn", "router": "serve"})
    launcher.first_line()
    launcher.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "term" in "".join(launcher._log("node")))
    code, _ = launcher.stop()
    assert code == 1
    assert is_gone(int(launcher.lives("node")[0][0]))


def test_children_and_redis_die_with_a_killed_launcher(launch: Callable[..., LauncherProcess]) -> None:
    launcher = launch({"node": "serve", "router": "serve"}, with_redis=True)
    redis_pid, port = map(int, launcher.first_line().split())
    launcher.first_line()
    os.kill(redis_pid, signal.SIGKILL)
    wait_until(lambda: answers(port))
    pids = [int(launcher.lives(name)[0][0]) for name in ("node", "router")]
    launcher.process.kill()
    wait_until(lambda: all(map(is_gone, pids)) and not answers(port))


# --- plans ----------------------------------------------------------------------------------------------------


def test_single_node_plan_has_one_node_and_a_router_that_connects_to_it() -> None:
    node, router = plan_single_node(
        {"model": "m", "port": 9000, "host": "0.0.0.0", "block_size": 128, "redis_url": "x"}
    )
    assert node.command[-1] == "unified"
    assert {"m", "--block-size=128"} <= set(node.arguments)
    assert not any(argument.startswith(("--port", "--host", "--redis")) for argument in node.arguments)
    assert router.connects_to == (node.name,)
    assert {"m", "--port=9000", "--host=0.0.0.0"} <= set(router.arguments)
    assert router.stage > node.stage


def test_cluster_plan_numbers_nodes_by_role_and_points_all_at_redis() -> None:
    plans = plan_cluster({"model": "m", "prefill": 2, "decode": 1, "device": "cpu"}, "redis://r/0")
    assert [plan.name for plan in plans] == ["prefill-0", "prefill-1", "decode-0", "router"]
    assert all(plan.environment == {"TANDEM_REDIS_URL": "redis://r/0"} for plan in plans)
    assert plans[-1].connects_to == ("prefill-0", "prefill-1", "decode-0"), "the router needs no Redis to find them"


def test_nodes_that_do_all_come_with_a_router_that_knows_it() -> None:
    values = {"model": "m", "elastic": 2, "prefill": 1, "decode": 0, "device": "cpu"}
    plans = plan_cluster(values, "redis://r/0")
    assert [plan.name for plan in plans] == ["prefill-0", "unified-0", "unified-1", "router"]
    assert "--placement=elastic" in plans[-1].arguments
    assert (
        "--placement=round_robin" in plan_cluster({**values, "placement": "round_robin"}, "redis://r/0")[-1].arguments
    )


def test_without_fixed_roles_nodes_do_all_work_and_begin_with_a_leaning() -> None:
    values = {"model": "m", "prefill": 1, "decode": 1, "fixed_roles": False, "device": "cpu"}
    *nodes, router = plan_cluster(values, "redis://r")
    assert [(node.name, node.command[-1]) for node in nodes] == [("prefill-0", "unified"), ("decode-0", "unified")]
    assert all(f"--leaning={node.name[:-2]}" in node.arguments for node in nodes)
    assert "--placement=elastic" in router.arguments
    fixed = plan_cluster({**values, "fixed_roles": True}, "redis://r")
    assert [node.command[-1] for node in fixed] == ["prefill", "decode", "router"]


def test_each_node_becomes_several_that_share_nothing_or_experts() -> None:
    values = {"model": "m", "prefill": 1, "decode": 2, "device": "cpu", "data_parallel_size": 2}
    *apart, _ = plan_cluster(values, "redis://r")
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "decode-3"]
    assert [node.name for node in apart] == names
    assert not any("data-parallel-rank" in argument for node in apart for argument in node.arguments)
    *nodes, router = plan_cluster({**values, "enable_expert_parallel": True}, "redis://r")
    assert [node.name for node in nodes] == names
    places = [{a for a in node.arguments if a.startswith("--data-parallel")} for node in nodes]
    ports = [next(a for a in place if "rpc-port" in a) for place in places]
    assert all(f"--data-parallel-rank={i % 2}" in place for i, place in enumerate(places) if i % 2)
    assert all("--data-parallel-size=2" in place for place in places)
    assert ports[0] == ports[1] != ports[2] == ports[3] != ports[4] == ports[5]
    assert not any("data-parallel" in argument for argument in router.arguments)
    given = plan_cluster({**values, "enable_expert_parallel": True, "data_parallel_rpc_port": 7000}, "redis://r")
    assert ["--data-parallel-rpc-port=7002" in node.arguments for node in given[:-1]] == [False] * 4 + [True] * 2


def test_without_roles_there_are_as_many_single_nodes() -> None:
    *nodes, router = plan_cluster({"model": "m", "data_parallel_size": 3, "device": "cpu"}, "redis://r")
    assert [(node.name, node.command[-1]) for node in nodes] == [(f"unified-{i}", "unified") for i in range(3)]
    assert not any("placement" in argument for argument in router.arguments)


def test_nodes_that_share_experts_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model": "m", "data_parallel_size": 2, "enable_expert_parallel": True}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    *nodes, _ = plan_cluster(values, "redis://r")
    assert ["--device-index=1" in node.arguments for node in nodes] == [False, True]
    with pytest.raises(ConfigError, match="4 nodes that share experts out take a GPU each, and 2 are visible"):
        plan_cluster({**values, "elastic": 2}, "redis://r")
    with pytest.raises(ConfigError, match="on one host alone"):
        plan_on_ray({**values, "prefill": 1, "decode": 1})


def test_processes_are_not_given_a_transport_within_one() -> None:
    with pytest.raises(ConfigError, match=r"local moves KV inside one process.*choose auto"):
        plan_cluster({"model": "m", "prefill": 1, "decode": 1, "device": "cpu", "transport": "local"}, "redis://r/0")


def test_a_single_node_reads_the_url_that_it_has_no_use_for() -> None:
    with pytest.raises(ConfigError, match=r"--redis-url must begin with redis://"):
        serve({"model": str(DEMO), "redis_url": "nonsense", "port": 0})


def test_nodes_share_gpus_memory_and_cores() -> None:
    assert share_of_machine(0, [1], 0, 8, {}) == {}
    assert share_of_machine(2, [1, 1, 1], 0, 8, {}) == {"num_threads": 2}
    assert share_of_machine(2, [1, 1, 1], 0, 8, {"num_threads": 5}) == {}
    assert share_of_machine(1, [1, 1], 4, 8, {}) == {"device_index": 1}
    assert share_of_machine(2, [1, 1, 1], 2, 8, {}) == {"device_index": 0, "gpu_memory_utilization": 0.45}
    assert share_of_machine(1, [1, 1, 1], 2, 8, {}) == {"device_index": 1}


def test_nodes_of_several_gpus_share_none() -> None:
    assert [share_of_machine(index, [1, 2, 1], 4, 8, {}) for index in range(3)] == [
        {"device_index": first} for first in (0, 1, 3)
    ]
    with pytest.raises(ConfigError, match=r"nodes of 2 \+ 2 GPUs, but 3 are visible"):
        share_of_machine(0, [2, 2], 3, 8, {})


def test_roles_may_have_numbers_of_gpus_of_their_own() -> None:
    values = {"model": "m", "prefill": 1, "decode": 2, "device": "cpu", "tensor_parallel_size": 2}
    plans = plan_cluster({**values, "decode_tensor_parallel_size": 4}, "redis://localhost")
    sizes = [[a for a in plan.arguments if "tensor" in a] for plan in plans]
    assert sizes == [["--tensor-parallel-size=2"], *[["--tensor-parallel-size=4"]] * 2, []]


def test_children_do_not_see_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("raise SystemExit('shadowed')")
    code = PROGRAM.replace(
        "from tandem", "import importlib.util as u; assert u.find_spec('kernels') is None; from tandem"
    )
    result = subprocess.run([sys.executable, "-c", code, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_redis_starts_again_on_its_port_after_a_crash() -> None:
    server = RedisServer()
    server.start()
    try:
        port = server.port
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.is_running())
        server.start()
        assert server.port == port
        assert answers(port)
    finally:
        server.stop()
    assert not answers(port)


def test_a_redis_that_is_killed_with_its_starter_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import os, signal; from tandem.deploy.redis_server import RedisServer; server = RedisServer(); "
        "server.start(); print(server.port, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    port = int(result.stdout)
    wait_until(lambda: not answers(port))
    assert list(tmp_path.iterdir()) == []


def test_redis_writes_nothing_though_it_is_told_to(tmp_path: Path) -> None:
    server = RedisServer()
    server.start()
    try:
        with redis.Redis(port=server.port) as client:
            client.set("key", "value")
            with pytest.raises(redis.ResponseError):
                client.save()
            assert client.get("key") == b"value"
    finally:
        server.stop()


def test_nodes_on_ray_find_each_other_through_redis_alone() -> None:
    """Their ports and hosts are chosen where they run, and routers that may share a host have different ports."""
    values = {
        "model": "m",
        "prefill": 2,
        "decode": 1,
        "ray_routers": 2,
        "port": 9000,
        "host": "0.0.0.0",
        "redis_url": "redis://r",
    }
    plans = plan_on_ray(values)
    assert [plan.name for plan in plans] == ["prefill-0", "prefill-1", "decode-0", "router", "router-1", "router-2"]
    assert [plan.is_local for plan in plans] == [False] * 3 + [True] + [False] * 2
    assert not any(plan.connects_to for plan in plans)
    assert all(plan.environment["TANDEM_REDIS_URL"] == "redis://r" for plan in plans)
    ports = [[part for part in plan.arguments if part.startswith(("--port", "--host"))] for plan in plans]
    assert ports == [[], [], [], ["--host=0.0.0.0", "--port=9000"], ["--port=9001"], ["--port=9002"]]


@pytest.mark.parametrize("given", [{"prefill": 1, "decode": 1}, {"redis_url": "redis://r"}])
def test_ray_needs_nodes_and_a_redis(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--redis-url: give both"):
        serve({"model": str(DEMO), "ray": "auto", "port": 0, **given})
