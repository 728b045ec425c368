"""How likely the tokens of a prompt were, for requests that ask."""

from __future__ import annotations

import numpy as np
import torch

from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.runner_needs import Model
from tandem.engine.running.sampler import logprobs_of
from tandem.engine.running.step_inputs import ForwardInputs
from tandem.engine.running.step_pieces import StepPiece
from tandem.engine.running.step_result import HostLogprobs


def prompt_logprobs(
    model: Model, state: BatchState, piece: StepPiece, inputs: ForwardInputs, hidden_TH: torch.Tensor
) -> list[HostLogprobs]:
    """Log-probabilities of the prompt's own next tokens, for the rows of `piece` that ask, a bounded run of positions
    at a time. `hidden_TH` has every token of the piece. Targets are indices of the step's scheduled rows."""
    parts = []
    for index, row in enumerate(piece.rows):
        wanted = int(state.settings["num_prompt_logprobs"][row.slot])
        for first, count in state.prompt_logprob_runs(row):
            begin = int(inputs.first_token_R[index]) + first
            after = row.start + first + 1
            # Within a span of media there are none: the router leaves them out.
            target_L = state.token_ids_SC[row.slot, after : after + count].to(torch.int64).clamp_min(0)
            logprobs = logprobs_of(model.compute_logits(hidden_TH[begin : begin + count]), target_L, wanted)
            parts.append(HostLogprobs.fetch(logprobs, np.full(count, piece.parents[index]), np.full(count, wanted)))
    return parts
