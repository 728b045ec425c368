"""Bit masks over logits, in place. M masked rows, V vocabulary."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, cdiv, overlap

MASK_BLOCK, MASK_WARPS = 4096, 4  # guesses


@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["masks"])
def ban_tokens_kernel(
    logits,  # [N, V], strides (row_stride, 1)
    rows,  # int64 [M]
    masks,  # int32 [M, num_words] contiguous
    row_stride,
    size,
    num_words,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M, cdiv(V, BLOCK))."""
    begin(PDL)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(masks + index * num_words + columns // 32, mask=columns < size, other=-1)
    is_banned = ((words >> (columns % 32)) & 1) == 0
    nothing = tl.full([BLOCK], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * row_stride + columns, nothing, mask=is_banned & (columns < size))


def ban_tokens_triton(logits_NV: torch.Tensor, row_M: torch.Tensor, mask_MW: torch.Tensor) -> None:
    """The Triton twin of `ban_tokens` (kernels/sampling/token_masks.py)."""
    size = logits_NV.shape[1]
    ban_tokens_kernel[(len(row_M), cdiv(size, MASK_BLOCK))](
        logits_NV, row_M, mask_MW, logits_NV.stride(0), size, mask_MW.shape[1],
        BLOCK=MASK_BLOCK, num_warps=MASK_WARPS, **overlap(logits_NV.device),
    )  # fmt: skip
