"""Requests a second that one or more router processes stream, and what they add to the first token.

    python benchmarks/front_load.py --routers 1 4

Stand-in nodes that answer at once, one for each router process, and clients, two processes for each, on the same host:
it takes some five cores a router process. Requests bring 512 prompt token ids and take 16 tokens, one event a token.
For each number of router processes:

- most: every connection asks again as soon as its answer has ended. The figure is the routers' when they are what is
  busy: the table shows CPU shares of the routers (least and most of a process), the busiest node, the busiest client.
With `--redis-url` (one server, or a cluster) the routers find the nodes there, and follow their directory while
`--changes-per-s` blocks change in it; `--most-only` leaves out the rest of what follows.

- few, and half of the most: time to the first token. The node sends it when it gets the request, so all of that time
  is what router and clients take. Beside it, with few: bare Starlette under uvicorn that answers with the same bytes;
  what is beyond that is what the router adds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path

from front import SHORT, SPAWN, bare_main, cpu_s, end, one_event, start, wait_for
from front_clients import Counts, clients_main
from front_node import MODEL, node_main

from tandem.deploy.redis_server import free_port
from tandem.engine.contracts.config import ModelOptions, RouterOptions
from tandem.engine.contracts.directory import BlockEvent
from tandem.kv_connector.directory.publisher import RedisPublisher
from tandem.kv_connector.directory.records import NodeRecord
from tandem.router.process.main import run_router

CLIENTS_PER_ROUTER = 2
FEW_PER_S = 50
KEPT = 100_000  # blocks of the directory, of all nodes
TURN_S = 0.01  # a node's step


def routers_main(port: int, num_routers: int, node_addresses: tuple[str, ...], redis_url: str) -> None:
    found = {"redis_url": redis_url} if redis_url else {"nodes": node_addresses}
    run_router(RouterOptions(ModelOptions(str(MODEL)), port=port, workers=num_routers, **found))  # type: ignore[arg-type]


def publishers_main(redis_url: str, node_addresses: Sequence[str], changes_per_s: float) -> None:
    """Says in Redis where the nodes are, and keeps changing what they hold."""
    publishers = [
        RedisPublisher(
            redis_url, "tandem", NodeRecord(node_id=f"node-{i}", epoch=1, role="unified", control_address=address)
        )
        for i, address in enumerate(node_addresses)
    ]
    each, kept = round(changes_per_s * TURN_S / len(publishers)), KEPT // len(publishers)
    held: list[list[bytes]] = [[] for _ in publishers]
    while True:
        began = time.monotonic()
        for publisher, blocks in zip(publishers, held, strict=True):
            new, gone = [os.urandom(16) for _ in range(each)], blocks[: max(0, len(blocks) + each - kept)]
            blocks[:] = [*blocks[len(gone) :], *new]
            publisher.publish([BlockEvent(b, False) for b in gone] + [BlockEvent(b, True) for b in new])
        time.sleep(max(0.0, began + TURN_S - time.monotonic()))


@dataclass(frozen=True)
class Bed:
    """Everything that runs but the clients."""

    port: int
    routers: SpawnProcess
    nodes: list[SpawnProcess]
    publishers: tuple[SpawnProcess, ...] = ()

    @classmethod
    def started(cls, num_routers: int, steps_per_s: float, redis_url: str = "", changes_per_s: float = 0.0) -> Bed:
        addresses = tuple(f"tcp://127.0.0.1:{free_port()}" for _ in range(num_routers))
        nodes = [start(node_main, address, steps_per_s, f"node-{i}") for i, address in enumerate(addresses)]
        publishers = (start(publishers_main, redis_url, addresses, changes_per_s),) if redis_url else ()
        port = free_port()
        routers = SPAWN.Process(target=routers_main, args=(port, num_routers, addresses, redis_url))  # has children
        routers.start()
        for _ in range(4 * num_routers):  # connections spread over the processes, each of which must know a node
            wait_for(port, "/ready")
        return cls(port, routers, nodes, publishers)

    def router_pids(self) -> list[int]:
        """The processes that serve: of several, the group's children."""
        assert self.routers.pid is not None
        pid = self.routers.pid
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        workers = [
            child for child in children if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        return workers or [pid]

    def stop(self) -> None:
        end(self.routers, *self.nodes, *self.publishers)


def bare_bed(event: bytes, steps_per_s: float) -> Bed:
    """A server without a router behind it."""
    port = free_port()
    server = start(bare_main, port, event, steps_per_s)
    wait_for(port, "/")
    return Bed(port, server, [])


@dataclass(frozen=True)
class Load:
    """What clients offer. `rate` 0: as much as goes."""

    num_streams: int
    num_clients: int
    rate: float
    seconds: float
    warm_up_s: float


@dataclass(frozen=True)
class Measured:
    """One row of the table. Shares are CPU seconds a second of a process."""

    requests_per_s: float
    ttft_s: list[float]
    num_late: int
    router_shares: list[float]
    node_share: float
    client_share: float

    def ttft_ms(self, percent: float) -> float:
        return 1e3 * self.ttft_s[min(len(self.ttft_s) - 1, int(len(self.ttft_s) * percent / 100))]


def measure(bed: Bed, load: Load) -> Measured:
    body, results, barrier = json.dumps(SHORT).encode(), SPAWN.Queue(), SPAWN.Barrier(load.num_clients + 1)
    streams, rate = load.num_streams // load.num_clients, load.rate / load.num_clients
    times = load.warm_up_s, load.seconds
    clients = [
        start(clients_main, bed.port, streams, body, rate, times, barrier, results) for _ in range(load.num_clients)
    ]
    barrier.wait()
    time.sleep(load.warm_up_s)
    routers, nodes = bed.router_pids(), [node.pid for node in bed.nodes]
    before = [cpu_s(pid) for pid in (*routers, *nodes)]  # type: ignore[arg-type]
    time.sleep(load.seconds)
    used = [cpu_s(pid) - then for pid, then in zip((*routers, *nodes), before, strict=True)]  # type: ignore[arg-type]
    counts: list[Counts] = [results.get(timeout=30) for _ in clients]
    for client in clients:
        client.join()
    return Measured(
        sum(each.num_ended for each in counts) / load.seconds,
        sorted(seconds for each in counts for seconds in each.ttft_s),
        sum(each.num_late for each in counts),
        [seconds / load.seconds for seconds in used[: len(routers)]],
        max(used[len(routers) :], default=0.0) / load.seconds,
        max(each.cpu_s for each in counts) / load.seconds,
    )


def report(name: str, measured: Measured) -> None:
    shares = f"{min(measured.router_shares):.0%}-{max(measured.router_shares):.0%}"
    late = f", {measured.num_late} late" if measured.num_late else ""
    first = f"first token {measured.ttft_ms(50):6.2f} ms p50 {measured.ttft_ms(99):6.2f} p99"
    others = f"node {measured.node_share:.0%}, client {measured.client_share:.0%}"
    rate = f"{measured.requests_per_s:8.0f} req/s"
    print(f"{name:26}{rate}   {first}   CPU: routers {shares}, {others}{late}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--streams", type=int, default=384, help="connections a router process")
    parser.add_argument("--steps-per-s", type=float, default=100, help="of the nodes")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--warm-up-s", type=float, default=2)
    parser.add_argument("--redis-url", default="", help="find the nodes there, and follow their directory")
    parser.add_argument("--changes-per-s", type=float, default=20_000, help="blocks that change in the directory")
    parser.add_argument("--most-only", action="store_true")
    args = parser.parse_args()
    print(
        f"routers {'':14}{SHORT['max_tokens']} tokens a request, {args.streams} connections a router process",
        flush=True,
    )
    few = Load(2 * CLIENTS_PER_ROUTER * FEW_PER_S, CLIENTS_PER_ROUTER, FEW_PER_S, args.seconds, args.warm_up_s)
    for num_routers in args.routers:
        bed = Bed.started(num_routers, args.steps_per_s, args.redis_url, args.changes_per_s)
        event = one_event(bed.port)
        clients = CLIENTS_PER_ROUTER * num_routers
        most = measure(bed, Load(args.streams * num_routers, clients, 0.0, args.seconds, args.warm_up_s))
        report(f"{num_routers} routers, most", most)
        if args.most_only:
            bed.stop()
            continue
        half = Load(args.streams * num_routers, clients, most.requests_per_s / 2, args.seconds, args.warm_up_s)
        report(f"{num_routers} routers, half of it", measure(bed, half))
        report(f"{num_routers} routers, {FEW_PER_S} a second", measure(bed, few))
        bed.stop()
    if args.most_only:
        return
    bare = bare_bed(event, args.steps_per_s)
    report(f"Starlette, {FEW_PER_S} a second", measure(bare, few))
    bare.stop()


if __name__ == "__main__":
    main()
