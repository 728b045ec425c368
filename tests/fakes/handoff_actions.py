"""What each event does to the model of handoff_world.py: deliveries, landing writes, crashes, timers."""

from __future__ import annotations

from handoff_pulls import open_world
from handoff_setting import Setting, ViolationError
from handoff_world import World

from tandem.kv_connector.protocol.sink_table import SinkEvent
from tandem.kv_connector.protocol.source_table import SourceEvent

Event = tuple
TO_SOURCE = frozenset({"grant", "committed", "resend", "refused", "ack"})


def successor(setting: Setting, state: tuple, event: Event, cost: int) -> tuple:
    """Raises ViolationError when the event breaks a promise."""
    world = open_world(setting, state)
    world.faults_left -= cost
    action = _ACTIONS.get(event[0])
    if action is not None:
        action(world, *event[1:])
    else:
        getattr(world, event[0])(*event[1:])
    return world.freeze()


def _deliver(world: World, message: tuple) -> None:
    world.network.discard(message)
    _hear(world, message)


def _hear(world: World, message: tuple) -> None:
    if message[0] == "pull":
        world.hear_pull(message, has_blocks=True)
    elif message[0] in TO_SOURCE:
        _hear_on_source(world, message)
    else:
        _hear_on_sink(world, message)


def _find_nothing(world: World, message: tuple) -> None:
    world.network.discard(message)
    world.hear_pull(message, has_blocks=False)


def _hear_on_source(world: World, message: tuple) -> None:
    kind, r, sender, _, grant_id, *data = message
    record = world.sources[r]
    if record is None or record.machine.sink_epoch != sender:
        if kind == "refused":
            world.network.add(("drained", r, world.source_epoch, sender, 0))
        return
    machine = record.machine
    if kind == "grant":
        before = machine.grant_id
        actions = machine.on_grant(grant_id, data[0], sender)
        if machine.grant_id != before:
            record.num_granted = data[1]
    elif kind == "committed":
        actions = machine.on_committed(grant_id)
    elif kind == "resend":
        record.resend_indices = data[1]
        actions = machine.on_resend(grant_id, data[0])
    else:
        actions = machine.on(SourceEvent.REFUSED if kind == "refused" else SourceEvent.DRAINED_ACK)
    world.run_source(r, actions)


def _hear_on_sink(world: World, message: tuple) -> None:
    kind, r, sender, addressee, *data = message
    if "confuses_attempts" in world.setting.flaws:
        r = max(range(world.setting.num_requests), key=lambda other: world.placed[other] is not None)
    record = world.sink_record(r)
    machine = record.machine
    if kind == "claim" and sender in world.lost:
        actions = ()  # it must greet again before it gets a grant
    elif kind == "claim":
        actions = machine.on_claim(sender, addressee)
    elif kind == "ready":
        actions = machine.on_ready(data[0], sender, addressee, data[1])
    elif kind == "release":
        actions = machine.on_release(sender)
    else:
        actions = machine.on_drained(sender, data[0])
    world.run_sink(r, actions)
    world.settle(r)


def _land(world: World, write: tuple, content: str) -> None:
    world.writes.discard(write)
    grant_id, index, r, _ = write
    if grant_id // 100 != world.sink_epoch:
        return  # into the memory of a process that is gone
    sink = world.sinks[r]
    holds = sink is not None and sink.machine.grant_id == grant_id and sink.contents
    if (
        not world.setting.one_sided
        and "receiver_has_no_gate" not in world.setting.flaws
        and not (sink and sink.is_open)
    ):
        if world.sources[r] is not None:
            world.sources[r].refused = True
        return
    if not holds:
        raise ViolationError(f"a write under grant {grant_id} lands in a block that may be free or another's")
    sink.contents = (*sink.contents[:index], content, *sink.contents[index + 1 :])


def _crash_source(world: World) -> None:
    epoch = world.source_epoch
    world.source_epoch += 1
    if world.setting.one_sided:
        world.writes = {write for write in world.writes if write[3] != epoch}
    for r, placed in enumerate(world.placed):
        if placed and placed[0] == epoch and not world.source_ends[r]:
            world.source_ends[r] = "died"
        world.sources[r] = None
    world.pending = {(kind, r) for kind, r in world.pending if not kind.endswith("_source")}


def _crash_sink(world: World) -> None:
    epoch = world.sink_epoch
    world.sink_epoch += 1
    world.writes = {write for write in world.writes if write[0] // 100 != epoch}
    for r, placed in enumerate(world.placed):
        if placed and placed[1] == epoch and not world.sink_ends[r]:
            world.sink_ends[r] = "died"
        world.sinks[r], world.held[r], world.cached[r] = None, 0, False
    world.pending = {(kind, r) for kind, r in world.pending if not kind.endswith("_sink")}
    world.queue, world.lost, world.fences = [], set(), []


def _decode_ends(world: World, r: int) -> None:
    world.held[r] = 0
    world.grant_in_order()


def _schedule(world: World, r: int) -> None:
    world.sources[r].was_asked = False
    world.on_source(r, SourceEvent.CLAIM)


def _forget(world: World, r: int) -> None:
    world.sources[r] = None


_ACTIONS = {
    "deliver": _deliver,
    "find_nothing": _find_nothing,
    "duplicate": _hear,
    "lose": lambda world, message: world.network.discard(message),
    "land": _land,
    "crash_source": _crash_source,
    "crash_sink": _crash_sink,
    "decode_ends": _decode_ends,
    "forget": _forget,
    "schedule": _schedule,
    "source_timer": lambda world, r: world.on_source(r, SourceEvent.TIMER),
    "source_deadline": lambda world, r: world.on_source(r, SourceEvent.DEADLINE),
    "sink_timer": lambda world, r: world.on_sink(r, SinkEvent.TIMER),
    "sink_deadline": lambda world, r: world.on_sink(r, SinkEvent.DEADLINE),
    "lease": lambda world, r: world.on_sink(r, SinkEvent.LEASE),
}
for _kind in ("submit_source", "submit_sink", "cancel_source", "cancel_sink"):

    def _arrive(world: World, r: int, kind: str = _kind) -> None:
        world.pending.discard((kind, r))
        getattr(world, kind)(r)

    _ACTIONS[_kind] = _arrive
