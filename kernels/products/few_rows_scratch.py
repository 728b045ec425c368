"""What the one launch of few_rows_attention.py works with: how many rows it serves, what its programs leave each other.

R rows, K KV heads, G query heads of each, D head size, N programs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tandem.kernels.products.matmul_plans import EMPTY

MOST_ROWS = 8  # a power of two
PROGRAMS = 264  # that run at once: two on each multiprocessor of an H200


@dataclass(frozen=True, eq=False)
class Scratch:
    """What programs of a launch leave for each other; launches on one stream share it. `partial` int64 [N, G, D],
    EMPTY between launches."""

    partial: torch.Tensor
    programs: int  # N

    def check_integrity(self) -> None:
        """Waits for the device."""
        assert bool((self.partial == EMPTY).all()), "a launch left parts behind"


@functools.cache
def scratch_for(heads: int, group: int, head_size: int, device: torch.device) -> Scratch:
    """The scratch for R rows of K KV heads, `heads` = R * K. Made once, outside of captures."""
    programs = PROGRAMS + heads
    partial = torch.full((programs, group, head_size), EMPTY, dtype=torch.int64, device=device)
    return Scratch(partial, programs)
