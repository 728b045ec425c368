"""Everything that can happen next in the model of handoff_world.py: (event, its cost in faults).

Timers fire only while nothing of their request is under way (message, job, write, verification): one that fires earlier
puts a second copy of a message beside the first, and that is what the fault "duplicate" does. This and the set of
messages (a message sent again while its twin is under way is one message) are the only reductions.
"""

from __future__ import annotations

from collections.abc import Iterator

from handoff_records import SOURCE_OVER, SourceRecord
from handoff_world import World

from tandem.kv_connector.protocol.sink_table import SinkState
from tandem.kv_connector.protocol.source_table import SourceState

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
        if message[0] == "pull":
            yield ("find_nothing", message), 0
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
    for epoch in set(world.fences):
        if epoch != world.source_epoch or world.setting.fences_living:
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
        may_claim = _fits_beside_parked(world, r) or not world.setting.claims_what_fits
        yield ("schedule" if may_claim else "ask_to_claim", r), 0
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
    if record.machine.state is SinkState.EXPECTING and record.machine.source_epoch in world.lost:
        yield ("source_stays_away", r), 0
    asks = r in world.setting.pulls and "asks_once" not in world.setting.flaws
    if record.machine.state is SinkState.EXPECTING and asks and _is_quiet(world, r):
        yield ("ask", r), 0
    if record.machine.state in (SinkState.RESENDING, SinkState.QUARANTINED) and _is_quiet(world, r):
        yield ("sink_timer", r), 0


def _parked_blocks(world: World) -> int:
    return sum(world.prompt_blocks(r) for r, each in enumerate(world.sources) if each and each.machine.state in _PARKED)


def _fits_beside_parked(world: World, r: int) -> bool:
    return _parked_blocks(world) + world.prompt_blocks(r) <= world.setting.source_blocks


def _may_start(world: World, r: int) -> bool:
    """SourceManager.get_num_new_matched_tokens and _may_park, then the scheduler's own look at the pool."""
    setting, record = world.setting, world.sources[r]
    need = world.prompt_blocks(r)
    used = sum(world.prompt_blocks(o) for o, other in enumerate(world.sources) if other and other.has_blocks)
    if used + need > setting.source_blocks:
        return False
    if record.machine.state is not SourceState.CLAIMING:
        return record.machine.state is SourceState.PUSHING
    others = [(o, other) for o, other in enumerate(world.sources) if other and o != r]
    unfinished = [world.prompt_blocks(o) for o, other in others if _is_unfinished(other)]
    room = setting.source_blocks - max(unfinished, default=0)
    if "parks_without_bound" in setting.flaws:
        return True
    return _parked_blocks(world) + need <= min(setting.max_parked, room)


def _is_unfinished(record: SourceRecord) -> bool:
    state = record.machine.state
    return state in _UNFINISHED or (state is SourceState.IDLE and record.was_asked)


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
    "reconnect": lambda w: (("reconnect",),) if w.source_epoch in w.lost else (),
    "suspect_sink": lambda w: (("source_loses_sink", w.sink_epoch),) if _live_sources(w) else (),
    "push_fails": _failing_pushes,
    "all_finished": _ending_prompts,
    "forget": lambda w: (
        ("forget", r) for r, each in enumerate(w.sources) if each and each.machine.state is SourceState.CLOSED
    ),
}
