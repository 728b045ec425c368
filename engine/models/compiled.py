"""A model's forward pass by torch.compile: one graph around the attention op, for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.engine.contracts.errors import ConfigError

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def compiled(forward: Forward) -> Forward:
    """The same function of input ids and positions, int [T] both, traced and compiled when it is first called.

    T stays open from the first trace on, 1 included, so that steps of other sizes compile nothing anew. Calls raise
    ConfigError when the function can't be traced as one graph, or there is no compiler for it.
    """
    from torch._dynamo.decorators import mark_unbacked  # seconds of every start, if it stood above
    from torch._dynamo.exc import TorchDynamoException

    made = torch.compile(forward, dynamic=False, fullgraph=True)

    def call(input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        for tensor in (input_ids_T, positions_T):
            mark_unbacked(tensor, 0)
        try:
            return made(input_ids_T, positions_T)
        except TorchDynamoException as error:
            said = str(error).strip().partition("\n")[0]
            raise ConfigError(f"--compile: torch.compile can't make this model's pass: {said}; leave it out") from error

    return call
