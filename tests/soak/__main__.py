"""`.venv/bin/python tests/soak COMMAND --help`: kill campaigns, many of them side by side, memory soaks, a table of
what they found, and the test suite many times.

Any number may run at the same time, each with a folder and a seed of its own: ports are chosen free.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the demo model is small: one thread for each node is fastest
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/soak", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    kill = commands.add_parser("kill", help="hurt a cluster at random moments and compare every answer")
    kill.add_argument("--setting", default="", help="one of tests/soak/settings.py, instead of transport and nodes")
    kill.add_argument("--moments", type=int, default=50)
    kill.add_argument(
        "--kinds", default="kill,helper,redis,disk,network,clock", help="which moments, with commas between"
    )
    kill.add_argument("--seconds-limit", type=float, default=3600, help="no new moment after this")
    kill.add_argument("--asks", type=int, default=40, help="different requests, whose right answers are made first")
    kill.add_argument("--longest-s", type=float, default=20, help="of a pause, a cut, a full disk")
    kill.add_argument("--arguments", default="", help="more options of `tandem serve`, in one string")
    kill.add_argument("--workers", type=int, default=2, help="router processes")
    memory = commands.add_parser("memory", help="sample memory, descriptors and threads of a cluster that serves")
    memory.add_argument("--minutes", type=float, default=20)
    memory.add_argument("--max-tokens", type=int, default=120, help="of a request; few make it a load of prompts")
    memory.add_argument("--arguments", default="", help="more options of `tandem serve`, in one string")
    for each in (kill, memory):
        each.add_argument("--seed", type=int, default=1)
        each.add_argument("--transport", default="shm", help="shm, tcp, nixl …; local: one unified node")
        each.add_argument("--prefill", type=int, default=1)
        each.add_argument("--decode", type=int, default=2)
        each.add_argument("--clients", type=int, default=6)
        each.add_argument("--folder", type=Path, required=True, help="for logs and summary.json; made where missing")
    many = commands.add_parser("many", help="kill campaigns in every setting, side by side")
    many.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="campaigns, a seed each")
    many.add_argument("--seconds-limit", type=float, default=600, help="no new moment after this")
    many.add_argument("--grace-s", type=float, default=300, help="that starts and ends may take beside it")
    many.add_argument("--seed", type=int, default=1, help="of the first")
    many.add_argument("--asks", type=int, default=20)
    many.add_argument("--longest-s", type=float, default=6)
    many.add_argument("--folder", type=Path, required=True, help="gets a folder for each seed, and summaries.jsonl")
    table = commands.add_parser("table", help="summaries of campaigns as the tables of docs/verification.md")
    table.add_argument("summaries", type=Path, nargs="+", help="files of summaries, or folders with summary.json below")
    steady = commands.add_parser("steady", help="the suite of `make test` many times, beside busy loops")
    steady.add_argument("--times", type=int, default=20, help="runs")
    steady.add_argument("--at-once", type=int, default=1, help="runs side by side")
    steady.add_argument("--workers", type=int, default=2, help="test processes of a run")
    steady.add_argument("--loops", type=int, default=2, help="busy loops beside a run")
    steady.add_argument("--seconds-limit", type=float, default=36000, help="by then all is ended and written down")
    steady.add_argument("--arguments", default="", help="for pytest, in one string: which tests")
    steady.add_argument("--folder", type=Path, required=True, help="gets summary.md and failures.txt")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # clusters end with their campaign
    run = {"kill": run_kill, "many": run_many, "memory": run_memory, "table": run_table, "steady": run_suites}
    return run[options.command](options)


def run_kill(options: argparse.Namespace) -> int:
    from campaign import KINDS, Plan, run_campaign
    from settings import SETTINGS, possible_kinds

    kinds = tuple(options.kinds.split(","))
    unknown = set(kinds) - set(KINDS)
    if unknown:
        sys.exit(f"--kinds: {', '.join(sorted(unknown))} are none of {', '.join(KINDS)}")
    if set(kinds) - set(possible_kinds()):
        print("no C compiler: clocks won't jump", file=sys.stderr)
        kinds = tuple(kind for kind in kinds if kind in possible_kinds())
    plan = Plan(
        folder=options.folder.resolve(), num_moments=options.moments, seed=options.seed, transport=options.transport,
        kinds=kinds, seconds_limit=options.seconds_limit, prefill=options.prefill, decode=options.decode,
        workers=options.workers, clients=options.clients, num_asks=options.asks, longest_s=options.longest_s,
        arguments=tuple(options.arguments.split()),
    )  # fmt: skip
    if options.setting:
        plan = replace(plan, **SETTINGS[options.setting])
    summary = run_campaign(plan)
    print((plan.folder / "summary.json").read_text(), end="")
    return 1 if summary.failures else 0


def run_many(options: argparse.Namespace) -> int:
    from many import run_side_by_side

    return run_side_by_side(
        options.folder.resolve(), options.at_once, options.seed, options.seconds_limit, options.grace_s,
        ("--asks", str(options.asks), "--longest-s", str(options.longest_s), "--clients", "4"),
    )  # fmt: skip


def run_memory(options: argparse.Namespace) -> int:
    from memory import MemoryPlan, run_memory_soak

    plan = MemoryPlan(
        folder=options.folder.resolve(), minutes=options.minutes, seed=options.seed, transport=options.transport,
        prefill=options.prefill, decode=options.decode, clients=options.clients,
        max_tokens=options.max_tokens, arguments=tuple(options.arguments.split()),
    )  # fmt: skip
    summary = run_memory_soak(plan)
    print((plan.folder / "summary.json").read_text(), end="")
    grows = any(each["verdict"] == "growth" for each in summary["verdicts"])
    return 1 if grows or summary["hung"] or summary["wrong"] else 0


def run_table(options: argparse.Namespace) -> int:
    from table import print_tables

    print_tables(options.summaries)
    return 0


def run_suites(options: argparse.Namespace) -> int:
    from steady import SteadyPlan, run_steady

    plan = SteadyPlan(
        folder=options.folder.resolve(), times=options.times, at_once=options.at_once, workers=options.workers,
        loops=options.loops, seconds_limit=options.seconds_limit, arguments=tuple(options.arguments.split()),
    )  # fmt: skip
    return run_steady(plan)


if __name__ == "__main__":
    sys.exit(main())
