"""Flags of `tandem bench`."""

from __future__ import annotations

import argparse
from typing import get_args

from tandem.engine.config import PlacementName


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="server to measure (default: %(default)s)")
    add("--model", default="", help="model name to ask for; default: the first that the server lists")
    add("--num-requests", type=_positive, default=100, metavar="N", help="requests in all (default: %(default)s)")
    add("--concurrency", type=_positive, default=8, metavar="N", help="closed loop: in flight (default: %(default)s)")
    add("--rate", type=float, default=0.0, metavar="R", help="open loop instead: Poisson arrivals a second")
    add("--input-tokens", type=_positive, default=128, metavar="N", help="prompt length (default: %(default)s)")
    add("--output-tokens", type=_positive, default=64, metavar="N", help="tokens to ask for (default: %(default)s)")
    add("--shared-prefix", type=int, default=0, metavar="N", help="prompt tokens that all requests share")
    add("--vocab-size", type=_positive, default=1000, metavar="N", help="random ids stay below (default: %(default)s)")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for one request (default: %(default)s)")
    add("--api-key", default="", help="sent as a bearer token")
    _add_trace_flags(parser)


def _add_trace_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "traces", "Mooncake's format; against --url, or against simulated nodes"
    ).add_argument
    add("--trace", default="", metavar="FILE", help="replay this trace instead of random prompts")
    add("--speed", type=_factor, default=1.0, metavar="X", help="so many times faster (default: %(default)s)")
    add("--compare", action="append", default=[], metavar="URL",
        help="then replay it through this router too, say one with another --placement; may be repeated")  # fmt: skip
    add("--limit", type=int, default=0, metavar="N", help="only the first N requests")
    add("--trace-scale", type=_factor, default=1.0, metavar="X", help="lengths times this, for small models")
    add("--simulate", type=_positive, default=0, metavar="N", help="N simulated nodes, in virtual time, no server")
    add("--policies", type=_policies, default="round_robin,least_loaded,prefix_aware", metavar="A,B",
        help="placement policies to simulate (default: %(default)s)")  # fmt: skip
    add("--gpu-tokens", type=_positive, default=880_000, metavar="N", help="KV of a node's GPU (default: %(default)s)")
    add("--host-tokens", type=int, default=880_000, metavar="N", help="KV of a node's host tier (default: %(default)s)")
    add(
        "--fetch-rate", type=float, default=0.0, metavar="R", help="tokens a second from a peer's cache; 0: nodes don't"
    )
    add("--routers", type=_positive, default=1, metavar="N", help="routers of as many hosts: each has its own view")
    add("--redis", default="", metavar="URL", help="a real Redis carries the directory; local: one is started")
    add("--find-speed", action="store_true", help="find the highest speed factor that keeps --ttft-target")
    add("--ttft-target", type=_factor, default=2.0, metavar="S", help="at p90, and for goodput (default: %(default)s)")
    add("--tpot-target", type=_factor, default=0.05, metavar="S", help="for goodput (default: %(default)s)")


def _policies(text: str) -> str:
    for name in text.split(","):
        if name not in get_args(PlacementName):
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(get_args(PlacementName))}")
    return text


def _factor(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
