"""What may happen next in a state of the world, and the faults that each of it costs."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVPull
from tests.worlds.node import Possible
from tests.worlds.world import Event, World


def events_of(world: World) -> Iterator[tuple[Event, int]]:
    """Everything that can happen next, with the faults that it costs.

    Timers fire only while nothing of their hand-off is under way: one that fires earlier puts a second copy of a
    message beside the first, and that is what the fault "duplicate" does."""
    busy = _busy(world)
    yield from _free_events(world)
    for name in world.nodes:
        for each in world.look(name).possible:
            waits = each.waits_for in busy
            if (not each.fault and not waits) or _is_last(world, name, each, busy):
                yield ("at", name, *each.event), 0
            elif world.faults_left and each.fault in world.setting.faults:
                yield ("at", name, *each.event), 1
    if world.faults_left:
        for event in _fault_events(world):
            yield event, 1


def _busy(world: World) -> set[AttemptKey]:
    """Hand-offs of which something is under way."""
    busy = {world.universe.key_of(letter) for letter in world.network}
    return busy | {key for _, key in world.transport.jobs} | {write[2] for write in world.transport.writes}


def _is_last(world: World, name: str, each: Possible, busy: set[AttemptKey]) -> bool:
    """A node that took its peer for lost without reason tells it nothing: the peer's own deadline ends what is
    left. Free only where the other side has ended and nothing is under way, so that no deadlock hides behind it."""
    key, other = each.waits_for, "d" if name == "p" else "p"
    if key is None or key in busy or not each.fault.endswith("deadline"):
        return False
    if key not in world.look(name).open or key in world.look(other).open:
        return False
    is_due = any(kind == "submit" and side == other and f"r{r}" == key.request_id for kind, side, r in world.pending)
    return not is_due and (key in world.look(other).ended or (other, key) in world.ends)


def _free_events(world: World) -> Iterator[tuple[Event, int]]:
    for r, placed in enumerate(world.placed):
        if placed is None:
            yield ("place", r), 0
    for kind, side, r in world.pending:
        if kind == "submit":
            yield ("submit", side, r), 0
        elif ("submit", side, r) not in world.pending:  # a cancel travels behind its submit
            yield ("arrive_cancel", side, r), 0
    for letter in world.network:
        if isinstance(world.universe.letters[letter][2], KVPull):
            yield ("hear_pull", letter, True), 0
            yield ("hear_pull", letter, False), 0
        else:
            yield ("deliver", letter), 0
    for write in world.transport.writes:
        yield ("land", write, "good"), 0
    for owner in world.transport.jobs:
        if world.transport.can_run(owner, world.setting.one_sided):
            yield ("run_job", *owner), 0
    for sink in {*world.look("p").sinks.values()} - {world.life("d")}:
        if ("p", sink) not in world.transport.lost:
            yield ("at", "p", "lose", sink), 0
    for source in [NodeKey("p", epoch) for epoch in range(1, world.epochs["p"])]:
        if ("d", source) not in world.transport.lost:
            yield ("at", "d", "lose", source), 0
    for fence in world.transport.fences:
        if fence[1] != world.life("p") or world.setting.fences_living:
            yield ("end_fence", fence), 0


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
    if "crash_source" in faults and world.epochs["p"] < 2:
        yield ("crash", "p")
    if "crash_sink" in faults and world.epochs["d"] < 12:
        yield ("crash", "d")
    if "cancel" in faults:
        yield from (("cancel", r) for r, placed in enumerate(world.placed) if placed)
    is_lost = ("d", world.life("p")) in transport.lost
    if "suspect_source" in faults and not is_lost:
        yield ("at", "d", "suspect_source", world.life("p"))
    if "reconnect" in faults and is_lost:
        yield ("reconnect",)
    if "suspect_sink" in faults and world.look("p").sinks:
        yield ("at", "p", "suspect_sink", world.life("d"))
    if "push_fails" in faults:
        for owner in transport.jobs:
            if transport.can_fail(owner, world.setting.one_sided):
                yield ("fail_push", *owner)
