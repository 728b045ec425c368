"""Which blocks of an fp8 pool hold values that had to saturate when they were stored (docs/layouts.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine.scheduling.step import WrittenSlots
from tandem.kernels.blocks.quantization import as_bytes

BLOCKS_AT_ONCE = 16  # bounds the memory that a look takes; a guess
_MAGNITUDE, _LARGEST = 0x7F, 0x7E  # of e4m3: all bits but the sign; 448


@torch.inference_mode()
def saturated_blocks(pool_NHLPBD: torch.Tensor, written: Sequence[WrittenSlots]) -> set[int]:
    """The blocks of `written` of which a slot named there holds fp8's largest magnitude: what saturated does,
    and what lies within a rounding of it. Waits for the device."""
    pool_NHLPBD = as_bytes(pool_NHLPBD)
    found = set()
    for first in range(0, len(written), BLOCKS_AT_ONCE):
        some = written[first : first + BLOCKS_AT_ONCE]
        ids = torch.tensor([each.block_id for each in some], device=pool_NHLPBD.device)
        is_largest = (pool_NHLPBD[ids] & _MAGNITUDE) == _LARGEST
        is_saturated_nB = is_largest.any(-1).any(-2).any(-2).any(-2).cpu() if some else is_largest
        for each, is_saturated_B in zip(some, is_saturated_nB, strict=True):
            if is_saturated_B[each.start : each.end].any():
                found.add(each.block_id)
    return found
