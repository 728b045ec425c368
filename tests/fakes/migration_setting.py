"""What is explored of running sequences that move: requests, moves, nodes, faults (migration_world.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.router.requests.actions import RequestSpec

PROMPT = np.zeros(1, np.int32)
ALL_FAULTS = frozenset(
    {"lose", "duplicate", "corrupt", "crash", "suspect_sink", "suspect_source", "source_deadline", "sink_deadline",
     "give_up", "client_gone", "push_fails", "preempt"}
)  # fmt: skip


@dataclass(frozen=True)
class MigrationSetting:
    """`moves`: (request, sample, from, to) that the router may ask for, each once. `starts`: where requests run."""

    name: str
    moves: tuple[tuple[int, int, str, str], ...]
    starts: tuple[str, ...] = ("a",)
    num_samples: int = 1
    max_faults: int = 1
    faults: frozenset[str] = ALL_FAULTS
    nodes: tuple[str, ...] = ("a", "b", "c")
    max_outputs: int = 3  # tokens of each sample, the one that starts the exploration included
    holds_tokens: bool = False  # none is made while a move of its request is under way: fewer states
    is_pipelined: bool = False  # tokens are in flight for a while before the host knows them
    pushes_early: bool = False  # a part while the sequence runs
    flaws: frozenset[str] = frozenset()

    def spec(self, r: int) -> RequestSpec:
        return RequestSpec(
            f"r{r}", PROMPT, SamplingParams(max_tokens=self.max_outputs), self.num_samples, max_attempts=9
        )
