"""What the launcher decides about its children: whom to start, restart, kill and stop, and when. Pure.

    WAITING ──start──> STARTING ──ready──> READY
       ^                  │ exit, silence    │ exit, silence
       └── backoff ───────┴──────────────────┘        stop: TERM stage by stage, the routers first

Children belong to stages. A stage starts when every child of the stages before it has been ready once; at the end the
last stage stops first. Until all have been ready, a child that fails quickly again and again ends the whole, and one
that ends by itself before it was ready does so at once: it would do the same again. From then on it is started for
ever, since the others may serve without it; so is one that is added then. One that is retired drains, and is forgotten
at its end. Events come in with the time; what is to be done comes out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

EXIT_BAD_CONFIG = 2
FIRST_BACKOFF_S = 0.5  # a guess
MAX_BACKOFF_S = 10.0  # a guess
QUICK_FAILURE_S = 10.0  # a child that served for less counts as failed quickly; a guess
MAX_QUICK_FAILURES = 5  # in a row; a guess
START_TIMEOUT_S = 1200.0  # loading a large model from cold storage takes minutes; a guess
ROUTER_NAME = "router"
STOP_MARGIN_S = 10.0  # beyond drain_s, for children to come down; a guess


class ChildState(enum.Enum):
    """Where a child stands between being wanted and being over."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"  # SIGTERM sent
    KILLED = "killed"  # SIGKILL sent
    ENDED = "ended"  # will not start again


class Phase(enum.Enum):
    """Where the whole stands: once it stops, no child starts again."""

    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Start:
    """Start this child's process."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM to this child."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to this child; `reason` is for the log."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Serving:
    """Every child has been ready: the whole is up."""


@dataclass(frozen=True, slots=True)
class Report:
    """A line for people."""

    text: str


Action = Start | Terminate | Kill | Serving | Report


@dataclass(slots=True)
class Child:
    """What is known of one child. Times are monotonic seconds."""

    name: str
    stage: int
    state: ChildState = ChildState.WAITING
    was_ready: bool = False
    start_at: float = 0.0  # WAITING: not before
    started_at: float = 0.0
    ready_at: float | None = None
    last_beat: float = 0.0  # or when it became ready
    num_quick_failures: int = 0
    is_extra: bool = False  # came when the others had begun
    retired: bool = False  # stops, and does not start again
    stop_by: float = 0.0  # STOPPING, retired: then it is killed

    @property
    def alive(self) -> bool:
        return self.state not in (ChildState.WAITING, ChildState.ENDED)


@dataclass
class Supervisor:
    """Decides what happens to the children. A ready node is killed after `peer_lost_s` seconds of silence. `exit_code`
    holds once `phase` is ENDED."""

    peer_lost_s: float
    drain_s: float
    children: dict[str, Child] = field(default_factory=dict)
    phase: Phase = Phase.RUNNING
    exit_code: int = 0
    _serving: bool = False
    _stop_deadline: float = 0.0
    _killed: bool = False
    _last_tick: float | None = None

    def add(self, name: str, stage: int) -> None:
        assert name not in self.children
        self.children[name] = Child(name, stage, is_extra=self._last_tick is not None)

    def retire(self, name: str, now: float) -> list[Action]:
        """Drains a child while the others go on; it is forgotten when it has ended."""
        child = self.children[name]
        if self.phase is not Phase.RUNNING or child.retired:
            return []
        if child.state is ChildState.WAITING:
            del self.children[name]
            return []
        child.retired, child.stop_by = True, now + self.drain_s + STOP_MARGIN_S
        if child.state not in (ChildState.STARTING, ChildState.READY):
            return []
        child.state = ChildState.STOPPING
        return [Terminate(name)]

    # --- events ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Starts the children that are due, and kills those that are silent or late. Must be called several times a
        second."""
        self._forgive_own_pause(now)
        if self.phase is Phase.STOPPING:
            return self._stop_tick(now)
        actions: list[Action] = []
        for child in self.children.values():
            if child.state is ChildState.WAITING and now >= child.start_at and self._stage_open(child.stage):
                child.state, child.started_at, child.ready_at = ChildState.STARTING, now, None
                actions.append(Start(child.name))
            elif child.state is ChildState.STARTING and now - child.started_at > START_TIMEOUT_S:
                actions.append(self._kill(child, f"not ready within {START_TIMEOUT_S:g} s"))
            elif child.state is ChildState.READY and now - child.last_beat > (most_s := self._silence_s(child)):
                actions.append(self._kill(child, f"silent for {most_s:g} s"))
            elif child.state is ChildState.STOPPING and now > child.stop_by:
                actions.append(self._kill(child, f"not drained within {self.drain_s + STOP_MARGIN_S:g} s"))
        return actions

    def ready(self, name: str, now: float) -> list[Action]:
        child = self.children[name]
        if child.state is not ChildState.STARTING:
            return []
        child.state, child.ready_at, child.last_beat, child.was_ready = ChildState.READY, now, now, True
        if self._serving or not all(other.was_ready for other in self.children.values()):
            return []
        self._serving = True
        return [Serving()]

    def beat(self, name: str, now: float) -> None:
        self.children[name].last_beat = now

    def exited(self, name: str, code: int, now: float, last_words: str = "") -> list[Action]:
        """Takes the end of a child's process. `code` is negative for a signal, as in subprocess."""
        child = self.children[name]
        assert child.alive, "only started children exit"
        quick = child.ready_at is None or now - child.ready_at < QUICK_FAILURE_S
        if self.phase is Phase.STOPPING:
            child.state = ChildState.ENDED
            return self._stop_tick(now)
        if child.retired:
            del self.children[name]
            return [Report(f"{name} has ended, as it was asked to")]
        child.num_quick_failures = child.num_quick_failures + 1 if quick else 1
        what = f"{name} ended ({_describe(code)})"
        if code == EXIT_BAD_CONFIG and not child.is_extra:
            return self._give_up(child, f"{what}: its configuration is wrong, as it said", EXIT_BAD_CONFIG, now)
        if code >= 0 and not child.was_ready and not child.is_extra:
            return self._give_up(child, f"{what} before it served. Its last words:\n{last_words}", 1, now)
        if child.num_quick_failures >= MAX_QUICK_FAILURES and not self._serving:
            text = f"{what}, {MAX_QUICK_FAILURES} times in a row; giving up. Its last words:\n{last_words}"
            return self._give_up(child, text, 1, now)
        backoff_s = min(FIRST_BACKOFF_S * 2 ** (child.num_quick_failures - 1), MAX_BACKOFF_S)
        child.state, child.start_at = ChildState.WAITING, now + backoff_s
        return [Report(f"{what}; starting it again in {backoff_s:g} s")]

    def stop(self, now: float) -> list[Action]:
        """Drains all children, the last stage first; a second call kills them."""
        if self.phase is Phase.RUNNING:
            return self._begin_stop(now)
        return self._kill_all("stopped twice")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _silence_s(self, child: Child) -> float:
        """After how many seconds of silence a child is killed. A router that is starved of its cores is late, and
        killing it ends every request: it gets the time that the workers of a router of several processes get."""
        return self.peer_lost_s * (4 if child.name.startswith(ROUTER_NAME) else 1)

    def _stage_open(self, stage: int) -> bool:
        return all(child.was_ready or child.is_extra for child in self.children.values() if child.stage < stage)

    def _give_up(self, child: Child, text: str, exit_code: int, now: float) -> list[Action]:
        child.state = ChildState.ENDED
        self.exit_code = exit_code
        return [Report(text), *self._begin_stop(now)]

    def _begin_stop(self, now: float) -> list[Action]:
        self.phase = Phase.STOPPING
        self._stop_deadline = now + self.drain_s + STOP_MARGIN_S
        for child in self.children.values():
            if not child.alive:
                child.state = ChildState.ENDED
        return self._stop_tick(now)

    def _stop_tick(self, now: float) -> list[Action]:
        alive = [child for child in self.children.values() if child.alive]
        if not alive:
            self.phase = Phase.ENDED
            return []
        if now > self._stop_deadline and not self._killed:
            return self._kill_all(f"not drained within {self.drain_s + STOP_MARGIN_S:g} s")
        last_stage = max(child.stage for child in alive)
        actions: list[Action] = []
        for child in alive:
            if child.stage == last_stage and child.state in (ChildState.STARTING, ChildState.READY):
                child.state = ChildState.STOPPING
                actions.append(Terminate(child.name))
        return actions

    def _kill_all(self, reason: str) -> list[Action]:
        self._killed = True
        self.exit_code = self.exit_code or 1
        return [self._kill(child, reason) for child in self.children.values() if child.alive]

    def _kill(self, child: Child, reason: str) -> Kill:
        child.state = ChildState.KILLED
        return Kill(child.name, reason)

    def _forgive_own_pause(self, now: float) -> None:
        """Takes the launcher's own pause off the children's silence: while it was stopped it heard nobody."""
        pause_s = now - self._last_tick if self._last_tick is not None else 0.0
        self._last_tick = now
        if pause_s > 1.0:
            for child in self.children.values():
                child.started_at += pause_s
                child.last_beat += pause_s

    def check_integrity(self) -> None:
        alive = [child for child in self.children.values() if child.alive]
        assert not (alive and self.phase is Phase.ENDED), "ended, and nobody is left behind"
        for child in self.children.values():
            assert (child.ready_at is not None) or child.state is not ChildState.READY
            if self.phase is Phase.RUNNING:
                assert child.state is not ChildState.ENDED, "nobody is over before the end begins"
                assert child.retired or child.state is not ChildState.STOPPING, "nobody stops before that, unasked"
                assert not child.alive or self._stage_open(child.stage), "stages start in order"
            else:
                assert child.state is not ChildState.WAITING, "nobody starts after the end began"


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
