"""Small operations between matrix products, one launch each. T tokens, E hidden size, F MLP size.

None depends on the number of tokens but through its grid, so a captured launch serves any step of its size.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.products.adapter_rows import UnaddedProduct
from tandem.kernels.triton_kernels.adapters.rows import arguments_of, rows_of_b, sum_of, times
from tandem.kernels.triton_kernels.common import (
    begin,
    begin_late,
    cdiv,
    fetch_row,
    next_power_of_2,
    overlap,
    start,
    wait,
)
from tandem.kernels.triton_kernels.products.quantise_rows import in_e4m3


@triton.jit
def rms_norm_kernel(
    x,  # [T, E], strides (x_row, 1)
    residual,  # [T, E], strides (residual_row, 1); becomes x + residual
    weight,  # [E]
    out,  # [T, E] contiguous; with ROUNDS e4m3
    scales,  # fp32 [T], with ROUNDS
    low,  # with RANK, like the four behind it: as in expand_rows_kernel, of one part
    b,
    ranks,
    order,
    slots,
    x_row,
    residual_row,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS: tl.constexpr,
    RANK: tl.constexpr,  # 0: no adapters
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    B_SLOT: tl.constexpr,
    RANK_SLOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T,): statistics in fp32 of the sum as it is stored. With adapters x + low B^T is what is normalised. What
    memory is asked for before the wait are the weight, and the stream's row, which by then products have driven out of
    the cache."""
    columns = tl.arange(0, PADDED)
    mask = columns < SIZE
    if RANK:
        start(PDL)
        place = tl.program_id(0) + tl.arange(0, 1)
        slot = tl.load(slots + place).to(tl.int64)
        row = tl.load(order + tl.program_id(0)).to(tl.int64)
        rank = tl.load(ranks + (slot - 1) * RANK_SLOT, slot > 0, 0)
        matrix = rows_of_b(b, slot, rank, columns, mask, B_SLOT, RANK)
        wait(PDL)
        added = times(matrix, sum_of(low, place, 0, rank, tl.num_programs(0), RANK, RANK, SPLITS, SPLITS_PAD, RANK))
        added = tl.sum(added, 0)
    else:
        start(PDL)
        row = tl.program_id(0).to(tl.int64)
        gain = tl.load(weight + columns, mask=mask, other=0.0)
        if HAS_RESIDUAL and PDL:
            fetch_row(residual + row * residual_row, SIZE)
        wait(PDL)
    values = tl.load(x + row * x_row + columns, mask=mask, other=0.0)
    if RANK:
        values = (values.to(tl.float32) + added).to(x.dtype.element_ty)
    if HAS_RESIDUAL:
        values = values.to(tl.float32) + tl.load(residual + row * residual_row + columns, mask=mask, other=0.0)
        values = values.to(x.dtype.element_ty)
        tl.store(residual + row * residual_row + columns, values, mask=mask)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    normed = (values * scale).to(x.dtype.element_ty).to(tl.float32)
    if RANK:
        gain = tl.load(weight + columns, mask=mask, other=0.0)
    scaled = (normed * gain).to(x.dtype.element_ty)
    if ROUNDS:
        scaled, row_scale = in_e4m3(scaled.to(tl.float32))
        tl.store(scales + row, row_scale)
    tl.store(out + row * SIZE + columns, scaled, mask=mask)


def rms_norm_triton(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    eps: float,
    scales_T1: torch.Tensor | None = None,
    adapted: UnaddedProduct | None = None,
) -> torch.Tensor:
    """With `scales_T1`, fp32, what is returned is in e4m3, and these are its rows' scales. `adapted`: the product of
    which `x_TE` is, if adapters are to be added to it."""
    num_tokens, size = x_TE.shape
    dtype = x_TE.dtype if scales_T1 is None else torch.float8_e4m3fn
    out = torch.empty((num_tokens, size), dtype=dtype, device=x_TE.device)
    residual = x_TE if residual_TE is None else residual_TE
    padded, (tensors, constants) = next_power_of_2(size), arguments_of(adapted)
    words = padded if adapted is None else padded * adapted.stack.rank // 8
    if num_tokens:
        rms_norm_kernel[(num_tokens,)](
            x_TE, residual, weight_E, out, scales_T1, *tensors, x_TE.stride(0), residual.stride(0), eps,
            SIZE=size, PADDED=padded, HAS_RESIDUAL=residual_TE is not None, ROUNDS=scales_T1 is not None,
            num_warps=min(16, max(1, words // 512)), **constants, **overlap(x_TE.device),
        )  # fmt: skip
    return out


@triton.jit
def embedding_kernel(
    ids,  # int32 or int64 [T]
    table,  # [V, E], strides (row_stride, 1)
    out,  # [T, E] contiguous
    row_stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T,): rows of a table. It begins late: who runs behind it in a pass finds complete, before any wait, what
    was there before the pass, such as lengths, tables and positions."""
    begin_late(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    mask = columns < SIZE
    start_of = tl.load(ids + row).to(tl.int64) * row_stride
    tl.store(out + row * SIZE + columns, tl.load(table + start_of + columns, mask=mask), mask=mask)


def embedding_triton(id_T: torch.Tensor, table_VE: torch.Tensor) -> torch.Tensor:
    (num_tokens,), size = id_T.shape, table_VE.shape[1]
    out = torch.empty((num_tokens, size), dtype=table_VE.dtype, device=table_VE.device)
    padded = next_power_of_2(size)
    if num_tokens:
        embedding_kernel[(num_tokens,)](
            id_T, table_VE, out, table_VE.stride(0), SIZE=size, PADDED=padded, num_warps=min(16, max(1, padded // 512)),
            **overlap(table_VE.device),
        )  # fmt: skip
    return out


@triton.jit
def silu_mul_kernel(
    gate_up,  # [T, 2F], strides (row, 1): gate, then up, or by turns GROUP columns of each
    out,  # [T, F] contiguous
    row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, ceil(F / BLOCK))."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    places = columns // GROUP * (2 * GROUP) + columns % GROUP
    gate = tl.load(gate_up + row * row_stride + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + places + GROUP, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up_TG: torch.Tensor, group: int = 0) -> torch.Tensor:
    """`group` 0: all of gate, then all of up."""
    num_tokens, size = gate_up_TG.shape[0], gate_up_TG.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up_TG.dtype, device=gate_up_TG.device)
    if num_tokens:
        block = min(2048, next_power_of_2(size))
        silu_mul_kernel[(num_tokens, cdiv(size, block))](
            gate_up_TG, out, gate_up_TG.stride(0), SIZE=size, BLOCK=block, GROUP=group or size,
            num_warps=max(1, min(8, block // 256)), **overlap(gate_up_TG.device),
        )  # fmt: skip
    return out
