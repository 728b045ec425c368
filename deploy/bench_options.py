"""Flags of `tandem bench`."""

from __future__ import annotations

import argparse


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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
