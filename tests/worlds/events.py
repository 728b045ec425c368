"""What may happen next in a state of a world, and the faults that each of it costs."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.handoff import KVPull
from tests.worlds.node import Possible
from tests.worlds.world import Event, World

TIMERS = ("source_timer", "sink_timer", "ask_again")


def events_of(world: World) -> Iterator[tuple[Event, int]]:
    """Everything that can happen next, with the faults that it costs.

    Timers fire only while nothing of their hand-off is under way: one that fires earlier puts a second copy of a
    message beside the first, and that is what the fault "duplicate" does."""
    busy = _busy(world)
    is_calm = world.setting.is_calm and world.faults_left == world.setting.max_faults
    for event in (*world.asked(), *_free_events(world)):
        yield event, 0
    for name in world.nodes:
        for each in world.look(name).possible:
            if not world.allows(each.event) or (is_calm and each.event[0] in TIMERS):
                continue
            waits = each.waits_for in busy
            if (not each.fault and not waits) or _is_last(world, name, each, busy):
                yield ("at", name, *each.event), 0
            elif world.faults_left and each.fault in world.setting.faults:
                yield ("at", name, *each.event), 1
    if world.faults_left:
        for event in (*_fault_events(world), *world.wrong()):
            yield event, 1


def _busy(world: World) -> set[AttemptKey]:
    """Hand-offs of which something is under way."""
    busy = {world.universe.key_of(letter) for letter in world.network}
    return busy | {key for _, key in world.transport.jobs} | {write[2] for write in world.transport.writes}


def _is_last(world: World, name: str, each: Possible, busy: set[AttemptKey]) -> bool:
    """A node that took its peer for lost without reason tells it nothing: the peer's own deadline ends what is
    left. Free only where the other side has ended and nothing is under way, so that no deadlock hides behind it."""
    key = each.waits_for
    if key is None or key in busy or not each.fault.endswith("deadline"):
        return False
    if key not in world.look(name).open or any(key in world.look(other).open for other in world.nodes if other != name):
        return False
    return world.is_over_elsewhere(name, key)


def _free_events(world: World) -> Iterator[Event]:
    for letter in world.network:
        if isinstance(world.universe.letters[letter][2], KVPull):
            yield "hear_pull", letter, True
            yield "hear_pull", letter, False
        else:
            yield "deliver", letter
    for write in world.transport.writes:
        yield "land", write, "good"
    for owner in world.transport.jobs:
        if world.transport.can_run(owner, world.setting.one_sided):
            yield "run_job", *owner
    yield from _losses(world)
    for fence in world.transport.fences:
        if fence[1] != world.life(fence[1].node_id) or world.setting.fences_living:
            yield "end_fence", fence


def _losses(world: World) -> Iterator[Event]:
    """Lives that have ended, and a node that has yet to notice."""
    for dead in [life for name in world.nodes for life in world.past_lives(name)]:
        for name in world.nodes:
            is_its_sink = dead in world.look(name).sinks.values()
            if name == dead.node_id or not (is_its_sink or world.setting.grants(name)):
                continue
            if (name, dead) not in world.transport.lost:
                yield "at", name, "lose", dead
            elif is_its_sink:
                yield "at", name, "be_refused", dead


def _fault_events(world: World) -> Iterator[Event]:
    faults, transport = world.setting.faults, world.transport
    if "lose" in faults:
        yield from (("lose", letter) for letter in world.network)
    if "duplicate" in faults:
        for letter in world.network:
            is_pull = isinstance(world.universe.letters[letter][2], KVPull)
            yield ("hear_pull", letter, True, True) if is_pull else ("deliver", letter, True)
    if "corrupt" in faults:
        yield from (("land", write, "bad") for write in transport.writes)
    if "push_fails" in faults:
        for owner in transport.jobs:
            if transport.can_fail(owner, world.setting.one_sided):
                yield "fail_push", *owner
