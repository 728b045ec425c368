"""Nodes, and between them a network and a transport that do their worst.

The nodes are real (`node.py`). Deliberately harsher than reality: the network is a set without order, and a new life of
a node still hears what was sent to the old one; deadlines, leases and wrong suspicions may come at any moment (each
costs one fault of the budget). What is asked of the nodes, and by whom: `prompts.py` and `moves.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVCommitted, KVGrant, KVReady, KVRefused, KVRelease, KVWait
from tandem.kv_connector.protocol.effects import Send
from tandem.kv_connector.protocol.jobs import BlockPush, CloseGrant, OpenGrant, TransferJob
from tandem.kv_connector.protocol.outcomes import Commit, HandoffCompleted, HandoffFailed
from tandem.kv_connector.protocol.peer_effects import AdmitSource, CloseChannel, Fenced, FenceSource
from tests.worlds.lives import Lives, plain_reason
from tests.worlds.node import Look, Node
from tests.worlds.setting import ViolationError
from tests.worlds.transport import Push, Transport

Event = tuple
ROUTER = NodeKey("router", 1)


class Universe:
    """What all states of one exploration have in common: the nodes' states, and letters and grants by number."""

    def __init__(self, setting: Any) -> None:
        self.setting = setting
        self.lives = Lives(self._translate)
        self.letters: list[tuple[NodeKey, NodeKey, Any]] = []  # (from, to, message)
        self.grants: dict[int, KVGrant] = {}
        self._letter_numbers: dict[tuple, int] = {}
        self._grant_numbers: dict[int, int] = {}
        self._checked: set[int] = set()
        self._born: dict[NodeKey, int] = {}

    def first(self, *own: Any) -> tuple:
        """A frozen state in which nothing has happened. `own`: what the world has besides nodes and transport."""
        names, none = self.setting.names, frozenset()  # type: ignore[var-annotated]
        epochs = tuple(10 * index + 1 for index in range(len(names)))
        born = tuple(self.born(NodeKey(*each)) for each in zip(names, epochs, strict=True))
        transport = Transport(self.grants).freeze()
        return (born, epochs, none, none, none, self.setting.max_faults, transport, own)

    def readable(self, event: tuple) -> str:
        kind, *rest = event
        if kind in ("deliver", "lose", "hear_pull"):
            sender, _, message = self.letters[rest[0]]
            rest = [type(message).__name__, message.request_id, "from", sender.node_id, *rest[1:]]
        return " ".join(map(str, rest if kind == "at" else (kind, *rest)))

    def born(self, key: NodeKey) -> int:
        if key not in self._born:
            self._born[key] = self.lives.born(Node(self.setting, key))
        return self._born[key]

    def letter(self, sender: NodeKey, to: NodeKey, message: Any) -> int:
        is_grant = isinstance(message, KVGrant)
        letter = (sender, to, msgspec.structs.replace(message, block_ids=()) if is_grant else message)
        number = self._letter_numbers.setdefault(letter, len(self.letters))
        if number == len(self.letters):
            self.letters.append((sender, to, message))
        return number

    def check_deadlines(self, number: int) -> None:
        """Were every message from this state of a node on lost, its deadline would end each request there."""
        if number in self._checked:
            return
        self._checked.add(number)
        look = self.lives.looks[number]
        for each in look.possible:
            if each.event[0].endswith("deadline") and each.waits_for in look.open:
                after = self.lives.looks[self.lives.after(number, each.event)[0]]
                if each.waits_for in after.open:
                    raise ViolationError(f"{each.waits_for} does not end by its deadline: {look.text}")

    def key_of(self, letter: int) -> AttemptKey:
        return self.letters[letter][2].key  # type: ignore[no-any-return]

    def _grant_number(self, grant: KVGrant) -> int:
        number = self._grant_numbers.setdefault(grant.grant_id, len(self._grant_numbers))
        self.grants[number] = grant
        return number

    def _translate(self, life: Any, effect: Any) -> tuple | None:
        """KVWait is no news to a source (a test of the table says so)."""
        if isinstance(effect, Send):
            effect = (effect.to, effect.message)
        if isinstance(effect, tuple):
            return self._translate_message(life, *effect)
        if isinstance(effect, BlockPush):
            at = {block_id: index for index, block_id in enumerate(effect.grant.block_ids)}
            indices = tuple(at[block_id] for block_id in effect.destination_block_ids)
            return "job", effect.key, Push(self._grant_number(effect.grant), effect.grant_id, indices)
        if isinstance(effect, TransferJob):
            return "job", effect.key, effect
        if isinstance(effect, OpenGrant):
            self._grant_number(effect.grant)
            return "opened", effect.grant.grant_id
        if isinstance(effect, CloseGrant):
            return "closed", effect.grant_id
        if isinstance(effect, FenceSource):
            return "fence", effect.node
        if isinstance(effect, AdmitSource):
            return "admitted", effect.peer.key
        if isinstance(effect, CloseChannel):
            return "channel_closed", effect.node
        return _outcome(effect)

    def _translate_message(self, node: Node, to: NodeKey, message: Any) -> tuple | None:
        if to == ROUTER or isinstance(message, KVWait):
            return None
        if isinstance(message, KVRefused | KVRelease):
            message = msgspec.structs.replace(message, reason=plain_reason(message.reason))
        return "sent", self.letter(node.info.key, to, message), type(message), message.key


def _outcome(effect: Any) -> tuple | None:
    if isinstance(effect, HandoffCompleted | HandoffFailed):
        end = "failed" if isinstance(effect, HandoffFailed) else {"": "committed"}.get(effect.reason, "released")
        return "ended", "p", effect.key, end
    if hasattr(effect, "request"):
        return "ended", "d", effect.request.key, "committed" if isinstance(effect, Commit) else "over"
    return None


def _ids(granted: dict[AttemptKey, tuple[int, int]]) -> set[int]:
    return {grant_id for grant_id, _ in granted.values()}


class World:
    """One state, opened. `ends` has sides: "p" is the source's, "d" the sink's."""

    def __init__(self, universe: Any, state: tuple) -> None:
        self.universe, self.setting = universe, universe.setting
        nodes, epochs, network, ends, refused, self.faults_left, transport, own = state
        self.nodes: dict[str, int] = dict(zip(self.setting.names, nodes, strict=True))
        self.epochs: dict[str, int] = dict(zip(self.setting.names, epochs, strict=True))  # of the lives they live now
        self.network = set(network)
        self.ends, self.refused = dict(ends), set(refused)  # (side, hand-off) -> how; (sink, hand-off)
        self.transport = Transport.thaw(universe.grants, *transport)
        self.thaw(*own)

    def thaw(self, *own: Any) -> None:
        raise NotImplementedError

    def own(self) -> tuple:
        raise NotImplementedError

    def freeze(self) -> tuple:
        return (
            tuple(self.nodes.values()), tuple(self.epochs.values()), frozenset(self.network),
            frozenset(self.ends.items()), frozenset(self.refused), self.faults_left, self.transport.freeze(),
            self.own(),
        )  # fmt: skip

    def life(self, name: str) -> NodeKey:
        """The life that it lives now."""
        return NodeKey(name, self.epochs[name])

    def look(self, name: str) -> Look:
        return self.universe.lives.looks[self.nodes[name]]

    # --- nodes ----------------------------------------------------------------------------------------------

    def at(self, name: str, *event: Any) -> None:
        """Something happens to a node."""
        before = self.look(name).granted
        self.nodes[name], effects = self.universe.lives.after(self.nodes[name], event)
        for effect in effects:
            getattr(self, "_" + effect[0])(name, before, *effect[1:])
        after = self.look(name)
        if before != after.granted:
            self.transport.forget_contents(_ids(before) - _ids(after.granted))
        if self.refused:
            self.refused = {each for each in self.refused if each[0] != name or each[1] in after.open}
        self._check_reads(name, after)
        self.transport.forget_failures(name, after.sinks)

    def _check_reads(self, name: str, look: Look) -> None:
        for (reader, key), jobs in self.transport.jobs.items():
            if reader == name and key not in look.read and any(hasattr(job, "indices") for job in jobs):
                raise ViolationError(f"source blocks of {key} are freed while a transfer job reads them")
        for grant, _, key in self.transport.writes if self.setting.one_sided else ():
            is_mine = self.universe.grants[grant].source == self.life(name)
            if is_mine and key not in look.read:
                raise ViolationError(f"source blocks of {key} are freed while a transfer job reads them")

    def _sent(self, name: str, granted: dict, letter: int, kind: type, key: AttemptKey) -> None:
        self.network.add(letter)
        if kind is KVRefused:
            self.refused.add((name, key))
        if kind is KVCommitted and key in granted:
            if (name, key) in self.refused:
                raise ViolationError(f"{key} is committed after it was refused")
            self._check_commit(key, *granted[key])
            if "/" in key.request_id:  # what a pull brings is its puller's
                self._ended(name, granted, "d", key, "committed")

    def _check_commit(self, key: AttemptKey, grant_id: int, num_blocks: int) -> None:
        contents = [self.transport.contents.get((grant_id, index), "unwritten") for index in range(num_blocks)]
        if set(contents) != {"good"}:
            raise ViolationError(f"{key} is committed with blocks {contents}")

    def _job(self, name: str, _: dict, key: AttemptKey, job: Any) -> None:
        self.transport.add((name, key), job)

    def _opened(self, name: str, _: dict, grant_id: int) -> None:
        self.transport.gates |= {grant_id}

    def _closed(self, name: str, _: dict, grant_id: int) -> None:
        self.transport.gates -= {grant_id}

    def _fence(self, name: str, _: dict, source: NodeKey) -> None:
        self.transport.fence(name, source, has_grants=self.setting.grants(name))

    def _admitted(self, name: str, _: dict, source: NodeKey) -> None:
        self.transport.lost -= {(name, source)}

    def _channel_closed(self, name: str, _: dict, sink: NodeKey) -> None:
        if not self.setting.one_sided:
            keys = [key for key, where in self.look(name).sinks.items() if where == sink]
            self.transport.failed |= {(name, key) for key in keys}

    def _ended(self, name: str, _: dict, side: str, key: AttemptKey, how: str) -> None:
        if (side, key) in self.ends:
            raise ViolationError(f"{key} ends twice on {side}: {self.ends[side, key]}, then {how}")
        self.ends[side, key] = how

    # --- network and transport ------------------------------------------------------------------------------

    def deliver(self, letter: int, keep: bool = False) -> None:
        if not keep:
            self.network.discard(letter)
        sender, to, message = self.universe.letters[letter]
        self.at(to.node_id, "hear", sender, message)

    def hear_pull(self, letter: int, is_cached: bool, keep: bool = False) -> None:
        if not keep:
            self.network.discard(letter)
        sender, to, message = self.universe.letters[letter]
        self.at(to.node_id, "hear_pull", sender, message, is_cached)

    def lose(self, letter: int) -> None:
        self.network.discard(letter)

    def run_job(self, name: str, key: AttemptKey) -> None:
        event, ready = self.transport.run((name, key), self._can_write(name, key))
        if ready is not None:
            sink = self.look(name).sinks[key].node_id
            self.network.add(self.universe.letter(self.life(name), NodeKey(sink, ready.sink_epoch), ready))
        if event is not None:
            self.at(name, "transfer", event)

    def fail_push(self, name: str, key: AttemptKey) -> None:
        self.at(name, "transfer", self.transport.fail((name, key), self.transport.jobs[name, key][0].grant_id))

    def _can_write(self, name: str, key: AttemptKey) -> bool:
        job = self.transport.jobs[name, key][0]
        grant = getattr(job, "grant", None)
        if grant is None:
            return True
        grant = self.universe.grants[grant] if isinstance(grant, int) else grant
        barred = self.setting.fences_living and self.transport.is_barred(grant.sink_id, self.life(name))
        return grant.sink == self.life(grant.sink_id) and not barred and (name, key) not in self.transport.refused

    def land(self, write: tuple, content: str) -> None:
        grant = self.universe.grants[write[0]]
        lives = grant.sink == self.life(grant.sink_id)
        self.transport.land(write, content, self.setting, self.look(grant.sink_id) if lives else None)

    # --- lives ----------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        life, grants, transport = self.life(name), self.universe.grants, self.transport
        ends_with = {n for n, g in grants.items() if g.sink == life}
        if self.setting.one_sided:
            ends_with |= {n for n, g in grants.items() if g.source == life}
        transport.drop_writes(ends_with)
        transport.forget(name)
        self.refused = {each for each in self.refused if each[0] != name}
        self.epochs[name] += 1
        self.nodes[name] = self.universe.born(self.life(name))
        self.meet(*[(name, other) for other in self.nodes if other != name])

    def past_lives(self, name: str) -> list[NodeKey]:
        return [NodeKey(name, epoch) for epoch in range(self.epochs[name] // 10 * 10 + 1, self.epochs[name])]

    def meet(self, *pairs: tuple[str, str]) -> None:
        for one, other in pairs:
            self.at(one, "greet", self.life(other))
            self.at(other, "greet", self.life(one))

    def end_fence(self, fence: tuple) -> None:
        self.transport.end_fence(fence, self.setting)
        self.at(fence[0], "transfer", Fenced(fence[1]))

    # --- for who explores -----------------------------------------------------------------------------------

    def asked(self) -> Iterator[Event]:
        """What the router may do next."""
        raise NotImplementedError

    def wrong(self) -> Iterator[Event]:
        """What may go wrong besides the network, the transport and clocks; each costs a fault."""
        raise NotImplementedError

    def allows(self, event: Event) -> bool:
        """Whether the setting lets this happen to a node."""
        return True

    def is_over_elsewhere(self, name: str, key: AttemptKey) -> bool:
        """Whether nobody will say anything more about a hand-off that no node but `name` has open."""
        raise NotImplementedError

    def apply(self, event: Event) -> None:
        getattr(self, event[0])(*event[1:])
        while self.setting.is_calm and self._move():
            pass

    def _move(self) -> bool:
        """Lets a write land, a transfer thread take its next job, a sink hear that all is written; False if nothing is
        left to do."""
        transport = self.transport
        if transport.writes:
            self.land(min(transport.writes), "good")
            return True
        for owner in sorted(transport.jobs):
            if transport.can_run(owner, self.setting.one_sided):
                self.run_job(*owner)
                return True
        letters = [each for each in self.network if isinstance(self.universe.letters[each][2], KVReady)]
        for letter in letters[:1]:
            self.deliver(letter)
        return bool(letters)

    def check_quiet(self) -> None:
        """Nothing more will happen: everything has ended and every pool is whole."""
        for name in self.nodes:
            if not self.look(name).is_whole:
                raise ViolationError(f"something waits for ever, or leaks: {self.look(name).text}")

    def outcome(self) -> frozenset[tuple[str, str]]:
        return frozenset((side, how) for (side, _), how in self.ends.items())

    def text(self) -> str:
        letters = [type(self.universe.letters[each][2]).__name__ for each in self.network]
        return f"  there: {'; '.join(self.look(name).text for name in self.nodes)}; {sorted(letters)} {self.ends}"

    def check(self) -> None:
        """What the two sides tell the router must fit together, and deadlines alone must end what is open."""
        for number in () if self.setting.is_calm else self.nodes.values():
            self.universe.check_deadlines(number)
        for (side, key), how in self.ends.items():
            sink = self.ends.get(("d", key), "")
            if side == "p" and how == "committed" and sink != "committed":
                raise ViolationError(f"{key}: the source was told of a commit, the sink says {sink or 'nothing'}")
            if side == "p" and how == "released" and sink == "committed":
                raise ViolationError(f"{key} is committed on its sink and released on its source")
