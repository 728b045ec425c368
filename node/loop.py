"""The step loop of a node: the one thread that decides.

Everything that happens (control messages, transfer events, signals) comes through one inbox; the logic turns it into
scheduler calls and messages; the engine core launches steps. The loop never waits while there is work it could do.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import Message, PeerRef
from tandem.engine.scheduling.core import EngineCore
from tandem.engine.scheduling.request import EngineEvent
from tandem.engine.scheduling.step import SchedulerOutput
from tandem.engine.scheduling.turn_times import TurnTimes
from tandem.node.control.board import LoopBoard
from tandem.node.control.events import ControlEvent, PeerLost, PeerRefused, PeerUp, Received

IDLE_WAIT_S = 0.02  # how long an idle loop sleeps before it looks at its timers; a guess
# Between statuses. Heartbeats carry them and are rarer; making one at each step would cost more than scheduling; a
# guess.
STATUS_EVERY_S = 0.02
# A launch layer by layer hardly lets other threads run. When it is so many layers ahead of the device it stops for a
# moment, so that they can end the hand-offs of what was just computed.
LAYERS_AHEAD, GIVE_WAY_S = 2, 0.001  # guesses
BLOCKED_WAIT_S = 0.002  # work exists but none can be launched: waiting for grants or blocks; a guess
HOLD_POLL_S = 0.001  # while the next step is not decided yet: how late the running one's end may be seen; a guess
STEP_POLL_S = 0.0002  # while a step runs and urgent events are served: how late its end may be seen; a guess
# How long before its expected end a step is looked at: each look takes the interpreter from other threads; a guess.
EARLY_S = 0.0005
# Nobody sleeps longer than this on the word of an estimate: what ends sooner would be read when it was expected, and so
# be measured as what was expected (docs/measurements.md#first-tokens-after-load). How long is a guess.
LOOK_S = 0.001


class NodeLogic(Protocol):
    """The sans-IO heart of a node; see node/serving.py."""

    def on_control(self, event: ControlEvent, now: float) -> None: ...

    def on_transfer(self, event: object, now: float) -> None: ...

    def on_tick(self, now: float) -> None: ...

    def on_engine_events(self, events: Sequence[EngineEvent]) -> None: ...

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]: ...

    def drain_connects(self) -> list[PeerRef]: ...

    def status(self, counters: Mapping[str, float]) -> Status: ...

    def drain(self) -> None: ...

    @property
    def is_empty(self) -> bool: ...


class ControlSender(Protocol):
    """See node/control/outgoing.py."""

    def send(self, to: NodeKey, message: Message) -> None: ...

    def connect(self, ref: PeerRef) -> None: ...


class NodeLoop:
    """The step loop of one node. `begin_drain` may be called from any thread; everything else belongs to the thread
    that calls `run`."""

    def __init__(
        self,
        logic: NodeLogic,
        core: EngineCore,
        inbox: queue.SimpleQueue[object],
        control: ControlSender,
        board: LoopBoard,
        drain_s: float,
        apply_effects: Callable[[], None] = lambda: None,
        handlers: Mapping[type, Callable[[Any], None]] | None = None,
        is_urgent: Callable[[object], bool] | None = None,
        launch_at: Callable[[], float] | None = None,
        times: TurnTimes | None = None,
        ends_at: Callable[[], float] = lambda: 0.0,
        counters: Callable[[], dict[str, float]] = dict,
        beside: EngineCore | None = None,
        may_end: Callable[[], bool] = lambda: True,
    ) -> None:
        """`inbox`: events from any thread; None only wakes. `board`: where other threads look. `handlers`: by an
        event's type, what takes it in place of the logic. `is_urgent`: which are served while two launched steps are
        unread; None: that is not looked for. Events keep their order: one that is not urgent holds up those behind it.
        `launch_at`: until when the next step need not be decided while one runs; the later it is, the more is known of
        what waits. `times`: is told what the loop does. `ends_at`: when the running step is expected to end.
        `counters`: those of the process around the logic, for its status. `beside`: a second engine for few requests,
        which has a step after each of the first one's. `may_end`: whether nobody needs this node any more, asked once
        it is drained."""
        self._logic = logic
        self._core = core
        self._inbox = inbox
        self._control, self._board = control, board
        self._drain_s = drain_s
        self._apply_effects = apply_effects
        self._handlers = dict(handlers or {})
        self._is_urgent = is_urgent
        self._launch_at = launch_at
        self._ends_at = ends_at
        self._times = times
        self._counters = counters
        self._beside = beside
        self._may_end = may_end
        self._held_up: list[object] = []  # the event, if any, that comes before those of the inbox
        self._drain_deadline: float | None = None
        self._stopping = False
        self._read: SchedulerOutput | None = None  # in this turn
        self._next_status = 0.0
        self._busy_s = 0.0  # with a step launched and not read
        self._was_inflight, self._counted_at = False, 0.0

    def begin_drain(self) -> None:
        """Makes the node take nothing new, finish what is here, then return from `run`. After a second call `run`
        returns at once."""
        self._inbox.put("drain")

    def run(self) -> None:
        """Runs the loop and returns when drained. An exception from the engine ends the node's epoch and is raised."""
        launched = True
        while not self._stopping:
            self._board.turn_begins()
            self._read_inbox(self._idle_wait(launched))
            self._charge("events")
            if self._launch_at is not None:
                self._hold_launch(self._launch_at)
                self._charge("device")
            now = time.monotonic()
            self._logic.on_tick(now)
            self._apply_effects()  # grants that ended are closed before the scheduler can reuse their blocks
            self._charge("upkeep")
            launched = self._step() | self._step_beside()
            self._count_busy(now, launched)
            self._write_outbox()
            self._end_turn(launched)
            if self._drain_deadline is not None and (self._is_done or now > self._drain_deadline):
                self._stopping = True
        self._write_outbox()

    @property
    def _is_done(self) -> bool:
        return self._logic.is_empty and not self._core.inflight and self._may_end()

    def _step(self) -> bool:
        self._read = None
        if not self._core.has_work():
            return False
        self._launch()
        if self._is_urgent is not None:
            self._serve_urgent(self._is_urgent)
        events = self._core.read()
        self._read = self._core.newest_read
        self._charge("device")
        if self._core.device_waits:  # for the next step, so that comes before what the last one made is told
            self._apply_effects()
            self._launch()
        if events:
            self._logic.on_engine_events(events)
        return self._core.inflight

    def _launch(self) -> None:
        self._core.launch(self._before_execution, self._look_at_step)
        self._charge("launch")

    def _step_beside(self) -> bool:
        """Does a whole step of the engine beside. Returns whether there was one."""
        if self._beside is None or not self._beside.has_work():
            return False
        self._logic.on_engine_events(self._beside.step())
        self._charge("device")
        return True

    def _count_busy(self, turn_began: float, inflight: bool) -> None:
        now = time.monotonic()
        if inflight or self._was_inflight:
            self._busy_s += now - (self._counted_at if self._was_inflight else turn_began)
        self._was_inflight, self._counted_at = inflight, now

    def _before_execution(self) -> None:
        self._write_outbox()  # claims of what starts
        self._charge("schedule")

    def _look_at_step(self, num_layers: int) -> None:
        """Hands out what the step before made, from within a launch that takes long, `num_layers` of it done."""
        events = self._core.read_ended()
        if events:
            self._logic.on_engine_events(events)
            self._write_outbox()
            if num_layers >= LAYERS_AHEAD:
                time.sleep(GIVE_WAY_S)

    def _charge(self, part: str) -> None:
        if self._times is not None:
            self._times.charge(part)

    def _end_turn(self, launched: bool) -> None:
        if self._times is None:
            return
        if self._read is not None:
            self._times.step_read(self._read)
        if not launched:
            self._times.paused()

    def _serve_urgent(self, is_urgent: Callable[[object], bool]) -> None:
        """Serves events that other nodes wait for, so that they do not wait for the running step. One for whose end the
        device waits is not looked at in the end, but waited for."""
        if self._core.read_would_wait:
            self._write_outbox()
        while not self._held_up and self._core.read_would_wait:
            early = self._ends_at() - EARLY_S - time.monotonic()
            if early <= 0 and self._core.read_decides:
                return
            try:
                event = self._inbox.get(timeout=min(max(STEP_POLL_S, early), LOOK_S))
            except queue.Empty:
                continue
            if event is None:
                continue
            if is_urgent(event):
                self._charge("device")
                self._dispatch(event, time.monotonic())
                self._write_outbox()
                self._charge("urgent")
            else:
                self._held_up.append(event)

    def _hold_launch(self, launch_at: Callable[[], float]) -> None:
        while (
            self._core.device_is_busy
            and not (self._stopping or self._core.is_behind)
            and (wait := launch_at() - time.monotonic()) > 0
        ):
            self._write_outbox()  # what was said by now does not wait for the next event
            self._read_inbox(min(wait, HOLD_POLL_S))

    def _idle_wait(self, launched: bool) -> float:
        if launched or self._held_up:
            return 0.0
        return BLOCKED_WAIT_S if self._core.has_work() else IDLE_WAIT_S

    def _read_inbox(self, wait: float) -> None:
        now = time.monotonic()
        for held_up in self._held_up:
            self._dispatch(held_up, now)
        self._held_up.clear()
        try:
            event = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
        except queue.Empty:
            return
        now = time.monotonic()
        while True:
            self._dispatch(event, now)
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _dispatch(self, event: object, now: float) -> None:
        if isinstance(event, Received | PeerUp | PeerLost | PeerRefused):
            self._logic.on_control(event, now)
        elif event == "drain":
            if self._drain_deadline is not None:
                self._stopping = True
            self._drain_deadline = now + self._drain_s
            self._logic.drain()
            self._next_status = 0.0  # so that whoever places requests here knows at once
        elif event is None:
            return
        elif handler := self._handlers.get(type(event)):
            handler(event)
        else:
            self._logic.on_transfer(event, now)

    def _write_outbox(self) -> None:
        self._apply_effects()  # hand-offs' messages among them, each behind what it speaks of
        for ref in self._logic.drain_connects():
            self._control.connect(ref)
        for to, message in self._logic.drain_outbox():
            self._control.send(to, message)
        now = time.monotonic()
        if now >= self._next_status:
            self._next_status = now + STATUS_EVERY_S
            self.report()

    def report(self) -> None:
        """Puts the node's status on the board for other threads."""
        self._board.show(self._logic.status({**self._counters(), "busy_s": self._busy_s}))
