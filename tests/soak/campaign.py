"""One campaign: a cluster, clients, moments that hurt it, and the proof that nothing was lost, wrong or leaked."""

from __future__ import annotations

import contextlib
import json
import random
import re
import secrets
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import psutil
from asks import Ask, make_asks
from changed_model import make_changed_model
from clients import Clients
from counted import Counted
from moments import Arena, Moment, NoTarget, moments
from processes import MARK, levels, shared_segments, wait_for_none
from relay import RELAY_HOST, Relay
from wall_clock import WallClock

from real_cluster import RealCluster
from redis_process import RedisProcess, running_redis
from tandem.deploy.options import DEMO_MODEL

KINDS = ("kill", "helper", "keeper", "redis", "disk", "network", "clock")
HOST_TIER_BYTES, DISK_TIER_BYTES = 1 << 20, 32 << 20
POOLS = (256, 96)  # blocks of 16 tokens: roomy, or so few that requests wait and caches are evicted
MORE_FDS, MORE_THREADS = 16, 6  # than at first that a process may hold at the end: connections that come when used
AGENT_FDS = 18  # of one end of a link over nixl, counted; they are given back when the link ends
COUNTERS = (
    "pull_completed", "tier_loaded_bytes", "tier_disk_hits", "tier_disk_dropped", "tier_blocks_left",
    "tier_blocks_given_up",
    "shared_begun", "shared_declined", "shared_failed", "leaning_changes",
)  # fmt: skip
ROUTER_S = 60.0  # after a signal to a router process, or its start, in which connections may be lost: drains, silence
TRACEBACK = re.compile(r"Traceback \(most recent call last\)")


@dataclass(frozen=True)
class Plan:
    """What one campaign is; `seconds_limit` ends it early, after the moment that it interrupts."""

    folder: Path
    num_moments: int = 50
    seed: int = 1
    transport: str = "shm"  # local: one unified node
    kinds: tuple[str, ...] = KINDS
    seconds_limit: float = 3600.0
    prefill: int = 1
    decode: int = 2
    elastic: int = 0  # nodes that do all work, instead of those
    workers: int = 2
    clients: int = 6
    num_asks: int = 40
    salted: float = 0.2  # share of requests that find nothing cached
    longest_s: float = 20.0
    restart_s: float = 120.0
    arguments: tuple[str, ...] = ()  # more options of `tandem serve`
    change: str = ""  # of the demo model: changed_model.py
    in_group: int = 1  # nodes in place of each one, which share experts out

    @cached_property
    def model(self) -> Path:
        return make_changed_model(self.folder / "model", self.change) if self.change else DEMO_MODEL

    @property
    def is_split(self) -> bool:
        return self.transport != "local"

    @property
    def traces(self) -> Path | None:
        """Where nodes tell of their hand-offs, if a prompt may be several nodes'."""
        return self.folder / "traces" if "--prefill-nodes-per-prompt" in self.arguments else None

    @property
    def roles(self) -> list[str]:
        return ["prefill", "decode"] if self.is_split and not self.elastic else ["unified"]

    @property
    def num_nodes(self) -> int:
        return self.in_group * (self.elastic or (self.prefill + self.decode if self.is_split else 1))

    @property
    def group(self) -> tuple[str, ...]:
        """Options of nodes that share experts out; parts of a token's sum are added up in another order then."""
        if self.in_group == 1:
            return ()
        return ("--data-parallel-size", str(self.in_group), "--enable-expert-parallel")

    @property
    def nodes(self) -> str:
        """1+2, or 3."""
        return f"{self.prefill}+{self.decode}" if "prefill" in self.roles else str(self.num_nodes)


@dataclass
class Summary:
    """One line of JSON in summary.json. `failures` is empty where every promise held."""

    seed: int
    transport: str
    kinds: str
    nodes: str = ""
    moments: int = 0
    struck: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    tracebacks: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run_campaign(plan: Plan) -> Summary:
    """Never raises for what the cluster did: that stands in the summary, which is also left in the folder, whatever
    ends the campaign."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    summary = Summary(plan.seed, plan.transport, ",".join(plan.kinds), plan.nodes)
    started, mark = time.monotonic(), f"{plan.seed}-{secrets.token_hex(4)}"
    try:
        asks = undisturbed(plan, mark)
        with _arena(plan, mark) as arena:
            _Run(plan, arena, asks, summary).run()
    except Exception as error:  # whatever it is, it belongs into the summary
        traceback.print_exc()
        summary.failures.append(f"{type(error).__name__}: {str(error)[:2000]}")
    except SystemExit:
        summary.failures.append("interrupted: what it would have left is not known")
        raise
    finally:
        _judge_what_is_left(plan, mark, summary)
        summary.seconds = round(time.monotonic() - started, 1)
        (plan.folder / "summary.json").write_text(json.dumps(asdict(summary)) + "\n")
    return summary


def _judge_what_is_left(plan: Plan, mark: str, summary: Summary) -> None:
    summary.failures += [f"a process outlived its cluster: {name}" for name in wait_for_none(mark, 30)]
    left = [path.name for path in (plan.folder / "tmp").glob("*")]
    if left:
        summary.failures.append(f"left in the temporary folder: {sorted(left)}")
    log = plan.folder / "cluster.log"
    summary.tracebacks = len(TRACEBACK.findall(log.read_text(errors="replace"))) if log.exists() else 0


def undisturbed(plan: Plan, mark: str) -> list[Ask]:
    """Requests with the answers of one node that serves them one at a time."""
    temporary = plan.folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {MARK: mark, "TMPDIR": str(temporary)}
    log = plan.folder / "reference.log"
    alone = ("--workers", "1", *plan.group)
    with RealCluster(plan.model, *alone, start_s=180, log=log, environment=environment) as reference:
        return make_asks(reference.url, random.Random(plan.seed), plan.num_asks, plan.model)


@contextlib.contextmanager
def _arena(plan: Plan, mark: str) -> Iterator[Arena]:
    rng = random.Random(f"moments {plan.seed}")
    disk = plan.folder / "disk"
    environment = {MARK: mark, "TMPDIR": str(plan.folder / "tmp")}
    clock = None
    if "clock" in plan.kinds:
        clock = WallClock(plan.folder)
        environment |= clock.environment
    arguments = [*_arguments(plan, rng, disk)]
    with contextlib.ExitStack() as stack:
        redis: RedisProcess | None = None
        relay: Relay | None = None
        arena: Arena | None = None
        if plan.is_split and "network" in plan.kinds:
            redis = stack.enter_context(running_redis())
            relay = Relay(lambda: {} if arena is None else arena.processes())
            stack.callback(relay.close)
            redis_url = f"redis://127.0.0.1:{relay.relay_redis(redis.port)}/0"
            arguments += ["--redis-url", redis_url, "--advertise-host", RELAY_HOST]
        log = plan.folder / "cluster.log"
        cluster = RealCluster(plan.model, *arguments, start_s=180, log=log, environment=environment)
        arena = Arena(cluster, rng, disk, plan.longest_s, relay, redis, clock, plan.traces)
        stack.enter_context(cluster)
        yield arena
        _end_cluster(cluster)


def _arguments(plan: Plan, rng: random.Random, disk: Path) -> Iterator[str]:
    yield from ("--workers", str(plan.workers), "--request-s", "60", "--drain-s", "20", "--peer-lost-s", "5")
    yield from ("--num-blocks", str(rng.choice(POOLS)), "--host-tier-bytes", str(HOST_TIER_BYTES))
    yield from ("--disk-tier-bytes", str(DISK_TIER_BYTES), "--disk-tier-dir", str(disk))
    if plan.is_split:
        yield from ("--transport", plan.transport, "--rebalance-kv", "0.2")
        roles = {"elastic": plan.elastic} if plan.elastic else {"prefill": plan.prefill, "decode": plan.decode}
        yield from (f"--{role}={count}" for role, count in roles.items())
    if plan.traces is not None:
        yield from ("--handoff-trace", str(plan.traces))
    yield from (*plan.group, *plan.arguments)


def _end_cluster(cluster: RealCluster) -> None:
    cluster.process.terminate()
    code = cluster.process.wait(60)
    assert code == 0, f"SIGTERM ended `tandem serve` with exit code {code}"


class _Run:
    """The moments of a campaign, one after the other."""

    def __init__(self, plan: Plan, arena: Arena, asks: list[Ask], summary: Summary) -> None:
        self._plan, self._arena, self._asks, self._summary = plan, arena, asks, summary
        self._cluster = arena.cluster
        self._segments: set[str] = set()
        self._counted = Counted(COUNTERS)
        self._router_hurt_at = time.monotonic()

    def run(self) -> None:
        plan, cluster = self._plan, self._cluster
        cluster.wait_until_ready(plan.num_nodes, plan.restart_s)
        self._exercise(20)
        first = levels(self._arena.processes())
        clients = self._start_clients()
        try:
            self._hurt(clients)
        finally:
            hung = clients.stop()
            self._count(clients, hung)
        cluster.wait_until_ready(plan.num_nodes, plan.restart_s)
        self._exercise(20)
        cluster.wait_until_whole(60)
        self._compare_levels(first)
        self._counted.look(cluster)
        self._summary.counters = dict(self._counted.totals)
        self._summary.counters["moved"] = cluster.router_metric("migration_pause_seconds_count")
        self._check_segments()

    def _hurt(self, clients: Clients) -> None:
        plan = self._plan
        roles = plan.roles
        kinds = set(plan.kinds) - ({"helper"} if plan.traces is None else set())
        every = moments(kinds - ({"keeper"} if "--keep-kv-once" not in plan.arguments else set()), roles)
        assert every, f"none of {plan.kinds} can happen to this cluster"
        if plan.workers < 2:
            every = {name: moment for name, moment in every.items() if "router-worker" not in name}
        deadline = time.monotonic() + plan.seconds_limit
        order: list[str] = []
        while self._summary.moments < plan.num_moments and time.monotonic() < deadline and not clients.wrong:
            if not order:  # each kind before any kind again
                order = self._arena.rng.sample(sorted(every), len(every))
            name = order.pop()
            self._moment(name, every[name], clients)

    def _moment(self, name: str, moment: Moment, clients: Clients) -> None:
        rng, cluster = self._arena.rng, self._cluster
        time.sleep(rng.random() * 2)
        self._segments |= shared_segments(self._arena.processes())
        self._counted.look(cluster)
        self._summary.moments += 1
        hurts_router = name.startswith("SIG") and "router" in name
        if hurts_router:
            self._router_hurt_at = time.monotonic()
        try:
            said = moment(self._arena)
            self._summary.struck[name] = self._summary.struck.get(name, 0) + 1
        except NoTarget as error:
            said = f"{name}: nothing to hurt ({error})"
        if hurts_router:
            self._router_hurt_at = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {self._summary.moments:4} {said}; {dict(clients.ends)}", flush=True)
        num_nodes = self._plan.num_nodes if rng.random() < 0.7 else 1
        cluster.wait_until_ready(num_nodes, self._plan.restart_s)

    def _exercise(self, count: int) -> None:
        """Every connection and thread that serving needs exists after it."""
        clients = self._start_clients()
        deadline = time.monotonic() + 300
        while clients.ends["equal"] < count and time.monotonic() < deadline:
            time.sleep(0.1)
        hung = clients.stop()
        self._count(clients, hung)
        assert clients.ends["equal"] >= count, f"an undisturbed cluster answers {dict(clients.ends)}"
        self._cluster.wait_until_whole(60)

    def _start_clients(self) -> Clients:
        plan = self._plan
        return Clients(self._cluster.url, self._draw, plan.seed, plan.clients, self._may_router_be_gone)

    def _draw(self, rng: random.Random) -> Ask:
        each = rng.choice(self._asks)
        if rng.random() >= self._plan.salted:
            return each
        return Ask({**each.body, "cache_salt": str(rng.random())}, each.expected)

    def _may_router_be_gone(self) -> bool:
        """Whether a router process was hurt, is missing, or has started, a moment ago."""
        if time.monotonic() - self._router_hurt_at < ROUTER_S:
            return True
        started = []
        for name, process in self._arena.processes().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                started += [process.create_time()] if name.startswith("router") else []
        expected = self._plan.workers + 1 if self._plan.workers > 1 else 1
        return len(started) < expected or time.time() - max(started) < ROUTER_S

    def _count(self, clients: Clients, hung: int) -> None:
        summary = self._summary
        summary.ends = dict(Counter(summary.ends) + clients.ends)
        summary.errors = dict(Counter(summary.errors) + clients.errors)
        summary.requests += clients.ends.total()
        summary.slowest_s = round(max(summary.slowest_s, clients.slowest_s), 1)
        summary.failures += clients.wrong[:20]
        if hung:
            summary.failures.append(f"{hung} requests did not end")

    def _compare_levels(self, first: dict[str, tuple[int, int]]) -> None:
        num_links = 2 * (self._plan.num_nodes - 1) if self._plan.transport in ("nixl", "ucx") else 0
        for name, (fds, threads) in levels(self._arena.processes()).items():
            before = first.get(name)
            if before and (fds > before[0] + MORE_FDS + AGENT_FDS * num_links or threads > before[1] + MORE_THREADS):
                text = f"{name}: {before[0]} → {fds} descriptors, {before[1]} → {threads} threads"
                self._summary.failures.append(text)

    def _check_segments(self) -> None:
        """Those of processes that are gone must be gone."""
        alive = shared_segments(self._arena.processes())
        left = [path for path in self._segments - alive if Path(path).exists()]
        if left:
            self._summary.failures.append(f"left in shared memory: {sorted(left)}")
