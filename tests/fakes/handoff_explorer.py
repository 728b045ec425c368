"""Breadth-first exploration of the hand-off: every state that a Setting allows, checked; violations with their path."""

from __future__ import annotations

from dataclasses import dataclass

from handoff_actions import successor
from handoff_events import events
from handoff_pulls import open_world
from handoff_records import SINK_OVER, SOURCE_OVER
from handoff_setting import Setting, ViolationError
from handoff_world import World, start

from tandem.kv_connector.protocol.sink_table import SinkEvent, SinkState
from tandem.kv_connector.protocol.source_table import SourceEvent


@dataclass(frozen=True)
class Report:
    num_states: int
    num_transitions: int
    num_final: int
    outcomes: frozenset[tuple[str, str]]  # (source's end, sink's end) of a request in a final state


class _Search:
    def __init__(self, setting: Setting, max_states: int) -> None:
        self.setting = setting
        self.max_states = max_states
        first = start(setting)
        self.numbers = {first: 0}
        self.states = [first]
        self.reached_by: list[tuple[int, tuple]] = [(-1, ())]  # (state before, event)
        self.free_before: list[list[int]] = [[]]  # states from which an event without a fault leads here
        self.final: list[int] = []
        self.num_transitions = 0
        self.ends_by_timers: set[tuple] = set()

    def run(self) -> Report:
        at = 0
        while at < len(self.states):
            state = self.states[at]
            try:
                self._expand(at, state)
            except AssertionError as error:  # ours, or the machines' own
                raise ViolationError(f"{error}\n{self._path(at)}") from error
            at += 1
            if len(self.states) > self.max_states:
                raise AssertionError(f"more than {self.max_states} states: tighten the setting")
        self._check_progress()
        outcomes = {pair for at in self.final for pair in zip(self.states[at][13], self.states[at][14], strict=True)}
        return Report(len(self.states), self.num_transitions, len(self.final), frozenset(outcomes))

    def _expand(self, at: int, state: tuple) -> None:
        world = open_world(self.setting, state)
        self._check_state(world)
        is_final = True
        for event, cost in list(events(world)):
            try:
                after = successor(self.setting, state, event, cost)
            except AssertionError as error:
                raise ViolationError(f"{error}\n  at last: {readable(event)}") from error
            if after == state:
                continue
            self.num_transitions += 1
            number = self.numbers.get(after)
            if number is None:
                number = self.numbers[after] = len(self.states)
                self.states.append(after)
                self.reached_by.append((at, event))
                self.free_before.append([])
            if not cost:
                is_final = False
                self.free_before[number].append(at)
        if is_final:
            self.final.append(at)
            check_quiet(world)

    def _check_state(self, world: World) -> None:
        check_pools(world)
        for r in range(self.setting.num_requests):
            check_outcome(world, r)
            self._check_ends_by_timers(world, r)

    def _check_ends_by_timers(self, world: World, r: int) -> None:
        """Were every message from here on lost, the deadline would end the request on both sides."""
        source, sink = world.sources[r], world.sinks[r]
        key = (source and source.freeze(), sink and sink.freeze(), world.source_ends[r], world.sink_ends[r])
        if key in self.ends_by_timers:
            return
        self.ends_by_timers.add(key)
        alone = open_world(self.setting, world.freeze())
        if source and not world.source_ends[r]:
            alone.on_source(r, SourceEvent.DEADLINE)
            if not alone.source_ends[r]:
                raise ViolationError(f"request {r} does not end on its source by its deadline")
        knows_request = sink and sink.machine.state not in (SinkState.UNKNOWN, SinkState.EARLY, SinkState.REJECTED)
        if knows_request and not world.sink_ends[r]:
            if alone.sinks[r].verifying:  # the digests need no message
                alone.verify(r)
            alone.on_sink(r, SinkEvent.DEADLINE)
            if not alone.sink_ends[r]:
                raise ViolationError(f"request {r} does not end on its sink by its deadline")

    def _check_progress(self) -> None:
        """From each state a final one is reachable without a further fault: no deadlock, no circle without exit."""
        reaches = bytearray(len(self.states))
        stack = list(self.final)
        for at in stack:
            reaches[at] = 1
        while stack:
            for before in self.free_before[stack.pop()]:
                if not reaches[before]:
                    reaches[before] = 1
                    stack.append(before)
        stuck = reaches.find(0)
        if stuck >= 0:
            raise ViolationError(f"no way to an end from here\n{self._path(stuck)}")

    def _path(self, at: int) -> str:
        """Shortest way from the start, a line an event."""
        lines = [_describe(self.setting, self.states[at])]
        while at:
            at, event = self.reached_by[at]
            lines.append(f"  {readable(event)}")
        return "\n".join([f"setting {self.setting.name}, shortest path:", *reversed(lines)])


def explore(setting: Setting, max_states: int = 2_000_000) -> Report:
    """Raises ViolationError with the shortest path to the first broken promise."""
    return _Search(setting, max_states).run()


def check_pools(world: World) -> None:
    used = sum(world.prompt_blocks(r) for r, record in enumerate(world.sources) if record and record.has_blocks)
    if used > world.setting.source_blocks or world.num_free_on_sink() < 0:
        raise ViolationError("more blocks in use than a pool has")
    for r, record in enumerate(world.sinks):
        if record and record.machine.state in SINK_OVER and (record.contents or record.pinned):
            raise ViolationError(f"request {r} is over on its sink and holds blocks")
        if record and record.machine.round > world.setting.max_resends:
            raise ViolationError(f"request {r} is sent again more often than allowed")
        if record and record.machine.state is SinkState.QUARANTINED and record.pinned:
            raise ViolationError(f"request {r} is over on its sink and pins hits")


def check_outcome(world: World, r: int) -> None:
    """What the two sides tell the router must fit together."""
    source, sink = world.source_ends[r], world.sink_ends[r]
    if source == "committed" and sink != "committed":
        raise ViolationError(f"request {r}: the source was told of a commit, the sink says {sink or 'nothing'}")
    if sink == "committed" and source in ("released", "refused"):
        raise ViolationError(f"request {r} is committed on its sink and {source} on its source")


def check_quiet(world: World) -> None:
    """Nothing more will happen: everything has ended and every pool is whole."""
    for r in range(world.setting.num_requests):
        source, sink = world.sources[r], world.sinks[r]
        was_never_asked = r in world.setting.pulls and source is None
        if not world.sink_ends[r] or not (world.source_ends[r] or was_never_asked):
            raise ViolationError(f"request {r} waits for ever: {world.source_ends[r]!r}, {world.sink_ends[r]!r}")
        if source and (source.machine.state not in SOURCE_OVER or source.has_blocks or source.jobs):
            raise ViolationError(f"request {r} leaves {source.machine.state} on its source")
        if sink and sink.machine.state not in SINK_OVER:
            raise ViolationError(f"request {r} leaves {sink.machine.state} on its sink")
    if world.num_used_on_sink() or world.writes or world.queue:
        raise ViolationError("blocks of the sink leak")


def readable(event: tuple) -> str:
    return " ".join(" ".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in event)


def _describe(setting: Setting, state: tuple) -> str:
    world = open_world(setting, state)
    parts = []
    for r in range(setting.num_requests):
        source, sink = world.sources[r], world.sinks[r]
        parts.append(
            f"request {r}: source {source.machine.state.value if source else '-'} {world.source_ends[r]!r}, "
            f"sink {sink.machine.state.value if sink else '-'} {world.sink_ends[r]!r}"
        )
    return "  there: " + "; ".join(parts) + f"; under way: {sorted(map(readable, world.network))}"
