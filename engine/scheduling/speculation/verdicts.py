"""Which rows of a step were computed behind tokens that are its sequences' own. Pure.

A row with a draft is one of its sequence's rows, directly behind the row that the draft is a guess for. What the model
draws there is its own token for that place, by the place's own random number. If the draft is that token, the row
behind it was computed behind the right tokens, and what it draws is the next token, exactly as a later step would have
drawn it. If not, everything behind it is void.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tandem.engine.scheduling.step import SampleRow


def void_samples(samples: Sequence[SampleRow], token_ids: Sequence[int]) -> set[int]:
    """Indices of samples that stand behind a wrong draft. `token_ids[i]`: what sample i drew."""
    return void_drafts(enumerate(sample.draft for sample in samples), token_ids)


def void_drafts(drafts: Iterable[tuple[int, int]], token_ids: Sequence[int] | np.ndarray) -> set[int]:
    """The same of some samples: pairs of an index and the draft there, below 0 for none, in order. A sequence's
    samples are all among them or none."""
    void: set[int] = set()
    for index, draft in drafts:
        if draft >= 0 and (index - 1 in void or token_ids[index - 1] != draft):
            void.add(index)
    return void
