"""What splitting costs and gives: one prefill and one decode node beside our own single nodes on the same devices.

    python benchmarks/handoff.py MODEL [--load-format dummy] [--rates 8 16] [--requests 200] [--long 8192] [--chat 256]

1. One request at a time: first and second token of a long and of a 2,048-token prompt; split minus single is what the
   hand-off adds. (A split server can hide a hand-off behind a first token made elsewhere, not behind a second.)
2. Poisson arrivals of chats and long prompts, the same for both servers: gap from first to second token, gaps between
   tokens, and the share of requests sent with TTFT <= 300 ms and TPOT <= 7 ms. Single nodes are two, taken in turn.

Each server is a real `tandem serve` in processes of its own. Prompts are random token ids, so no cache helps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.deploy.sse_client import HttpError, get_json, stream_events

TTFT_S, TPOT_S = 0.3, 0.007
READY_S = 240.0


@dataclass(frozen=True)
class Shape:
    kind: str
    num_prompt: int
    num_output: int


@dataclass
class Sample:
    shape: Shape
    sent_at: float
    times: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def is_ok(self) -> bool:
        if self.error or len(self.times) < self.shape.num_output:
            return False
        tpot = (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)
        return self.times[0] - self.sent_at <= TTFT_S and tpot <= TPOT_S


@contextlib.contextmanager
def serving(model: str, arguments: Sequence[str], device: int | None = None) -> Iterator[tuple[str, int]]:
    """(URL, model's length) of a server that is ready; it is stopped at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = dict(os.environ)
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    command = [sys.executable, "-m", "tandem.deploy.cli", "serve", model, "--port", str(port), *arguments]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        yield url, asyncio.run(until_ready(process, url))
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


async def until_ready(process: subprocess.Popen[bytes], url: str) -> int:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}; start it by hand to see why")
        with contextlib.suppress(OSError, HttpError, EOFError):
            await get_json(url, "/ready")
            return int((await get_json(url, "/v1/models"))["data"][0]["max_model_len"])
        await asyncio.sleep(0.2)
    raise SystemExit(f"the server was not ready after {READY_S:.0f} s")


async def request(url: str, shape: Shape, rng: random.Random) -> Sample:
    prompt = [rng.randrange(100, 400) for _ in range(shape.num_prompt)]
    body = {"prompt": prompt, "max_tokens": shape.num_output, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True}  # fmt: skip
    sample = Sample(shape, time.monotonic())
    try:
        async for data in stream_events(url, "/v1/completions", body):
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                raise HttpError(event["error"]["message"])
            now = time.monotonic()
            sample.times += [now for choice in event.get("choices", ()) for _ in choice.get("token_ids") or ()]
    except (OSError, HttpError, EOFError) as error:
        sample.error = repr(error)
    return sample


async def one_at_a_time(url: str, shape: Shape, count: int) -> list[Sample]:
    rng = random.Random(shape.num_prompt)
    await request(url, shape, rng)
    return [await request(url, shape, rng) for _ in range(count)]


async def open_loop(urls: Sequence[str], shapes: Sequence[Shape], rate: float, count: int) -> list[Sample]:
    """The same arrivals and shapes for each server: one chat in five is a long prompt instead."""
    rng = random.Random(int(rate))
    at, plan = 0.0, []
    for index in range(count):
        at += rng.expovariate(rate)
        plan.append((at, shapes[rng.random() < 0.2], urls[index % len(urls)], random.Random(index)))
    begin = time.monotonic()

    async def later(after: float, shape: Shape, url: str, prompt_rng: random.Random) -> Sample:
        await asyncio.sleep(max(0.0, begin + after - time.monotonic()))
        return await request(url, shape, prompt_rng)

    return list(await asyncio.gather(*(later(*arrival) for arrival in plan)))


def milliseconds(values: Sequence[float], *percentiles: float) -> str:
    if not values:
        return "-"
    return " / ".join(f"{1e3 * value:.1f}" for value in np.percentile(values, percentiles))


def token_times(samples: Sequence[Sample]) -> tuple[float, float]:
    """Median first and second token, in milliseconds."""
    good = [s for s in samples if len(s.times) > 1]
    if not good:
        raise SystemExit(f"no request came through: {samples[0].error}")
    return tuple(1e3 * float(np.median([s.times[i] - s.sent_at for s in good])) for i in (0, 1))  # type: ignore[return-value]


def print_mixed(name: str, rate: float, shapes: Sequence[Shape], samples: Sequence[Sample]) -> None:
    for shape in shapes:
        mine = [s for s in samples if s.shape == shape]
        ttft = [s.times[0] - s.sent_at for s in mine if s.times]
        gap = [s.times[1] - s.times[0] for s in mine if len(s.times) > 1]
        itl = [b - a for s in mine for a, b in zip(s.times[1:], s.times[2:], strict=False)]
        share = sum(s.is_ok for s in mine) / max(1, len(mine))
        print(f"{rate:4.0f}/s {name:10} {shape.kind:5} {len(mine):4} {sum(bool(s.error) for s in mine):3} "
              f"{milliseconds(ttft, 50, 90):>15} {milliseconds(gap, 50, 99):>14} {milliseconds(itl, 50, 99, 99.9):>20} "
              f"{100 * share:5.1f} %", flush=True)  # fmt: skip


def num_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def counters(url: str, *names: str) -> str:
    from urllib.request import urlopen

    text = urlopen(f"{url}/metrics", timeout=5).read().decode()
    found = {name: sum(map(float, re.findall(rf'counter="{name}".*}} (.+)$', text, re.MULTILINE))) for name in names}
    return ", ".join(f"{name} {value:.0f}" for name, value in found.items())


def measure_split(options: argparse.Namespace, common: list[str]) -> tuple[dict[Shape, tuple[float, float]], int]:
    alone = {}
    with serving(options.model, [*common, "--prefill", "1", "--decode", "1"]) as (url, length):
        for shape in single_shapes(options, length):
            alone[shape] = token_times(asyncio.run(one_at_a_time(url, shape, options.repeat)))
        print_header()
        for rate in options.rates:
            shapes = mixed_shapes(options, length)
            print_mixed("1+1", rate, shapes, asyncio.run(open_loop([url], shapes, rate, options.requests)))
        names = ("sink_commits", "source_handoffs_failed", "sink_mismatches", "kernels_compiled_late")
        print(f"1+1: {counters(url, *names)}", flush=True)
    return alone, length


def single_shapes(options: argparse.Namespace, length: int) -> list[Shape]:
    return [Shape("alone", min(size, length - 16), 8) for size in (options.long, options.long // 4)]


def mixed_shapes(options: argparse.Namespace, length: int) -> list[Shape]:
    long = min(options.long, length - 40)
    return [Shape("chat", options.chat, min(256, length - options.chat)), Shape("long", long, 32)]


def print_header() -> None:
    print(f"{'':6} {'server':10} {'kind':5} {'sent':>4} {'err':>3} {'TTFT p50/p90':>15} {'gap p50/p99':>14} "
          f"{'ITL p50/p99/p99.9':>20} {'ok':>7}   (ms)", flush=True)  # fmt: skip


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
    options = parser.parse_args()
    common = ["--load-format", options.load_format, "--max-model-len", str(options.max_model_len)]
    split, length = measure_split(options, common)
    devices = [0, 1] if num_devices() > 1 else [None, None]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serving(options.model, common, device))[0] for device in devices]
        single = {
            shape: token_times(asyncio.run(one_at_a_time(urls[0], shape, options.repeat)))
            for shape in single_shapes(options, length)
        }
        for rate in options.rates:
            shapes = mixed_shapes(options, length)
            print_mixed("2 single", rate, shapes, asyncio.run(open_loop(urls, shapes, rate, options.requests)))
    print("\none at a time, ms      first token: split  single  adds     second token: split  single  adds")
    for shape, (first, second) in split.items():
        one, two = single[shape]
        print(f"{shape.num_prompt:6} tokens {first:26.1f} {one:7.1f} {first - one:5.1f} {second:25.1f} {two:7.1f} "
              f"{second - two:5.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
