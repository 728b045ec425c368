"""Ranks that exchange mail in host memory they share, each a process of its own, kernels under Triton's interpreter.

Run as a script: `mail_ranks.py RANKS FILE`, where FILE holds everyone's mail, zeroed.
"""

from __future__ import annotations

import mmap
import sys
from functools import partial

import torch
from interpreted_ranks import fork_ranks

from tandem.kernels.products.all_reduce import MailLayout

MAX_ROWS, HIDDEN, SHARD, EPS = 3, 44, 40, 1e-5
ROUNDS = {torch.float16: (2, 3, 1, 3), torch.float32: (1, 2)}  # rows of each exchange


def parts_of(number: int, num_ranks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(every rank's part [R, N, E], residual [N, E], weight [E]) of an exchange: the same in every process."""
    generator = torch.Generator().manual_seed(number)
    rows = ROUNDS[dtype][number]
    parts = torch.randn(num_ranks, rows, HIDDEN, generator=generator)
    residual = torch.randn(rows, HIDDEN, generator=generator)
    return parts.to(dtype), residual.to(dtype), torch.rand(HIDDEN, generator=generator).to(dtype)


def layout_of(num_ranks: int, dtype: torch.dtype) -> MailLayout:
    return MailLayout(num_ranks, MAX_ROWS, HIDDEN, dtype)


def logits_of(number: int, num_rows: int, num_ranks: int) -> torch.Tensor:
    """[N, R * SHARD] with few distinct values: ties within and across ranks."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randint(0, 12, (num_rows, num_ranks * SHARD), generator=generator).float()


def _exchange(num_ranks: int, path: str, rank: int) -> None:
    from tandem.kernels.products.all_reduce import Mail, argmax_of_shards, sum_add_rms_norm, sum_add_rms_norm_twin

    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    begin = everything.data_ptr()
    for dtype, rounds in ROUNDS.items():
        layout = layout_of(num_ranks, dtype)
        size = layout.num_bytes
        addresses = [begin + peer * size for peer in range(num_ranks)]
        mail = Mail.make(rank, addresses, layout, torch.device("cpu"))
        begin += num_ranks * size
        for number, num_rows in enumerate(rounds):
            parts, first_residual, weight = parts_of(number, num_ranks, dtype)
            twin = first_residual.clone()
            expected = sum_add_rms_norm_twin(parts, twin, weight, EPS)
            wide = torch.zeros(num_rows, 2 * HIDDEN, dtype=dtype)  # the kernel must mind the rows' stride
            wide[:, :HIDDEN] = parts[rank]
            for way in ("words", "rows", "shares"):
                residual = first_residual.clone()
                normed = sum_add_rms_norm(mail, wide[:, :HIDDEN], residual, weight, EPS, way)
                assert torch.equal(residual, twin), f"exchange {number} by {way}: the residual differs"
                torch.testing.assert_close(normed, expected)
            logits = logits_of(number, num_rows, num_ranks)
            tokens = argmax_of_shards(mail, logits[:, rank * SHARD : (rank + 1) * SHARD])
            assert torch.equal(tokens, logits.argmax(-1)), f"exchange {number}: another token"


if __name__ == "__main__":
    fork_ranks(int(sys.argv[1]), partial(_exchange, int(sys.argv[1]), sys.argv[2]))
