"""Breadth-first exploration: every state that a setting allows, checked; violations with the shortest path to them."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from tests.worlds.events import events_of
from tests.worlds.setting import ViolationError


@dataclass(frozen=True)
class Report:
    num_states: int
    num_transitions: int
    num_final: int
    num_lives: int  # states of single nodes
    outcomes: frozenset[Any]  # of final states


class _Search:
    def __init__(self, universe: Any, max_states: int) -> None:
        self.universe, self.max_states = universe, max_states
        first = universe.start()
        self.numbers = {first: 0}
        self.states = [first]
        self.reached_by: list[tuple[int, tuple]] = [(-1, ())]  # (state before, event)
        self.free_before: list[list[int]] = [[]]  # states from which an event without a fault leads here
        self.final: list[int] = []
        self.num_transitions = 0

    def run(self) -> Report:
        at = 0
        while at < len(self.states):
            try:
                self._expand(at, self.states[at])
            except AssertionError as error:  # ours, or the nodes' own
                raise ViolationError(f"{error}\n{self._path(at)}") from error
            at += 1
            assert len(self.states) <= self.max_states, f"more than {self.max_states} states: tighten the setting"
        self._check_progress()
        outcomes = frozenset(self.universe.world(self.states[at]).outcome() for at in self.final)
        num_lives = len(self.universe.lives)
        return Report(len(self.states), self.num_transitions, len(self.final), num_lives, outcomes)

    def _expand(self, at: int, state: tuple) -> None:
        world = self.universe.world(state)
        world.check()
        is_final = True
        for event, cost in events_of(world):
            try:
                after = self._successor(state, event, cost)
            except AssertionError as error:
                raise ViolationError(f"{error}\n  at last: {self._readable(event)}") from error
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
            world.check_quiet()

    def _successor(self, state: tuple, event: tuple, cost: int) -> tuple:
        world = self.universe.world(state)
        world.faults_left -= cost
        world.apply(event)
        return world.freeze()  # type: ignore[no-any-return]

    def _check_progress(self) -> None:
        """From each state a final one is reachable without a further fault: no deadlock, no circle without exit."""
        reaches, stack = bytearray(len(self.states)), list(self.final)
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
        lines = [self.universe.world(self.states[at]).text()]
        while at:
            at, event = self.reached_by[at]
            lines.append(f"  {self._readable(event)}")
        return "\n".join([f"setting {self.universe.setting.name}, shortest path:", *reversed(lines)])

    def _readable(self, event: tuple) -> str:
        return self.universe.readable(event)  # type: ignore[no-any-return]


def explore(setting: Any, max_states: int = 2_000_000) -> Report:
    """Raises ViolationError with the shortest path to the first broken promise. Collects no garbage: all states live to
    the end, and looking through them again and again takes a sixth of the time."""
    gc.disable()
    try:
        return _Search(setting.universe(), max_states).run()
    finally:
        gc.enable()
