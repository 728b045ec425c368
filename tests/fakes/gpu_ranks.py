"""Ranks that exchange rows through each other's GPU memory, against NCCL: one process a rank, started by `run_ranks`.

Run as a script: `gpu_ranks.py RANK RANKS PORT`. Rank 0 prints one line of JSON: rows -> {way, or "chosen": its us;
"nccl": us of NCCL's sum and our norm; "chosen launch", "nccl launch": us of the host for launching them one by one}.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandem.kernels.products.all_reduce import Way

HIDDEN, VOCAB, EPS = 4096, 128256, 1e-5
ROWS = (1, 3, 16, 32, 64, 128, 256, 512, 2048, 8192)
MOST_LOGITS = 512  # rows
REPLAYS = 30
WAYS: tuple[Way, ...] = ("words", "rows", "shares")


def run_ranks(num_ranks: int) -> dict[str, dict[str, float]]:
    """For tests: what rank 0 says, when every rank found every exchange exact."""
    return said_by_rank_0(Path(__file__), num_ranks)


def said_by_rank_0(script: Path, num_ranks: int, *more: str, timeout_s: float = 100) -> Any:
    """What rank 0 of processes that run `script` with RANK, RANKS, a free PORT and `more` prints last, from JSON, once
    all have ended well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), port, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(num_ranks)
    ]
    try:
        said = [rank.communicate(timeout=timeout_s) for rank in ranks]
        errors = [f"rank {number}: {each.decode()[-4000:]}" for number, (_, each) in enumerate(said)]
        assert not any(rank.returncode for rank in ranks), "\n".join(errors)
        return json.loads(said[0][0].splitlines()[-1])
    finally:
        for rank in ranks:
            rank.kill()


def graph_of(call) -> torch.cuda.CUDAGraph:  # type: ignore[no-untyped-def]
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYS):
            call()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / REPLAYS


def _launch_microseconds(call) -> float:  # type: ignore[no-untyped-def]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(REPLAYS):
        call()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * took / REPLAYS


def _run(rank: int, num_ranks: int, port: int) -> None:
    import torch.distributed as dist

    from tandem.engine.parallel.group import Membership, TensorParallel
    from tandem.engine.parallel.sharding import Shard
    from tandem.kernels.products.all_reduce import sum_add_rms_norm, sum_add_rms_norm_twin
    from tandem.kernels.products.fused_ops import add_rms_norm

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False) if rank == 0 else None
    group = TensorParallel.join(
        Membership(Shard(rank, num_ranks), port, store), device, max(ROWS), HIDDEN, torch.bfloat16
    )
    generator = torch.Generator(device).manual_seed(1)
    weight = torch.rand(HIDDEN, device=device, dtype=torch.bfloat16, generator=generator)
    took: dict[int, dict[str, float]] = {}
    for rows in (*ROWS, *reversed(ROWS)):
        shape = (num_ranks, rows, HIDDEN)
        parts = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        residual = torch.randn(shape[1:], device=device, dtype=torch.bfloat16, generator=generator)
        twin = residual.clone()
        mail = group._mail
        assert mail is not None
        layout = mail.layout
        ways = [way for way in WAYS if rows <= (layout.word_lanes if way == "words" else layout.row_lanes)]
        for way in (*ways, *ways):
            normed = sum_add_rms_norm(mail, parts[rank], residual, weight, EPS, way)
            expected = sum_add_rms_norm_twin(parts, twin, weight, EPS)
            assert torch.equal(residual, twin), f"{rows} rows by {way}: the sum differs"
            torch.testing.assert_close(normed, expected)
        if rows <= MOST_LOGITS:
            logits = torch.randint(0, 50, (rows, VOCAB), device=device, generator=generator).bfloat16()
            shard = VOCAB // num_ranks
            own = logits[:, rank * shard : (rank + 1) * shard]
            assert torch.equal(group.argmax(own), logits.float().argmax(-1)), f"{rows} rows: another token"
            assert torch.equal(group.gather_logits(own), logits)
        if rows in took:
            continue
        x, stream = torch.zeros_like(parts[rank]), torch.zeros_like(residual)
        calls = {way: partial(sum_add_rms_norm, mail, x, stream, weight, EPS, way) for way in ways}
        calls["chosen"] = partial(group.sum_add_rms_norm, x, stream, weight, EPS)

        def by_nccl(x=x, stream=stream) -> None:  # type: ignore[no-untyped-def]
            dist.all_reduce(x)
            add_rms_norm(x, stream, weight, EPS)

        calls["nccl"] = by_nccl
        took[rows] = {way: microseconds(graph_of(call)) for way, call in calls.items()}
        took[rows] |= {f"{way} launch": _launch_microseconds(calls[way]) for way in ("chosen", "nccl")}
    torch.cuda.synchronize()
    group.smallest(0)
    if rank == 0:
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    import os

    _run(*map(int, sys.argv[1:]))
    os._exit(0)  # without NCCL's teardown
