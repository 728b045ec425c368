"""What a model that pools is given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """int32 [num_tokens]; from `pair_start` on the second text of a pair, 0: there is one text alone."""

    token_ids: npt.NDArray[np.int32]
    pair_start: int = 0
