"""Nodes that divide work by demand beside fixed roles and single nodes, on the GPUs that are there.

    python benchmarks/elastic.py mix MODEL --load-format dummy       chat beside long prompts at 300 ms and 7 ms a token
    python benchmarks/elastic.py shift MODEL --load-format dummy     chat alone turns into long prompts alone
    python benchmarks/elastic.py trace MODEL TRACE --load-format dummy     a production trace at 2 s and 25 ms

`mix` and `trace` start one server after the other: `--divisions 1+1 elastic single` (also 2+2, 3+1), the latter two of
`--nodes`. `mix` sends 16 requests a second for `--seconds`, then 8; with `--workloads` in the shapes and shares of that
file's mixed_r16 and mixed_r8. `trace` at `--speed 0.5` puts on two nodes what the whole trace puts on four; the elastic
nodes compute long prompts together. `shift` has two nodes that lean (1+1, 25 ms a token) and says how long after the
shift the first came to lean the other way, and how many requests failed. The table comes last. Logs and figures go to
`--logs` ($OUT).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from handoff import LONG_SHARE, Mixed, Shape
from servers import node_counters, started_server, started_single_nodes

from tandem.deploy.bench.load import open_loop, request_once
from tandem.deploy.bench.request_times import RequestTimes
from tandem.deploy.explain import table
from tandem.deploy.launch.cluster_plan import count_gpus

MIX_TARGETS = ("--ttft-target-ms", "300", "--tpot-target-ms", "7")
TRACE_TARGETS = ("--ttft-target-ms", "2000", "--tpot-target-ms", "25")
TOLD = ("source_handoffs_failed", "shared_begun", "shared_declined", "shared_failed", "shared_tokens",
        "pull_completed", "leaning_changes", "moves_completed", "kernels_compiled_late")  # fmt: skip
POLL_S = 0.05


def divided(options: argparse.Namespace, name: str) -> tuple[str, ...]:
    """What `tandem serve` is told of a division: elastic, or as many prefill and decode nodes as 2+2."""
    if name == "single":
        return ()
    if "+" in name:
        prefill, decode = name.split("+")
        return ("--prefill", prefill, "--decode", decode)
    return ("--elastic", str(options.nodes), "--placement", "elastic")


@contextlib.contextmanager
def serving(options: argparse.Namespace, name: str, arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(URL, the model's length) of nodes that serve so."""
    common = ["--load-format", options.load_format, "--max-model-len", str(options.max_model_len)]
    common += [each for extra in options.node_options for each in extra.replace("DIVISION", name).split()]
    began = time.monotonic()
    with (options.logs / f"{options.what}_{name}.log").open("wb") as log:
        if name == "single":
            server = started_single_nodes(options.model, [*common, *arguments], "prefix_aware", log, options.nodes)
        else:
            server = started_server(options.model, [*common, *arguments], log)
        with server as ready:
            url, length = ready()
            print(f"{name}: ready after {time.monotonic() - began:.0f} s", flush=True)
            yield url, length


def tell_counters(options: argparse.Namespace, name: str, url: str) -> dict[str, float]:
    """Prints what became of placements and of what nodes did together, and keeps it."""
    text = urlopen(f"{url}/metrics", timeout=10).read().decode()
    (options.logs / f"{options.what}_{name}.metrics").write_text(text)
    found = re.findall(r'^tandem_router_placements_total\{reason="([^"]+)"\} (\S+)', text, re.MULTILINE)
    counted = {reason: float(number) for reason, number in found}
    totals = node_counters(url)
    counted |= {each: totals[each] for each in TOLD if totals.get(each)}
    print(f"{name}:", ", ".join(f"{what} {number:.0f}" for what, number in counted.items()), flush=True)
    return counted


def keep(options: argparse.Namespace, header: list[str], rows: list[list[str]], more: dict[str, Any]) -> None:
    (options.logs / f"{options.what}.json").write_text(json.dumps({"header": header, "rows": rows, **more}) + "\n")
    print(table(header, rows), flush=True)


def ask_at(url: str, arrivals: Sequence[tuple[float, Shape, int]]) -> list[RequestTimes]:
    """Sends each request at its time after now, whatever becomes of those before."""

    async def run() -> list[RequestTimes]:
        began, tasks = time.monotonic(), []
        for at, shape, seed in arrivals:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            tasks.append(asyncio.ensure_future(request_once(url, shape.body(random.Random(seed)))))
        return list(await asyncio.gather(*tasks))

    return asyncio.run(run())


# --- chat beside long prompts ---------------------------------------------------------------------------------


def mix_arrivals(options: argparse.Namespace, rate: float, length: int) -> list[tuple[float, Shape, int]]:
    """When which request comes, up to `--seconds`."""
    rng, num = random.Random(int(rate)), 100_000
    long = min(options.long, length - 40)
    shapes = [Shape("chat", options.chat, min(options.output, length - options.chat)), Shape("long", long, 32)]
    weights = [1 - LONG_SHARE, LONG_SHARE]
    if options.workloads:
        named = {each["name"]: each for each in json.loads(Path(options.workloads).read_text())}
        found = named[f"mixed_r{rate:.0f}"]
        rng, num = random.Random(found["seed"]), found["n"]
        shapes = [Shape(each["tag"], each["input"], each["output"]) for each in found["mix"]]
        weights = [each["share"] for each in found["mix"]]
    arrivals, at = [], 0.0
    for index in range(num):
        shape = rng.choices(shapes, weights)[0]
        at += rng.expovariate(rate)
        if at > options.seconds:
            break
        arrivals.append((at, shape, index))
    return arrivals


def warm(url: str, options: argparse.Namespace, length: int) -> None:
    shape = Shape("warm", min(options.long, length - 40), 8)
    ask_at(url, [(0.3 * index, shape, 10_000 + index) for index in range(6)])


def mix_row(url: str, name: str, rate: float, arrivals: Sequence[tuple[float, Shape, int]]) -> list[str]:
    samples = ask_at(url, arrivals)
    kinds = [shape.kind for _, shape, _ in arrivals]
    chat, long = (
        Mixed.of([sample for sample, own in zip(samples, kinds, strict=True) if own == kind])
        for kind in ("chat", "long")
    )
    itl, ttft = (" / ".join(f"{each:.1f}" for each in values) for values in (chat.itl, long.ttft))
    row = [f"{rate:g}/s", name, chat.sent, chat.errors, f"{chat.ok:.1f}", itl]
    return [str(each) for each in (*row, long.sent, long.errors, f"{long.ok:.1f}", ttft)]


def mix(options: argparse.Namespace) -> None:
    header = ["rate", "nodes", "chat sent", "failed", "chat good %", "ITL ms p50 / p99 / p99.9", "long sent", "failed",
              "long good %", "TTFT ms p50 / p90"]  # fmt: skip
    rows, counted = [], {}
    for name in options.divisions:
        targets = () if "+" in name else MIX_TARGETS
        with serving(options, name, (*divided(options, name), *targets)) as (url, length):
            warm(url, options, length)
            for rate in options.rates:
                rows.append(mix_row(url, name, rate, mix_arrivals(options, rate, length)))
                print("  ".join(rows[-1]), flush=True)
            counted[name] = tell_counters(options, name, url)
    keep(options, header, rows, {"counters": counted})


# --- a shift of the mix ---------------------------------------------------------------------------------------


@dataclass
class Leanings:
    """What nodes were seen to be for first, and since when, in seconds of the monotonic clock."""

    seen: list[tuple[float, dict[str, str]]] = field(default_factory=list)

    def look(self, url: str) -> None:
        nodes = json.loads(urlopen(f"{url}/status", timeout=5).read())["nodes"]
        now = {node["node_id"]: node["leaning"] for node in nodes}
        if not self.seen or self.seen[-1][1] != now:
            self.seen.append((time.monotonic(), now))

    def after(self, at: float) -> list[tuple[float, str]]:
        """(Seconds after `at`, what changed) of each change."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        return [
            (when - at, ", ".join(f"{name} {now[name]}" for name in now if before.get(name) != now[name]))
            for (_, before), (when, now) in pairs
            if when >= at
        ]


async def shift_once(url: str, options: argparse.Namespace, length: int) -> tuple[list[RequestTimes], float, Leanings]:
    """(All requests, when long prompts began, what nodes were for)."""
    leanings, loop = Leanings(), asyncio.get_running_loop()
    kinds = [
        (Shape("chat", options.chat, min(options.output, length - options.chat)), options.chat_rate),
        (Shape("long", min(options.long, length - 40), 32), options.long_rate),
    ]

    async def watch() -> None:
        while True:
            await loop.run_in_executor(None, leanings.look, url)
            await asyncio.sleep(POLL_S)

    async def one(each: tuple[Shape, int]) -> RequestTimes:
        return await request_once(url, each[0].body(random.Random(each[1])))

    async def load(shape: Shape, rate: float, first: int) -> list[RequestTimes]:
        bodies = [(shape, first + index) for index in range(max(1, round(rate * options.seconds)))]
        return await open_loop(one, bodies, rate, random.Random(first))

    watching = asyncio.ensure_future(watch())
    (chat, chat_rate), (long, long_rate) = kinds
    chats = asyncio.ensure_future(load(chat, chat_rate, 0))
    await asyncio.sleep(options.seconds)
    shifted_at = time.monotonic()
    samples = [*await load(long, long_rate, 100_000), *await chats]
    watching.cancel()
    return samples, shifted_at, leanings


def shift(options: argparse.Namespace) -> None:
    targets = ("--ttft-target-ms", "2000", "--tpot-target-ms", f"{options.tpot_ms:g}")
    arguments = (*divided(options, "1+1"), "--no-fixed-roles", *targets)
    with serving(options, "leaning", arguments) as (url, length):
        samples, shifted_at, leanings = asyncio.run(shift_once(url, options, length))
        counted = tell_counters(options, "leaning", url)
    failed = [sample for sample in samples if sample.error]
    changes = leanings.after(shifted_at)
    rows = [
        ["requests, failed", f"{len(samples)}, {len(failed)}"],
        ["changes of leanings while there was chat alone", str(max(0, len(leanings.seen) - 1 - len(changes)))],
        ["leanings as long prompts began", str(next((n for at, n in leanings.seen[::-1] if at <= shifted_at), {}))],
        *([f"changed {after:.2f} s after the shift", what] for after, what in changes),
        ["seconds to the first", f"{changes[0][0]:.2f}" if changes else "none: nobody leaned the other way"],
    ]
    rows += [["the first failure", failed[0].error]] if failed else []
    keep(options, ["long prompts in place of chat", ""], rows, {"counters": counted})


# --- a production trace ---------------------------------------------------------------------------------------


def trace(options: argparse.Namespace) -> None:
    shared = ("--prefill-nodes-per-prompt", str(options.nodes))
    header = ["nodes", "requests", "failed", "good %", "TTFT s p50 / p90 / p99", "TPOT ms p50 / p99", "cached %",
              "of the bound %"]  # fmt: skip
    lines = [json.loads(line) for line in Path(options.trace).read_text().splitlines() if line.strip()]
    until = lines[0]["timestamp"] + 1e3 * options.seconds * options.speed
    limit = min(options.limit, sum(line["timestamp"] <= until for line in lines))
    rows, reports = [], {}
    for name in options.divisions:
        arguments = (*divided(options, name), *TRACE_TARGETS, *(shared if name == "elastic" else ()))
        with serving(options, name.replace(" ", "_"), arguments) as (url, _length):
            reports[name] = replayed(options, name, url, limit)
            tell_counters(options, name.replace(" ", "_"), url)
        report = reports[name]
        ttft, tpot = report["ttft_s"], report["tpot_s"]
        bound = report["hit_rate_bound"]
        row = [name, report["num_requests"], report["num_failed"], f"{100 * report['good_share']:.1f}"]
        row += [" / ".join(f"{ttft[each]:.2f}" for each in ("p50", "p90", "p99"))]
        row += [" / ".join(f"{1e3 * tpot[each]:.1f}" for each in ("p50", "p99")), f"{100 * report['hit_rate']:.1f}"]
        row += [f"{100 * report['hit_rate'] / bound:.0f}" if bound else "-"]
        rows.append([str(each) for each in row])
    keep(options, header, rows, {"reports": reports})


def replayed(options: argparse.Namespace, name: str, url: str, limit: int) -> dict[str, Any]:
    """What `tandem bench --trace` reports."""
    path = options.logs / f"trace_{name.replace(' ', '_')}.report.json"
    command = [sys.executable, "-m", "tandem.deploy.cli", "bench", "--url", url, "--trace", options.trace, "--limit",
               str(limit), "--speed", str(options.speed), "--trace-scale", str(options.trace_scale), "--ttft-target",
               "2", "--tpot-target", "0.025", "--output", str(path)]  # fmt: skip
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # 1: a request failed, which the report says
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="what", required=True)
    for way, divisions in ((mix, ["1+1", "elastic", "single"]), (shift, []), (trace, ["1+1", "elastic", "single"])):
        own = ways.add_parser(way.__name__)
        own.set_defaults(way=way)
        own.add_argument("model")
        if way is trace:
            own.add_argument("trace")
        own.add_argument("--load-format", default="auto")
        own.add_argument("--max-model-len", type=int, default=0)
        own.add_argument("--node-options", action="append", default=[], help="more of each division, DIVISION its name")
        own.add_argument("--nodes", type=int, default=max(2, count_gpus()), help="of those that have no fixed roles")
        own.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", ".")))
        own.add_argument("--chat", type=int, default=256, help="tokens of a chat's prompt")
        own.add_argument("--output", type=int, default=256, help="tokens of a chat's answer")
        own.add_argument("--long", type=int, default=8192, help="tokens of a long prompt")
        own.add_argument("--seconds", type=float, default={"mix": 35.0, "shift": 30.0, "trace": 100.0}[way.__name__])
        if divisions:
            own.add_argument("--divisions", nargs="*", default=divisions)
    mixed, shifted, traced = (ways.choices[name] for name in ("mix", "shift", "trace"))
    mixed.add_argument("--rates", type=float, nargs="*", default=[16.0, 8.0])
    mixed.add_argument("--workloads", default="", help="JSON with mixed_r16 and mixed_r8")
    shifted.add_argument("--chat-rate", type=float, default=24.0)
    shifted.add_argument("--long-rate", type=float, default=6.0)
    shifted.add_argument("--tpot-ms", type=float, default=25.0)
    traced.add_argument("--limit", type=int, default=330)
    traced.add_argument("--speed", type=float, default=0.5)
    traced.add_argument("--trace-scale", type=float, default=1.0)
    return parser.parse_args()


def main() -> None:
    options = read_options()
    options.logs.mkdir(parents=True, exist_ok=True)
    options.way(options)


if __name__ == "__main__":
    main()
