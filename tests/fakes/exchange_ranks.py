"""Ranks that send tokens to each other's experts through memory they share, each a process of its own: on a CPU in host
memory, kernels under Triton's interpreter.

Run as a script: `exchange_ranks.py RANKS FILE`, where FILE holds everyone's memory, and a byte a rank, zeroed; or
on GPUs `exchange_ranks.py RANK RANKS PORT gpu`, where rank 0 prints a line of JSON: rows -> us of an exchange, there
and back, without experts.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from functools import partial
from pathlib import Path

import torch
from gpu_ranks import graph_of, microseconds, said_by_rank_0
from interpreted_ranks import fork_ranks

from tandem.kernels.experts.exchange import (
    Arrived,
    ExchangeLayout,
    ExpertMail,
    Sent,
    combine_twin,
    dispatch_twin,
)
from tandem.kernels.experts.plans import experts_of_rank

HIDDEN, TOP_K, NUM_EXPERTS, MAX_ROWS = 44, 3, 7, 5
# Tokens of each rank, and the capacity: more than any has, none at one, one padding among them.
ROUNDS = (((2, 2, 2), 2), ((1, 4, 0), 4), ((0, 1, 0), 1), ((3, 3, 5), 5), ((1, 1, 1), 5), ((4, 0, 2), 4))


def layout_of(num_ranks: int, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> ExchangeLayout:
    return ExchangeLayout(num_ranks, MAX_ROWS, hidden, TOP_K, NUM_EXPERTS, dtype)


def tokens_of(
    number: int, counts: tuple[int, ...], capacity: int, layout: ExchangeLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [R, C, E], ids int32 [R, C, k] and weights fp32 [R, C, k] of an exchange, the same in every process; ids of
    padding are -1. Each rank's first token is padding where it has more than two."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(len(counts), capacity, layout.hidden_size, generator=generator).to(layout.dtype)
    scores = torch.rand(len(counts), capacity, layout.num_experts, generator=generator)
    ids = scores.topk(layout.top_k).indices.to(torch.int32)
    weights = torch.rand(ids.shape, generator=generator)
    for rank, count in enumerate(counts):
        ids[rank, count:] = -1
        if count > 2:
            ids[rank, 0] = -1
    return x, ids, weights


def made_of(arrived: Arrived, rank: int, layout: ExchangeLayout) -> torch.Tensor:
    """What a rank's experts make of what came: expert e multiplies by e + 1. Rows that have none here become zeros."""
    first, _ = experts_of_rank(rank, layout.num_ranks, layout.num_experts)
    factors = torch.where(arrived.ids >= 0, (arrived.ids + first + 1) * arrived.weights, 0.0).sum(1, keepdim=True)
    rows = torch.where((arrived.ids >= 0).any(1, keepdim=True), arrived.x.float(), 0.0)
    return (rows * factors).to(layout.dtype)


def check_exchange(mail: ExpertMail, number: int, counts: tuple[int, ...], capacity: int, alone: bool = False) -> None:
    """Does one exchange and compares what came and what is left of it with the twins."""
    layout, rank = mail.layout, mail.rank
    device = mail._counters.device
    x, ids, weights = (each.to(device) for each in tokens_of(number, counts, capacity, layout))
    num_rows = counts[rank]
    slots = torch.arange(num_rows, device=device)
    chosen = ids[rank, :num_rows].clone()
    if num_rows > 2:  # what padding chose must not matter
        chosen[0] = torch.arange(layout.top_k, dtype=torch.int32, device=device)
        slots[0] = -1
    if alone:
        ids[:rank], ids[rank + 1 :] = -1, -1
        ids[rank, :num_rows] = chosen
    wide = torch.zeros(
        num_rows, 2 * layout.hidden_size, dtype=layout.dtype, device=device
    )  # the kernel must mind strides
    wide[:, : layout.hidden_size] = x[rank, :num_rows]
    sent = Sent(chosen, slots if number % 2 or num_rows > 2 else None, capacity)
    arrived = mail.dispatch(wide[:, : layout.hidden_size], weights[rank, :num_rows].contiguous(), sent)
    twin = dispatch_twin(x, ids, weights, (rank, layout.num_ranks), layout.num_experts)
    assert torch.equal(arrived.ids, twin.ids), f"exchange {number}: other experts"
    here = (twin.ids >= 0).any(1)
    assert torch.equal(arrived.x[here], twin.x[here]), f"exchange {number}: other rows"
    assert torch.equal(arrived.weights[here], twin.weights[here]), f"exchange {number}: other weights"
    out = mail.combine(made_of(arrived, rank, layout), sent)
    ranks = [rank] if alone else range(layout.num_ranks)
    every = [
        made_of(dispatch_twin(x, ids, weights, (each, layout.num_ranks), layout.num_experts), each, layout)
        for each in ranks
    ]
    own = torch.stack([parts.view(layout.num_ranks, capacity, -1)[rank, :num_rows] for parts in every])
    assert torch.equal(out, combine_twin(own)), f"exchange {number}: another sum"


def _exchange(num_ranks: int, path: str, rank: int) -> None:
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    layout = layout_of(num_ranks)
    size = layout.num_bytes
    addresses = [everything.data_ptr() + peer * size for peer in range(num_ranks)]
    mail = ExpertMail(rank, everything[rank * size : (rank + 1) * size], addresses, layout)
    for number in range(rank + 1):  # unlike numbers of exchanges, which the others don't take part in
        check_exchange(mail, 50 + number, (4, 4, 4), 4, alone=True)
    mail.join()
    joined = everything[num_ranks * size :]
    joined[rank] = 1
    while not joined.all():
        time.sleep(0.001)
    for number, (counts, capacity) in enumerate(ROUNDS):
        check_exchange(mail, number, counts, capacity)


def run_on_gpus(num_ranks: int) -> dict[str, float]:
    """For tests: what rank 0 says, when every rank found every exchange exact."""
    return said_by_rank_0(Path(__file__), num_ranks, "gpu")


GPU_ROWS = (1, 16, 64, 128, 256, 1024, 4096)


def _on_gpu(rank: int, num_ranks: int, port: int) -> None:
    from tandem.engine.parallel.expert_group import ExpertGroup, GroupPlace

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = ExpertGroup.join(GroupPlace(rank, num_ranks, port), device, max(GPU_ROWS))
    group.open(2048, 8, 128, torch.bfloat16)
    mail = group._mail
    assert mail is not None
    for number in range(2 * rank):
        check_exchange(mail, 90 + number, (7,) * num_ranks, 9, alone=True)
    group.begin_serving()
    assert group.begin_step(1 + rank) == num_ranks
    for number, (counts, capacity) in enumerate(ROUNDS * 4):
        check_exchange(mail, number, tuple((*counts, *counts)[:num_ranks]), capacity)
    for number, rows in enumerate((*GPU_ROWS, *reversed(GPU_ROWS))):
        counts = tuple(max(0, rows - 3 * each * (number % 3)) for each in range(num_ranks))
        check_exchange(mail, 100 + number, counts, rows)
    took = {str(rows): _microseconds(mail, rows) for rows in GPU_ROWS}
    torch.cuda.synchronize()
    group.begin_step(1)
    if rank == 0:
        print(json.dumps(took), flush=True)
    while not group.agreement.leave():  # who ends before takes the others along
        time.sleep(0.01)


def _microseconds(mail: ExpertMail, rows: int) -> float:
    layout, device = mail.layout, mail._counters.device
    x, ids, weights = (each.to(device) for each in tokens_of(7, (rows,) * layout.num_ranks, rows, layout))
    sent = Sent(ids[mail.rank].contiguous(), torch.arange(rows, device=device), rows)
    own, counts = x[mail.rank].contiguous(), weights[mail.rank].contiguous()
    return microseconds(graph_of(lambda: mail.combine(mail.dispatch(own, counts, sent).x, sent)))


if __name__ == "__main__":
    if sys.argv[4:] == ["gpu"]:
        import os

        _on_gpu(*map(int, sys.argv[1:4]))
        os._exit(0)  # others may still read what is shown to them
    fork_ranks(int(sys.argv[1]), partial(_exchange, int(sys.argv[1]), sys.argv[2]))
