"""The pipelined step loop: launch step N+1, then read step N."""

from __future__ import annotations

from tandem.engine.interfaces import Runner, StepHandle
from tandem.engine.request import EngineEvent
from tandem.engine.scheduler import Scheduler
from tandem.engine.step import SchedulerOutput


class EngineCore:
    """`pipelined=False` reads each step before the next is scheduled (for debugging)."""

    def __init__(self, scheduler: Scheduler, runner: Runner, pipelined: bool = True) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._pipelined = pipelined
        self._pending: tuple[SchedulerOutput, StepHandle] | None = None

    @property
    def inflight(self) -> bool:
        """Whether a launched step has not been read yet."""
        return self._pending is not None

    def has_work(self) -> bool:
        return self.inflight or self.scheduler.has_work()

    def step(self) -> list[EngineEvent]:
        """One turn of the loop; events of the step that was read."""
        output = self.scheduler.schedule()
        launched = None
        if output is not None:
            self.scheduler.pool.step_launched(output.step_id)
            launched = (output, self._runner.execute(output))
        events = self.scheduler.take_events()
        if self._pipelined:
            finished, self._pending = self._pending, launched
        else:
            finished = launched
        if finished is not None:
            done, handle = finished
            result = handle.result()
            if result.failure is None:
                self.scheduler.pool.step_completed(done.step_id)
            else:
                self.scheduler.pool.step_failed(done.step_id)
            events += self.scheduler.update(done, result)
        return events
