"""What ranks compute together in a step, in the order in which each of them does: what a rank owes the others even when
it lacks the memory for its own part. No torch.

T tokens of the step, N of them wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple


class Collective(NamedTuple):
    """One call of `TensorParallel`'s: a sum with its norm, the most likely tokens, logits of the whole vocabulary, or
    rank 0's tokens."""

    kind: Literal["sum", "argmax", "gather", "from_rank_0"]
    num_rows: int


def of_layers(num_layers: int, num_tokens: int, num_wanted: int | None) -> list[Collective]:
    """Of a forward pass layer by layer: each norm but the first takes in a sum, and what follows the last layer's
    attention is of the wanted tokens only (None: of all)."""
    last = num_tokens if num_wanted is None else num_wanted
    return [Collective("sum", num_tokens)] * (2 * num_layers - 2) + [Collective("sum", last)] * 2


def of_sampling(num_samples: int, is_greedy: bool) -> list[Collective]:
    if not num_samples:
        return []
    if is_greedy:
        return [Collective("argmax", num_samples)]
    return [Collective("gather", num_samples), Collective("from_rank_0", num_samples)]


def holds_rank_0_up(collectives: Iterable[Collective]) -> bool:
    """Whether rank 0 can't get past these without the rank that owes them: what it gives, it doesn't wait for, nor are
    sums of no rows made."""
    return any(kind != "from_rank_0" and num_rows for kind, num_rows in collectives)
