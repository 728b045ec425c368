"""A decode step's inputs, gathered on the device from batch state: the host sends only which slots are in the step.

Shapes: R rows of the step (padding rows have slot -1), S slots, C columns of a token table, B of a block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Buffers that keep their addresses, so that a captured graph can be replayed over them.

    A padding row gets token 0, length 0 and slot_mapping -1: nothing of it is stored and attention gives zeros.
    """

    input_ids_R: torch.Tensor  # int32
    seq_lens_R: torch.Tensor  # int32, the new token counted
    slot_mapping_R: torch.Tensor  # int64
    block_tables_RB: torch.Tensor  # int32; entries past a row's length are stale

    @classmethod
    def allocate(cls, num_rows: int, num_blocks: int, device: torch.device) -> DecodeInputs:
        return cls(
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.full((num_rows,), -1, dtype=torch.int64, device=device),
            torch.zeros((num_rows, num_blocks), dtype=torch.int32, device=device),
        )

    def first(self, num_rows: int) -> DecodeInputs:
        """Views of the first `num_rows` rows."""
        return DecodeInputs(
            self.input_ids_R[:num_rows],
            self.seq_lens_R[:num_rows],
            self.slot_mapping_R[:num_rows],
            self.block_tables_RB[:num_rows],
        )


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
