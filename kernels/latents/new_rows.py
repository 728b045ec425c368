"""A step's new tokens, from what a layer's products make of them to rows of the cache and queries over these: norms,
rotations, stores and the products with a head's matrices, fused where Triton runs.

T tokens, M decode rows of them, H heads, N elements of a head's key without a position, P rotated ones, D = N + P,
L latent size, V elements of a head's value, S slots a block. Eager twins: kernels/reference/latents.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tandem.kernels.products.fused_ops import is_fused
from tandem.kernels.reference import latents as twins


@dataclass(frozen=True, slots=True)
class NewLatents:
    """A step's tokens as a layer's products make them, nothing normalised or rotated yet. Rows may lie apart; what
    finishes them may overwrite them.

    `query_THD`; `row_TR` [T, L + P]: the latent and the part of the key that is rotated. `gain_L`, `eps`: of the
    latent's norm. `position_T` int64; `cos_sin_CP`: row p holds cos, then sin of position p's P / 2 angles, fp32.
    `interleaved`: an angle is of two neighbours; else of an element of the first half and the one as far in the second.
    """

    query_THD: torch.Tensor
    row_TR: torch.Tensor
    gain_L: torch.Tensor
    eps: float
    position_T: torch.Tensor
    cos_sin_CP: torch.Tensor
    interleaved: bool = True

    def some(self, tokens: slice) -> NewLatents:
        return replace(
            self, query_THD=self.query_THD[tokens], row_TR=self.row_TR[tokens], position_T=self.position_T[tokens]
        )

    @property
    def is_fused(self) -> bool:
        """Whether the kernels finish these. Where they don't, nothing is stored either."""
        return is_fused(self.query_THD)

    def finished(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries [T, H, D], rows [T, L + P]) as attention takes them, by plain torch."""
        return (
            twins.rotated_queries(self.query_THD, self.position_T, self.cos_sin_CP, self.interleaved),
            twins.finished_rows(self.row_TR, self.gain_L, self.eps, self.position_T, self.cos_sin_CP, self.interleaved),
        )


def store_and_rotate(new: NewLatents, cache: torch.Tensor, slot_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `NewLatents.finished` gives, in place, in one launch that also stores the rows. `cache`
    [num_blocks, S, L + P]; `slot_T` int64, -1: nowhere. CUDA only."""
    from tandem.kernels.triton_kernels.latents.new_rows import store_and_rotate_triton

    store_and_rotate_triton(
        new.query_THD, new.row_TR, new.gain_L, new.eps, new.position_T, new.cos_sin_CP, cache, slot_T, new.interleaved
    )
    return new.query_THD, new.row_TR


def store_and_absorb(new: NewLatents, key_HNL: torch.Tensor, cache: torch.Tensor, slot_M: torch.Tensor) -> torch.Tensor:
    """[M, H, L + P]: queries of decode rows over the cache itself, multiplied with what would make their keys and
    rotated; the same launch stores the tokens' rows. CUDA only."""
    from tandem.kernels.triton_kernels.latents.absorb import store_and_absorb_triton

    return store_and_absorb_triton(
        new.query_THD, new.row_TR, key_HNL, new.gain_L, new.eps, new.position_T, new.cos_sin_CP, cache, slot_M,
        new.interleaved,
    )  # fmt: skip


def values_of(summed_MHL: torch.Tensor, value_HVL: torch.Tensor, out_MHV: torch.Tensor) -> None:
    """Writes each head's values of sums of latents to `out_MHV`, contiguous."""
    if is_fused(summed_MHL):
        from tandem.kernels.triton_kernels.latents.absorb import values_triton

        values_triton(summed_MHL, value_HVL, out_MHV)
    else:
        out_MHV.copy_(twins.values(summed_MHL, value_HVL))
