"""Breadth-first exploration of migration_world.py: what may happen next, and every state checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from migration_nodes import SINK_OVER, SOURCE_OVER, Node
from migration_setting import MigrationSetting
from migration_world import World, start

from tandem.kv_connector.protocol.sink_table import SinkEvent, SinkState
from tandem.kv_connector.protocol.source_table import SourceEvent, SourceState
from tests.worlds.setting import ViolationError

Event = tuple


@dataclass(frozen=True)
class Report:
    num_states: int
    num_transitions: int
    num_final: int
    num_moved: int  # final states in which a sample has left its first node


def events(world: World) -> Iterator[tuple[Event, int]]:
    """(event, its cost in faults)."""
    for number in range(len(world.setting.moves)):
        if world.can_move(number):
            yield ("move", number), 0
    for name, node in world.nodes.items():
        if world.to_node[name]:
            yield ("node_hears", name), 0
        if world.to_router[name]:
            yield ("router_hears", name), 0
        yield from _on_node(world, name, node)
    for message in world.network:
        yield ("deliver", message), 0
    for write in world.writes:
        yield ("land", write, "good"), 0
    if world.faults_left:
        for event in _faults(world):
            yield event, 1


def _on_node(world: World, name: str, node: Node) -> Iterator[tuple[Event, int]]:
    for seq in node.seqs:
        if seq.num_in_flight:
            yield ("land_token", name, seq.key, seq.sample), 0
        elif not seq.is_paused and not (world.setting.holds_tokens and _moves(world, seq.key)):
            yield ("launch", name, seq.key, seq.sample), 0
    for key, record in node.sources.items():
        if record.jobs and _job_is_ready(world, name, key):
            yield ("run_job", name, key), 0
        dead = world.nodes[record.peer].epoch != record.machine.sink_epoch
        if dead and record.machine.state is not SourceState.CLOSED:
            yield ("source_loses", name, key), 0
        if _is_quiet(world, key) and record.machine.state not in (SourceState.PUSHING, SourceState.CLOSED):
            yield ("on_source", name, key, SourceEvent.TIMER), 0
            if _other_is_over(world.nodes[record.peer].sinks.get(key), SINK_OVER) and _is_idle(world, name):
                yield ("on_source", name, key, SourceEvent.DEADLINE), 0
    for key, sink in node.sinks.items():
        state = sink.machine.state
        if state is SinkState.QUEUED:
            yield ("grant", name, key), 0
        if sink.verifying:
            yield ("verify", name, key), 0
        dead = bool(sink.source) and world.nodes[sink.source].epoch != sink.machine.source_epoch
        if dead and state not in SINK_OVER and not sink.machine.source_lost:
            yield ("sink_loses", name, key), 0
        if dead and sink.machine.source_lost and not sink.machine.fenced:
            yield ("fence", name, key), 0
        if _is_quiet(world, key):
            if state in (SinkState.RESENDING, SinkState.QUARANTINED):
                yield ("on_sink", name, key, SinkEvent.TIMER), 0
            if state not in SINK_OVER and _other_is_over(world.nodes[sink.source].sources.get(key), SOURCE_OVER):
                yield ("on_sink", name, key, SinkEvent.DEADLINE), 0
            if state is SinkState.EARLY:
                yield ("on_sink", name, key, SinkEvent.DEADLINE), 0


def _moves(world: World, key: tuple) -> bool:
    return bool(world.machines[int(key[0][1:].split("-")[0])].moves.under_way)


def _other_is_over(record, over) -> bool:  # type: ignore[no-untyped-def]
    return record is None or record.machine.state in over


def _is_idle(world: World, name: str) -> bool:
    """Nothing is on its way between the router and this node."""
    return not world.to_node[name] and not world.to_router[name]


def _job_is_ready(world: World, name: str, key: tuple) -> bool:
    """Flush, Finalize and Retire wait for the writes of their grant."""
    record = world.nodes[name].sources[key]
    if record.jobs[0][0] in ("push", "sent"):
        return True
    return not any(w[0] == key and w[5] == record.machine.grant_id and w[2] == name for w in world.writes)


def _is_quiet(world: World, key: tuple) -> bool:
    """Nothing of this hand-off is under way."""
    busy = any(
        (key in node.sources and node.sources[key].jobs) or (key in node.sinks and node.sinks[key].verifying)
        for node in world.nodes.values()
    )
    return not busy and not any(w[0] == key for w in world.writes) and not any(m[2] == key for m in world.network)


def _faults(world: World) -> Iterator[Event]:
    faults = world.setting.faults
    if "lose" in faults:
        yield from (("lose", message) for message in world.network)
    if "duplicate" in faults:
        yield from (("deliver", message, True) for message in world.network)
    if "corrupt" in faults:
        yield from (("land", write, "bad") for write in world.writes)
    if "crash" in faults:
        yield from (("crash", name) for name, node in world.nodes.items() if node.epoch < 10)
    for r, machine in enumerate(world.machines):
        if "client_gone" in faults and machine.outcome is None:
            yield ("client_gone", r)
        if "give_up" in faults and machine.moves.under_way:
            yield ("give_up", r)
    for name, node in world.nodes.items():
        for key, record in node.sources.items():
            if record.machine.state is SourceState.CLOSED:
                continue
            if "suspect_sink" in faults:
                yield ("source_loses", name, key)
            if "source_deadline" in faults:
                yield ("on_source", name, key, SourceEvent.DEADLINE)
            stores = any(w[0] == key and w[2] == name for w in world.writes)
            if "push_fails" in faults and record.jobs and record.jobs[0][0] in ("push", "finalize") and not stores:
                yield ("fail_push", name, key)
        for key, sink in node.sinks.items():
            if sink.machine.state in SINK_OVER:
                continue
            if "suspect_source" in faults:
                yield ("sink_loses", name, key)
            if "sink_deadline" in faults:
                yield ("on_sink", name, key, SinkEvent.DEADLINE)
        if "preempt" in faults:
            yield from (("preempt", name, s.key, s.sample) for s in node.seqs if not s.is_paused)


def successor(setting: MigrationSetting, packed: bytes, event: Event, cost: int) -> World:
    world = World.unpack(setting, packed)
    world.faults_left -= cost
    if event[0] == "lose":
        world.network.discard(event[1])
    else:
        getattr(world, event[0])(*event[1:])
    for node in world.nodes.values():
        node.settle()
    return world


def explore(setting: MigrationSetting, max_states: int = 500_000) -> Report:
    """Raises ViolationError with the shortest way to the first broken promise."""
    first = start(setting)
    numbers = {first.frozen(): 0}
    states, reached_by = [first.pack()], [(-1, ())]
    free_before: list[list[int]] = [[]]
    final: list[int] = []
    num_transitions = num_moved = at = 0

    def path(at: int) -> str:
        lines = []
        while at > 0:
            at, event = reached_by[at]
            lines.append("  " + " ".join(map(str, event)))
        return "\n".join([f"setting {setting.name}, shortest path:", *reversed(lines)])

    while at < len(states):
        is_final, world = True, World.unpack(setting, states[at])
        for event, cost in list(events(world)):
            try:
                after = successor(setting, states[at], event, cost)
            except AssertionError as error:
                raise ViolationError(f"{error}\n{path(at)}\n  at last: {event}") from error
            key = after.frozen()
            number = numbers.get(key)
            if number == at:
                continue
            num_transitions += 1
            if number is None:
                number = numbers[key] = len(states)
                states.append(after.pack())
                reached_by.append((at, event))
                free_before.append([])
            if not cost:
                is_final = False
                free_before[number].append(at)
        if is_final:
            final.append(at)
            num_moved += any(attempt > 1 for node in world.nodes.values() for _, attempt in node.sinks)
            try:
                world.check_end()
            except AssertionError as error:
                raise ViolationError(f"{error}\n{path(at)}") from error
        at += 1
        assert len(states) <= max_states, f"more than {max_states} states: tighten the setting"
    _check_progress(len(states), final, free_before, path)
    return Report(len(states), num_transitions, len(final), num_moved)


def _check_progress(num_states, final, free_before, path) -> None:  # type: ignore[no-untyped-def]
    """From each state a final one is reachable without a further fault."""
    reaches, stack = bytearray(num_states), list(final)
    for at in stack:
        reaches[at] = 1
    while stack:
        for before in free_before[stack.pop()]:
            if not reaches[before]:
                reaches[before] = 1
                stack.append(before)
    stuck = reaches.find(0)
    if stuck >= 0:
        raise ViolationError(f"no way to an end from here\n{path(stuck)}")
