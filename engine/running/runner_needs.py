"""The two things that a runner needs: the model that it runs, and the ranks that it leads."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from tandem.engine.parallel.group import TensorParallel
from tandem.engine.running.decode_graphs import DecoderLike
from tandem.engine.scheduling.step import SchedulerOutput


class Model(DecoderLike, Protocol):
    """A model as the runner uses it. `group` are the ranks that share it out; None: this process holds all of it."""

    @property
    def group(self) -> TensorParallel | None: ...

    @property
    def vocab_size(self) -> int: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Followers(Protocol):
    """The other ranks, as rank 0 leads them."""

    def announce(
        self, verb: Literal["step", "dummy", "warm_up", "capture"], step: SchedulerOutput | None = None
    ) -> None: ...
