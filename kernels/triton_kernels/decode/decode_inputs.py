"""Gathers a decode step's inputs from batch state. R rows, S slots, C token columns, B block columns."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.sampling.decode_buffers import DecodeInputs
from tandem.kernels.triton_kernels.common import begin, cdiv, overlap

COLUMNS_AT_ONCE = 256  # a guess


@triton.jit(do_not_specialize=["token_columns", "table_columns", "out_columns"])
def gather_decode_inputs_kernel(
    slots,  # int64 [R]; -1: padding
    positions,  # int64 [R]
    token_ids,  # int32 [S, C], contiguous rows of token_columns
    block_table,  # int32 [S, B], contiguous rows of table_columns
    input_ids,  # out int32 [R]
    seq_lens,  # out int32 [R]
    slot_mapping,  # out int64 [R]
    block_tables,  # out int32 [R, B], contiguous rows of out_columns
    token_columns,
    table_columns,
    out_columns,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,): one row."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        tl.store(input_ids + row, 0)
        tl.store(seq_lens + row, 0)
        tl.store(slot_mapping + row, -1)
        return
    position = tl.load(positions + row)
    table = block_table + slot * table_columns
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    tl.store(input_ids + row, tl.load(token_ids + slot * token_columns + position))
    tl.store(seq_lens + row, (position + 1).to(tl.int32))
    tl.store(slot_mapping + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
    num_blocks = position // BLOCK_SIZE + 1
    for first in range(0, num_blocks, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        mask = columns < num_blocks
        tl.store(block_tables + row * out_columns + columns, tl.load(table + columns, mask=mask), mask=mask)


def gather_decode_inputs_triton(
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    token_ids_SC: torch.Tensor,
    block_table_SB: torch.Tensor,
    block_size: int,
    inputs: DecodeInputs,
) -> None:
    """The Triton twin of `gather_decode_inputs`."""
    assert token_ids_SC.is_contiguous()
    assert block_table_SB.is_contiguous()
    gather_decode_inputs_kernel[(len(slot_R),)](
        slot_R, position_R, token_ids_SC, block_table_SB, inputs.input_ids_R, inputs.seq_lens_R,
        inputs.slot_mapping_R, inputs.block_tables_RB, token_ids_SC.shape[1], block_table_SB.shape[1],
        inputs.block_tables_RB.stride(0), BLOCK_SIZE=block_size, COLUMNS=COLUMNS_AT_ONCE, num_warps=2,
        **overlap(slot_R.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "token_columns"])
def store_tokens_kernel(
    slots,  # int64 [R]; -1: padding
    positions,  # int64 [R], of the token before
    tokens,  # int64 or int32 [R]
    token_ids,  # int32 [S, C], contiguous rows of token_columns
    num_rows,
    token_columns,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R / ROWS,)."""
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    slot = tl.load(slots + row, mask=mask, other=-1)
    mask = mask & (slot >= 0)
    position = tl.load(positions + row, mask=mask, other=0)
    token = tl.load(tokens + row, mask=mask, other=0)
    tl.store(token_ids + slot * token_columns + position + 1, token.to(tl.int32), mask=mask)


def store_tokens_triton(
    slot_R: torch.Tensor, position_R: torch.Tensor, token_R: torch.Tensor, token_ids_SC: torch.Tensor
) -> None:
    """The Triton twin of `store_tokens`."""
    assert token_ids_SC.is_contiguous()
    num_rows = len(slot_R)
    store_tokens_kernel[(cdiv(num_rows, 128),)](
        slot_R, position_R, token_R, token_ids_SC, num_rows, token_ids_SC.shape[1], ROWS=128, num_warps=4,
        **overlap(slot_R.device),
    )  # fmt: skip
