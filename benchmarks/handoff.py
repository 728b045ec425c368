"""What splitting costs and gives: one prefill and one decode node beside our own single nodes on the same devices.

    python benchmarks/handoff.py MODEL [--load-format dummy] [--rates 8 16] [--requests 200] [--long 8192] [--chat 256]
                                       [--picture handoff.svg] [--without-pushes] [--kv-bytes 25769803776]

1. One request at a time: first and second token of a long and of a 2,048-token prompt; split minus single is what the
   hand-off adds. (A split server can hide a hand-off behind a first token made elsewhere, not behind a second.)
2. Poisson arrivals of chats and long prompts, the same for both: gap from first to second token, gaps between tokens,
   and the share of requests sent with TTFT <= 300 ms and TPOT <= 7 ms. Single nodes are two, behind one router.
3. With two GPUs, bytes to the peer, and what pushing and digests cost a prefill: benchmarks/push.py.
4. All that beside its targets.

Each server has processes of its own. With `--kv-bytes` all of them start at once and wait for their turn beside each
other, each node with so much memory for KV; else a server starts when the one before has ended, and has all memory.
Prompts are random token ids, so no cache helps. With a picture, one hand-off of a long prompt is traced and drawn:
compute, push and commit of each layer. `--logs` says where servers write.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from handoff_timeline import draw, handoffs, read_folder, summary
from servers import Ready, node_counters, started_server, started_single_nodes

from tandem.deploy.bench.load import open_loop, request_once
from tandem.deploy.bench.request_times import RequestTimes, percentile
from tandem.deploy.launch.cluster_plan import count_gpus

TTFT_S, TPOT_S = 0.3, 0.007
LONG_SHARE = 0.2
# vLLM 0.24 with NIXL, one prefill and one decode node on H200s (docs/measurements.md): default; tuned. Of these shapes.
VLLM_LONG, VLLM_CHAT = 8192, 256
VLLM = {
    "8192 tokens, second token added": "-; +38 ms",
    "2048 tokens, second token added": "-; +26 ms",
    "16/s chat: ITL p99 / p99.9": "118 / -; 13.3 / 21.7 ms",
    "16/s chat: ok": "10; 45 %",
    "16/s long: ok": "0; 29 %",
    "8/s chat: ITL p99 / p99.9": "14.6 / -; 10.6 / 14.9 ms",
    "8/s chat: ok": "79; 87 %",
    "8/s long: ok": "0; 71 %",
}
# Counters that are told after a split server was measured.
TOLD = ("sink_commits", "source_handoffs_failed", "sink_digest_mismatches", "kernels_compiled_late", "kv_digest_passes")


@dataclass(frozen=True)
class Shape:
    """Requests of one kind and length, in tokens."""

    kind: str
    num_prompt: int
    num_output: int

    def body(self, rng: random.Random) -> dict[str, Any]:
        prompt = [rng.randrange(100, 400) for _ in range(self.num_prompt)]
        return {"prompt": prompt, "max_tokens": self.num_output, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip


@dataclass
class Mixed:
    """What requests of one shape showed under one load, in ms and %."""

    sent: int
    errors: int
    ttft: tuple[float, float]  # p50, p90
    gap: tuple[float, float]  # first to second token: p50, p99
    itl: tuple[float, float, float]  # after that: p50, p99, p99.9
    ok: float

    @classmethod
    def of(cls, samples: Sequence[RequestTimes]) -> Mixed:
        good = [s for s in samples if not s.error and len(s.event_times) > 1]
        gaps = [s.event_times[1] - s.event_times[0] for s in good]
        later = [b - a for s in good for a, b in zip(s.event_times[1:], s.event_times[2:], strict=False)]

        def ms(values: Sequence[float], *percents: float) -> Any:
            return tuple(1e3 * percentile(values, percent) for percent in percents)

        num_ok = sum(s.ttft_s <= TTFT_S and s.tpot_s <= TPOT_S for s in good)
        return cls(
            len(samples),
            len(samples) - len(good),
            ms([s.ttft_s for s in good], 50, 90),
            ms(gaps, 50, 99),
            ms(later, 50, 99, 99.9),
            100 * num_ok / max(1, len(samples)),
        )


@dataclass
class Server:
    """Everything measured of one way to serve."""

    name: str
    alone: dict[int, tuple[float, float]] = field(default_factory=dict)  # prompt tokens -> first, second token in ms
    mixed: dict[tuple[float, str], Mixed] = field(default_factory=dict)  # (rate, kind of shape)


def measure_alone(server: Server, url: str, shapes: Sequence[Shape], count: int) -> None:
    async def one_at_a_time(shape: Shape) -> list[RequestTimes]:
        rng = random.Random(shape.num_prompt)
        return [await request_once(url, shape.body(rng)) for _ in range(count + 1)][1:]

    for shape in shapes:
        samples = asyncio.run(one_at_a_time(shape))
        good = [s for s in samples if not s.error and len(s.event_times) > 1]
        if not good:
            raise SystemExit(f"no request came through: {samples[0].error}")
        first, second = (1e3 * median(s.event_times[index] - s.sent_at for s in good) for index in (0, 1))
        server.alone[shape.num_prompt] = first, second


def measure_mixed(server: Server, url: str, shapes: Sequence[Shape], rate: float, count: int) -> None:
    """Measures the shapes mixed, with the same arrivals and shapes for each server."""
    rng = random.Random(int(rate))
    plan = [(shapes[rng.random() < LONG_SHARE], index) for index in range(count)]

    async def one(arrival: tuple[Shape, int]) -> RequestTimes:
        shape, seed = arrival
        return await request_once(url, shape.body(random.Random(seed)))

    samples = asyncio.run(open_loop(one, plan, rate, rng))
    for shape in shapes:
        found = Mixed.of([s for s, (own, _) in zip(samples, plan, strict=True) if own is shape])
        server.mixed[rate, shape.kind] = found
        numbers = (*found.ttft, *found.gap, *found.itl)
        columns = "{:7.1f} /{:7.1f} {:7.1f} /{:6.1f} {:6.1f} /{:6.1f} /{:6.1f}".format(*numbers)
        print(f"{rate:4.0f}/s {server.name:9} {shape.kind:5}{found.sent:5}{found.errors:4} {columns} {found.ok:5.1f} %",
              flush=True)  # fmt: skip


def print_header() -> None:
    print(f"{'':6} {'server':9} {'kind':5}{'sent':>5}{'err':>4} {'TTFT p50 /p90':>16} {'gap p50 /p99':>15} "
          f"{'ITL p50 /p99 /p99.9':>22} {'ok':>7}   (ms)", flush=True)  # fmt: skip


def single_shapes(options: argparse.Namespace, length: int) -> list[Shape]:
    return [Shape("alone", min(size, length - 16), 8) for size in (options.long, options.long // 4)]


def mixed_shapes(options: argparse.Namespace, length: int) -> list[Shape]:
    long = min(options.long, length - 40)
    return [Shape("chat", options.chat, min(256, length - options.chat)), Shape("long", long, 32)]


class Servers:
    """All that are measured, by name. With `--kv-bytes` they are up from the beginning; each ends when it was used."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._logs = options, Path(options.logs or folder)
        self._common = ["--load-format", options.load_format, "--max-model-len", str(options.max_model_len)]
        self._common += ["--kv-cache-memory-bytes", str(options.kv_bytes)] if options.kv_bytes else []
        self.traces = folder / "traces"
        self._early: dict[str, tuple[contextlib.ExitStack, Ready]] = {}

    def __enter__(self) -> Servers:
        if self._options.kv_bytes:
            for name in ("1+1", "2 single", *(["traced"] if self._options.picture else [])):
                up = contextlib.ExitStack()
                self._early[name] = up, up.enter_context(self._started(name))
        return self

    def __exit__(self, *_: object) -> None:
        for up, _ready in self._early.values():
            up.close()

    @contextlib.contextmanager
    def serving(self, name: str) -> Iterator[tuple[str, int]]:
        """(URL, model's length) when it is ready. When what is done with it fails, the end of its log is told."""
        up = contextlib.ExitStack()
        up, ready = self._early.pop(name, None) or (up, up.enter_context(self._started(name)))
        with up:
            try:
                yield ready()
            except SystemExit:
                print(*self._log(name).read_text().splitlines()[-40:], sep="\n", file=sys.stderr)
                raise

    @contextlib.contextmanager
    def _started(self, name: str) -> Iterator[Ready]:
        model, common, split = self._options.model, self._common, ("--prefill", "1", "--decode", "1")
        with self._log(name).open("wb") as log:
            if name == "2 single":
                server = started_single_nodes(model, common, "prefix_aware", log)
            else:
                trace = ["--handoff-trace", str(self.traces)] if name == "traced" else []
                server = started_server(model, [*common, *split, *trace], log)
            with server as ready:
                yield ready

    def _log(self, name: str) -> Path:
        return self._logs / f"{name.replace(' ', '_')}.log"


def measure_split(options: argparse.Namespace, servers: Servers) -> Server:
    server = Server("1+1")
    with servers.serving("1+1") as (url, length):
        measure_alone(server, url, single_shapes(options, length), options.repeat)
        print_header()
        for rate in options.rates:
            measure_mixed(server, url, mixed_shapes(options, length), rate, options.requests)
        counted = node_counters(url)
        print("1+1:", ", ".join(f"{name} {counted.get(name, 0):.0f}" for name in TOLD), flush=True)
    return server


def measure_single(options: argparse.Namespace, servers: Servers) -> Server:
    server = Server("2 single")
    with servers.serving("2 single") as (url, length):
        measure_alone(server, url, single_shapes(options, length), options.repeat)
        for rate in options.rates:
            measure_mixed(server, url, mixed_shapes(options, length), rate, options.requests)
    return server


def measure_pushes(options: argparse.Namespace) -> list[tuple[str, str, str, str]]:
    """Rows of the table, of a process of its own: it has both GPUs."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        program = [sys.executable, str(Path(__file__).with_name("push.py")), options.model, "--json", file.name]
        subprocess.run([*program, "--load-format", options.load_format, "--tokens", str(options.long)], check=True)
        found = json.load(file)
    beside = f"plain copy {found['plain_gb_s']:.0f}"
    return [
        ("1 GiB of blocks to the peer", f"{found['whole_gb_s']:.0f} GB/s", ">= 330", beside),
        ("prefill slow-down while pushing", f"{100 * found['pushed']:+.2f} %", "<= 1 %", "-"),
        ("and digests, of that prefill", f"{100 * found['digests']:+.2f} %", "<= 0.5 %", "-"),
    ]


def draw_one(options: argparse.Namespace, servers: Servers) -> None:
    """The third of three long prompts, alone."""
    with servers.serving("traced") as (url, length):
        measure_alone(Server("traced"), url, single_shapes(options, length)[:1], 2)
    drawn = handoffs(read_folder(servers.traces))[-1]
    Path(options.picture).write_text(draw(drawn))
    print(f"{options.picture}: {summary(drawn)}", flush=True)


def print_targets(
    split: Server, single: Server, rows: list[tuple[str, str, str, str]], options: argparse.Namespace
) -> None:
    """Prints each figure that has a target, the target, the same of two single nodes and of vLLM; `rows` are the
    first."""
    for tokens, (first, second) in split.alone.items():
        one, two = single.alone[tokens]
        rows.append(
            (f"{tokens} tokens, first token added", f"{first - one:+.1f} ms", "<= 3", f"{first:.1f} - {one:.1f}")
        )
        rows.append(
            (f"{tokens} tokens, second token added", f"{second - two:+.1f} ms", "<= 8", f"{second:.1f} - {two:.1f}")
        )
    for (rate, kind), found in split.mixed.items():
        beside, name = single.mixed[rate, kind], f"{rate:.0f}/s {kind}"
        if kind == "long":
            share = 60 if rate > 8 else 80
            gaps = ("{:.1f} / {:.1f} ms".format(*which.gap) for which in (found, beside))
            rows.append((f"{name}: hand-off gap p50 / p99", next(gaps), "<= 12 / 25", next(gaps)))
        else:
            share = 97 if rate > 8 else 99
            both = ("{:.1f} / {:.1f} ms".format(*which.itl[1:]) for which in (found, beside))
            rows.append((f"{name}: ITL p99 / p99.9", next(both), "<= 7 / 15", next(both)))
        rows.append((f"{name}: ok", f"{found.ok:.0f} %", f">= {share} %", f"{beside.ok:.0f} %"))
    peers = VLLM if (options.long, options.chat) == (VLLM_LONG, VLLM_CHAT) else {}
    print(f"\n{'':36}{'1+1':>18}  {'target':12}{'two single nodes':20}{'vLLM 1P1D; tuned' if peers else ''}")
    for row in rows:
        print(f"{row[0]:36}{row[1]:>18}  {row[2]:12}{row[3]:20}{peers.get(row[0], '')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-model-len", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs="*", default=[8.0, 16.0])
    parser.add_argument("--requests", type=int, default=200, help="of each rate")
    parser.add_argument("--repeat", type=int, default=8, help="requests one at a time")
    parser.add_argument("--long", type=int, default=8192, help="tokens of a long prompt")
    parser.add_argument("--chat", type=int, default=256, help="tokens of a chat's prompt")
    parser.add_argument("--picture", default="", help="draw one hand-off into this file (SVG)")
    parser.add_argument("--without-pushes", action="store_true", help="leave benchmarks/push.py to be run by itself")
    parser.add_argument("--kv-bytes", type=int, default=0, help="each node's; servers then start all at once")
    parser.add_argument("--logs", default="", help="folder for the servers' logs")
    options = parser.parse_args()
    pushes = measure_pushes(options) if count_gpus() > 1 and not options.without_pushes else []
    with tempfile.TemporaryDirectory() as folder, Servers(options, Path(folder)) as servers:
        split = measure_split(options, servers)
        print_targets(split, measure_single(options, servers), pushes, options)
        if options.picture:
            draw_one(options, servers)


if __name__ == "__main__":
    main()
