"""The most likely token of each row, in two launches. R rows, V vocabulary."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, overlap

MAX_SPLITS = 64  # a guess


@triton.jit(do_not_specialize=["num_splits", "size"])
def argmax_parts_kernel(
    logits,  # [R, V], strides (row_stride, 1)
    peaks,  # fp32 [R, MAX_SPLITS]
    places,  # int32 [R, MAX_SPLITS]
    row_stride,
    size,
    num_splits,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, num_splits): the largest logit of one part of a row, the first of equals."""
    begin(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_blocks = tl.cdiv(size, BLOCK)
    per_split = tl.cdiv(num_blocks, num_splits)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32) + size
    for block in range(split * per_split, tl.minimum((split + 1) * per_split, num_blocks)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row * row_stride + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        better = (values > best) | ((values == best) & (columns < where))
        best = tl.where(better, values, best)
        where = tl.where(better, columns, where)
    peak = tl.max(best, 0)
    tl.store(peaks + row * MAX_SPLITS + split, peak)
    tl.store(places + row * MAX_SPLITS + split, tl.min(tl.where(best == peak, where, size), 0))


@triton.jit(do_not_specialize=["num_splits", "size", "token_columns"])
def argmax_whole_kernel(
    peaks,  # fp32 [R, MAX_SPLITS]
    places,  # int32 [R, MAX_SPLITS]
    tokens,  # int64 [R]; with STORES in the host's memory
    slots,  # with STORES, like the two behind it: int64 [R]; -1: padding
    positions,  # int64 [R], of the token before; becomes the token's
    token_ids,  # int32 [S, C], contiguous rows of token_columns
    size,
    num_splits,
    token_columns,
    MAX_SPLITS: tl.constexpr,
    STORES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, MAX_SPLITS)
    mask = splits < num_splits
    values = tl.load(peaks + row * MAX_SPLITS + splits, mask=mask, other=float("-inf"))
    where = tl.load(places + row * MAX_SPLITS + splits, mask=mask, other=size)
    chosen = tl.min(tl.where(values == tl.max(values, 0), where, size), 0)
    token = tl.minimum(chosen, size - 1)
    tl.store(tokens + row, token.to(tl.int64))
    if STORES:
        slot = tl.load(slots + row)
        if slot >= 0:
            position = tl.load(positions + row) + 1
            tl.store(token_ids + slot * token_columns + position, token.to(tl.int32))
            tl.store(positions + row, position)


def argmax_triton(logits_RV: torch.Tensor) -> torch.Tensor:
    tokens = torch.empty(logits_RV.shape[0], dtype=torch.int64, device=logits_RV.device)
    _launch(logits_RV, tokens, None)
    return tokens


def store_argmax_triton(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    token_ids_SC: torch.Tensor,
    token_R: torch.Tensor,
) -> None:
    """The Triton twin of `store_most_likely`."""
    assert token_ids_SC.is_contiguous()
    _launch(logits_RV, token_R, (slot_R, position_R, token_ids_SC))


def _launch(
    logits_RV: torch.Tensor, tokens: torch.Tensor, stores: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
) -> None:
    num_rows, size = logits_RV.shape
    device = logits_RV.device
    if not num_rows:
        return
    num_splits = max(1, min(MAX_SPLITS, 1024 // num_rows))
    peaks = torch.empty((num_rows, MAX_SPLITS), dtype=torch.float32, device=device)
    places = torch.empty((num_rows, MAX_SPLITS), dtype=torch.int32, device=device)
    argmax_parts_kernel[(num_rows, num_splits)](
        logits_RV, peaks, places, logits_RV.stride(0), size, num_splits, MAX_SPLITS=MAX_SPLITS, BLOCK=2048,
        num_warps=4, **overlap(device),
    )  # fmt: skip
    argmax_whole_kernel[(num_rows,)](
        peaks, places, tokens, *(stores or (None, None, None)), size, num_splits,
        0 if stores is None else stores[2].shape[1], MAX_SPLITS=MAX_SPLITS, STORES=stores is not None, num_warps=2,
        **overlap(device),
    )  # fmt: skip
