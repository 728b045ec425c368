"""`tandem serve`: starts nodes and router as children, watches them, and brings them down together.

    single node      unified node -> router --node ADDRESS                      (no Redis)
    local cluster    Redis, nodes -> router --redis-url

One thread and one poll loop: the children's pipes and output, signals. What to do about them is decided in
supervisor.py. Children die with this process (PR_SET_PDEATHSIG) and get its signals only from it.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import secrets
import select
import signal
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from tandem.deploy.launch.child_process import ChildProcess, RunningChild
from tandem.deploy.launch.cluster_plan import NODES, ChildPlan, plan_cluster, plan_on_ray, plan_single_node
from tandem.deploy.launch.console import Console
from tandem.deploy.launch.preflight import check_redis, check_redis_url, check_router
from tandem.deploy.launch.rates import Rates
from tandem.deploy.launch.scaled_pools import POOLS, ScaledPools
from tandem.deploy.launch.summary import summary
from tandem.deploy.launch.supervisor import Action, Kill, Phase, Report, Serving, Start, Supervisor, Terminate
from tandem.deploy.redis_server import RedisServer, free_port
from tandem.engine.contracts.config import RouterOptions, Timeouts
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.model_folder import served_name
from tandem.engine.process.process_log import chosen_format
from tandem.router.process.port import bind

POLL_MS = 100  # a guess: how late the end of a child may be seen
REDIS_RETRY_S = 1.0  # a guess
PROBE_S = 0.5  # how long the router may take to answer a question of the launcher; a guess
RATES_EVERY_S = 10.0  # as often as vLLM does
RAYS_PATIENCE = 4  # times `peer_lost_s` that a child elsewhere may be silent: what is late may be Ray; a guess
Write = Callable[[str, str], None]
StartChild = Callable[[ChildPlan, Sequence[str], Write], RunningChild]
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # bound everywhere: asked here
_ACTIVE = re.compile(r"^tandem_router_active_prompts (\S+)$", re.MULTILINE)


def serve(values: Mapping[str, Any]) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP has drained everything; returns the exit code. Raises ConfigError."""
    num_prefill, num_decode, num_all = (values.get(name, 0) for name in ("prefill", "decode", "elastic"))
    if not num_all and (num_prefill > 0) != (num_decode > 0):
        raise ConfigError("--prefill and --decode go together: a local cluster needs at least one node of each")
    is_cluster = num_prefill + num_decode + num_all > 0 or values.get("data_parallel_size", 1) > 1
    if not values.get("ray") and any(values.get(f"{pool}_max") for pool, _ in POOLS):
        raise ConfigError("pools change their size on a Ray cluster (--ray); in Kubernetes: `tandem scale`")
    check_router(values)
    values = {**values, "log_format": chosen_format(values.get("log_format", "auto"), sys.stderr)}
    console = Console(log_format=values["log_format"])
    url = values.get("redis_url", "")
    if url and is_cluster:
        check_redis(url)
    elif url:
        check_redis_url(url)
        console.say("a single node needs no Redis: --redis-url is for --prefill and --decode, or --elastic")
    if (num_all or not values.get("fixed_roles", True)) and not values.get("tpot_target_ms"):
        console.say(
            "nodes that do all work go by deadlines: until --tpot-target-ms is given, each request stays on one"
        )
    # Bound from here on and never listening: a taken port is found now, port 0 becomes one for good, and the system
    # gives it to nobody who asks for any, neither while weights are loaded nor while a router starts again.
    port = values.get("port", RouterOptions.port)
    with bind(values.get("host", RouterOptions.host), port, share_port=False) as reserved:
        values = {**values, "port": reserved.getsockname()[1]}
        if values.get("ray"):
            return _serve_on_ray(values, is_cluster)
        if not is_cluster:
            return Launcher(plan_single_node(values), values).run()
        if url:
            return Launcher(plan_cluster(values, url), values).run()
        redis = RedisServer()
        redis.start()
        try:
            return Launcher(plan_cluster(values, redis.url), values, redis).run()
        finally:
            redis.stop()


def start_here(plan: ChildPlan, arguments: Sequence[str], write: Write) -> RunningChild:
    """Starts a child as a process of this host."""
    return ChildProcess(plan.name, plan.command, arguments, plan.environment, write)


def _serve_on_ray(values: Mapping[str, Any], has_nodes: bool) -> int:
    from tandem.deploy.launch.ray_cluster import RayCluster

    if not has_nodes or not values.get("redis_url"):
        raise ConfigError(
            "--ray places nodes (--prefill and --decode, or --elastic), which find each other through --redis-url: "
            "give both, and a Redis that all hosts of the Ray cluster reach"
        )
    with RayCluster(values) as cluster:
        plans = plan_on_ray(values)
        cluster.reserve(plans)
        pools = ScaledPools.of(values)
        return Launcher(plans, values, start_child=cluster.start, forget_child=cluster.forget, pools=pools).run()


class Launcher:
    """Carries out what the supervisor decides."""

    def __init__(
        self,
        plans: list[ChildPlan],
        values: Mapping[str, Any],
        redis: RedisServer | None = None,
        start_child: StartChild = start_here,
        forget_child: Callable[[str], None] = lambda name: None,
        pools: ScaledPools | None = None,
    ) -> None:
        """`forget_child` is told which children won't start again. `pools`: those that grow and shrink."""
        timeouts = Timeouts(**{name: values[name] for name in ("peer_lost_s", "drain_s") if name in values})
        self._plans = {plan.name: plan for plan in plans}
        self._values, self._redis = values, redis
        silence_s = timeouts.peer_lost_s * (1 if start_child is start_here else RAYS_PATIENCE)
        self._supervisor = Supervisor(silence_s, timeouts.drain_s)
        self._start_child, self._forget_child, self._pools = start_child, forget_child, pools
        for plan in plans:
            self._supervisor.add(plan.name, plan.stage)
        self._children: dict[str, RunningChild] = {}
        self._ready_lines: dict[str, dict[str, Any]] = {}
        self._busy: dict[str, str] = {}
        self._console = Console(log_format=values.get("log_format", "auto"))
        self._stop_requests = 0
        self._next_redis_check = 0.0
        self._announcing = False
        self._rates = Rates()
        self._next_rates: float | None = None  # None: nothing serves yet, or nobody wants to know

    def run(self) -> int:
        handlers = {number: signal.signal(number, self._on_signal) for number in _signals_to_handle()}
        try:
            while self._supervisor.phase is not Phase.ENDED:
                self._turn()
            return self._supervisor.exit_code
        finally:
            for child in self._children.values():
                child.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_requests += 1

    def _turn(self) -> None:
        self._wait()
        while self._stop_requests:
            self._stop_requests -= 1
            self._stop()
        for name, child in list(self._children.items()):
            child.forward_output()
            for said in child.said():
                self._hear(name, said)
            code = child.exit_code()
            if code is not None:
                child.close()
                del self._children[name]
                self._busy.pop(name, None)
                self._carry_out(self._supervisor.exited(name, code, time.monotonic(), child.last_words()))
                self._forget_retired(name)
        self._console.progress(self._busy, time.monotonic())
        self._keep_redis(time.monotonic())
        if self._announcing:
            self._announce_when_ready()
        self._say_rates(time.monotonic())
        self._resize_pools(time.monotonic())
        self._carry_out(self._supervisor.tick(time.monotonic()))

    def _wait(self) -> None:
        poller = select.poll()
        for child in self._children.values():
            for fd in child.open_fds():
                poller.register(fd, select.POLLIN)
        poller.poll(POLL_MS)

    def _hear(self, name: str, said: dict[str, Any]) -> None:
        """Takes one line that a child has written to its pipe (engine/process/launcher_pipe.py)."""
        now = time.monotonic()
        if "beat" in said:
            self._supervisor.beat(name, now)
        elif "doing" in said:
            self._busy[name] = str(said["doing"])
        else:
            self._busy.pop(name, None)
            self._ready_lines[name] = said
            self._carry_out(self._supervisor.ready(name, now))

    def _stop(self) -> None:
        if self._supervisor.phase is Phase.RUNNING:
            self._console.say(f"draining{self._under_way()}; stop again to kill")
        self._carry_out(self._supervisor.stop(time.monotonic()))

    def _under_way(self) -> str:
        """Says how many requests are under way, if the router answers at once; else nothing."""
        found = _ACTIVE.search(self._ask_router("/metrics")[1]) if "router" in self._ready_lines else None
        if found is None:
            return ""
        number = int(float(found[1]))
        return f" {number} request{'s' * (number != 1)}"

    def _keep_redis(self, now: float) -> None:
        """Restarts a dead Redis; the nodes publish into it again by themselves."""
        if self._redis is None or self._redis.is_running() or now < self._next_redis_check:
            return
        self._next_redis_check = now + REDIS_RETRY_S
        self._console.say("redis-server ended; starting it again")
        try:
            self._redis.start()
        except ConfigError as error:
            self._console.say(error.message)

    # --- carrying out ---------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(self._plans[action.name])
            elif isinstance(action, Terminate):
                self._children[action.name].terminate()
            elif isinstance(action, Kill):
                self._console.say(f"killing {action.name}: {action.reason}")
                self._children[action.name].kill()
            elif isinstance(action, Report):
                self._console.say(action.text)
            elif isinstance(action, Serving):
                self._announcing = True

    def _start(self, plan: ChildPlan) -> None:
        arguments = list(plan.arguments)
        if plan.node_id:
            arguments.append(f"--node-id={plan.node_id}-{secrets.token_hex(3)}")
        arguments += [f"--node={self._ready_lines[name]['address']}" for name in plan.connects_to]
        known = self._ready_lines.get(plan.name)
        if not plan.is_local:
            pass  # its successor may be on another host
        elif known is not None:
            arguments.append(f"--port={_port(known)}")  # whoever knows the address finds the successor there
        elif plan.stage == NODES:
            # None that the system may give to a connection while the node is down: its successor could not bind.
            arguments.append(f"--port={free_port()}")
        self._children[plan.name] = self._start_child(plan, arguments, self._write)

    def _write(self, name: str, text: str) -> None:
        self._console.child_line(name, text, time.monotonic())

    def _announce_when_ready(self) -> None:
        """Prints that all is ready: every process is up, and the router has met its nodes."""
        if self._ask_router("/ready")[0] != 200:
            return
        self._announcing = False
        self._next_rates = time.monotonic() if self._values.get("log_stats", True) else None
        host = str(self._values.get("host", RouterOptions.host))
        shown, scheme = f"[{host}]" if ":" in host else host, "https" if self._values.get("ssl_certfile") else "http"
        url = f"{scheme}://{shown}:{_port(self._ready_lines['router'])}"
        name = served_name(self._values["model"], self._values.get("served_name", ""))
        for line in summary(name, url, self._ready_lines):
            self._console.say(line)
        with contextlib.suppress(OSError):
            print(f"serving {name} on {url}", flush=True)

    def _say_rates(self, now: float) -> None:
        if self._next_rates is None or now < self._next_rates or self._supervisor.phase is not Phase.RUNNING:
            return
        self._next_rates = now + RATES_EVERY_S
        if line := self._rates.line(self._ask_router("/metrics")[1], now):
            self._console.say(line)

    def _resize_pools(self, now: float) -> None:
        """Adds nodes that the cluster asks for, and retires the newest of those that it can spare."""
        is_serving = "router" in self._ready_lines and not self._announcing
        if self._pools is None or not is_serving or self._supervisor.phase is not Phase.RUNNING:
            return
        if not self._pools.is_due(now):
            return
        kept = [name for name, child in self._supervisor.children.items() if not child.retired]
        routers = [name for name in self._children if name.startswith("router") and name in self._ready_lines]
        shown = {name: self._ask_router("/metrics", name)[1] for name in routers}
        added, retired = self._pools.look(shown, kept, self._supervisor.children, now)
        for plan in added:
            self._console.say(f"adding {plan.name}, which is lacking")
            self._plans[plan.name] = plan
            self._supervisor.add(plan.name, plan.stage)
        for name in retired:
            self._console.say(f"draining {name}, which is idle; it ends then")
            self._carry_out(self._supervisor.retire(name, now))
            self._forget_retired(name)

    def _forget_retired(self, name: str) -> None:
        if name not in self._supervisor.children:
            del self._plans[name]
            self._forget_child(name)

    def _ask_router(self, path: str, name: str = "router") -> tuple[int, str]:
        """The status and body of the router's answer to GET `path`; 0 and nothing where it doesn't answer within
        `PROBE_S`. One that wants a client's certificate can't be asked: it counts as ready."""
        if self._values.get("ssl_cert_reqs") == 2:
            return 200, ""
        connection = self._router_connection(self._ready_lines[name])
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()

    def _router_connection(self, said: Mapping[str, Any]) -> http.client.HTTPConnection:
        """A connection to a router. `said`: its ready line, which names its host where that is another one."""
        host, port = str(said.get("host", self._values.get("host", RouterOptions.host))), _port(said)
        host = _ANY_HOST.get(host, host)
        if not self._values.get("ssl_certfile"):
            return http.client.HTTPConnection(host, port, timeout=PROBE_S)
        unchecked = ssl.create_default_context()  # the certificate names the outside, not this address
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(host, port, timeout=PROBE_S, context=unchecked)


def _signals_to_handle() -> list[signal.Signals]:
    """The signals that stop the launcher. One that was ignored at the start (nohup) stays ignored."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _port(ready_line: Mapping[str, Any]) -> int:
    """The port in a ready line: a router reports its port, a node its control address."""
    return int(ready_line["port"] if "port" in ready_line else ready_line["address"].rpartition(":")[2])
