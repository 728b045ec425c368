"""Two nodes' pools, counted in blocks, and everybody who wants or holds some of them: requests that grow, are
preempted, load or pull their prefix first, and prompts that are handed from one node to the other.

Who may take, hold or must give back is asked of the real Reservations, put up anew in each state. What is modelled is
what their askers want: the planner's line, the sink's line, stages of loads, pulls and hand-offs. Nothing is lost and
nothing times out: a state that only a deadline would end is a dead end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from tandem.engine.blocks.reservations import Hold, Kind, Reservations


@dataclass(frozen=True)
class Sequence:
    """A request of one node, and how it stands. Sizes are in blocks; who comes first in a setting is more important."""

    pool: int
    blocks: int  # to start
    most: int  # when it ends
    hits: int = 0  # of them, cached when everything begins
    more: int = 0  # blocks after the hits that a lower tier, or a peer, has
    via: str = ""  # "load", "pull"
    stage: str = "absent"  # absent, waits, runs, over
    held: int = 0
    way: str = "wanted"  # fetched, loading, loaded, dropped; asked, offered, granted, held, left, quarantine; over

    @property
    def parts(self) -> tuple:
        return self.stage, self.held, self.way, self.hits


@dataclass(frozen=True)
class Handoff:
    """A prompt that pool 0 computes for pool 1, where it goes on as a sequence."""

    blocks: int
    most: int
    hits: int = 0  # cached at the sink when everything begins
    source: str = "absent"  # idle, asked, claiming, parked, done, pushing, over
    sink: str = "absent"  # ticket, queued, granted, over
    pinned: int = 0
    has_blocks: bool = False  # at its source
    pool = 1

    @property
    def parts(self) -> tuple:
        return self.source, self.sink, self.pinned, self.has_blocks, self.hits


Actor = Sequence | Handoff


@dataclass(frozen=True)
class Setting:
    name: str
    sizes: tuple[int, int]
    actors: tuple[Actor, ...]
    headroom: int = 0
    most_parked: int = 8
    asks_early: bool = False  # a source is asked to claim before there is room for the prompt
    reservations: type[Reservations] = Reservations
    flaws: frozenset[str] = frozenset()


class _Pool:
    """What Reservations ask of a pool. Cached blocks have no numbers here: hits are as many of anything."""

    def __init__(self, world: World, index: int, size: int) -> None:
        self.world, self.index, self.size = world, index, size

    @property
    def num_free(self) -> int:
        return self.size - sum(self.world.used(each, self.index) for each in self.world.actors)

    def num_unused(self, hits: range) -> int:
        return len(hits)


class World:
    """One state, opened: apply one event, then freeze."""

    def __init__(self, setting: Setting, state: tuple) -> None:
        self.setting = setting
        self.actors, self.queue = list(state[0]), list(state[1])
        self.pools = [_Pool(self, index, size) for index, size in enumerate(setting.sizes)]
        self.reservations = [setting.reservations(pool, pool.size) for pool in self.pools]
        self._holds: list[list[tuple[Reservations, Hold]]] = [[] for _ in self.actors]
        for index in range(len(self.actors)):
            self._book(index)

    def freeze(self) -> tuple:
        return tuple(self.actors), tuple(self.queue)

    def used(self, actor: Actor, pool: int) -> int:
        if isinstance(actor, Handoff):
            at_sink = {"ticket": actor.pinned, "queued": actor.pinned, "granted": actor.blocks}.get(actor.sink, 0)
            return at_sink if pool else actor.blocks * actor.has_blocks
        served = actor.more if actor.way in ("offered", "left", "granted", "quarantine") and actor.via == "pull" else 0
        if pool != actor.pool:
            return served
        holds_more = actor.way in ("loading", "loaded", "dropped", "granted", "quarantine", "held")
        holds_hits = actor.way in ("fetched", "loading", "loaded", "dropped", "asked", "offered", "granted", "held")
        waits = actor.hits * (holds_hits and actor.stage != "runs") + actor.more * holds_more
        return actor.held + waits

    # --- holds ----------------------------------------------------------------------------------------------

    def _book(self, index: int) -> None:
        actor = self.actors[index]
        if isinstance(actor, Handoff):
            if actor.sink in ("ticket", "queued") and actor.pinned:
                self._add(1, Kind.HITS, actor.pinned, index, lambda: self._change(index, pinned=0))
            kinds = {"parked": Kind.PARKED, "done": Kind.PARKED}
            kinds |= dict.fromkeys(("asked", "claiming", "pushing"), Kind.CLAIMED)
            if actor.source in kinds:
                self._add(0, kinds[actor.source], actor.blocks, index, lambda: None)
        elif actor.via == "load" and actor.way in ("fetched", "loading", "loaded", "dropped"):
            self._add(actor.pool, Kind.LOAD, actor.hits + actor.more, index, partial(self._drop_load, index))
        elif actor.via == "pull" and actor.way in ("asked", "offered", "granted", "held"):
            self._add(actor.pool, Kind.PULL, actor.hits + actor.more, index, partial(self._drop_pull, index))
        if isinstance(actor, Sequence) and actor.way in ("offered", "granted", "left", "quarantine"):
            self._add(1 - actor.pool, Kind.OFFER, actor.more, index, partial(self._withdraw, index))

    def _add(self, pool: int, kind: Kind, num_blocks: int, index: int, give_back: Callable[[], None]) -> None:
        reservations = self.reservations[pool]
        self._holds[index].append((reservations, reservations.add(kind, num_blocks, give_back, index)))

    def _change(self, index: int, **parts: object) -> None:
        self.actors[index] = replace(self.actors[index], **parts)  # type: ignore[arg-type]
        for reservations, hold in self._holds[index]:
            reservations.end(hold)
        self._holds[index].clear()
        self._book(index)

    def _drop_load(self, index: int) -> None:
        way = {"loading": "dropped", "dropped": "dropped"}.get(self.actors[index].way, "over")
        self._change(index, way=way)

    def _drop_pull(self, index: int) -> None:
        way = {"offered": "left", "granted": "quarantine"}.get(self.actors[index].way, "over")
        self._change(index, way=way)

    def _withdraw(self, index: int) -> None:
        if self.actors[index].way == "offered":
            self._change(index, way="over")

    # --- the scheduler --------------------------------------------------------------------------------------

    def grow(self, index: int) -> None:
        """StepPlanner._make_room."""
        actor = self.actors[index]
        if self._room(actor.pool, 1, Kind.RUN, index):
            self._change(index, held=actor.held + 1)
            self._evict(actor.pool)
            return
        last = max(i for i, each in enumerate(self.actors) if each.pool == actor.pool and _runs(each))
        if last > index:
            self._change(last, stage="waits", blocks=self.actors[last].held, held=0)

    def admit(self, pool: int) -> None:
        """StepPlanner._admit of everybody who waits: who lacks blocks holds the line."""
        is_open = True
        for index, actor in enumerate(self.actors):
            if not _waits(actor, pool):
                continue
            if isinstance(actor, Sequence):
                is_open = is_open and self._admit_sequence(index)
            elif is_open or (actor.source == "pushing" and "granted_wait_in_line" not in self.setting.flaws):
                kind = Kind.CLAIM if actor.source == "pushing" else Kind.START
                has_room = self._room(0, actor.blocks, kind, index)
                is_open = is_open and has_room
                if has_room or (self.setting.asks_early and actor.source in ("idle", "asked")):
                    self._start_prompt(index)

    def _admit_sequence(self, index: int) -> bool:
        actor = self.actors[index]
        found = actor.hits + actor.more * (actor.way in ("loaded", "held"))
        holds = actor.way not in ("wanted", "over", "dropped", "left", "quarantine")
        hits = range(0 if holds else actor.hits)
        if not self._room(actor.pool, actor.blocks - found, Kind.START, index, hits):
            return False
        actor = self.actors[index]
        if actor.via and actor.way == "wanted":
            self._begin(index)
        elif actor.way == "fetched":
            self._load(index)
        elif actor.way in ("wanted", "over", "loaded", "held"):
            self._change(index, stage="runs", held=actor.blocks, way="over", more=0, hits=0)
            self._evict(actor.pool)
        return True

    def _begin(self, index: int) -> None:
        """TierManager.prepare, Puller.prepare."""
        actor = self.actors[index]
        if not self.reservations[actor.pool].may_wait_with(actor.hits + actor.more):
            moves = ("asked", "offered", "granted") if actor.via == "pull" else ("loading", "dropped")
            others = [each for each in self.actors if isinstance(each, Sequence) and each.pool == actor.pool]
            if not any(each.way in moves and each.via == actor.via for each in others):
                self._change(index, way="over")
        elif actor.via == "pull":
            self._change(index, way="asked")
        else:
            self._change(index, way="fetched")
            self._load(index)

    def _load(self, index: int) -> None:
        actor = self.actors[index]
        if actor.more <= self.pools[actor.pool].num_free:
            self._change(index, way="loading")
            self._evict(actor.pool)

    def _start_prompt(self, index: int) -> None:
        """PushedPrompts.get_num_new_matched_tokens."""
        actor, reservations = self.actors[index], self.reservations[0]
        if actor.source in ("idle", "asked") and not reservations.may_claim(actor.blocks):
            self._change(index, source="asked")
        elif actor.source in ("idle", "asked"):
            self._change(index, source="claiming")
        elif actor.source == "pushing":
            self._change(index, has_blocks=True)
        else:
            hold = next(hold for hold in reservations._holds[Kind.CLAIMED] if hold.owner == index)
            if reservations.may_park(hold, self.setting.most_parked):
                self._change(index, source="parked", has_blocks=True)

    def _room(self, pool: int, num: int, kind: Kind, index: int, hits: range = range(0)) -> bool:
        return self.reservations[pool].make_room(num, kind, index, hits)

    def _evict(self, pool: int) -> None:
        """Cached blocks that nobody holds go when their room is taken, the least important's first."""
        for index in reversed(range(len(self.actors))):
            actor = self.actors[index]
            if actor.pool == pool and self._has_loose_hits(actor):
                self._change(index, hits=min(actor.hits, max(0, self._num_loose(pool, index))))

    def _num_loose(self, pool: int, index: int) -> int:
        """Free blocks, less those that others' hits lie in."""
        others = [each for i, each in enumerate(self.actors) if i < index and each.pool == pool]
        return self.pools[pool].num_free - sum(each.hits for each in others if self._has_loose_hits(each))

    def _has_loose_hits(self, actor: Actor) -> bool:
        if isinstance(actor, Handoff):
            return not actor.pinned
        return actor.way in ("wanted", "over", "dropped", "left", "quarantine") and actor.stage != "runs"

    # --- the sink -------------------------------------------------------------------------------------------

    def grant_in_order(self, is_patient: bool = True) -> None:
        """SinkLine.grant_in_order."""
        while self.queue:
            index = self.queue[0]
            actor = self.actors[index]
            if actor.hits > actor.pinned:
                self._change(index, pinned=actor.hits)
            needed = actor.blocks - self.actors[index].pinned
            room = self.pools[1].num_free - self.setting.headroom
            if needed > room and not self._make_way(index, needed, is_patient):
                return
            self.queue.pop(0)
            self._change(index, sink="granted", pinned=0, hits=0, source="pushing")
            self._evict(1)

    def _make_way(self, index: int, needed: int, is_patient: bool) -> bool:
        """SinkLine._make_room."""
        tickets = [each for each in self.actors if isinstance(each, Handoff) and each.sink in ("ticket", "queued")]
        if self.pools[1].size - self.pools[1].num_free <= sum(each.pinned for each in tickets):
            return self._room(1, needed, Kind.CLAIM, index)
        wanted = needed + self.setting.headroom
        return not is_patient and self._room(1, wanted, Kind.CLAIM, index) and wanted <= self.pools[1].num_free

    # --- events ---------------------------------------------------------------------------------------------

    def events(self) -> Iterator[tuple]:
        yield from (("admit", pool) for pool in range(2) if any(_waits(actor, pool) for actor in self.actors))
        if self.queue:
            yield ("run_out_of_patience",)
        for index, actor in enumerate(self.actors):
            names = _sequence_events(actor) if isinstance(actor, Sequence) else _handoff_events(actor)
            yield from ((name, index) for name in names)

    def apply(self, event: tuple) -> None:
        if event[0] == "run_out_of_patience":
            self.grant_in_order(is_patient=False)
            return
        getattr(self, event[0])(event[1])
        self.grant_in_order()

    def arrive(self, index: int) -> None:
        if isinstance(self.actors[index], Handoff):
            self._change(index, source="idle", sink="ticket", pinned=self.actors[index].hits)
        else:
            self._change(index, stage="waits")

    def end(self, index: int) -> None:
        self._change(index, stage="over", held=0, hits=0)

    def copied(self, index: int) -> None:
        self._change(index, way="loaded" if self.actors[index].way == "loading" else "over")

    def serve(self, index: int) -> None:
        """PullServer._answer: what is offered is cached there, and was free."""
        actor = self.actors[index]
        peer = 1 - actor.pool
        room = min(self.pools[peer].num_free, max(0, self.reservations[peer].num_spare()))
        self._change(index, way="offered" if room >= actor.more else "over")
        self._evict(peer)

    def answer(self, index: int) -> None:
        """SinkLine._grant_pulls."""
        actor = self.actors[index]
        fits = actor.more <= self.pools[actor.pool].num_free - self.setting.headroom
        self._change(index, way="granted" if fits else "over")
        self._evict(actor.pool)

    def land(self, index: int) -> None:
        self._change(index, way="held")

    def hear(self, index: int) -> None:
        """Nobody reads or writes any more for a pull that was given up."""
        self._change(index, way="over")

    def claim(self, index: int) -> None:
        self._change(index, sink="queued")
        self.queue.append(index)

    def compute(self, index: int) -> None:
        self._change(index, source="done")

    def commit(self, index: int) -> None:
        actor = self.actors[index]
        self.actors[index] = Sequence(1, actor.blocks, actor.most, stage="runs", held=actor.blocks, way="over")


def _runs(actor: Actor) -> bool:
    return isinstance(actor, Sequence) and actor.stage == "runs"


def _waits(actor: Actor, pool: int) -> bool:
    """In the line of this pool's scheduler."""
    if isinstance(actor, Sequence):
        return actor.pool == pool and actor.stage == "waits"
    return pool == 0 and actor.source in ("idle", "asked", "claiming", "pushing") and not actor.has_blocks


def _sequence_events(actor: Sequence) -> list[str]:
    ways = {"loading": "copied", "dropped": "copied", "asked": "serve", "offered": "answer", "granted": "land"}
    ways |= {"left": "hear", "quarantine": "hear"}
    stages = {"absent": "arrive", "runs": "grow" if actor.held < actor.most else "end"}
    return [names[key] for names, key in ((ways, actor.way), (stages, actor.stage)) if key in names]


def _handoff_events(actor: Handoff) -> list[str]:
    names = ["arrive"] if actor.source == "absent" else []
    if actor.source in ("claiming", "parked", "done") and actor.sink == "ticket":
        names.append("claim")
    if actor.source == "parked":
        names.append("compute")
    if actor.source == "pushing" and actor.has_blocks:
        names.append("commit")
    return names


def explore(setting: Setting, max_states: int = 200_000) -> int:
    """Visits every state, breadth-first; how many there are. AssertionError, with the way there, when no further events
    lead from one of them to the end of everybody, or a pool gives away more than it has."""
    first = (setting.actors, ())
    numbers, states, before, ends = {first: 0}, [first], [[]], []
    reached_by: list[tuple[int, tuple]] = [(-1, ())]
    for at, state in enumerate(states):
        assert len(states) <= max_states, "tighten the setting"
        opened = World(setting, state)
        if all(_is_over(actor) for actor in opened.actors):
            ends.append(at)
            continue
        assert all(pool.num_free >= 0 for pool in opened.pools), _way(states, reached_by, at)
        for event in opened.events():
            world = World(setting, state)
            world.apply(event)
            after = world.freeze()
            number = numbers.setdefault(after, len(states))
            if number == len(states):
                states.append(after)
                before.append([])
                reached_by.append((at, event))
            before[number].append(at)
    reaches = set(ends)
    todo = list(ends)
    while todo:
        new = [each for each in before[todo.pop()] if each not in reaches]
        reaches.update(new)
        todo += new
    stuck = next((at for at in range(len(states)) if at not in reaches), None)
    assert stuck is None, f"nobody can go on: {_way(states, reached_by, stuck)}"
    return len(states)


def _is_over(actor: Actor) -> bool:
    return isinstance(actor, Sequence) and actor.stage == "over" and actor.way == "over"


def _way(states: list[tuple], reached_by: list[tuple[int, tuple]], at: int) -> str:
    lines = [str([actor.parts for actor in states[at][0]])]
    while at:
        at, event = reached_by[at]
        lines.append(" ".join(map(str, event)))
    return "\n  ".join(reversed(lines))
