"""A launched step on its way back to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tandem.engine.contracts.wire.parts import Candidates, TokenLogprobs
from tandem.engine.running.sampler import Logprobs
from tandem.engine.scheduling.step import RunnerOutput
from tandem.engine.structured.guides import GuidedSamples

NO_MEMORY = "the device has no memory left for a step; give the node less with --gpu-memory-utilization"


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host: on CUDA into pinned memory, complete when the stream gets there; on CPU the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Log-probabilities on the host. Row i is for entry `targets[i]` of the step and keeps `num_logprobs[i]` top
    tokens."""

    targets: np.ndarray
    num_logprobs: np.ndarray
    token_ids: torch.Tensor  # int64 [L, K + 1]
    logprobs: torch.Tensor  # float32 [L, K + 1]
    ranks: torch.Tensor  # int64 [L]

    @classmethod
    def fetch(cls, logprobs: Logprobs, targets: np.ndarray, num_logprobs: np.ndarray) -> HostLogprobs:
        on_host = (to_host(t) for t in (logprobs.token_LK1, logprobs.logprob_LK1, logprobs.rank_L))
        return cls(targets, num_logprobs, *on_host)

    def entries(self) -> list[tuple[int, TokenLogprobs]]:
        """(target, entry) of each row, in order."""
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        return [
            (target, TokenLogprobs(tuple(ids[: k + 1]), tuple(values[: k + 1]), rank))
            for target, k, (ids, values, rank) in zip(
                self.targets.tolist(), self.num_logprobs.tolist(), rows, strict=True
            )
        ]


@dataclass(slots=True)
class LaunchedStep:
    """The runner's StepHandle. `event` is None on CPU, where the step is done when it is launched."""

    step_id: int
    token_ids: torch.Tensor | None = None  # int64 [N]
    logprobs: HostLogprobs | None = None
    prompt_logprobs: Sequence[HostLogprobs] = field(default_factory=tuple)  # targets are indices of scheduled rows
    event: torch.cuda.Event | None = None
    failure: str | None = None
    failed_slots: dict[int, str] = field(default_factory=dict)
    guided: GuidedSamples | None = None
    num_overflows: torch.Tensor | None = None  # int64 [1], on its way as the tokens are
    beams: frozenset[int] = frozenset()  # samples whose log-probabilities are candidates
    find_spoiled: Callable[[], dict[int, str]] = dict  # slots whose rows lacked KV, once the step has run
    is_lost: Callable[[], bool] = bool  # whether another rank had no memory for it, once the step has run
    _draw_later: Callable[[], None] | None = None

    def put_off(self, draw: Callable[[], None]) -> None:
        """Leaves the drawing of its tokens to `sample`. Replaces what was put off before."""
        self._draw_later = draw

    @property
    def is_put_off(self) -> bool:
        return self._draw_later is not None

    def sample(self) -> None:
        if self._draw_later is not None:
            draw, self._draw_later = self._draw_later, None
            draw()

    def tell_guides(self) -> None:
        """Tells its samples' guides what was drawn; blocks until that is on the host. Idempotent."""
        self.sample()
        if self.guided is not None and self.token_ids is not None:
            self._wait()
            self.guided.take(self.token_ids.numpy(), self._candidates())

    def _candidates(self) -> dict[int, Candidates]:
        """What may follow each beam: the likeliest tokens of those that it may take at all."""
        found: dict[int, Candidates] = {}
        if self.logprobs is None or not self.beams:
            return found
        for sample, entry in self.logprobs.entries():
            if sample in self.beams:
                likely = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
                allowed = [each for each in likely if each[1] > -math.inf]
                found[sample] = Candidates(tuple(each[0] for each in allowed), tuple(each[1] for each in allowed))
        return found

    def fail(self, reason: str) -> None:
        """Marks a step of which nothing was computed; the requests of the step end with this reason."""
        self.failure, self.token_ids, self.logprobs, self.prompt_logprobs = reason, None, None, ()

    def done(self) -> bool:
        return not self.is_put_off and (self.event is None or self.event.query())

    def _wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def result(self) -> RunnerOutput:
        """Blocks until the tokens are on the host. Raises what the device raises."""
        self.tell_guides()
        self._wait()
        tokens = np.empty(0, np.int32) if self.token_ids is None else self.token_ids.numpy().astype(np.int32)
        failure = NO_MEMORY if self.is_lost() else self.failure
        ended, misled = (set(), {}) if self.guided is None else (self.guided.ended, self.guided.failed)
        output = RunnerOutput(
            self.step_id,
            tokens,
            failure=failure,
            failed_slots=self.failed_slots,
            spoiled_slots=self.find_spoiled(),
            ended=ended,
            misled=misled,
            num_overflows=0 if self.num_overflows is None else int(self.num_overflows),
        )
        if self.logprobs is not None:
            output.logprobs = [None] * len(tokens)
            for sample, entry in self.logprobs.entries():
                if sample not in self.beams:
                    output.logprobs[sample] = entry
            ends = {} if self.guided is None else self.guided.ends
            for sample, given in self._candidates().items():
                output.candidates[sample] = Candidates(given.token_ids, given.logprobs, ends.get(sample, ()))
        for part in self.prompt_logprobs:
            for row, entry in part.entries():
                output.prompt_logprobs.setdefault(row, []).append(entry)
        return output
