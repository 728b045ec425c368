"""Flags of `tandem kernels`."""

from __future__ import annotations

import argparse


def add_kernels_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--heads", type=int, default=32, metavar="N", help="query heads of a layer (default: %(default)s)")
    add("--kv-heads", type=int, default=8, metavar="N", help="KV heads (default: %(default)s)")
    add("--head-size", type=int, default=128, metavar="N", help="elements of a head (default: %(default)s)")
    add("--block-size", type=int, default=64, metavar="N", help="tokens of a KV block (default: %(default)s)")
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="of the model; auto: "
        "bfloat16 on a GPU, float32 on the CPU")  # fmt: skip
    add("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of the KV cache; auto: the model's")
    add("--sliding-window", type=int, metavar="N", help="tokens that a query sees")
    add("--soft-cap", type=float, metavar="X", help="scores are X * tanh(score / X)")
    add("--alibi", action="store_true", help="with ALiBi's slopes")
    add("--rows", type=int, default=64, metavar="N", help="sequences of the decode step explained")
    add("--length", type=int, default=2048, metavar="N", help="their tokens in the cache")
    add("--device", default="auto", help="cuda, cuda:1, cpu; auto: a GPU if there is one")
    add("--attention-backend", default="auto", metavar="NAME", help="test only this one; auto: all that fit")
    add("--no-test", action="store_true", help="only say what would be chosen; run nothing")
