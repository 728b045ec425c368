"""Where a decode step's inputs lie on the device: R rows of the step, B columns of a block table."""

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
