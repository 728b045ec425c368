"""`tandem bench --trace FILE --simulate N`: the policies beside each other on simulated nodes, in virtual time."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import get_args

from tandem.deploy.bench.simulated.cluster import Channel, Simulation, wire_channel
from tandem.deploy.bench.simulated.costs import CostModel
from tandem.deploy.bench.simulated.shape import ClusterShape, read_counts
from tandem.deploy.bench.trace import TraceRequest, faster, pooled_hit_rate, read_trace
from tandem.deploy.bench.trace_report import HEADER, TraceReport, summarize_jobs
from tandem.deploy.explain import table
from tandem.deploy.redis_server import RedisServer
from tandem.engine.contracts.config import PlacementName
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets

SPEED_PRECISION = 1.03  # of the highest speed factor; a guess
MAX_SPEED = 1024.0  # a guess: far above what any cluster serves


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables. Raises ConfigError for a trace or Redis that can't be read."""
    requests = read_trace(arguments.trace, arguments.limit)
    targets = Targets(arguments.ttft_target, arguments.tpot_target)
    num_nodes, num_prefill, num_decode = read_counts(arguments.simulate)
    shape = ClusterShape(
        num_nodes=num_nodes,
        num_prefill=num_prefill,
        num_decode=num_decode,
        gpu_tokens=arguments.gpu_tokens,
        host_tokens=arguments.host_tokens,
        num_routers=arguments.routers,
        keeps_once=arguments.keep_kv_once,
        leans=arguments.leanings,
        targets=targets if arguments.deadlines else NO_TARGETS,
        costs=CostModel(fetch_s_per_token=1 / arguments.fetch_rate if arguments.fetch_rate else 0.0),
    )
    print(_title(requests, shape, arguments))
    with _channel(arguments.redis) as channel:
        policies = read_policies(arguments)
        reports = {}
        for policy in policies:
            reports[policy] = simulate(shape, policy, faster(requests, arguments.speed), targets, channel)
        print(table(HEADER, [report.row(name) for name, report in reports.items()]))
        bound = pooled_hit_rate(requests, len(shape.roles) * (shape.gpu_tokens + shape.host_tokens))
        print(f"bound, one pooled LRU cache of all memory: {100 * bound:.1f} %; by policy, in shares of the bound: "
              + ", ".join(f"{name} {100 * report.hit_rate / bound:.1f} %" for name, report in reports.items())
              if bound else "nothing in this trace repeats")  # fmt: skip
        if arguments.find_speed:
            print(f"highest speed factor with TTFT p90 <= {targets.ttft_s:g} s:")
            for policy in policies:
                print(f"  {policy}: {highest_speed(shape, policy, requests, targets, channel):.2f}", flush=True)
    return 0


def read_policies(arguments: argparse.Namespace) -> list[PlacementName]:
    """Raises ConfigError for a name that there is not, and for one that goes by targets without any."""
    known, names = get_args(PlacementName), arguments.policies.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"--policies {name}: there are {', '.join(known)}")
    if arguments.leanings and names != ["elastic"]:
        raise ConfigError("--leanings are prices of one policy: add --policies elastic")
    if "elastic" in names and not arguments.deadlines:
        raise ConfigError("--policies elastic goes by targets: add --deadlines")
    return names


def simulate(
    shape: ClusterShape, policy: PlacementName, requests: Sequence[TraceRequest], targets: Targets, channel: Channel
) -> TraceReport:
    simulation = Simulation(shape, policy, channel)
    simulation.run(requests)
    return summarize_jobs(simulation.jobs, simulation.nodes, targets)


def highest_speed(
    shape: ClusterShape, policy: PlacementName, requests: Sequence[TraceRequest], targets: Targets, channel: Channel
) -> float:
    """The highest speed, found by doubling and bisection; 0 when even 1/64 of the trace's own speed is too much."""

    def holds(speed: float) -> bool:
        return simulate(shape, policy, faster(requests, speed), targets, channel).ttft_s[1] <= targets.ttft_s

    low, high = 0.0, 1.0
    if holds(high):
        while high < MAX_SPEED and holds(2 * high):
            high *= 2
        low, high = high, 2 * high
    else:
        while high > 1 / 64 and not holds(high / 2):
            high /= 2
        if high <= 1 / 64:
            return 0.0
        low = high / 2
    while high / low > SPEED_PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@contextlib.contextmanager
def _channel(redis: str) -> Iterator[Channel]:
    if not redis:
        yield wire_channel
        return
    from redis import RedisError

    from tandem.deploy.bench.redis_channel import RedisChannel  # only clusters need the Redis client

    with contextlib.ExitStack() as stack:
        if redis == "local":
            server = RedisServer()
            server.start()
            stack.callback(server.stop)
            redis = server.url
        try:
            channel = RedisChannel(redis)
            stack.callback(channel.close)
            yield channel
        except RedisError as error:
            raise ConfigError(f"the Redis at {redis} fails: {error}; check --redis") from None


def _title(requests: Sequence[TraceRequest], shape: ClusterShape, arguments: argparse.Namespace) -> str:
    num_tokens = sum(request.num_prompt_tokens for request in requests)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (
        f"{len(requests)} requests, {num_tokens / len(requests):.0f} prompt tokens each, in {span_s:.0f} s at speed "
        f"{arguments.speed:g}; {arguments.simulate} simulated nodes of {shape.gpu_tokens} + {shape.host_tokens} tokens "
        f"(GPU + host), {shape.num_routers} router(s), directory through {arguments.redis or 'memory'}"
    )
