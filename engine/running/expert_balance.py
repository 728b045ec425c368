"""How evenly a mixture's experts are chosen, from counts that the router's kernel keeps on the device.

L layers with experts, X experts.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from tandem.engine.running.runner_needs import Model
from tandem.engine.running.step_result import to_host
from tandem.kernels.experts.plans import experts_of_rank

LOOKS_S = 1.0  # between two looks at the device's counts; a guess
# An expert's tokens, on average, before a layer counts: of 128 the busiest has 1.3 times as many by chance; a guess.
LEAST_MEAN = 100


class ExpertBalance:
    """Reads the counts now and then, without waiting for the device. A look that shows too few tokens is left to the
    next."""

    def __init__(self, counts_LX: torch.Tensor, first_experts: list[int] | None = None) -> None:
        """`counts_LX`: int32, growing; they may wrap around. `first_experts`: the first expert of each rank, where
        ranks hold whole experts."""
        self._counts_LX, self._first_experts = counts_LX, first_experts
        self._seen_LX = np.zeros(counts_LX.shape, np.int32)
        self._pending: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self._next_look, self._has_grown = 0.0, False
        self._figures: dict[str, float] = {"expert_tokens": 0.0}

    def step_launched(self) -> None:
        self._has_grown = True

    def counters(self) -> dict[str, float]:
        """What has come from the device by now. If steps were launched since, another copy is sent for behind them."""
        if self._pending is not None and ((event := self._pending[1]) is None or event.query()):
            self._take(self._pending[0].numpy())
            self._pending = None
        now = time.monotonic()
        if self._pending is None and self._has_grown and now >= self._next_look:
            self._next_look, self._has_grown = now + LOOKS_S, False
            self._pending = self._sent_for()
        return self._figures

    def _sent_for(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if self._counts_LX.device.type == "cpu":
            return self._counts_LX.clone(), None
        copy, event = to_host(self._counts_LX), torch.cuda.Event()
        event.record()
        return copy, event

    def _take(self, counts_LX: np.ndarray) -> None:
        new_LX = (counts_LX - self._seen_LX).astype(np.int64)  # of 32 bits, so that it doesn't matter if they wrapped
        said_LX = new_LX[new_LX.mean(1) >= LEAST_MEAN]  # fewer layers where prompts leave out the last one's tokens
        if not len(said_LX):
            return
        self._seen_LX = counts_LX
        self._figures["expert_tokens"] += float(new_LX.sum())
        ratio_L = said_LX.max(1) / said_LX.mean(1)
        self._figures["expert_imbalance"] = float(ratio_L.mean())
        self._figures["expert_imbalance_worst"] = float(ratio_L.max())
        if self._first_experts is not None:
            by_rank_LR = np.add.reduceat(said_LX, self._first_experts, axis=1)
            self._figures["expert_rank_imbalance"] = float((by_rank_LR.max(1) / by_rank_LR.mean(1)).mean())


def make_expert_balance(model: Model) -> ExpertBalance | None:
    """The reader of the model's counts; None: its experts aren't counted, since it has none or runs by transformers'
    modules."""
    if model.expert_counts is None:
        return None
    num_sharing = 1
    if model.expert_group is not None:
        num_sharing = model.expert_group.size
    elif model.group is not None and model.group.shard.expert_parallel:
        num_sharing = model.group.shard.size
    if num_sharing == 1:
        return ExpertBalance(model.expert_counts)
    num_experts = model.expert_counts.shape[1]
    ranks = range(num_sharing)
    return ExpertBalance(model.expert_counts, [experts_of_rank(rank, num_sharing, num_experts)[0] for rank in ranks])
