"""`tandem plan`: how many nodes a measured load needs for given targets, found on simulated nodes in virtual time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tandem.deploy.bench.recorded_load import read_load
from tandem.deploy.bench.simulated.cluster import wire_channel
from tandem.deploy.bench.simulated.command import simulate
from tandem.deploy.bench.simulated.costs import CostModel
from tandem.deploy.bench.simulated.shape import ClusterShape
from tandem.deploy.bench.trace import faster
from tandem.deploy.bench.trace_report import TraceReport
from tandem.deploy.explain import table
from tandem.engine.contracts.wire.parts import Targets

HEADER = ("nodes", "GPUs", "good %", "TTFT p50 s", "p90", "p99", "TPOT p50 ms", "p99", "")


@dataclass(frozen=True, slots=True)
class Division:
    """Nodes that do all work, or prefill and decode nodes."""

    num_nodes: int = 0
    num_prefill: int = 0
    num_decode: int = 0

    @property
    def total(self) -> int:
        return self.num_nodes + self.num_prefill + self.num_decode

    @property
    def command(self) -> str:
        """How a cluster so divided is started."""
        if not self.num_prefill:
            return "tandem serve MODEL" if self.total == 1 else f"{self.total} × tandem unified MODEL"
        return f"tandem serve MODEL --prefill {self.num_prefill} --decode {self.num_decode}"

    def __str__(self) -> str:
        return f"{self.num_prefill}+{self.num_decode}" if self.num_prefill else str(self.num_nodes)


class Verdict(NamedTuple):
    """How good a division is: the greater of two is the better one's."""

    good_share: float  # of requests, that keep both targets
    relief: float  # decides where shares are equal, as where none is good: less the further times are above targets


Judge = Callable[[Division], Verdict]


def fewest_alone(judge: Judge, wanted: float, most: int) -> Division:
    """The fewest nodes that do all work and keep `wanted`; `most` of them if none do. Found by doubling and bisection:
    more nodes are taken to be no worse."""
    high = 1
    while high < most and judge(Division(high)).good_share < wanted:
        high = min(2 * high, most)
    low = high // 2  # was not enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if judge(Division(middle)).good_share >= wanted else (middle, high)
    return Division(high)


def fewest_split(judge: Judge, wanted: float, most: int) -> Division:
    """Few prefill and decode nodes that keep `wanted`; `most` of both if none do. From one of each the role is added
    that helps more, and what turns out not to be needed is taken away again: no smaller neighbour keeps it, while
    a division far from these could."""
    now = Division(0, 1, 1)
    while judge(now).good_share < wanted and now.total < most:
        more = replace(now, num_prefill=now.num_prefill + 1), replace(now, num_decode=now.num_decode + 1)
        now = max(more, key=judge)
    while smaller := next((each for each in _smaller(now) if judge(each).good_share >= wanted), None):
        now = smaller
    return now


def _smaller(now: Division) -> list[Division]:
    fewer = replace(now, num_prefill=now.num_prefill - 1), replace(now, num_decode=now.num_decode - 1)
    return [each for each in fewer if each.num_prefill and each.num_decode]


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; 1 if no division keeps the targets. Raises ConfigError for a file that can't be read."""
    targets = Targets.of_milliseconds(arguments.ttft_target_ms, arguments.tpot_target_ms, None)
    requests = faster(read_load(arguments.trace), arguments.speed)
    shape = ClusterShape(0, arguments.gpu_tokens, arguments.host_tokens, costs=_costs(arguments))
    reports: dict[Division, TraceReport] = {}

    def judge(division: Division) -> Verdict:
        if division not in reports:
            cluster = replace(
                shape, num_nodes=division.num_nodes, num_prefill=division.num_prefill, num_decode=division.num_decode
            )
            reports[division] = simulate(cluster, "prefix_aware", requests, targets, wire_channel)
        return _verdict(reports[division], targets)

    most = arguments.gpus_max // arguments.gpus_per_node
    wanted = min(1.0, (arguments.good_percent + arguments.margin_percent) / 100)
    found = [fewest_alone(judge, wanted, most)] if most else []
    found += [fewest_split(judge, wanted, most)] if most > 1 else []
    enough = [division for division in found if judge(division).good_share >= wanted]
    # The fewest nodes; of equally many, those that keep more.
    best = min(enough, key=lambda division: (division.total, -judge(division).good_share), default=None)
    if arguments.json:
        print(json.dumps(_as_json(reports, wanted, best, arguments.gpus_per_node), indent=1))
    else:
        _print(reports, found, wanted, best, arguments)
    return 0 if best else 1


def _verdict(report: TraceReport, targets: Targets) -> Verdict:
    ttft, tpot = sum(report.ttft_s[:2]) / targets.ttft_s, sum(report.tpot_s[:2]) / targets.tpot_s
    return Verdict(report.good_share, -ttft - tpot)


def _costs(arguments: argparse.Namespace) -> CostModel:
    """The measured costs of one kind of node, with what was measured of another in its place."""
    costs, rate = CostModel(), arguments.prompt_rate
    if rate:
        slower = 1 / rate / costs.prefill_s_per_token
        attention = costs.prefill_s_per_token_and_context * slower
        costs = replace(costs, prefill_s_per_token=1 / rate, prefill_s_per_token_and_context=attention)
    return replace(costs, step_s=arguments.step_ms / 1000) if arguments.step_ms else costs


def _as_json(
    reports: dict[Division, TraceReport], wanted: float, best: Division | None, gpus_per_node: int
) -> dict[str, Any]:
    def plain(division: Division) -> dict[str, Any]:
        report = reports[division]
        return {
            "single": division.num_nodes,
            "prefill": division.num_prefill,
            "decode": division.num_decode,
            "gpus": division.total * gpus_per_node,
            "good_share": round(report.good_share, 4),
            "ttft_s": dict(zip(("p50", "p90", "p99"), report.ttft_s, strict=True)),
            "tpot_s": dict(zip(("p50", "p90", "p99"), report.tpot_s, strict=True)),
            "enough": report.good_share >= wanted,
        }

    tried = sorted(reports, key=lambda division: (division.total, division.num_prefill))
    return {"wanted_share": wanted, "best": best and plain(best), "tried": [plain(division) for division in tried]}


def _print(
    reports: dict[Division, TraceReport],
    found: list[Division],
    wanted: float,
    best: Division | None,
    arguments: argparse.Namespace,
) -> None:
    sizes = {division.total for division in found}
    near = [d for d in reports if d in found or d.total + 1 in sizes]  # and what is a node too small
    rows = []
    for division in sorted(near, key=lambda division: (division.total, division.num_prefill)):
        report = reports[division]
        ttft, tpot = [f"{value:.2f}" for value in report.ttft_s], [f"{1e3 * value:.1f}" for value in report.tpot_s]
        verdict = "enough" if report.good_share >= wanted else "too few"
        share = f"{100 * report.good_share:.1f}"
        gpus = str(division.total * arguments.gpus_per_node)
        rows.append([str(division), gpus, share, *ttft, tpot[0], tpot[2], verdict])
    print(table(list(HEADER), rows))
    print(
        f"wanted: {100 * wanted:g} % of requests with their first token within {arguments.ttft_target_ms:g} ms and "
        f"{arguments.tpot_target_ms:g} ms a token, {arguments.margin_percent:g} % of them since the simulator flatters "
        "(docs/planning.md)"
    )
    if best is None:
        print(f"no division of {arguments.gpus_max} GPUs keeps that: more of them, or other targets")
    else:
        print(f"fewest: {best.command}")
