"""The exchange of a group of ranks each of which has tokens of its own and some of the experts: tokens go to their
experts' ranks (all-to-all) and come back. docs/expert_groups.md.

N tokens of a rank, C the capacity of an exchange: at least every rank's N. R ranks, E hidden size, k experts of a
token, X experts of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from tandem.kernels.experts.plans import experts_of_rank

WORD_BYTES = 4  # of an id, a weight, a flag
ALIGNMENT = 128  # bytes; a guess


@dataclass(frozen=True)
class ExchangeLayout:
    """What lies where in the memory that each rank shows to the others, for exchanges of up to `max_rows` of capacity:
    rows that came [R * C, E], their experts int32 [R * C, k], weights fp32 [R * C, k], flags int32 [R, max_rows], then
    results [R, max_rows, E] and their flags int32 [R, max_rows]."""

    num_ranks: int
    max_rows: int
    hidden_size: int
    top_k: int
    num_experts: int
    dtype: torch.dtype

    @property
    def places(self) -> int:
        return self.num_ranks * self.max_rows

    @cached_property
    def ids_at(self) -> int:
        return _aligned(self.places * self.hidden_size * self.dtype.itemsize)

    @cached_property
    def weights_at(self) -> int:
        return _aligned(self.ids_at + self.places * self.top_k * WORD_BYTES)

    @cached_property
    def flags_at(self) -> int:
        return _aligned(self.weights_at + self.places * self.top_k * WORD_BYTES)

    @cached_property
    def results_at(self) -> int:
        return _aligned(self.flags_at + self.places * WORD_BYTES)

    @cached_property
    def result_flags_at(self) -> int:
        return _aligned(self.results_at + self.places * self.hidden_size * self.dtype.itemsize)

    @cached_property
    def num_bytes(self) -> int:
        return _aligned(self.result_flags_at + self.places * WORD_BYTES)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Arrived:
    """What came to a rank: rows [R * C, E], the experts of each as the rank counts its own, int32 [R * C, k] with
    NOT_HERE for others, and weights fp32 [R * C, k]. Rows that have none here hold anything. Valid until the next
    exchange."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Sent:
    """What a rank brings to an exchange: experts of each of its tokens, int32 [N, k] of all X, and where tokens' KV
    goes, int64 [N], below 0: it is padding and isn't sent. None: all are tokens."""

    ids: torch.Tensor
    slots: torch.Tensor | None
    capacity: int


class ExpertMail:
    """This rank's memory and its peers', and this rank's counts of exchanges. All ranks must make the same exchanges,
    each of one capacity, in the same order and on one stream. While `is_alone` the others take no part: what their
    experts would make is missing."""

    def __init__(self, rank: int, memory: torch.Tensor, addresses: list[int], layout: ExchangeLayout) -> None:
        """`memory`: this rank's, uint8 [`layout.num_bytes`], zeroed; `addresses[r]`: where that of rank r begins."""
        device = memory.device
        self.rank, self.layout, self._memory = rank, layout, memory
        self._addresses_R = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._counters = torch.zeros(layout.max_rows, dtype=torch.int32, device=device)
        self._is_alone = torch.ones(1, dtype=torch.int32, device=device)

    @torch.inference_mode()  # what was made within a pass can't be written outside of one
    def join(self) -> None:
        """Has the others take part from here on. No rank may dispatch before all ranks' devices have done this."""
        self._is_alone.zero_()

    def dispatch(self, x_NE: torch.Tensor, weights_Nk: torch.Tensor, sent: Sent) -> Arrived:
        """Sends tokens to the ranks of their experts and returns what came here. Eager twin: `dispatch_twin`."""
        from tandem.kernels.triton_kernels.common import overlap
        from tandem.kernels.triton_kernels.experts.exchange import dispatch_kernel

        layout = self.layout
        assert len(x_NE) <= sent.capacity <= layout.max_rows, "agreed on before"
        assert x_NE.stride(1) == 1
        assert x_NE.dtype == layout.dtype
        dispatch_kernel[(sent.capacity,)](
            x_NE, sent.ids, weights_Nk, sent.ids if sent.slots is None else sent.slots, self._addresses_R,
            self._counters, self._is_alone, x_NE.stride(0), len(x_NE), sent.capacity, layout.num_experts,
            layout.ids_at, layout.weights_at, layout.flags_at, **self._constants(sent), **overlap(x_NE.device),
        )  # fmt: skip
        return self._arrived(sent.capacity)

    def combine(self, parts_PE: torch.Tensor, sent: Sent) -> torch.Tensor:
        """[N, E]: the sums of what all ranks made of this rank's tokens, 0 of padding. `parts_PE`: what this rank made
        of what came, [R * C, E]. Eager twin: `combine_twin`."""
        from tandem.kernels.triton_kernels.common import overlap
        from tandem.kernels.triton_kernels.experts.exchange import combine_kernel

        layout, num_rows = self.layout, len(sent.ids)
        out = torch.empty((num_rows, layout.hidden_size), dtype=layout.dtype, device=parts_PE.device)
        combine_kernel[(sent.capacity,)](
            parts_PE, out, sent.ids, sent.ids if sent.slots is None else sent.slots, self._addresses_R, self._counters,
            self._is_alone, num_rows, sent.capacity, layout.num_experts, layout.ids_at, layout.results_at,
            layout.result_flags_at, **self._constants(sent), **overlap(parts_PE.device),
        )  # fmt: skip
        return out

    def _constants(self, sent: Sent) -> dict[str, int | bool]:
        layout = self.layout
        padded = 1 << (layout.hidden_size - 1).bit_length()
        return {
            "SIZE": layout.hidden_size, "PADDED": padded, "TOP_K": layout.top_k,
            "PADDED_K": 1 << (layout.top_k - 1).bit_length(), "LANES": layout.max_rows, "RANK": self.rank,
            "RANKS": layout.num_ranks, "HAS_SLOTS": sent.slots is not None,
            "num_warps": min(16, max(1, padded // 256)),
        }  # fmt: skip

    def _arrived(self, capacity: int) -> Arrived:
        layout, places = self.layout, self.layout.num_ranks * capacity
        return Arrived(
            self._part(0, layout.dtype, places, layout.hidden_size),
            self._part(layout.ids_at, torch.int32, places, layout.top_k),
            self._part(layout.weights_at, torch.float32, places, layout.top_k),
        )

    def _part(self, at: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
        return self._memory[at : at + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)


def dispatch_twin(
    x_RCE: torch.Tensor, ids_RCk: torch.Tensor, weights_RCk: torch.Tensor, place: tuple[int, int], num_experts: int
) -> Arrived:
    """What comes to a rank, with all tokens at hand that anybody sends; padding has NOT_HERE (-1) among its ids.
    `place`: which rank, of how many."""
    first, last = experts_of_rank(*place, num_experts)
    here = (ids_RCk >= first) & (ids_RCk < last)
    ids = torch.where(here, ids_RCk - first, -1)
    return Arrived(x_RCE.flatten(0, 1), ids.flatten(0, 1), weights_RCk.flatten(0, 1))


def combine_twin(parts_RCE: torch.Tensor) -> torch.Tensor:
    """[C, E]: the ranks' parts of one rank's tokens, added in order in fp32, rounded once. A rank that has none of a
    token's experts made zeros of it."""
    total = torch.zeros_like(parts_RCE[0], dtype=torch.float32)
    for part in parts_RCE:
        total += part.float()
    return total.to(parts_RCE.dtype)
