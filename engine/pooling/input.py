"""The input of a model that pools."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """Token ids, int32 [num_tokens]. The second text of a pair begins at `pair_start`; 0: there is only one text."""

    token_ids: npt.NDArray[np.int32]
    pair_start: int = 0
