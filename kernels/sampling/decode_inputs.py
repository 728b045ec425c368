"""A decode step's inputs, gathered on the device from batch state: the host sends only which slots are in the step.

Shapes: R rows of the step (padding rows have slot -1), S slots, C columns of a token table, B of a block table.
"""

from __future__ import annotations

import torch

from tandem.kernels.products.fused_ops import argmax_tokens, is_fused
from tandem.kernels.sampling.decode_buffers import DecodeInputs


def gather_decode_inputs(
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    token_ids_SC: torch.Tensor,
    block_table_SB: torch.Tensor,
    block_size: int,
    inputs: DecodeInputs,
) -> None:
    """Fills `inputs` for the token at `position_R` (int64) of each `slot_R` (int64); one launch on CUDA."""
    if slot_R.is_cuda:
        from tandem.kernels.triton_kernels.decode.decode_inputs import gather_decode_inputs_triton

        gather_decode_inputs_triton(slot_R, position_R, token_ids_SC, block_table_SB, block_size, inputs)
        return
    real_R = slot_R >= 0
    safe_R = slot_R.clamp(min=0)
    inputs.input_ids_R.copy_(torch.where(real_R, token_ids_SC[safe_R, position_R], 0))
    inputs.seq_lens_R.copy_(torch.where(real_R, position_R + 1, 0))
    block_R = block_table_SB[safe_R, position_R // block_size].to(torch.int64)
    inputs.slot_mapping_R.copy_(torch.where(real_R, block_R * block_size + position_R % block_size, -1))
    inputs.block_tables_RB.copy_(block_table_SB[safe_R])


def store_tokens(
    slot_R: torch.Tensor, position_R: torch.Tensor, token_R: torch.Tensor, token_ids_SC: torch.Tensor
) -> None:
    """token_ids_SC[slot, position + 1] = token for rows whose slot isn't -1: the input of the next step."""
    if slot_R.is_cuda:
        from tandem.kernels.triton_kernels.decode.decode_inputs import store_tokens_triton

        store_tokens_triton(slot_R, position_R, token_R, token_ids_SC)
        return
    real_R = slot_R >= 0
    token_ids_SC[slot_R[real_R], position_R[real_R] + 1] = token_R[real_R].to(token_ids_SC.dtype)


def store_most_likely(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    token_ids_SC: torch.Tensor,
    token_R: torch.Tensor,
) -> None:
    """Stores each row's most likely token as `store_tokens` does, also into `token_R` (int64, on the host in pinned
    memory: there when the stream gets there), and adds 1 to the positions of rows whose slot isn't -1."""
    if is_fused(logits_RV):
        from tandem.kernels.triton_kernels.sampling.argmax import store_argmax_triton

        store_argmax_triton(logits_RV, slot_R, position_R, token_ids_SC, token_R)
        return
    most_likely_R = argmax_tokens(logits_RV)
    store_tokens(slot_R, position_R, most_likely_R, token_ids_SC)
    position_R += (slot_R >= 0).to(position_R.dtype)
    token_R.copy_(most_likely_R, non_blocking=True)
