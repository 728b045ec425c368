"""Running sequences that move between unified nodes, as a real request machine of the router orders it.

Links between the router and a node keep their order, as the control sockets do. A node that dies takes its links along,
which the router notices at once, and comes back empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.engine.contracts.errors import ClientGoneError
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import PeerRef
from tandem.engine.contracts.wire.requests import Accepted, Cancelled, Migrated, RequestFailed, Tokens
from tandem.router.placing.placement import Placement
from tandem.router.requests.actions import Fail, Finish, Place, RequestSpec, SendToNode
from tandem.router.requests.machine import RequestMachine
from tests.worlds.lives import NOW
from tests.worlds.setting import MoveSetting, ViolationError
from tests.worlds.world import ROUTER, Event, Universe, World

Nodes = tuple[NodeKey, ...]  # as they live now


@dataclass(frozen=True)
class RouterLook:
    movable: frozenset[tuple[int, NodeKey]]  # samples, and where they run
    moves: bool
    end: str  # "": none yet
    problem: str  # with how it ended


class Router:
    """One request's machine, as a life that is explored like a node's. Nodes are placed in the order of their names,
    but for those that failed."""

    def __init__(self, setting: MoveSetting, r: int) -> None:
        prompt = np.zeros(setting.num_prompt_tokens, np.int32)
        spec = RequestSpec(
            f"r{r}", prompt, SamplingParams(max_tokens=setting.max_outputs), setting.num_samples, max_attempts=9
        )
        self.machine = RequestMachine(spec, NOW)
        self.start = setting.names.index(setting.starts[r])
        self.constants = [spec]

    def do(self, event: tuple) -> list[Any]:
        effects = getattr(self, event[0])(*event[1:])
        self.machine.check_integrity()
        for sample in self.machine.samples:
            if sample.token_ids != list(range(len(sample.token_ids))):
                raise ViolationError(f"the client sees {sample.token_ids}")
        return effects

    def begin(self, nodes: Nodes) -> list[Any]:
        return self._carry_out(self.machine.start(), nodes[self.start :])

    def hear(self, node: NodeKey, message: Any, nodes: Nodes) -> list[Any]:
        if not isinstance(message, Tokens):
            return self._carry_out(self.machine.answered(node, message, NOW), nodes)
        return [
            effect
            for delta in message.deltas
            for effect in self._carry_out(self.machine.tokens(node, delta, NOW), nodes)
        ]

    def lose(self, node: NodeKey, nodes: Nodes) -> list[Any]:
        return self._carry_out(self.machine.node_lost(node, "it died", NOW), nodes)

    def move(self, sample: int, source: NodeKey, target: NodeKey) -> list[Any]:
        refs = (PeerRef(*each, "") for each in (source, target))
        return self._carry_out(self.machine.move(sample, *refs, NOW, 10.0), ())

    def give_up(self) -> list[Any]:
        return self._carry_out(self.machine.moves.give_up_overdue(NOW + 10.0), ())

    def leave(self) -> list[Any]:
        return self._carry_out(self.machine.abort(ClientGoneError("the client left")), ())

    def _carry_out(self, actions: list[Any], nodes: Nodes) -> list[Any]:
        sent = []
        for action in actions:
            if isinstance(action, Place):
                avoid = {node.node_id for node in self.machine.attempts.live[action.request_id].avoid}
                node = next((each for each in nodes if each.node_id not in avoid), nodes[0])
                placement = Placement(PeerRef(*node, ""), None, "test")
                sent += self._carry_out(self.machine.placed(action.request_id, placement, NOW), nodes)
            elif isinstance(action, SendToNode):
                sent.append(action)
        return sent

    def look(self) -> RouterLook:
        machine = self.machine
        nodes = {attempt.primary for attempt in machine.attempts.live.values() if attempt.primary is not None}
        movable = {(i, node) for node in nodes for i in machine.moves.movable(node, NOW + 100.0)}
        outputs, most = [sample.token_ids for sample in machine.samples], machine.spec.sampling.max_tokens
        problem = ""
        if machine.outcome is None:
            problem = "it waits for ever"
        elif isinstance(machine.outcome, Fail) and machine.outcome.error.status != ClientGoneError.status:
            problem = f"it fails: {machine.outcome.error.message}"
        elif isinstance(machine.outcome, Finish) and any(len(each) != most for each in outputs):
            problem = f"the client has got {outputs}"
        end = "" if machine.outcome is None else type(machine.outcome).__name__
        return RouterLook(frozenset(movable), bool(machine.moves.under_way), end, problem)

    def blocks(self) -> tuple:
        return ()

    def settled(self, part: Any) -> frozenset[str]:
        return frozenset()


class MoveUniverse(Universe):
    setting: MoveSetting

    def start(self) -> tuple:
        """Every request runs on its node and has streamed its first token."""
        setting = self.setting
        routers = tuple(self.lives.born(Router(setting, r)) for r in range(len(setting.starts)))
        empty = ((),) * len(setting.names)
        world = self.world(self.first(routers, empty, empty, frozenset(), False))
        names = setting.names
        world.meet(*[(one, other) for i, one in enumerate(names) for other in names[i + 1 :]])
        for r, name in enumerate(setting.starts):
            world.ask(r, "begin", world.refs)
            world.node_hears(name)
            world.at(name, "make_token", AttemptKey(f"r{r}", 1), 0)
            while world.to_router[name]:
                world.router_hears(name)
        return world.freeze()

    def world(self, state: tuple) -> MoveWorld:
        return MoveWorld(self, state)

    def _translate(self, life: Any, effect: Any) -> tuple | None:
        if isinstance(effect, SendToNode):
            return "ordered", effect.node, self.letter(ROUTER, effect.node, effect.message)
        return super()._translate(life, effect)

    def _translate_message(self, node: Any, to: NodeKey, message: Any) -> tuple | None:
        if to == ROUTER:
            return "answered", self.letter(node.info.key, to, message)
        return super()._translate_message(node, to, message)


class MoveWorld(World):
    def thaw(self, routers: tuple, to_node: tuple, to_router: tuple, asked: frozenset, has_moved: bool) -> None:
        """`routers`: by request; links by node; moves that were asked for; whether a hand-off was committed."""
        names = self.setting.names
        self.routers = list(routers)
        self.to_node, self.to_router = dict(zip(names, to_node, strict=True)), dict(zip(names, to_router, strict=True))
        self.moved, self.has_moved = set(asked), has_moved

    def own(self) -> tuple:
        links = (tuple(self.to_node.values()), tuple(self.to_router.values()))
        return (tuple(self.routers), *links, frozenset(self.moved), self.has_moved)

    @property
    def refs(self) -> Nodes:
        return tuple(map(self.life, self.nodes))

    # --- router ---------------------------------------------------------------------------------------------

    def router(self, r: int) -> RouterLook:
        return self.universe.lives.looks[self.routers[r]]  # type: ignore[no-any-return]

    def ask(self, r: int, *event: Any) -> None:
        """Something happens to a request at the router."""
        self.routers[r], effects = self.universe.lives.after(self.routers[r], event)
        for _, node, letter in effects:
            if node == self.life(node.node_id):
                self.to_node[node.node_id] += (letter,)

    def move(self, number: int) -> None:
        self.moved.add(number)
        r, sample, source, target = self.setting.moves[number]
        self.ask(r, "move", sample, self.life(source), self.life(target))

    def node_hears(self, name: str) -> None:
        letter, *rest = self.to_node[name]
        self.to_node[name] = tuple(rest)
        self.at(name, "hear", ROUTER, self.universe.letters[letter][2])
        for key in [each.event[1] for each in self.look(name).possible if each.event[0] == "start"]:
            self.at(name, "start", key)  # there is room

    def router_hears(self, name: str) -> None:
        letter, *rest = self.to_router[name]
        self.to_router[name] = tuple(rest)
        self._tell_router(letter)

    def _tell_router(self, letter: int) -> None:
        sender, _, message = self.universe.letters[letter]
        names = {each.request_id for each in message.deltas} if isinstance(message, Tokens) else {message.request_id}
        for r in sorted({_request_of(name) for name in names}):
            mine = message
            if isinstance(message, Tokens):
                mine = Tokens(deltas=tuple(each for each in message.deltas if _request_of(each.request_id) == r))
            self.ask(r, "hear", sender, mine, self.refs)

    def _answered(self, name: str, _: dict, letter: int) -> None:
        message = self.universe.letters[letter][2]
        if isinstance(message, Accepted | Cancelled):
            self._tell_router(letter)  # at once: only the router's memory of it depends on when it comes
        else:
            assert isinstance(message, Tokens | Migrated | RequestFailed)
            self.to_router[name] += (letter,)

    def _ended(self, name: str, granted: dict, side: str, key: AttemptKey, how: str) -> None:
        super()._ended(name, granted, side, key, how)
        self.has_moved |= (side, how) == ("d", "committed")

    # --- lives ----------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        dead = self.life(name)
        self.to_node[name], self.to_router[name] = (), ()
        super().crash(name)
        for r in range(len(self.routers)):
            self.ask(r, "lose", dead, self.refs)

    # --- for who explores -----------------------------------------------------------------------------------

    def asked(self) -> Iterator[Event]:
        for number, (r, sample, source, _) in enumerate(self.setting.moves):
            if number not in self.moved and (sample, self.life(source)) in self.router(r).movable:
                yield "move", number
        for name in self.nodes:
            if self.to_node[name]:
                yield "node_hears", name
            if self.to_router[name]:
                yield "router_hears", name

    def wrong(self) -> Iterator[Event]:
        faults = self.setting.faults
        for name in self.nodes:
            look, others = self.look(name), [self.life(other) for other in self.nodes if other != name]
            if "crash" in faults and not self.past_lives(name):
                yield "crash", name
            for other in others:
                if "suspect_sink" in faults and other in look.sinks.values():
                    yield "at", name, "suspect_sink", other
                if "suspect_source" in faults and look.open and (name, other) not in self.transport.lost:
                    yield "at", name, "suspect_source", other
        for r in range(len(self.routers)):
            if "client_gone" in faults and not self.router(r).end:
                yield "ask", r, "leave"
            if "give_up" in faults and self.router(r).moves:
                yield "ask", r, "give_up"

    def allows(self, event: Event) -> bool:
        makes_token = event[0] in ("make_token", "decode")
        return not (self.setting.holds_tokens and makes_token and self.router(_request_of(event[1].request_id)).moves)

    def is_over_elsewhere(self, name: str, key: AttemptKey) -> bool:
        return not any(self.to_node.values()) and not any(self.to_router.values())

    def check_quiet(self) -> None:
        super().check_quiet()
        for r in range(len(self.routers)):
            if self.router(r).problem:
                raise ViolationError(f"request {r}: {self.router(r).problem}")

    def outcome(self) -> frozenset[Any]:
        return frozenset({*(self.router(r).end for r in range(len(self.routers))), "moved" if self.has_moved else ""})


def _request_of(request_id: str) -> int:
    """Of "r0", or "r0-s1", which is one sample of it."""
    return int(request_id[1:].split("-")[0])
