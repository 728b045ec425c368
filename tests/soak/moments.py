"""What a campaign does to a cluster: signals, a missing or empty Redis, bad disks, cut connections, jumping clocks."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import redis
from processes import named_processes
from relay import FAULTS, Relay, Rule
from shared_parts import Traces
from wall_clock import WallClock

from real_cluster import RealCluster
from redis_process import RedisProcess
from tandem.kv_connector.directory.kept import gives_way
from tandem.router.metrics.nodes import read_nodes

SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
PAIRS = (
    ("router", "prefill", "control"),
    ("router", "decode", "control"),
    ("router", "unified", "control"),
    ("prefill", "decode", "control"),
    ("prefill", "decode", "kv"),
    ("decode", "decode", "kv"),
    ("prefill", "redis", "redis"),
    ("decode", "redis", "redis"),
    ("router", "redis", "redis"),
)
DAMAGES = ("bits", "zeros", "torn")
SHARED_WITHIN_S = 30.0  # that somebody helps with a prompt
LEFT = ("tier_blocks_left", "tier_blocks_given_up")  # what a node leaves to those behind it


class NoTarget(Exception):
    """Nothing was hurt: what should have been is about to be started again, or not part of this cluster."""


@dataclass
class Arena:
    """A cluster with everything that moments need. `redis` and `relay` only where connections are cut."""

    cluster: RealCluster
    rng: random.Random
    disk: Path
    longest_s: float  # of a pause, a cut, a full disk
    relay: Relay | None = None
    redis: RedisProcess | None = None
    clock: WallClock | None = None
    traces: Path | None = None  # of hand-offs, where prompts are several nodes'

    def processes(self) -> dict[str, psutil.Process]:
        found = named_processes(self.cluster.process.pid)
        if self.redis is not None and self.redis.is_running():
            found["redis"] = psutil.Process(self.redis.pid)
        return found

    def pick(self, role: str, but: str = "") -> tuple[str, psutil.Process]:
        """One of that role: router means the process that the launcher started. Raises NoTarget."""
        among = {name: each for name, each in self.processes().items() if is_of(name, role) and name != but}
        if not among:
            raise NoTarget(role)
        name = self.rng.choice(sorted(among))
        return name, among[name]

    def some_time(self) -> float:
        return min(self.longest_s, 0.5 * 40 ** self.rng.random())  # 0.5 to 20 s, short ones as often as long ones


Moment = Callable[[Arena], str]  # does it, and says what; raises NoTarget


def is_of(name: str, role: str) -> bool:
    return name == role or (name.startswith(role + "-") and name.removeprefix(role + "-").isdigit())


def moments(kinds: set[str], roles: list[str]) -> dict[str, Moment]:
    """By name, those of these kinds: kill, helper, keeper, redis, disk, network, clock. `roles`: of its nodes."""
    found: dict[str, Moment] = {}
    if "kill" in kinds:
        for role in (*roles, "router", "router-worker"):
            found |= {f"{name} {role}": _signal(name, role) for name in SIGNALS}
    if "helper" in kinds:
        found |= {f"SIGKILL {who} of a shared prompt": _in_the_middle(who) for who in ("helper", "lead")}
    if "keeper" in kinds:
        found["SIGKILL keeper of last copies"] = _keeper
    if "redis" in kinds and "unified" not in roles:
        found |= {f"{name} redis": _signal(name, "redis") for name in SIGNALS}
        found["FLUSHALL"] = flush_redis
    if "disk" in kinds:
        found |= {f"disk full {role}": _full_disk(role) for role in roles}
        found |= {f"disk damaged: {how}": _damage(how) for how in DAMAGES}
    if "network" in kinds and "unified" not in roles:
        pairs = [pair for pair in PAIRS if "unified" not in pair]
        found |= {f"{fault} {'–'.join(pair)}": _cut(fault, pair) for fault in FAULTS for pair in pairs}
    if "clock" in kinds:
        found["clock jumps"] = jump
    return found


# --- signals and Redis ----------------------------------------------------------------------------------------


def _signal(name: str, role: str) -> Moment:
    def moment(arena: Arena) -> str:
        target, process = arena.pick(role)
        with _may_be_gone():
            process.send_signal(signal.Signals[name])
        said = f"{name} {target}"
        if name == "SIGSTOP":
            pause_s = arena.some_time()
            time.sleep(pause_s)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
            said += f" for {pause_s:.1f} s"
        elif role == "redis" and arena.redis is not None:
            time.sleep(arena.some_time())
            arena.redis.start()
        return said

    return moment


def _in_the_middle(who: str) -> Moment:
    """Kills a node while several compute a prompt: the one that it is, or one that helps."""

    def moment(arena: Arena) -> str:
        assert arena.traces is not None
        part = Traces(arena.traces).wait(SHARED_WITHIN_S)
        if part is None:
            raise NoTarget("nobody shares a prompt")
        wait_s = arena.rng.choice((0.0, 0.05, 0.2))
        time.sleep(wait_s)
        target = (part.helper if who == "helper" else part.lead).rpartition("-")[0]
        process = arena.processes().get(target)
        if process is None:
            raise NoTarget(target)
        with _may_be_gone():
            process.kill()
        return f"SIGKILL {target}, {who} of a shared prompt, after {wait_s} s"

    return moment


def _keeper(arena: Arena) -> str:
    """Kills a node just after another has left it what both held: now it has the last copies."""
    first, deadline = _num_left(arena), time.monotonic() + SHARED_WITHIN_S
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = _num_left(arena)
        leaving = [node for node, num in now.items() if num > first.get(node, num)]
        keepers = [node for node in now if any(gives_way(each, node) for each in leaving)]
        if keepers:
            target = arena.rng.choice(sorted(keepers))
            process = arena.processes().get(target.rpartition("-")[0])
            with _may_be_gone():
                if process is None or arena.cluster.node_of(process.pid) != target:
                    raise NoTarget(target)  # the router has not noticed yet that it is gone
                process.kill()
            return f"SIGKILL {target}, to which {leaving[0]} left blocks"
    raise NoTarget("nobody leaves anything")


def _num_left(arena: Arena) -> dict[str, float]:
    """How many blocks each node has left to others so far."""
    try:
        nodes = read_nodes(arena.cluster.metrics())
    except httpx.HTTPError:
        return {}
    return {node_id: sum(node.figures.get(name, 0.0) for name in LEFT) for node_id, node in nodes.items()}


@contextlib.contextmanager
def _may_be_gone() -> Iterator[None]:
    try:
        yield
    except psutil.NoSuchProcess as error:
        raise NoTarget(str(error)) from error


def flush_redis(arena: Arena) -> str:
    _, process = arena.pick("redis")
    with _may_be_gone():
        command = process.cmdline()
    # The title that redis-server gives itself ends with its address; its own command line names the port.
    text = " ".join(command)
    port = int(text.split("--port ")[1].split()[0] if "--port " in text else text.rsplit(":", 1)[1].split()[0])
    try:
        redis.Redis("127.0.0.1", port, socket_timeout=5).flushall()
    except redis.RedisError as error:
        raise NoTarget(str(error)) from error
    return "FLUSHALL"


# --- disks ----------------------------------------------------------------------------------------------------


def _full_disk(role: str) -> Moment:
    """Files of a node can't grow beyond a limit, or be written there: what a full disk is, for one process."""

    def moment(arena: Arena) -> str:
        target, process = arena.pick(role)
        pause_s, limit = arena.some_time(), arena.rng.choice((0, 1 << 16, 1 << 20))
        with _may_be_gone():
            _, hard = process.rlimit(resource.RLIMIT_FSIZE)
            process.rlimit(resource.RLIMIT_FSIZE, (limit, hard))
        time.sleep(pause_s)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(resource.RLIMIT_FSIZE, (hard, hard))
        return f"disk of {target} full at {limit} bytes for {pause_s:.1f} s"

    return moment


def _damage(how: str) -> Moment:
    """Bytes of a tier file change: single bits, pages of zeros, a tail that was never written."""

    def moment(arena: Arena) -> str:
        files = sorted(arena.disk.glob("blocks-*"))
        if not files:
            raise NoTarget("no tier file")
        path, rng = arena.rng.choice(files), arena.rng
        with path.open("r+b") as file:
            size = file.seek(0, 2)
            if how == "torn" and path.suffix == ".kv":  # a mapped index that shrinks is a bus error by definition
                file.truncate(rng.randrange(size))
                file.truncate(size)
            for _ in range(200):
                file.seek(rng.randrange(max(1, size - 4096)))
                file.write(rng.randbytes(1) if how == "bits" else bytes(4096))
        return f"{path.name} damaged: {how}"

    return moment


# --- connections and clocks -----------------------------------------------------------------------------------


def _cut(fault: str, pair: tuple[str, str, str]) -> Moment:
    def moment(arena: Arena) -> str:
        assert arena.relay is not None, "connections are cut by a relay"
        first, second, channel = pair
        one = arena.pick(first)[0] if first != "router" else "router"
        other = arena.pick(second, but=one)[0]
        rule = Rule(fault, one, other, channel, delay_s=arena.rng.choice((0.02, 0.2, 1.0)))
        pause_s, before = arena.some_time(), arena.relay.num_struck
        arena.relay.apply(rule)
        time.sleep(pause_s)
        arena.relay.apply()
        if arena.relay.num_struck == before:
            raise NoTarget(f"no {channel} connection between {one} and {other}")
        return f"{fault} {one}–{other} {channel} for {pause_s:.1f} s"

    return moment


def jump(arena: Arena) -> str:
    """The wall clock of all processes jumps by up to a day; the monotonic one does not."""
    assert arena.clock is not None
    offset_s = arena.rng.choice((-86400, -7200, -90, 90, 3600, 86400))
    arena.clock.jump_to(offset_s)
    return f"wall clock at {offset_s:+d} s"
