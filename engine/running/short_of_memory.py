"""What a rank does that finds no memory in the middle of a step: it goes along.

The other ranks are in the middle of the step, too, or will launch it whole, and can't be called back; on their devices
sums wait for this rank's part. So it takes part in all that is left to compute together, with zeros, and rank 0 hears
of it before it has done the step, whose requests end there. Nothing is asked or sent in a step that has its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tandem.engine.parallel import collectives
from tandem.engine.parallel.collectives import Collective
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.running.batch_state import BatchState
from tandem.engine.scheduling.step import SchedulerOutput


def go_along(
    group: TensorParallel,
    state: BatchState,
    output: SchedulerOutput,
    rest: Sequence[Collective],
    report_failed: Callable[[int], None] | None,
) -> None:
    """`rest`: what this rank still owes of the step. `report_failed` tells rank 0; None: this is rank 0.

    Raises OutOfMemoryError, which ends the node, where rank 0 may have done the step already, or if there is no memory
    even for this."""
    if report_failed is not None:
        ends_together = group.ends_steps_together and not output.samples
        if not ends_together and not collectives.holds_rank_0_up(rest):
            raise torch.OutOfMemoryError("no memory to end a step whose tokens rank 0 may have already")
        report_failed(output.step_id)
    state.fork(output.forks)  # batch state stays that of the other ranks
    group.take_part(rest, state.vocab_size)


def collectives_of(output: SchedulerOutput, num_layers: int, state: BatchState) -> list[Collective]:
    """Of a step that is launched layer by layer, in one piece."""
    every = any(row.prompt_logprobs for row in output.rows)
    runs = [run for row in output.rows for run in state.prompt_logprob_runs(row)]
    return [
        *collectives.of_layers(num_layers, output.num_tokens, None if every else len(output.samples)),
        *(Collective("gather", count) for _, count in runs),
        *collectives_of_sampling(output, state),
    ]


def collectives_of_sampling(output: SchedulerOutput, state: BatchState) -> list[Collective]:
    samples = output.samples
    return collectives.of_sampling(len(samples), not samples or state.are_greedy(samples))
