"""Requests as a node makes them of a Submit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.scheduling.request import Prompt, Request


def made_request(
    name: str,
    token_ids: np.ndarray,
    sampling: SamplingParams | None = None,
    samples: Sequence[int] = (0,),
    hashes: Sequence[bytes] = (),
    **asked: Any,
) -> Request:
    """`asked`: fields of Prompt by name."""
    prompt = Prompt(AttemptKey(name, 0), token_ids, sampling or SamplingParams(), **asked)
    return Request(prompt, tuple(samples), list(hashes))
