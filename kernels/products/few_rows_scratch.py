"""What the one launch of few_rows_attention.py works with: how many rows it serves, what its programs leave each other.

R rows, K KV heads, G query heads of each, D head size, N programs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

MOST_ROWS = 8  # a power of two
PROGRAMS = 264  # that run at once: two on each multiprocessor of an H200


@dataclass(frozen=True, eq=False)
class Scratch:
    """What programs of a launch leave for each other; launches on one stream share it. fp32: `partial` [N, G, D],
    `peaks` and `totals` [N, G]. `arrivals` int32 [R * K], zero between launches."""

    partial: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor
    arrivals: torch.Tensor
    programs: int  # N

    def check_integrity(self) -> None:
        """Waits for the device."""
        assert not bool(self.arrivals.any()), "a launch left arrivals behind"


@functools.cache
def scratch_for(heads: int, group: int, head_size: int, device: torch.device) -> Scratch:
    """The scratch for R rows of K KV heads, `heads` = R * K. Made once, outside of captures."""
    programs = PROGRAMS + heads
    partial = torch.empty((programs, group, head_size), dtype=torch.float32, device=device)
    peaks, totals = (torch.empty((programs, group), dtype=torch.float32, device=device) for _ in range(2))
    return Scratch(partial, peaks, totals, torch.zeros(heads, dtype=torch.int32, device=device), programs)
