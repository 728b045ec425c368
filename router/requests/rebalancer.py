"""Moves running sequences where the policy wants them. One per router process, on its event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tandem.engine.contracts.config import RouterOptions
from tandem.router.placing.rebalancing import MigrationPolicy
from tandem.router.placing.view import NodeView
from tandem.router.requests.actions import Action
from tandem.router.requests.generation import Generation

CarryOut = Callable[[Generation, Sequence[Action]], None]


class Nodes(Protocol):
    """The nodes that can be moved from and to, with their load."""

    def serving(self) -> list[NodeView]: ...

    def expect_sequence(self, view: NodeView, now: float) -> None: ...


class Rebalancer:
    """Starts moves as the policy decides. `carry_out` carries out the actions of a generation's machine."""

    def __init__(self, options: RouterOptions, nodes: Nodes, carry_out: CarryOut) -> None:
        self._within_s = options.timeouts.migrate_s
        self._policy = MigrationPolicy(options.rebalance_kv, options.placement == "elastic")
        self._nodes, self._carry_out = nodes, carry_out

    def tick(self, generations: Iterable[Generation], now: float) -> None:
        nodes = self._nodes.serving()
        for source, most in self._policy.sources(nodes, now):
            known = list(generations)
            room = most - sum(generation.machine.moves.num_away_from(source.key) for generation in known)
            for generation, sample in self._candidates(known, source, now)[: max(0, room)]:
                self._move(generation, sample, source, nodes, now)

    def _candidates(
        self, generations: Sequence[Generation], source: NodeView, now: float
    ) -> list[tuple[Generation, int]]:
        """(generation, sample index) that may move now, at most one sample of each prompt, since the others then find
        its blocks at the target. The longest come first: moving one large sequence interrupts fewer streams than moving
        many small ones."""
        found = []
        for generation in generations:
            machine = generation.machine
            if machine.moves.under_way:
                continue
            for sample in machine.moves.movable(source.key, now)[:1]:
                found.append((generation, sample))
        return sorted(found, key=lambda each: -each[0].machine.num_tokens_of(each[1]))

    def _move(
        self, generation: Generation, sample: int, source: NodeView, nodes: Sequence[NodeView], now: float
    ) -> None:
        machine = generation.machine
        target = self._policy.target(source, nodes, machine.num_tokens_of(sample), machine.spec.most_tokens, now)
        if target is None:
            return
        self._policy.moved(source, now)
        self._nodes.expect_sequence(target, now)
        self._carry_out(generation, machine.move(sample, source.ref, target.ref, now, self._within_s))
