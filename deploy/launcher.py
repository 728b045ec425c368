"""`tandem serve`: starts nodes and router as children, watches them, and brings them down together.

    single node      unified node -> router --node ADDRESS                      (no Redis)
    local cluster    Redis, prefill nodes, decode nodes -> router --redis-url

One thread and one poll loop: readiness pipes, the children's output, heartbeats, signals. What to do about them is
decided in supervisor.py. Children die with this process (PR_SET_PDEATHSIG) and get its signals only from it.
"""

from __future__ import annotations

import http.client
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import zmq

from tandem.deploy.child_process import ChildProcess
from tandem.deploy.cluster_plan import NODES, ChildPlan, plan_cluster, plan_single_node
from tandem.deploy.redis_server import RedisServer, free_port
from tandem.deploy.supervisor import Action, Kill, Phase, Report, Serving, Start, Supervisor, Terminate
from tandem.engine.config import Timeouts
from tandem.engine.errors import ConfigError

POLL_MS = 100
REDIS_RETRY_S = 1.0
READY_PROBE_S = 0.5
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # bound everywhere: asked here


def serve(values: Mapping[str, Any]) -> int:
    """Serves until SIGTERM or SIGINT has drained everything; returns the exit code. Raises ConfigError."""
    num_prefill, num_decode = values.get("prefill", 0), values.get("decode", 0)
    if (num_prefill > 0) != (num_decode > 0) or min(num_prefill, num_decode) < 0:
        raise ConfigError("--prefill and --decode go together: a local cluster needs at least one node of each")
    if not num_prefill:
        return Launcher(plan_single_node(values), values).run()
    if values.get("redis_url"):
        return Launcher(plan_cluster(values, values["redis_url"]), values).run()
    redis = RedisServer()
    redis.start()
    try:
        return Launcher(plan_cluster(values, redis.url), values, redis).run()
    finally:
        redis.stop()


class Launcher:
    """Carries out what the supervisor decides."""

    def __init__(self, plans: list[ChildPlan], values: Mapping[str, Any], redis: RedisServer | None = None) -> None:
        timeouts = Timeouts(**{name: values[name] for name in ("peer_lost_s", "drain_s") if name in values})
        self._plans = {plan.name: plan for plan in plans}
        self._values, self._redis = values, redis
        self._supervisor = Supervisor(timeouts.peer_lost_s, timeouts.drain_s)
        for plan in plans:
            self._supervisor.add(plan.name, plan.stage)
        self._children: dict[str, ChildProcess] = {}
        self._ready_lines: dict[str, dict[str, Any]] = {}
        self._stop_requests = 0
        self._next_redis_check = 0.0
        self._announcing = False
        self._context = zmq.Context()
        self._heartbeats = self._context.socket(zmq.PULL)
        port = self._heartbeats.bind_to_random_port("tcp://127.0.0.1")
        self._address = f"tcp://127.0.0.1:{port}"

    def run(self) -> int:
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self._supervisor.phase is not Phase.ENDED:
                self._turn()
            return self._supervisor.exit_code
        finally:
            for child in self._children.values():
                child.close()
            self._heartbeats.close(linger=0)
            self._context.term()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_requests += 1

    def _turn(self) -> None:
        self._wait()
        while self._stop_requests:
            self._stop_requests -= 1
            self._carry_out(self._supervisor.stop(time.monotonic()))
        self._read_heartbeats()
        for name, child in list(self._children.items()):
            child.forward_output()
            line = child.ready_line()
            if line is not None:
                self._ready_lines[name] = line
                self._carry_out(self._supervisor.ready(name, time.monotonic()))
            code = child.exit_code()
            if code is not None:
                child.close()
                del self._children[name]
                self._carry_out(self._supervisor.exited(name, code, time.monotonic(), child.last_words()))
        self._keep_redis(time.monotonic())
        if self._announcing:
            self._announce_when_ready()
        self._carry_out(self._supervisor.tick(time.monotonic()))

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._heartbeats, zmq.POLLIN)
        for child in self._children.values():
            for fd in child.open_fds():
                poller.register(fd, zmq.POLLIN)
        poller.poll(POLL_MS)

    def _read_heartbeats(self) -> None:
        names = {child.pid: name for name, child in self._children.items()}
        while self._heartbeats.poll(0):
            try:
                beat = msgspec.msgpack.decode(self._heartbeats.recv())
                name = names.get(beat["pid"])
            except (msgspec.DecodeError, KeyError, TypeError):
                continue
            if name is not None:
                self._supervisor.beat(name, time.monotonic())

    def _keep_redis(self, now: float) -> None:
        """Restarts a dead Redis; the nodes publish into it again by themselves."""
        if self._redis is None or self._redis.is_running() or now < self._next_redis_check:
            return
        self._next_redis_check = now + REDIS_RETRY_S
        _say("redis-server ended; starting it again")
        try:
            self._redis.start()
        except ConfigError as error:
            _say(error.message)

    # --- carrying out ---------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(self._plans[action.name])
            elif isinstance(action, Terminate):
                self._children[action.name].terminate()
            elif isinstance(action, Kill):
                _say(f"killing {action.name}: {action.reason}")
                self._children[action.name].kill()
            elif isinstance(action, Report):
                _say(action.text)
            elif isinstance(action, Serving):
                self._announcing = True

    def _start(self, plan: ChildPlan) -> None:
        arguments = [*plan.arguments, f"--launcher-address={self._address}"]
        if plan.node_id:
            arguments.append(f"--node-id={plan.node_id}-{secrets.token_hex(3)}")
        arguments += [f"--node={self._ready_lines[name]['address']}" for name in plan.connects_to]
        known = self._ready_lines.get(plan.name)
        if known is not None:
            arguments.append(f"--port={_port(known)}")  # whoever knows the address finds the successor there
        elif plan.stage == NODES:
            # None that the system may give to a connection while the node is down: its successor could not bind.
            arguments.append(f"--port={free_port()}")
        self._children[plan.name] = ChildProcess(plan.name, plan.command, arguments)

    def _announce_when_ready(self) -> None:
        """Every process is up; the line comes when the router has also met its nodes."""
        host = str(self._values.get("host", "127.0.0.1"))
        port = _port(self._ready_lines["router"])
        if not _is_ready(host, port):
            return
        self._announcing = False
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {served_name(self._values)} on http://{shown}:{port}", flush=True)


def served_name(values: Mapping[str, Any]) -> str:
    model = Path(str(values["model"])).expanduser()
    return str(values.get("served_name") or (model.resolve().name if model.is_dir() else model.name))


def _is_ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(_ANY_HOST.get(host, host), port, timeout=READY_PROBE_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _port(ready_line: Mapping[str, Any]) -> int:
    """A router reports its port, a node its control address."""
    return int(ready_line["port"] if "port" in ready_line else ready_line["address"].rpartition(":")[2])


def _say(text: str) -> None:
    print(f"tandem: {text}", file=sys.stderr, flush=True)
