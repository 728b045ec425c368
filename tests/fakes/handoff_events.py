"""Everything that can happen next in the model of handoff_world.py: (event, its cost in faults) and what it does.

Timers fire only while nothing of their request is under way (message, job, write, verification): one that fires earlier
puts a second copy of a message beside the first, and that is what the fault "duplicate" does. This and the set of
messages (a message sent again while its twin is under way is one message) are the only reductions.
"""

from __future__ import annotations

from collections.abc import Iterator

from handoff_records import SOURCE_OVER
from handoff_world import Setting, ViolationError, World
from tandem.kv_connector.handoff.sink import SinkEvent, SinkState
from tandem.kv_connector.handoff.source import SourceEvent, SourceState

TO_SOURCE = frozenset({"grant", "committed", "resend", "refused", "ack"})
_UNFINISHED = (SourceState.CLAIMING, SourceState.PUSHING)
_PARKED = (SourceState.PARKED, SourceState.PARKED_DONE)
Event = tuple


def events(world: World) -> Iterator[tuple[Event, int]]:
    """Every event that is possible here, with the faults that it costs."""
    yield from _free_events(world)
    yield from _last_deadlines(world)
    if world.faults_left:
        for event in _fault_events(world):
            yield event, 1


def _free_events(world: World) -> Iterator[tuple[Event, int]]:
    for r in range(world.setting.num_requests):
        if world.placed[r] is None:
            yield ("place", r), 0
        if world.held[r]:
            yield ("decode_ends", r), 0
    for kind, r in world.pending:
        if not (kind.startswith("cancel_") and ("submit_" + kind[7:], r) in world.pending):
            yield (kind, r), 0  # a cancel travels behind its submit
    for message in world.network:
        yield ("deliver", message), 0
    for write in world.writes:
        yield ("land", write, "good"), 0
    for r, record in enumerate(world.sources):
        if record is not None:
            yield from _free_on_source(world, r)
    for r, record in enumerate(world.sinks):
        if record is not None:
            yield from _free_on_sink(world, r)
    for epoch in range(1, world.source_epoch):
        if epoch not in world.lost:
            yield ("sink_loses_source", epoch), 0
    for epoch in world.lost:
        if epoch not in world.fenced and (epoch != world.source_epoch or not world.setting.one_sided):
            yield ("fence", epoch), 0


def _last_deadlines(world: World) -> Iterator[tuple[Event, int]]:
    """A node that took its peer for lost without reason tells it nothing: the peer's own deadline ends what is left.
    Free only where the other side has ended and nothing is under way, so that no deadlock hides behind a deadline."""
    for r in range(world.setting.num_requests):
        if world.source_ends[r] and not world.sink_ends[r] and world.sinks[r] and _is_quiet(world, r):
            yield ("sink_deadline", r), 0
        if world.sink_ends[r] and not world.source_ends[r] and world.sources[r] and _is_quiet(world, r):
            yield ("source_deadline", r), 0


def _free_on_source(world: World, r: int) -> Iterator[tuple[Event, int]]:
    record = world.sources[r]
    state = record.machine.state
    if record.machine.sink_epoch != world.sink_epoch and (state not in SOURCE_OVER or state is SourceState.DRAINED):
        yield ("source_loses_sink", record.machine.sink_epoch), 0
    if state is SourceState.IDLE:
        yield ("schedule", r), 0
    if not record.has_blocks and not record.is_computed and _may_start(world, r):
        yield ("start_prompt", r), 0
    if record.has_blocks and not record.is_computed:
        if state is SourceState.PUSHING and not record.num_pushed:
            yield ("push_early", r), 0
        if state in (SourceState.PARKED, SourceState.PUSHING):
            yield ("compute", r, False), 0
    if record.jobs and _job_is_ready(world, r):
        yield ("run_job", r), 0
    if _is_quiet(world, r):
        yield ("source_timer", r), 0


def _free_on_sink(world: World, r: int) -> Iterator[tuple[Event, int]]:
    record = world.sinks[r]
    if record.verifying:
        yield ("verify", r), 0
    if record.machine.state in (SinkState.RESENDING, SinkState.QUARANTINED) and _is_quiet(world, r):
        yield ("sink_timer", r), 0


def _may_start(world: World, r: int) -> bool:
    """SourceManager.get_num_new_matched_tokens and _may_park, then the scheduler's own look at the pool."""
    setting, record = world.setting, world.sources[r]
    need = world.prompt_blocks(r)
    used = sum(world.prompt_blocks(o) for o, other in enumerate(world.sources) if other and other.has_blocks)
    if used + need > setting.source_blocks:
        return False
    if record.machine.state is not SourceState.CLAIMING:
        return record.machine.state is SourceState.PUSHING
    states = [(o, other.machine.state) for o, other in enumerate(world.sources) if other]
    parked = sum(world.prompt_blocks(o) for o, state in states if state in _PARKED)
    unfinished = [world.prompt_blocks(o) for o, state in states if o != r and state in _UNFINISHED]
    room = setting.source_blocks - max(unfinished, default=0)
    if "parks_without_bound" in setting.flaws:
        return True
    return parked + need <= min(setting.max_parked, room)


def _job_is_ready(world: World, r: int) -> bool:
    """Finalize and Retire flush: they wait for the writes of their grant, unless the channel is broken."""
    record = world.sources[r]
    kind = record.jobs[0][0]
    if kind == "retire" and "retires_without_flush" in world.setting.flaws:
        return True
    if kind == "finalize" and "ready_without_flush" in world.setting.flaws:
        return True
    if kind in ("push", "sent") or (record.failed and not world.setting.one_sided):
        return True
    return not any(write[0] == record.machine.grant_id for write in world.writes)


def _is_quiet(world: World, r: int) -> bool:
    source, sink = world.sources[r], world.sinks[r]
    busy = (source and source.jobs) or (sink and sink.verifying) or any(write[2] == r for write in world.writes)
    return not busy and not any(message[1] == r for message in world.network)


def _fault_events(world: World) -> Iterator[Event]:
    for fault in world.setting.faults:
        yield from _FAULTS[fault](world)


def _live_sources(world: World) -> list[int]:
    return [r for r, record in enumerate(world.sources) if record and record.machine.state is not SourceState.CLOSED]


def _live_sinks(world: World) -> list[int]:
    return [r for r, record in enumerate(world.sinks) if record and not world.sink_ends[r]]


def _failing_pushes(world: World) -> Iterator[Event]:
    """On a one-sided transport a failed write has stopped storing before its failure is known."""
    for r, record in enumerate(world.sources):
        if record and record.jobs and record.jobs[0][0] in ("push", "finalize") and not record.failed:
            stores = any(write[0] == record.machine.grant_id for write in world.writes)
            if not (world.setting.one_sided and stores):
                yield ("fail_push", r)


def _ending_prompts(world: World) -> Iterator[Event]:
    for r, record in enumerate(world.sources):
        computes = record and record.machine.state in (SourceState.PARKED, SourceState.PUSHING)
        if computes and record.has_blocks and not record.is_computed:
            yield ("compute", r, True)


_FAULTS = {
    "lose": lambda w: (("lose", message) for message in w.network),
    "duplicate": lambda w: (("duplicate", message) for message in w.network),
    "corrupt": lambda w: (("land", write, "bad") for write in w.writes),
    "crash_source": lambda w: (("crash_source",),) if w.source_epoch < 2 else (),
    "crash_sink": lambda w: (("crash_sink",),) if w.sink_epoch < 12 else (),
    "cancel": lambda w: (("cancel", r) for r, placed in enumerate(w.placed) if placed),
    "source_deadline": lambda w: (("source_deadline", r) for r in _live_sources(w)),
    "sink_deadline": lambda w: (("sink_deadline", r) for r in _live_sinks(w)),
    "lease": lambda w: (("lease", r) for r in _live_sinks(w) if w.sinks[r].contents),
    "suspect_source": lambda w: (("sink_loses_source", w.source_epoch),) if w.source_epoch not in w.lost else (),
    "suspect_sink": lambda w: (("source_loses_sink", w.sink_epoch),) if _live_sources(w) else (),
    "push_fails": _failing_pushes,
    "all_finished": _ending_prompts,
    "forget": lambda w: (
        ("forget", r) for r, each in enumerate(w.sources) if each and each.machine.state is SourceState.CLOSED
    ),
}


# --- what an event does -------------------------------------------------------------------------------------


def successor(setting: Setting, state: tuple, event: Event, cost: int) -> tuple:
    """Raises ViolationError when the event breaks a promise."""
    world = World(setting, state)
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
    if message[0] in TO_SOURCE:
        _hear_on_source(world, message)
    else:
        _hear_on_sink(world, message)


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
    if kind == "claim":
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
    world.queue, world.lost, world.fenced = [], set(), set()


def _decode_ends(world: World, r: int) -> None:
    world.held[r] = 0
    world.grant_in_order()


def _forget(world: World, r: int) -> None:
    world.sources[r] = None


_ACTIONS = {
    "deliver": _deliver,
    "duplicate": _hear,
    "lose": lambda world, message: world.network.discard(message),
    "land": _land,
    "crash_source": _crash_source,
    "crash_sink": _crash_sink,
    "decode_ends": _decode_ends,
    "forget": _forget,
    "schedule": lambda world, r: world.on_source(r, SourceEvent.CLAIM),
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
