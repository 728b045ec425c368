"""Where it is counted how often experts are chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tally(NamedTuple):
    """One layer's counts, to which a step's choices are added on the device.

    `counts_X`: int32, of all experts of the model, here or elsewhere; they wrap around. `slots_T`: int64, where each
    token's KV goes; below 0 it is padding, and not counted.
    """

    counts_X: torch.Tensor
    slots_T: torch.Tensor
