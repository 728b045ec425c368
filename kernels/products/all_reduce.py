"""Exchanges between the ranks of a tensor-parallel node, through each other's memory.

Mail is a piece of each rank's device memory that its peers map and write. Legend: N rows, E hidden size, V
vocabulary, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from tandem.kernels.products.fused_ops import add_rms_norm, argmax_tokens

ARGMAX_ROWS = 64  # rows of one lane; a guess
WORD_BYTES = 8
FLAG_BYTES = 4
MOST_WORD_LANES = 512  # a guess
MOST_ROW_BYTES = 1 << 29  # of the mail's rows; larger steps go another way; a guess
Way = Literal["words", "rows", "shares"]
# For up to so many ranks: how sums of up to so many bytes travel; by NCCL beyond. Measured on H200s over NVLink, 8B
# Llama: with four ranks NCCL takes the device an eighth less from 2,048 rows on, but its launches take the host longer
# than ours, and such steps wait for the host up to some 4,096 rows.
WAYS: tuple[tuple[int, tuple[tuple[int, Way], ...]], ...] = (
    (2, ((32 * 8192, "words"), (1 << 62, "rows"))),
    (1 << 30, ((32 * 8192, "words"), (4096 * 8192, "shares"))),
)


def way_to_sum(num_ranks: int, num_bytes: int) -> Way | None:
    """`num_bytes` of each rank's part. "words" and "rows": to every peer (each word with a number beside it, or rows
    and flags); "shares": each row to one rank, which sends the sum to all; None: by NCCL."""
    steps = next(steps for most_ranks, steps in WAYS if num_ranks <= most_ranks)
    return next((way for most, way in steps if num_bytes <= most), None)


def _aligned(offset: int) -> int:
    return -(-offset // 128) * 128


@dataclass(frozen=True)
class MailLayout:
    """What lies where in each rank's mail. Raises ValueError for sizes that the kernels don't serve.

    [2 halves, word lanes, R, words of a row] int64, [2, argmax lanes, R, 2, ARGMAX_ROWS] int64, [2, row lanes, R, E]
    of the dtype, [2, row lanes, R] int32.
    """

    num_ranks: int
    max_rows: int
    hidden_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if (self.hidden_size * self.dtype.itemsize) % 4:
            raise ValueError(f"rows of {self.hidden_size} {self.dtype} values are no whole 32-bit words")

    @cached_property
    def row_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    @cached_property
    def word_lanes(self) -> int:
        return min(self.max_rows, MOST_WORD_LANES)

    @cached_property
    def argmax_lanes(self) -> int:
        return -(-self.max_rows // ARGMAX_ROWS)

    @cached_property
    def row_lanes(self) -> int:
        steps = next(steps for most_ranks, steps in WAYS if self.num_ranks <= most_ranks)
        most_bytes = min(steps[-1][0], MOST_ROW_BYTES // (2 * self.num_ranks))
        return min(self.max_rows, most_bytes // self.row_bytes)

    @cached_property
    def argmax_at(self) -> int:
        return 2 * self.word_lanes * self.num_ranks * self.row_bytes // 4 * WORD_BYTES

    @cached_property
    def rows_at(self) -> int:
        end = self.argmax_at + 2 * self.argmax_lanes * self.num_ranks * 2 * ARGMAX_ROWS * WORD_BYTES
        return _aligned(end)

    @cached_property
    def flags_at(self) -> int:
        return _aligned(self.rows_at + 2 * self.row_lanes * self.num_ranks * self.row_bytes)

    def way(self, num_rows: int) -> Way | None:
        """How so many rows are summed; None: they don't fit."""
        way = way_to_sum(self.num_ranks, num_rows * self.row_bytes)
        return way if num_rows <= (self.word_lanes if way == "words" else self.row_lanes) else None

    @property
    def ways(self) -> list[Way]:
        """Every answer that `way` has."""
        answers = {self.way(rows) for rows in range(1, self.max_rows + 1)}
        return sorted(answer for answer in answers if answer is not None)

    @property
    def num_bytes(self) -> int:
        return self.flags_at + 2 * self.row_lanes * self.num_ranks * FLAG_BYTES

    @property
    def num_counters(self) -> int:
        return self.word_lanes + self.argmax_lanes + self.row_lanes


@dataclass(frozen=True)
class Mail:
    """This rank's and its peers' mail, and this rank's counts of exchanges. All ranks must make the same exchanges, in
    the same order, each on one stream."""

    rank: int
    layout: MailLayout
    addresses_R: torch.Tensor  # int64, where each rank's mail begins, as this rank maps it
    counters: torch.Tensor  # int32: of word lanes, argmax lanes and row lanes; zeros at first

    @classmethod
    def make(cls, rank: int, addresses: list[int], layout: MailLayout, device: torch.device) -> Mail:
        """This rank's end of the exchange. `addresses[r]`: zeroed memory of rank r, `layout.num_bytes` or more."""
        counters = torch.zeros(layout.num_counters, dtype=torch.int32, device=device)
        return cls(rank, layout, torch.tensor(addresses, dtype=torch.int64, device=device), counters)

    def way(self, x_NE: torch.Tensor) -> Way | None:
        """How rows like these are summed here; None: not here."""
        layout, num_rows = self.layout, x_NE.shape[0]
        if x_NE.dtype != layout.dtype or x_NE.shape[1] != layout.hidden_size or x_NE.stride(1) != 1:
            return None
        return layout.way(num_rows) if num_rows and x_NE.stride(0) * x_NE.element_size() % 4 == 0 else None


def sum_add_rms_norm(
    mail: Mail, x_NE: torch.Tensor, residual_NE: torch.Tensor, weight_E: torch.Tensor, eps: float, way: Way
) -> torch.Tensor:
    """residual += sum of all ranks' x, in place; returns the new residual normalised. Same bits on every rank.

    The sum is taken in fp32 in the order of ranks and rounded once. Eager twin: `sum_of_parts`, then `add_rms_norm`.
    """
    out = torch.empty(x_NE.shape, dtype=x_NE.dtype, device=x_NE.device)
    if way == "words":
        _sum_words(mail, x_NE, residual_NE, weight_E, out, eps)
    else:
        _sum_rows(mail, x_NE, residual_NE, weight_E, out, eps, scatters=way == "shares")
    return out


def _sum_words(
    mail: Mail, x_NE: torch.Tensor, residual_NE: torch.Tensor, weight_E: torch.Tensor, out_NE: torch.Tensor, eps: float
) -> None:
    from tandem.kernels.triton_kernels.common import overlap
    from tandem.kernels.triton_kernels.products.all_reduce import TRITON_DTYPES, sum_add_rms_norm_words_kernel

    layout, (num_rows, size) = mail.layout, x_NE.shape
    x, residual = x_NE.view(torch.int32), residual_NE.view(torch.int32)
    words = layout.row_bytes // 4
    padded = 1 << (words - 1).bit_length()
    sum_add_rms_norm_words_kernel[(num_rows,)](
        x, residual, weight_E.view(torch.int32), out_NE.view(torch.int32), mail.addresses_R, mail.counters,
        x.stride(0), residual.stride(0), eps, DTYPE=TRITON_DTYPES[x_NE.dtype], IS_WIDE=x_NE.dtype.itemsize == 4,
        SIZE=size, WORDS=words, PADDED=padded, LANES=layout.word_lanes, RANK=mail.rank, RANKS=layout.num_ranks,
        num_warps=min(16, max(1, padded // 128)), **overlap(x_NE.device),
    )  # fmt: skip


def _sum_rows(
    mail: Mail,
    x_NE: torch.Tensor,
    residual_NE: torch.Tensor,
    weight_E: torch.Tensor,
    out_NE: torch.Tensor,
    eps: float,
    *,
    scatters: bool,
) -> None:
    from tandem.kernels.triton_kernels.common import overlap
    from tandem.kernels.triton_kernels.products.all_reduce import sum_add_rms_norm_rows_kernel

    layout, (num_rows, size) = mail.layout, x_NE.shape
    padded = 1 << (size - 1).bit_length()
    counters = mail.counters[layout.word_lanes + layout.argmax_lanes :]
    sum_add_rms_norm_rows_kernel[(num_rows,)](
        x_NE, residual_NE, weight_E, out_NE, mail.addresses_R, counters, x_NE.stride(0), residual_NE.stride(0), eps,
        layout.rows_at, layout.flags_at, SIZE=size, PADDED=padded, LANES=layout.row_lanes, RANK=mail.rank,
        RANKS=layout.num_ranks, SCATTERS=scatters, num_warps=min(16, max(1, padded // 256)), **overlap(x_NE.device),
    )  # fmt: skip


def argmax_of_shards(mail: Mail, logits_NV: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the most likely token of the whole vocabulary, the lowest id of equals; `logits_NV` is this rank's run
    of it. Same on every rank."""
    from tandem.kernels.triton_kernels.common import overlap
    from tandem.kernels.triton_kernels.products.all_reduce import argmax_of_shards_kernel

    layout, (num_rows, shard) = mail.layout, logits_NV.shape
    assert num_rows <= layout.max_rows
    best = argmax_tokens(logits_NV)
    tokens = torch.empty_like(best)
    argmax_of_shards_kernel[(-(-num_rows // ARGMAX_ROWS),)](
        logits_NV, best, tokens, mail.addresses_R, mail.counters[layout.word_lanes :], logits_NV.stride(0), num_rows,
        layout.argmax_at, SHARD=shard, ROWS=ARGMAX_ROWS, LANES=layout.argmax_lanes, RANK=mail.rank,
        RANKS=layout.num_ranks, num_warps=2, **overlap(logits_NV.device),
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
