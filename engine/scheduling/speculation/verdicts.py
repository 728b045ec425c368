"""Which rows of a step were computed behind tokens that are its sequences' own. Pure.

A row with a draft is one of its sequence's rows, directly behind the row that the draft is a guess for. What the model
draws there is its own token for that place, by the place's own random number. If the draft is that token, the row
behind it was computed behind the right tokens, and what it draws is the next token, exactly as a later step would have
drawn it. If not, everything behind it is void.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.scheduling.step import SampleRow


def void_samples(samples: Sequence[SampleRow], token_ids: Sequence[int]) -> set[int]:
    """Indices of samples that stand behind a wrong draft. `token_ids[i]`: what sample i drew."""
    void: set[int] = set()
    for index, sample in enumerate(samples):
        if sample.draft >= 0 and (index - 1 in void or token_ids[index - 1] != sample.draft):
            void.add(index)
    return void
