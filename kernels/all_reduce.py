"""Exchanges between the ranks of a tensor-parallel node at the sizes of decode steps, through each other's memory.

Mail is a piece of each rank's device memory that its peers map and write. Legend: N rows, E hidden size, V
vocabulary, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.kernels.fused_ops import add_rms_norm, argmax_tokens

ARGMAX_ROWS = 64  # rows of one lane
WORD_BYTES = 8


@dataclass(frozen=True)
class Mail:
    """This rank's and its peers' mail, and this rank's counts of exchanges. All ranks must make the same exchanges, in
    the same order, each on one stream."""

    rank: int
    num_ranks: int
    max_rows: int
    hidden_size: int
    dtype: torch.dtype
    addresses_R: torch.Tensor  # int64, where each rank's mail begins, as this rank maps it
    counters: torch.Tensor  # int32 [max_rows + lanes of argmax], zeros at first

    @classmethod
    def make(
        cls, rank: int, addresses: list[int], max_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> Mail:
        """`addresses[r]`: zeroed memory of rank r of at least `mail_bytes`."""
        counters = torch.zeros(max_rows + _argmax_lanes(max_rows), dtype=torch.int32, device=device)
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(rank, len(addresses), max_rows, hidden_size, dtype, table, counters)

    def takes(self, x_NE: torch.Tensor) -> bool:
        """Whether rows like these can be exchanged here."""
        fits = 0 < x_NE.shape[0] <= self.max_rows and x_NE.shape[1] == self.hidden_size
        return fits and x_NE.dtype == self.dtype and x_NE.stride(1) == 1 and x_NE.stride(0) % 2 == 0


def mail_bytes(max_rows: int, hidden_size: int, dtype: torch.dtype, num_ranks: int) -> int:
    """Memory of one rank: both halves of all lanes, a number beside each word of data. Raises ValueError for sizes
    that the kernels don't serve."""
    if (hidden_size * dtype.itemsize) % 4:
        raise ValueError(f"rows of {hidden_size} {dtype} values are no whole 32-bit words")
    sums = 2 * max_rows * num_ranks * _row_words(hidden_size, dtype)
    return (sums + 2 * _argmax_lanes(max_rows) * num_ranks * 2 * ARGMAX_ROWS) * WORD_BYTES


def sum_add_rms_norm(
    mail: Mail, x_NE: torch.Tensor, residual_NE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += sum of all ranks' x, in place; returns the new residual normalised. Same bits on every rank.

    The sum is taken in fp32 in the order of ranks and rounded once. Eager twin: `sum_of_parts`, then `add_rms_norm`.
    """
    from tandem.kernels.triton_kernels.all_reduce import TRITON_DTYPES, sum_add_rms_norm_kernel
    from tandem.kernels.triton_kernels.common import overlap

    assert mail.takes(x_NE), f"no mail for {tuple(x_NE.shape)} {x_NE.dtype}"
    num_rows, size = x_NE.shape
    out = torch.empty((num_rows, size), dtype=x_NE.dtype, device=x_NE.device)
    x, residual = x_NE.view(torch.int32), residual_NE.view(torch.int32)
    words = _row_words(size, x_NE.dtype)
    padded = 1 << (words - 1).bit_length()
    sum_add_rms_norm_kernel[(num_rows,)](
        x, residual, weight_E.view(torch.int32), out.view(torch.int32), mail.addresses_R, mail.counters,
        x.stride(0), residual.stride(0), eps, DTYPE=TRITON_DTYPES[x_NE.dtype], IS_WIDE=x_NE.dtype.itemsize == 4,
        SIZE=size, WORDS=words, PADDED=padded, LANES=mail.max_rows, RANK=mail.rank, RANKS=mail.num_ranks,
        num_warps=min(16, max(1, padded // 128)), **overlap(x_NE.device),
    )  # fmt: skip
    return out


def argmax_of_shards(mail: Mail, logits_NV: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the most likely token of the whole vocabulary, the lowest id of equals; `logits_NV` is this rank's run
    of it. Same on every rank."""
    from tandem.kernels.triton_kernels.all_reduce import argmax_of_shards_kernel
    from tandem.kernels.triton_kernels.common import overlap

    num_rows, shard = logits_NV.shape
    assert num_rows <= mail.max_rows
    best = argmax_tokens(logits_NV)
    tokens = torch.empty_like(best)
    offset = 2 * mail.max_rows * mail.num_ranks * _row_words(mail.hidden_size, mail.dtype)
    argmax_of_shards_kernel[(-(-num_rows // ARGMAX_ROWS),)](
        logits_NV, best, tokens, mail.addresses_R, mail.counters[mail.max_rows :], logits_NV.stride(0), num_rows,
        offset, SHARD=shard, ROWS=ARGMAX_ROWS, LANES=_argmax_lanes(mail.max_rows), RANK=mail.rank,
        RANKS=mail.num_ranks, num_warps=2, **overlap(logits_NV.device),
    )  # fmt: skip
    return tokens


def sum_of_parts(parts_RNE: torch.Tensor) -> torch.Tensor:
    """[N, E]: the ranks' parts added in order in fp32, rounded once."""
    total = torch.zeros_like(parts_RNE[0], dtype=torch.float32)
    for part in parts_RNE:
        total += part.float()
    return total.to(parts_RNE.dtype)


def sum_add_rms_norm_twin(
    parts_RNE: torch.Tensor, residual_NE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """Eager twin of `sum_add_rms_norm`, with every rank's part at hand."""
    return add_rms_norm(sum_of_parts(parts_RNE), residual_NE, weight_E, eps)


def _row_words(hidden_size: int, dtype: torch.dtype) -> int:
    return hidden_size * dtype.itemsize // 4


def _argmax_lanes(max_rows: int) -> int:
    return -(-max_rows // ARGMAX_ROWS)
