"""Visits breadth-first every state of nodes that leave blocks to each other (keeping_world.py). What an event makes of
a node is computed once, however many states of the cluster it occurs in."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import ge

from keeping_world import Event, Node, Setting, Told


class BrokenError(AssertionError):
    """A promise is broken; with the shortest way to it."""


@dataclass(frozen=True)
class Report:
    """What was visited: states, those of single nodes, and states in which a block is bare somewhere."""

    num_states: int
    num_lives: int
    num_bare: int


@dataclass(frozen=True)
class _Look:
    """What the others have to know of a node's state."""

    events: tuple[Event, ...]
    num_found: tuple[int, ...]
    told: Told
    num_aged: int
    has_bare: bool


State = tuple[tuple[int, ...], int]  # nodes' states by number, and how many more requests may come


class _Search:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._lives: list[bytes] = []
        self.looks: list[_Look] = []
        self._numbers: dict[tuple, int] = {}
        self._known: dict[tuple, int] = {}
        first = tuple(self._number(Node(setting, index)) for index in range(len(setting.nodes)))
        start = (first, setting.most_used)
        self._came_by: dict[State, tuple[State | None, int, Event]] = {start: (None, 0, ())}
        self._states: list[State] = [start]

    def run(self, most_states: int) -> Report:
        for state in self._states:
            for index, event, after in self._successors(state):
                if after not in self._came_by:
                    self._came_by[after] = (state, index, event)
                    self._states.append(after)
                    assert len(self._states) <= most_states, f"more than {most_states} states: tighten the setting"
        num_bare = sum(any(self.looks[each].has_bare for each in nodes) for nodes, _ in self._states)
        return Report(len(self._states), len(self._lives), num_bare)

    def _successors(self, state: State) -> Iterator[tuple[int, Event, State]]:
        nodes, uses_left = state
        looks = [self.looks[each] for each in nodes]
        num_aged = sum(each.num_aged for each in looks)
        for index, number in enumerate(nodes):
            for event in looks[index].events:
                is_use = event[0] in ("use", "hold")
                if is_use and not uses_left:
                    continue
                told = tuple(each.told for each in looks) if event[0] == "look" else ()
                try:
                    after = self._after(number, event, told)
                    if after == number:
                        continue
                    following = (*nodes[:index], after, *nodes[index + 1 :])
                    now = num_aged + self.looks[after].num_aged - looks[index].num_aged
                    if now > self.setting.most_aged:
                        continue
                    if not now and not all(map(ge, self.looks[after].num_found, looks[index].num_found)):
                        left = _most(self.looks[each] for each in following)
                        assert all(map(ge, left, _most(looks))), "the last copy is lost, though none has aged"
                except AssertionError as error:
                    raise BrokenError(f"{error}\n{self._way(state)}, {self._name(index, event)}") from error
                yield index, event, (following, uses_left - is_use)

    def _after(self, number: int, event: Event, told: tuple[Told, ...]) -> int:
        key = (number, event, told)
        after = self._known.get(key)
        if after is None:
            node: Node = pickle.loads(self._lives[number])
            node.do(event, dict(zip(self.setting.nodes, told, strict=bool(told))))
            after = self._known[key] = self._number(node)
        return after

    def _number(self, node: Node) -> int:
        content = (node.name, *node.content())
        if content not in self._numbers:
            self._numbers[content] = len(self._lives)
            self._lives.append(pickle.dumps(node))
            self.looks.append(
                _Look(tuple(node.events()), node.num_found(), node.told(), len(node.aged), node.has_bare())
            )
        return self._numbers[content]

    def _name(self, index: int, event: Event) -> str:
        return " ".join(map(str, (self.setting.nodes[index], *event)))

    def _way(self, state: State | None) -> str:
        events = []
        while state is not None:
            state, index, event = self._came_by[state]
            events.append(self._name(index, event))
        return f"{self.setting.name}: " + ", ".join(reversed(events[:-1]))


def _most(looks: Iterable[_Look]) -> tuple[int, ...]:
    """How much each request finds on some node."""
    return tuple(map(max, zip(*(each.num_found for each in looks), strict=True)))


def explore(setting: Setting, most_states: int = 1_000_000) -> Report:
    """Raises BrokenError with the shortest way to the first broken promise."""
    return _Search(setting).run(most_states)
