"""The pipelined step loop: launch step N+1, then read step N; a step with drafts is read before the next is decided."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tandem.engine.scheduling.ports import BetweenLayers, Fellows, Runner, StepHandle
from tandem.engine.scheduling.request import EngineEvent
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.step import SchedulerOutput, WrittenSlots


class EngineCore:
    """The step loop's two halves, `launch` and `read`. `pipelined=False` reads each step before the next is scheduled
    (for debugging)."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        pipelined: bool = True,
        find_saturated: Callable[[Sequence[WrittenSlots]], set[int]] | None = None,
        fellows: Fellows | None = None,
    ) -> None:
        """`find_saturated`: which of the blocks that were written hold values that fp8 could not; None: such values
        are served as they are. `fellows`: others that launch as many steps as this engine; None: there are none."""
        self.scheduler = scheduler
        self._runner = runner
        self._pipelined = pipelined
        self._fellows = fellows
        self._find_saturated, self._num_overflows = find_saturated, 0
        self._unread: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._events: list[EngineEvent] = []
        self._reads = False  # whether `read` takes a step
        self.newest_read: SchedulerOutput | None = None  # what the last `read` took, None: nothing

    @property
    def inflight(self) -> bool:
        """Whether a launched step has not been read yet."""
        return bool(self._unread)

    def has_work(self) -> bool:
        return self.inflight or self.scheduler.state.has_work() or self.is_behind

    @property
    def is_behind(self) -> bool:
        """Whether others have begun a step that this engine hasn't."""
        return self._fellows is not None and self._fellows.is_behind

    def step(self) -> list[EngineEvent]:
        """Does one turn of the loop. Returns the events of the step that was read."""
        self.launch()
        return self.read()

    def launch(
        self, before_execution: Callable[[], None] | None = None, between_layers: BetweenLayers | None = None
    ) -> None:
        """First half of a turn: decides a step and launches it. `before_execution` is called between the two, since the
        launch takes the host some time; `between_layers` from within a launch layer by layer, which takes long."""
        is_undecided = self._is_undecided
        output = None if is_undecided else self.scheduler.schedule()
        if output is not None:
            self.scheduler.state.pool.step_launched(output.step_id)
            if before_execution is not None:
                before_execution()
            self._unread.append((output, self._runner.execute(output, between_layers)))
            self.scheduler.pace.executed(output.num_tokens)
        elif self._fellows is not None and self.is_behind and not is_undecided:
            self._fellows.accompany()
        self._events += self.scheduler.state.take_events()
        self._reads = bool(self._unread) and (len(self._unread) > 1 or output is None or not self._pipelined)
        if not self._reads:
            self._draw()

    @property
    def _is_undecided(self) -> bool:
        """Whether a launched step has to be read to know where its sequences stand."""
        return bool(self._unread) and self._unread[-1][0].has_drafts

    @property
    def read_decides(self) -> bool:
        """Whether the next `read` takes a step with drafts, behind which the device has nothing to do."""
        return self._reads and self._is_undecided

    @property
    def device_waits(self) -> bool:
        """Whether the last `read` took a step with drafts, so that the device has nothing to do until the next step."""
        was_undecided = self.newest_read is not None and self.newest_read.has_drafts
        return was_undecided and self._pipelined and not self._unread and self.scheduler.state.has_work()

    @property
    def device_is_busy(self) -> bool:
        """Whether the newest step that was launched still runs."""
        return bool(self._unread) and not self._unread[-1][1].done()

    @property
    def read_would_wait(self) -> bool:
        waits = self._reads and not self._unread[0][1].done()
        if waits:
            self.scheduler.state.clock.seen_running()
        return waits

    def read(self) -> list[EngineEvent]:
        """Second half of a turn: waits for the step before the launched one, whose tokens may decide what that one may
        draw. Returns all events since the last call."""
        events, self._events = self._events, []
        self.newest_read = None
        if self._reads:
            events += self._read_oldest()
        self._draw()
        return events

    def _draw(self) -> None:
        """Lets the launched steps draw their tokens, now that all steps before them have been read."""
        for _, handle in self._unread:
            handle.sample()

    def read_ended(self) -> list[EngineEvent]:
        """Events of the step before, if it has ended. To be called from within a launch layer by layer."""
        if self._unread and self._pipelined and self._unread[0][1].done():
            return self._read_oldest()
        return []

    def _read_oldest(self) -> list[EngineEvent]:
        done, handle = self._unread.popleft()
        self.newest_read = done
        result = handle.result()
        self._draw()  # first, since the device may wait for it
        if self._find_saturated is not None and result.num_overflows > self._num_overflows:
            self._num_overflows = result.num_overflows
            saturated = self._find_saturated(self.scheduler.written_by(done))
            self.scheduler.fail_overflowed(done, frozenset(saturated))
        if result.failure is None:
            self.scheduler.state.pool.step_completed(done.step_id)
        else:
            self.scheduler.state.pool.step_failed(done.step_id)
        return self.scheduler.update(done, result)
