"""What a step may survive on this process: a device without memory, a kernel that can't be launched."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.running.step_result import NO_MEMORY, LaunchedStep
from tandem.kernels.api.selection import count_fallback, is_launch_failure

logger = logging.getLogger(__name__)


class StepFaults:
    """Keeps a runner's counters, and judges errors of a step: counted where the step can be computed in another way,
    raised otherwise. In a group there is no other way, since the other ranks compute the step as one, in the old way,
    and wait for this one's part."""

    def __init__(
        self,
        group: TensorParallel | ExpertGroup | None,
        device: torch.device,
        tell_lost: Callable[[int], None] | None = None,
    ) -> None:
        """`tell_lost` tells rank 0 of a step that this rank has lost; None on rank 0."""
        self._group = group
        self._device = device
        self._tell_lost = tell_lost
        self.counters = {"steps_out_of_memory": 0, "steps_launched": 0}

    def on_out_of_memory(self, num_tokens: int, error: torch.OutOfMemoryError) -> None:
        """Counts it. Raises it where other nodes wait for this one's experts, which nothing can stand in for."""
        if isinstance(self._group, ExpertGroup) and self._others_wait:
            raise error
        logger.warning("%d tokens at once ran out of memory: %s", num_tokens, error)
        self.counters["steps_out_of_memory"] += 1
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def lose(self, step: LaunchedStep) -> None:
        """Gives up a step that the other ranks compute. To be called before this rank takes part in any exchange that
        it has left of it: whoever has seen the end of these then finds that rank 0 was told."""
        step.fail(NO_MEMORY)
        if self._tell_lost is not None:
            self._tell_lost(step.step_id)

    def on_launch_failure(self, failed: str, following: str, error: Exception) -> None:
        """Counts that `failed` couldn't be launched and `following` computes the step instead. Raises any other
        error."""
        if self._others_wait or not is_launch_failure(error):
            raise error
        count_fallback(failed, following, error)

    @property
    def _others_wait(self) -> bool:
        """Whether others compute the step with this process, as one and in one way."""
        if isinstance(self._group, ExpertGroup):
            return self._group.is_serving
        return self._group is not None
