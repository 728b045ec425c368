"""What a rank without memory for a step gives to the exchanges that the other ranks have launched of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class StandIn:
    """Zeros in place of a step's rows: the rank goes through the step once more with a few rows that stand for all of
    them, so that the exchanges come in their order, each of as many rows as on the other ranks."""

    rows: Mapping[int, int]  # of the step, by those of the pass
    num_done: int  # exchanges in which the rank had taken part before its memory ended

    def give(self, x: torch.Tensor, exchange: Callable[[torch.Tensor], object]) -> None:
        """Does in the size of the step what the pass does with `x` [rows of the pass, ...], unless that is done."""
        if self.num_done:
            self.num_done -= 1
            return
        exchange(x.new_zeros((self.rows[len(x)], *x.shape[1:])))
