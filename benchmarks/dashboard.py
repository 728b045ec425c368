"""CPU time that the dashboard takes of a router process, each second: without viewers, and for the first of them.

Nodes are their newest statuses alone, with as many counters as real ones report; a full log of requests; no sockets.

    python benchmarks/dashboard.py --nodes 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import msgspec

from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.router.metrics.catalog import NODE_METRICS
from tandem.router.placing.view import NodeView
from tandem.router.recent.ring import KEPT, RecentRequests
from tandem.router.recent.story import RequestStory
from tandem.router.watching.fleet import FleetLog
from tandem.router.watching.points import PointMaker
from tandem.router.watching.samples import RouterTotals, SampleLog

ROUNDS = 300  # a guess: enough for a steady mean


def milliseconds(work: Callable[[int], object]) -> float:
    begin = time.process_time()
    for number in range(ROUNDS):
        work(number)
    return (time.process_time() - begin) / ROUNDS * 1e3


def views_of(num_nodes: int) -> list[NodeView]:
    counters = {metric.key: 1.0 for metric in NODE_METRICS}
    views = []
    for index in range(num_nodes):
        info = NodeInfo(node_id=f"decode-{index:08x}", epoch=1, role="decode", pid=1)
        status = Status(node_id=info.node_id, epoch=1, num_blocks=100, block_size=64, counters=counters)
        views.append(NodeView(info, status))
    return views


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    views = views_of(parser.parse_args().nodes)
    recent, log, fleet, maker = RecentRequests(), SampleLog(), FleetLog(), PointMaker()
    for index in range(KEPT):
        recent.begin(RequestStory(f"cmpl-{index:032x}", ("mine",), 0.0, 0.0, 100, 10, 1))

    def write_down(number: int) -> None:
        totals = RouterTotals({"finished": float(number)}, {"ttft": (number,) * 17, "itl": (number,) * 15})
        log.take(number, totals, recent, 0, float(number))
        fleet.take(number, views)

    def tell(number: int) -> bytes:
        point = maker.point(log.since(number - 1)[0], fleet.samples[number])
        return msgspec.json.encode([point, fleet.shown(views), recent.newest(20, 0.0)])

    print(f"{len(views)} nodes, {KEPT} requests")
    print(f"written down: {milliseconds(write_down):.2f} ms a second")
    print(f"made and encoded for viewers: {milliseconds(tell):.2f} ms a second, {len(tell(0)) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
